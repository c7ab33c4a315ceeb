"""What users and other code rely on: names, options, light imports, layers, sizes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire import errors
from thinwire.cli.main import parser
from thinwire.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "thinwire"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_METHODS = 60, 19
"""Of a function without its docstring, and of a class."""
LONG = {
    "cli/main.py: parser",
    "cluster/preflight.py: probe",
    "cluster/preflight.py: _probe_task",
}
"""Functions from before this limit; nothing is to be added."""
UNPICKLERS = {"pickle.loads", "cloudpickle.loads", "dill.loads", "marshal.loads", "torch.load", "pickle.load"}


def test_public_names_are_sorted_and_all_there() -> None:
    names = [n for n in thinwire.__all__ if not n.startswith("_")]
    assert names == sorted(names)
    assert set(thinwire._HOMES) == set(thinwire.__all__)
    for name in names:
        assert getattr(thinwire, name) is not None


def test_every_registered_strategy_is_exported() -> None:
    assert {kind.__name__ for kind in STRATEGIES.values()} <= set(thinwire.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Horovod'"):
        thinwire.Horovod  # noqa: B018


@pytest.mark.processes
def test_importing_thinwire_imports_nothing_heavy() -> None:
    code = "import sys, json, thinwire; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "numpy", "pyarrow", "zmq", "pyspark", "numba", "rich"}


@pytest.mark.processes
def test_an_ordinary_command_does_not_search_installed_packages() -> None:
    code = (
        "import importlib.metadata as m, thinwire.cli.main as c\n"
        "m.entry_points = lambda **k: exit('searched for ' + str(k))\n"
        "c.parser('train'), c.parser('bnech')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_codecs_do_not_import_numba_until_they_are_used() -> None:
    code = "import sys, thinwire.run.session; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"


def test_every_error_has_an_exit_code_of_its_own_and_pickles() -> None:
    import pickle

    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.ThinwireError)]
    codes = [k.exit_code for k in kinds]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
    for kind in kinds:
        assert str(pickle.loads(pickle.dumps(kind("what happened")))) == "what happened"
        assert kind.__name__ in (errors.__doc__ or "")


def test_command_line_options_are_these() -> None:
    """Without those of thinwire-lab's commands, which lab/tests/test_commands.py has."""
    found: dict[str, list[str]] = {}
    for action in parser()._actions:
        if hasattr(action, "choices") and isinstance(action.choices, dict):
            for name, sub in action.choices.items():
                found[name] = sorted(o for a in sub._actions for o in (a.option_strings or [a.dest]))
    assert found == {
        "bench": ["--help", "-h"],
        "caffe": ["--help", "-h", "act"],
        "dashboard": ["--help", "--listen", "-h", "folders"],
        "doctor": ["--data", "--help", "--json", "--master", "--workers", "-h"],
        "export": ["--help", "--onnx", "-h", "model"],
        "plan": [
            "--alone",
            "--discrepancy",
            "--exchange",
            "--gflops",
            "--group",
            "--help",
            "--input",
            "--json",
            "--latency",
            "--link",
            "--memory",
            "--profile",
            "--rounds",
            "--run",
            "--set",
            "--step",
            "--workers",
            "-h",
            "recipe",
        ],
        "simulate": [
            "--help",
            "--json",
            "--latency",
            "--link",
            "--out",
            "--ratio",
            "--set",
            "--spread",
            "--step",
            "--strategies",
            "--workers",
            "-h",
            "recipe",
        ],
        "testbed": ["--help", "-h"],
        "train": ["--dashboard", "--help", "--json", "--out", "--resume", "--set", "-h", "recipe"],
    }


def test_functions_and_classes_are_no_larger_than_a_reader_can_keep_in_mind() -> None:
    long, large = set(), set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body and (node.end_lineno or 0) - body[0].lineno >= MOST_LINES:
                    long.add(f"{path.relative_to(PACKAGE)}: {node.name}")
            methods = filter(lambda each: isinstance(each, ast.FunctionDef), ast.iter_child_nodes(node))
            if isinstance(node, ast.ClassDef) and len(list(methods)) > MOST_METHODS:
                large.add(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert long <= LONG
    assert not large


def test_no_file_is_named_after_nothing() -> None:
    assert not {p.stem for p in SOURCES} & {"utils", "helpers", "common", "core", "misc", "manager"}


def test_nothing_unpickles_what_comes_from_a_network() -> None:
    """The fork server reads the driver's pipe, a Spark task its closure, a saved model what the caller allowed.

    The trial of a row copies the user's transform, which it has pickled itself.
    """
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLERS:
                found.append(path.name)
    assert sorted(found) == ["fork_server.py", "objects.py", "predict.py", "spark.py", "trial.py"]
