"""A slice of the tests under each Python and PySpark that can be had here; the result as a table and as JSON.

    PYTHONS="python3.10 python3.11" SPARKS="3.5 4.0" python .ci/matrix.py [RESULT.json]

Environments are made under .matrix/ and kept. The Python that runs this lends its packages to environments of its own
minor version, so that only PySpark is fetched anew; others get everything by themselves. None has thinwire-lab: what is
tested here works without it. torch is taken only where pip
would find one without CUDA's packages, which are gigabytes: elsewhere what needs no torch is run, and the row says so.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]
PLACE = TREE / ".matrix"
PYTHONS = os.environ.get("PYTHONS", "python3.10 python3.11 python3.12 python3.13").split()
SPARKS = os.environ.get("SPARKS", "3.5 4.0 4.3").split()
WHOLE = tuple(os.environ.get("TESTS", "").split()) or (
    "tests/contracts",
    "tests/rules",
    "tests/unit/test_coordinator.py",
    "tests/unit/test_stopping.py",
    "tests/unit/checkpoint/test_round_trips.py",
    "tests/unit/data",
    "tests/spark/test_fit_on_spark.py",
    "tests/spark/test_storage.py",
    "tests/spark/test_old_saved.py",
)
"""Contracts, equations, engine, a fit on a cluster of executors, estimators and models stored; or what TESTS names."""
LIGHT = (
    "tests/dashboard/test_event_reducer.py",
    "tests/dashboard/test_server.py",
    "tests/unit/test_stopping.py",
    "--deselect=tests/dashboard/test_server.py::test_a_live_run_is_on_the_page_to_its_last_event",
)
"""What needs no torch."""
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy", "pyarrow", "pyzmq", "rich", "cloudpickle", "fsspec")


def main() -> int:
    """Runs every combination; 1 where one failed."""
    rows: list[dict[str, Any]] = []
    for name in PYTHONS:
        python = shutil.which(name)
        version = python and said([python, "-c", "import platform; print(platform.python_version())"])
        if not python or not version:
            rows.append({"python": name, "result": "not here"})
            continue
        version = version.strip()
        refusal = without_torch(python)
        if refusal:
            rows.append(light(python, version, refusal))
            continue
        rows += [whole(python, version, spark) for spark in SPARKS]
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "platform": platform.platform(),
        "whole": WHOLE,
        "light": LIGHT,
        "rows": rows,
    }
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=2) + "\n")
    return any(row["result"] == "failed" for row in rows)


def without_torch(python: str) -> str:
    """Why torch is not to be had for this Python; empty where it is. Nothing is downloaded."""
    ask = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    told = said([*pip(python), *ask, "-c", str(TREE / "constraints.txt"), "torch"])
    if not told:
        return "pip finds no torch of constraints.txt"
    (found,) = json.loads(told[told.index("{") :])["install"]
    more = [need for need in found["metadata"].get("requires_dist", []) if re.match("nvidia|cuda", need)]
    version = found["metadata"]["version"]
    return f"torch {version} is there with CUDA's packages only ({len(more)} of them)" if more else ""


def whole(python: str, version: str, spark: str) -> dict[str, Any]:
    """One row: the slice under this Python and PySpark."""
    place = PLACE / f"py{version}-spark{spark}"
    began = time.monotonic()
    own = environment(python, place)
    if not (place / "ready").exists():
        if version.split(".")[:2] == platform.python_version().split(".")[:2]:
            lend(place)
        else:
            needs = [f"{TREE}[spark]", *TOOLS]
            install(own, "-c", str(TREE / "constraints.txt"), *needs)
        install(own, f"pyspark=={spark}.*", "hatchling", "editables")
        install(own, "--no-deps", "--no-build-isolation", "--editable", str(TREE))
        (place / "ready").touch()
    code = "import torch, pyspark; print(torch.__version__, pyspark.__version__)"
    torch, pyspark = (said([own, "-c", code]) or "? ?").split()
    row = {"python": version, "pyspark": pyspark, "torch": torch}
    return row | tested(own, WHOLE, began)


def light(python: str, version: str, refusal: str) -> dict[str, Any]:
    """One row: what needs no torch."""
    place = PLACE / f"py{version}-light"
    began = time.monotonic()
    own = environment(python, place)
    if not (place / "ready").exists():
        extra = ["tomli"] if version.startswith("3.10.") else []
        install(own, *TOOLS, *extra, "hatchling", "editables")
        install(own, "--no-deps", "--no-build-isolation", "--editable", str(TREE))
        (place / "ready").touch()
    row = {"python": version, "pyspark": None, "torch": None, "note": refusal}
    compiled = (
        subprocess.run(
            [own, "-m", "compileall", "-q", "-f", str(TREE / "src"), str(TREE / "lab" / "src")], env=alone()
        ).returncode
        == 0
    )
    starts = said([own, "-c", "import thinwire.cli.main, thinwire.recipe as r; r.load('digits'); print('yes')"])
    if not compiled or not starts:
        return row | {"result": "failed", "compiles": compiled, "starts": bool(starts)}
    return row | tested(own, LIGHT, began)


def tested(own: str, tests: tuple[str, ...], began: float) -> dict[str, Any]:
    """The outcome of some tests; old and new PySparks warn of what pandas and Python deprecate."""
    line = [own, "-W", "default", "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    line += ["-p", "no:randomly", "-o", "timeout=600", *tests]  # a machine may be busy with other rows
    done = subprocess.run(line, cwd=TREE, env=alone(), capture_output=True, text=True)
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout[-300:])}
    row: dict[str, Any] = {"result": "failed" if done.returncode else "passed", **found}
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    return row | {"seconds": round(time.monotonic() - began)}


def environment(python: str, place: Path) -> str:
    """The Python of an environment, made where it is not there yet."""
    if not (place / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", "--without-pip", str(place)], check=True)
    return str(place / "bin" / "python")


def lend(place: Path) -> None:
    """Lets the environment use what is installed here, after what is its own."""
    (packages,) = place.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("-packages")]
    (packages / "outer.pth").write_text("\n".join(outer) + "\n")


def install(python: str, *wanted: str) -> None:
    """Installs with this process's own pip."""
    subprocess.run([*pip(python), "install", "--quiet", *wanted], check=True, env=alone())


def pip(python: str) -> list[str]:
    """This process's pip, acting on another Python."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]


def said(command: list[str]) -> str:
    """What a command prints; empty where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=alone())
    return done.stdout if done.returncode == 0 else ""


def alone() -> dict[str, str]:
    """Without what would let one environment see another's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}


if __name__ == "__main__":
    sys.exit(main())
