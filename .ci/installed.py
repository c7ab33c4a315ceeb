"""The demo, a recipe and a slice of the tests against an installed thinwire, in a folder outside the tree.

Run it with the Python of the environment that thinwire is installed in: `python .ci/installed.py FOLDER`. That
environment has no thinwire-lab. With thinwire-lab in it, `python .ci/installed.py --lab FOLDER` tries its commands.
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


COMMAND = str(Path(sys.executable).with_name("thinwire"))


def alone(folder: Path) -> None:
    """Checks thinwire without thinwire-lab, on copies in the folder, so that nothing of the tree is on a path."""
    home("thinwire", folder)
    print(said([sys.executable, "-m", "thinwire", "--version"], folder), flush=True)
    for module in ("thinwire_lab", "thinwire.bench", "thinwire.testing"):
        said([sys.executable, "-c", f"import importlib.util as u; exit(u.find_spec({module!r}) is not None)"], folder)
    for name in ("bench", "testbed"):
        refused = subprocess.run([COMMAND, name], cwd=folder, capture_output=True, text=True)
        assert refused.returncode == 2, refused
        assert "pip install thinwire-lab" in refused.stderr, refused
    assert "pip install thinwire-lab" in " ".join(said([COMMAND, "--help"], folder).split())
    told = said([COMMAND, "train", "digits", "--set", "train.epochs=4", "--out", "run", "--json"], folder)
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


def with_lab(folder: Path) -> None:
    """The commands of thinwire-lab."""
    home("thinwire_lab", folder)
    assert "pip install" not in said([COMMAND, "--help"], folder)
    assert "overhead" in said([COMMAND, "bench", "--help"], folder)
    said([COMMAND, "testbed", "schedules", "--seeds", "0:3", "--jobs", "1"], folder)


def home(package: str, folder: Path) -> None:
    """Checks that a package is that of this environment, not the tree's."""
    found = Path(said([sys.executable, "-c", f"import {package}; print({package}.__file__)"], folder).strip())
    assert found.is_relative_to(Path(sys.prefix).resolve()), f"{found} is not of {sys.prefix}"
    assert not found.is_relative_to(TREE / "src"), f"{found} is the tree's"
    assert not found.is_relative_to(TREE / "lab"), f"{found} is the tree's"


def said(command: list[str], folder: Path) -> str:
    """What a command prints; where it fails, its own words are the error."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def main(words: list[str]) -> None:
    """Checks what is installed, in a folder."""
    os.environ.pop("PYTHONPATH", None)
    folder = Path(words[-1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (with_lab if words[0] == "--lab" else alone)(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
