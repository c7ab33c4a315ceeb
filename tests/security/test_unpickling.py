"""Where bytes may become code: every place in the source, each with its reason. A new one fails until it is listed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "thinwire"
RUNS_CODE = {
    "loads": {"pickle", "cloudpickle", "dill", "marshal", "joblib", "yaml", "jsonpickle", "_pickle"},
    "load": {
        "pickle",
        "cloudpickle",
        "dill",
        "marshal",
        "joblib",
        "yaml",
        "torch",
        "jit",
        "hub",
        "shelve",
        "np",
        "numpy",
        "entry_point",
    },
    "Unpickler": {"pickle", "cloudpickle", "_pickle"},
    "open": {"shelve"},
    "system": {"os"},
    "popen": {"os"},
    "load_model": {"keras", "models", "pytorch", "mlflow"},
    "import_module": {"importlib"},
    "read_pickle": {"pd", "pandas"},
}
BARE = {"eval", "exec", "compile", "__import__", "execfile"}
SHELLS = {"Popen", "run", "call", "check_call", "check_output", "getoutput"}
ALLOWED = {
    # where: why it is no way in
    ("__init__.py", "importlib.import_module"): "names of this package's own table",
    ("checkpoint/format.py", "torch.load"): "safetensors.torch.load, which has no code in it",
    ("cli/extras.py", "entry_point.load"): "of an installed package, by names of that file's own table",
    ("cli/wiring.py", "importlib.import_module"): "a recipe is trusted as code is",
    ("cluster/fork_server.py", "cloudpickle.loads"): "from the driver's own pipe",
    ("cluster/fork_server.py", "importlib.import_module"): "names of this file's own table",
    ("cluster/fork_server.py", "subprocess.Popen"): "this Python, without a shell",
    ("cluster/spark.py", "cloudpickle.loads"): "from the driver, in Spark's own closure",
    ("data/builtin.py", "np.load"): "a file of this package, and never pickled arrays",
    ("run/trial.py", "cloudpickle.loads"): "a copy of the caller's own transform, packed in the same function",
    ("run/display.py", "importlib.import_module"): "one name",
    ("models/__init__.py", "importlib.import_module"): "a recipe, or the caller, is trusted as code is",
    ("rules/compression.py", "importlib.import_module"): "one name",
    ("spark/predict.py", "cloudpickle.loads"): "from the driver, in Spark's own closure",
    ("spark/imports.py", "importlib.import_module"): "named by a saved model, and trusted: see test_saved_models",
    ("spark/objects.py", "cloudpickle.loads"): "only where the caller said allow_pickle=True",
    ("trackers.py", "importlib.import_module"): "one name",
}


def found_in(tree: ast.Module) -> set[str]:
    """Calls by which bytes, or words, become code."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in BARE | {"Unpickler"}:
            found.add(called.id)
        if isinstance(called, ast.Attribute):
            owner = called.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in RUNS_CODE.get(called.attr, ()) or (name == "subprocess" and called.attr in SHELLS):
                found.add(f"{name}.{called.attr}")
        if any(word.arg == "shell" for word in node.keywords):
            found.add("shell=")
    return found


def imported_from(tree: ast.Module) -> set[str]:
    """Names taken out of such modules, by which a call would be overlooked."""
    modules = {name for names in RUNS_CODE.values() for name in names} - {"torch", "np", "numpy", "models", "pytorch"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules | {"subprocess"}:
            found |= {f"from {node.module} import {alias.name}" for alias in node.names}
    return found & {f"from {m} import {n}" for m in modules | {"subprocess"} for n in {*RUNS_CODE, *SHELLS}}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Every file of the source, parsed."""
    return {p.relative_to(SOURCES).as_posix(): ast.parse(p.read_text()) for p in sorted(SOURCES.rglob("*.py"))}


def test_every_place_where_bytes_become_code_is_listed_with_its_reason(trees: dict[str, ast.Module]) -> None:
    found = {(name, call) for name, tree in trees.items() for call in found_in(tree) | imported_from(tree)}
    assert found - set(ALLOWED) == set(), "new: is what it reads trusted? Then list it here, with why"
    assert set(ALLOWED) - found == set(), "gone: take it off the list"


def test_the_search_finds_what_it_is_for() -> None:
    code = ast.parse(
        "import pickle, torch, subprocess, yaml\npickle.loads(b)\ntorch.load(f)\neval(x)\nyaml.load(x)\n"
        "torch.jit.load(f)\nsubprocess.run('x', shell=True)\nfrom pickle import loads"
    )
    assert found_in(code) >= {"pickle.loads", "torch.load", "eval", "yaml.load", "jit.load", "subprocess.run", "shell="}
    assert imported_from(code) == {"from pickle import loads"}


def test_what_reads_the_network_or_a_checkpoint_knows_no_pickle(trees: dict[str, ast.Module]) -> None:
    readers = {"protocol", "transport", "worker", "coordinator", "exchange"}
    readers |= {"checkpoint", "data", "caffe", "dashboard", "rules"}
    for path, tree in trees.items():
        if path.partition("/")[0] in readers:
            nodes = list(ast.walk(tree))
            names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not {name for name in names if "pickle" in name or name in ("marshal", "shelve", "yaml")}, path
