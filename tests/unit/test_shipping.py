"""Which modules travel whole to workers."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from thinwire.cluster.shipping import packed

CODE = "def answer():\n    return 42\n"


def module_in(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(folder))
    found = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, found)  # taken out again at the end
    return found.answer


def loads_elsewhere(data: bytes, folder: Path) -> bool:
    """Whether a process that does not have the module can read it."""
    (folder / "data").write_bytes(data)
    code = "import pickle, sys; assert pickle.load(open(sys.argv[1], 'rb'))() == 42"
    return not subprocess.run([sys.executable, "-c", code, str(folder / "data")], capture_output=True).returncode


@pytest.mark.processes
def test_a_module_of_the_users_travels_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = module_in(tmp_path / "mine", "own_module_a", monkeypatch)
    assert not loads_elsewhere(pickle.dumps(answer), tmp_path)
    assert loads_elsewhere(packed(answer), tmp_path)


@pytest.mark.processes
def test_one_that_goes_by_two_names_travels_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = module_in(tmp_path / "mine", "own_module_b", monkeypatch)
    monkeypatch.setitem(sys.modules, "own_module_b_again", sys.modules["own_module_b"])
    assert loads_elsewhere(packed(answer), tmp_path)


@pytest.mark.processes
def test_a_package_of_another_environment_on_the_path_goes_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = module_in(tmp_path / "lib" / "site-packages", "own_module_c", monkeypatch)
    assert not loads_elsewhere(packed(answer), tmp_path)


@pytest.mark.processes
def test_what_thinwire_itself_needs_goes_by_name_wherever_it_is_installed(tmp_path: Path) -> None:
    """As after `pip install --target`: cloudpickle cannot pickle itself by value."""
    shutil.copytree(Path(cloudpickle.__file__).parent, tmp_path / "cloudpickle")
    code = "from thinwire.cluster import shipping; shipping.packed(lambda: 1); print(shipping.cloudpickle.__file__)"
    there = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=there, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
