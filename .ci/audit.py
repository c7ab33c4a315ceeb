"""Looks for known holes in what requirements.lock pins, with pip-audit; tells if no service can be asked about them.

    python .ci/audit.py        # or: make audit

pip-audit lives in an environment of its own, .audit/, so that what it needs is no part of what is audited.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
PLACE = TREE / ".audit"
SERVICES = {"pypi": "https://pypi.org/pypi/pip/19.0/json", "osv": "https://api.osv.dev/v1/vulns/PYSEC-2023-228"}
"""Who knows of holes, and a page that tells of a known one: a mirror without it would have all packages pass."""
KNOWN = "PYSEC-2023-228"


def service() -> tuple[str | None, str]:
    """The first service that answers, and why the others did not."""
    reasons = []
    for name, url in SERVICES.items():
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                if KNOWN in answer.read().decode():
                    return name, ""
                reasons.append(f"{name}: it does not know {KNOWN}")
        except (OSError, ValueError) as error:
            reasons.append(f"{name}: {error}")
    return None, "; ".join(reasons)


def main() -> int:
    """Audits, and fails where a package could not be looked up; 0 without any service."""
    name, why = service()
    if name is None:
        print(f"audit skipped: no service of known holes can be reached from here ({why})")
        return 0
    program = PLACE / "bin" / "pip-audit"
    if not program.exists():
        venv.create(PLACE, with_pip=True, clear=True)
        subprocess.run([PLACE / "bin" / "pip", "install", "--quiet", "pip-audit"], check=True)
    asked = ["-r", "requirements.lock", "--require-hashes", "--disable-pip", "--strict", "--progress-spinner=off"]
    return subprocess.run([program, *asked, "--vulnerability-service", name], cwd=TREE, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
