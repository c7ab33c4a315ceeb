"""The demo, a recipe and a slice of the tests against an installed thinwire, in a folder outside the tree.

Run it with the Python of the environment that thinwire is installed in: `python .ci/installed.py FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
SLICE = (
    "rules/test_equations.py",
    "unit/test_coordinator.py",
    "unit/test_stopping.py",
    "unit/checkpoint/conftest.py",
    "unit/checkpoint/test_round_trips.py",
    "unit/data/test_builtin.py",
    "dashboard/__init__.py",
    "dashboard/logs.py",
    "dashboard/test_server.py",
)
"""What needs the package and its files alone: equations, engine, checkpoints, the digits, the dashboard's page."""


def main(folder: Path) -> None:
    """Copies what it runs into the folder, so that nothing of the tree is on a path."""
    os.environ.pop("PYTHONPATH", None)
    folder.mkdir(parents=True, exist_ok=True)
    found = Path(said([sys.executable, "-c", "import thinwire; print(thinwire.__file__)"], folder).strip())
    assert found.is_relative_to(Path(sys.prefix).resolve()), f"{found} is not of {sys.prefix}"
    assert not found.is_relative_to(TREE / "src"), f"{found} is the tree's"
    print(said([sys.executable, "-m", "thinwire", "--version"], folder), flush=True)
    command = str(Path(sys.executable).with_name("thinwire"))
    told = said([command, "train", "digits", "--set", "train.epochs=4", "--out", "run", "--json"], folder)
    summary = json.loads(told.splitlines()[-1])
    assert summary["complete"]
    assert summary["val_accuracy"] > 0.8, summary
    shutil.copy(TREE / "examples" / "spark_digits.py", folder / "demo.py")
    said([sys.executable, "demo.py"], folder)
    for name in SLICE:
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / "tests" / name, folder / "tests" / name)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\ntimeout = 120\n")
    print(said([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], folder), flush=True)


def said(command: list[str], folder: Path) -> str:
    """What a command prints; where it fails, its own words are the error."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
