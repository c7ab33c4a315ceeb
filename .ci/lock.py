"""Writes requirements.lock: the packages of an environment with the hashes of their files on PyPI.

    .venv/bin/python .ci/lock.py        # or: make lock

What is installed is what was tested, so that versions are taken from there. Of their files those count that this Python
can install on Linux, on any processor, and source archives. torch and what is built here are left out:
the lock's own header says why. A version that PyPI does not have, or without a hash, ends this with an error.
"""

from __future__ import annotations

import html
import importlib.metadata
import platform
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
LEFT_OUT = {"thinwire", "thinwire-lab", "torch", "setuptools", "wheel"}
BUILD = {"editables": "0.5"}
"""What hatchling wants for an editable install, which pip would otherwise fetch without a hash each time."""
HEADER = """\
# What development and CI install, with the SHA-256 of its files on PyPI: `make` installs these and nothing else besides
# torch, if Python is {python} on {system}. Elsewhere, and with `make LOCK=`, it resolves pyproject.toml's ranges under
# constraints.txt.
#
# torch is not in here. Its builds (CPU, CUDA, ROCm) have files of their own under one version, in indexes of their own,
# and none is right on every machine; constraints.txt pins its version. Its dependencies are in here, but for those that
# its CUDA builds alone have. Not covered either: what pip fetches to build pyspark, which has a source archive only.
#
# Written by `make lock` from .venv; install with: pip install --require-hashes --no-deps -r requirements.lock
"""
_LINK = re.compile(r'<a[^>]*href="([^"]*)#sha256=([0-9a-f]{64})"[^>]*>([^<]*)</a>')


def normal(name: str) -> str:
    """A project's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Versions of what is installed here, by name."""
    found = {normal(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    return {name: version for name, version in sorted((BUILD | found).items()) if name not in LEFT_OUT}


def hashes(name: str, version: str) -> list[str]:
    """The hashes of a version's files, from the index that pip reads."""
    with urllib.request.urlopen(f"https://pypi.org/simple/{name}/", timeout=120) as page:
        links = _LINK.findall(page.read().decode())
    return sorted({digest for _, digest, file in links if is_of(html.unescape(file), name, version)})


def is_of(file: str, name: str, version: str) -> bool:
    """Whether a file is a wheel or source archive of a version.

    >>> is_of("ruff-0.9.0-py3-none-any.whl", "ruff", "0.9.0"), is_of("ruff-0.9.0.tar.gz", "ruff", "0.9.0")
    (True, True)
    >>> is_of("ruff-0.9.0.post1-py3-none-any.whl", "ruff", "0.9.0"), is_of("a-ruff-0.9.0.tar.gz", "ruff", "0.9.0")
    (False, False)
    """
    stem = re.sub(r"(\.tar\.gz|\.zip|\.whl)$", "", file)
    if stem == file:
        return False
    if file.endswith(".whl"):
        project, found, *_, python, abi, system = stem.split("-")
        here = {f"cp{sys.version_info.major}{sys.version_info.minor}", "py3"} & set(python.split(".")) or "abi3" in abi
        return normal(project) == name and found == version and bool(here) and ("linux" in system or system == "any")
    project, _, found = stem.rpartition("-")
    return normal(project) == name and found == version


def main() -> int:
    """Writes the lock; 1 where PyPI lacks a version."""
    pins = installed()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(hashes, pins, pins.values()))
    lacking = [
        f"{name}=={version}" for (name, version), digests in zip(pins.items(), found, strict=True) if not digests
    ]
    if lacking:
        print(f"PyPI has no file of {', '.join(lacking)}; install versions that it has", file=sys.stderr)
        return 1
    text = HEADER.format(python=".".join(platform.python_version_tuple()[:2]), system=platform.system())
    for (name, version), digests in zip(pins.items(), found, strict=True):
        text += f"{name}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{digest}" for digest in digests) + "\n"
    LOCK.write_text(text)
    print(f"{LOCK.name}: {len(pins)} packages, {sum(map(len, found))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
