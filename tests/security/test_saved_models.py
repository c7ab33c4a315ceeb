"""What a saved model may name: shapes from a list. Whatever else can be imported is neither called nor given back."""

from __future__ import annotations

import importlib
import importlib.machinery
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import CheckpointError, ConfigError

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")

from tests.security import every_callable
from thinwire.spark import imports, objects
from thinwire.spark.objects import SLOTS, Source, code_of, made_of

F = {"kind": "name", "module": "torch.utils.collect_env", "name": "run"}
SHELL = {"kind": "value", "value": "exit 1"}
COLUMNS = {"kind": "value", "value": ["x"]}
DECODER = {"kind": "partial", "of": "decode_images", "args": [COLUMNS]}


class Own(nn.Module):
    """A network of a module that this program has imported."""

    class Inner(nn.Module):
        """A class within a class has a name, too."""


def prepare(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


def name_of(value: Any) -> dict[str, Any]:
    return {"kind": "name", "module": value.__module__, "name": value.__qualname__}


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize(
    "code",
    [
        {"kind": "partial", "of": "in_turn", "args": [F, F, SHELL]},
        {"kind": "partial", "of": "in_turn", "args": [F, F]},
        {"kind": "partial", "of": "in_turn", "args": [DECODER, F]},
        {"kind": "partial", "of": "in_turn", "args": [DECODER, SHELL]},
        {"kind": "partial", "of": "in_turn", "args": [DECODER, DECODER, DECODER]},
        {"kind": "partial", "of": "in_turn", "args": [DECODER]},
        {"kind": "partial", "of": "in_turn", "args": []},
        {"kind": "partial", "of": "decode_images", "args": [COLUMNS, COLUMNS]},
        {"kind": "partial", "of": "decode_images", "args": [F]},
        {"kind": "partial", "of": "decode_images", "args": [{"kind": "value", "value": {"x": 1}}]},
        {"kind": "partial", "of": "decode_images", "args": [COLUMNS], "keywords": {"columns": {}}},
        {"kind": "partial", "of": F, "args": [SHELL]},
        {"kind": "name", "module": "torch.utils.collect_env", "name": "run", "args": ["exit 1"]},
        {"kind": "call", "of": F, "args": [SHELL]},
        {"kind": "zoo", "name": "mlp", "args": [SHELL]},
        F,
    ],
    ids=str,
)
def test_no_slot_takes_a_call(slot: str, code: dict[str, Any]) -> None:
    for modules in ((), ("saved_net",)):
        with pytest.raises(CheckpointError):
            made_of(code, slot, Source("saved", modules))


@pytest.mark.parametrize("slot", ["model", "loss", "optimizer", "scheduler", "strategy", "option"])
def test_partials_are_transforms_and_nothing_else(slot: str) -> None:
    assert made_of(DECODER, "transform", Source("saved")).args == (["x"],)
    with pytest.raises(CheckpointError, match="not known"):
        made_of(DECODER, slot, Source("saved"))


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        (Own, {"model"}),
        (Own.Inner, {"model"}),
        (torch.optim.Adam, {"optimizer"}),
        (torch.optim.lr_scheduler.ConstantLR, {"scheduler"}),
        (torch.nn.functional.mse_loss, {"loss"}),
        (prepare, set()),
        (torch.nn.functional.dropout, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_slot_takes_its_own_kind_of_imported_names(value: Any, slots: set[str]) -> None:
    assert code_of(value) == name_of(value)
    for slot in SLOTS:
        if slot in slots:
            assert made_of(code_of(value), slot, Source("saved")) is value
        else:
            with pytest.raises(CheckpointError):
                made_of(code_of(value), slot, Source("saved"))


def test_functions_of_trusted_modules_are_taken_where_functions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"model", "transform", "loss", "optimizer", "scheduler"}
    top = __name__.partition(".")[0]
    for slot in SLOTS:
        for names in ((__name__,), (top,), (f"{__name__}.x", top[:-1], f"{top}x")):
            source = Source("saved", names)
            if slot in taken and top in names[0].split("."):
                if names[0].endswith(".x"):
                    continue
                assert made_of(name_of(prepare), slot, source) is prepare
            else:
                with pytest.raises(CheckpointError):
                    made_of(name_of(prepare), slot, source)
    monkeypatch.setattr(imports, "_trusted", set())
    imports.trust_modules(top)
    assert made_of(name_of(prepare), "transform", Source("saved")) is prepare
    with pytest.raises(CheckpointError):
        made_of(F, "transform", Source("saved", ["torch.utils"]))


def test_trust_in_a_module_does_not_reach_what_it_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`module` names the place of definition: torch's function is not this module's because it is in it."""
    monkeypatch.setitem(globals(), "borrowed", torch.utils.collect_env.run)
    monkeypatch.setitem(globals(), "Borrowed", nn.Linear)
    monkeypatch.setitem(globals(), "shell", __import__("os"))
    for name in ("borrowed", "Borrowed", "shell.system", "Own.forward", "Own.__init__", "pytest.main", "F.keys"):
        for slot in ("model", "transform"):
            with pytest.raises(CheckpointError):
                made_of({"kind": "name", "module": __name__, "name": name}, slot, Source("saved", [__name__]))


@pytest.mark.parametrize("names", ["mine", ["os"], ["torch"], ["thinwire.spark"], ["__main__"], ["a b"], [""], [3]])
def test_trust_that_would_be_a_mistake_is_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match="modules"):
        imports.checked(names)


def test_attributes_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's `__getattr__`, a metaclass and a descriptor are code, which a name could have run."""

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise AssertionError(name)

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    module = Lazy("lazy_saved")
    module.__spec__ = importlib.machinery.ModuleSpec("lazy_saved", None, origin="/nowhere/lazy_saved.py")
    module.Strange = Meta("Strange", (), {"__module__": "lazy_saved", "inner": property(lambda self: 1 / 0)})
    module.__getattr__ = lambda name: 1 / 0
    monkeypatch.setitem(sys.modules, "lazy_saved", module)
    for name in ("Strange", "Strange.inner", "missing", "Strange.missing"):
        with pytest.raises(CheckpointError):
            made_of({"kind": "name", "module": "lazy_saved", "name": name}, "model", Source("saved"))


NOT_NAMES = (
    ("torch.nn.modules.linear", "Linear.forward"),
    ("torch.nn.modules.linear", "Linear.__init__"),
    ("torch.nn.modules.linear", "Linear.__class__"),
    ("torch.nn.modules.linear", "__builtins__"),
    ("torch.nn.modules.linear", "__builtins__.eval"),
    ("torch.nn.modules.linear", "__loader__"),
    ("torch.nn.modules.linear", "__spec__.loader"),
    ("torch.nn.modules.linear", "torch.nn.Linear"),
    ("torch.nn.modules.linear", "init.uniform_"),
    ("torch.nn.modules.linear", "Linear "),
    ("torch.nn.modules.linear", ""),
    ("torch.nn.modules.linear", "Linear."),
    ("torch.nn.modules.linear", ["Linear"]),
    ("torch.nn.modules.linear.Linear", "forward"),
    (".nn.modules.linear", "Linear"),
    ("..linear", "Linear"),
    ("torch..nn", "Linear"),
    ("torch/nn/modules/linear", "Linear"),
    ("torch.nn.modules.linear\n", "Linear"),
    ("torch.nn.modules.linear\0", "Linear"),
    ("TORCH.nn.modules.linear", "Linear"),
    ("Torch.nn.modules.linear", "Linear"),
    ("\uff54orch.nn.modules.linear", "Linear"),  # a wide t, which is a letter of names
    ("torch.nn", "Linear"),  # where it is only imported
    ("OS", "system"),
    ("Os.path", "join"),
    ("\uff4fs", "system"),
    ("__main__", "main"),
    ("builtins", "eval"),
    ("x" * 10**6, "y"),
    ("torch" + ".nn" * 10**5, "y"),
    (None, "Linear"),
    ({"kind": "name"}, "Linear"),
    (0, 1),
)


@pytest.mark.parametrize(("module", "name"), NOT_NAMES, ids=lambda value: repr(value)[:40])
def test_a_name_that_is_not_that_of_a_definition_finds_nothing(module: Any, name: Any) -> None:
    for slot in SLOTS:
        for modules in ((), ("tests",)):
            with pytest.raises(CheckpointError) as said:
                made_of({"kind": "name", "module": module, "name": name}, slot, Source("saved", modules))
            assert len(str(said.value)) < 1000


def test_no_class_is_called_or_asked_while_it_is_loaded() -> None:
    """Neither by what makes an object of it, nor by what copies and unpickles one."""
    ran = []

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            ran.append("call")

        def __instancecheck__(cls, instance: Any) -> bool:
            ran.append("instancecheck")
            return True

        def __subclasscheck__(cls, subclass: type) -> bool:
            ran.append("subclasscheck")
            return True

        def __eq__(cls, other: object) -> bool:
            ran.append("eq")
            return True

        def __hash__(cls) -> int:
            return 0

    def act(name: str) -> Any:
        return lambda *args, **kwargs: ran.append(name)

    hooks = ("__init__", "__new__", "__reduce__", "__reduce_ex__", "__setstate__", "__getattr__", "__init_subclass__")
    hooks += ("__class_getitem__", "__set_name__", "__get__", "__deepcopy__")
    body = {"__module__": __name__, "__qualname__": "Eager", **{name: act(name) for name in hooks}}
    eager = Meta("Eager", (nn.Module,), body)
    ran.clear()
    globals()["Eager"] = eager
    try:
        code = {"kind": "name", "module": __name__, "name": "Eager"}
        assert made_of(code, "model", Source("saved")) is eager
        for slot in set(SLOTS) - {"model"}:
            with pytest.raises(CheckpointError):
                made_of(code, slot, Source("saved", [__name__]))
    finally:
        del globals()["Eager"]
    assert ran == []


NESTED: list[Any] = [DECODER]
for _ in range(200):
    NESTED.append({"kind": "partial", "of": "in_turn", "args": [NESTED[-1], DECODER]})


@pytest.mark.parametrize("depth", [9, 50, 200])
def test_transforms_in_transforms_have_a_limit(depth: int) -> None:
    assert callable(made_of(NESTED[8], "transform", Source("saved")))
    with pytest.raises(CheckpointError):
        made_of(NESTED[depth], "transform", Source("saved"))


@pytest.mark.parametrize(
    "code",
    [
        {"kind": "strategy", "name": "sparknet", "knobs": {"period": F}},
        {"kind": "strategy", "name": "parameter_table", "knobs": {"optimizer": F}},
        {"kind": "strategy", "name": F, "knobs": {}},
        {"kind": "strategy", "name": "__class__", "knobs": {}},
        {"kind": "zoo", "name": F},
        {"kind": "zoo", "name": "__class__"},
        {"kind": ["name"], "module": "torch", "name": "x"},
        {"kind": {"kind": "name"}},
        {"kind": "value", "value": F},
        {"kind": "value", "value": "os:system"},
        {"kind": "value", "value": "torch.utils.collect_env:run"},
        {"kind": "value", "value": "torch.nn.modules.linear:Linear.forward"},
        {"kind": "value", "value": ":"},
        {"kind": "value", "value": "mlp:"},
        {},
        {"kind": None},
        {"kind": "pickle", "data": "gAU="},
        {"kind": "pickle", "data": None},
    ],
    ids=str,
)
def test_values_within_values_are_not_code_either(code: dict[str, Any]) -> None:
    for slot in SLOTS:
        if slot == "option" and code.get("kind") == "value":
            assert made_of(code, slot, Source("saved")) == code["value"], "a plain value, and no code"
            continue
        with pytest.raises((CheckpointError, ConfigError)):
            made_of(code, slot, Source("saved"))


@pytest.mark.parametrize(
    "trusted", ["test", "tests.security.test_saved", "Tests", "TESTS", "tests.security.test_saved_models.x"]
)
def test_trust_is_in_whole_parts_of_a_name_as_it_is_written(trusted: str) -> None:
    if trusted.partition(".")[0] in sys.stdlib_module_names:
        with pytest.raises(ConfigError):
            imports.checked([trusted])
    with pytest.raises(CheckpointError):
        made_of(name_of(prepare), "transform", Source("saved", [trusted]))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with packages that no program has imported; each leaves a mark when it is."""
    body = "open({!r}, 'w').close()\nfrom torch import nn\nclass Net(nn.Module):\n    pass\n"
    before = set(sys.modules)
    for place in ("saved_proper/__init__", "saved_proper/nets", "saved_bare/nets"):
        file = tmp_path / f"{place}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(body.format(str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_is_imported_only_if_it_is_trusted_and_of_a_proper_package(packages: Path) -> None:
    proper = {"kind": "name", "module": "saved_proper.nets", "name": "Net"}
    bare = {"kind": "name", "module": "saved_bare.nets", "name": "Net"}
    for code, modules, said in (
        (proper, [], "not imported here"),
        (proper, ["saved"], "not imported here"),
        (bare, [], "not imported here"),
        (bare, ["saved_bare"], "without __init__"),
        (proper | {"module": "saved_proper.none"}, ["saved_proper"], "there is no module"),
    ):
        with pytest.raises(CheckpointError, match=said):
            made_of(code, "model", Source("elsewhere", modules))
    for folder in (packages, packages / "saved_proper"):
        with pytest.raises(CheckpointError, match="a part of the folder"):
            made_of(proper, "model", Source(str(folder), ["saved_proper"]))
    assert not (packages / "ran").exists(), "found by specs alone"
    assert made_of(proper, "model", Source("elsewhere", ["saved_proper"])).__name__ == "Net"
    assert made_of(proper, "model", Source("elsewhere")).__name__ == "Net", "it is imported now"


def test_links_do_not_hide_the_loaded_folder(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (packages / "link").symlink_to(packages / "saved_proper")
    (packages / "saved_linked").symlink_to(packages / "link")
    for module, folder in (("saved_linked.nets", "saved_proper"), ("saved_proper.nets", "link")):
        code = {"kind": "name", "module": module, "name": "Net"}
        with pytest.raises(CheckpointError, match="a part of the folder"):
            made_of(code, "model", Source(str(packages / folder), [module.partition(".")[0]]))
    assert not (packages / "ran").exists()


def test_a_class_that_a_program_imported_from_a_bare_folder_loads(packages: Path) -> None:
    import saved_bare.nets

    assert made_of(name_of(saved_bare.nets.Net), "model", Source("elsewhere")) is saved_bare.nets.Net


# -- every callable that can be imported ------------------------------------------------------------------------------


def test_no_callable_of_this_process_is_called_or_given_back() -> None:
    names = ["os", "posix", "subprocess", "builtins", "shutil", "pickle", "torch.hub", "torch.utils.collect_env"]
    names += ["torch.optim.adam", "torch.optim.lr_scheduler", "torch.nn.functional", "torch.nn.modules.linear"]
    names += [
        "pyspark.cloudpickle",
        "thinwire.run.session",
        "thinwire.cluster.frames",
        "thinwire.models.small",
        __name__,
    ]
    tally = every_callable.tried([name for name in names if importlib.import_module(name)])
    assert tally.wrong == []
    assert tally.seen > 1000
    assert {"Linear", "Adam", "ConstantLR", "mse_loss", "Own"} <= tally.taken


def test_the_watch_sees_a_loader_that_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = objects._named

    def careless(module: str, name: str, slot: str, source: Source) -> Any:
        found = vars(sys.modules[module]).get(name)
        return (
            found() if name in ("getcwd", "get_pretty_env_info", "OrderedDict") else honest(module, name, slot, source)
        )

    monkeypatch.setattr(objects, "_named", careless)
    monkeypatch.setattr(torch.utils.collect_env, "get_pretty_env_info", lambda: "")
    tally = every_callable.tried(["posix", "torch.utils.collect_env", "collections"])
    assert {name for _, _, name in tally.wrong} == {"getcwd", "get_pretty_env_info", "OrderedDict"}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_no_importable_callable_of_the_environment_is_called_or_given_back() -> None:
    """In a process of its own, which imports whatever there is of Python, torch, NumPy, PySpark and thinwire."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.security.every_callable"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen, taken = map(int, done.stdout.split()[-2:])
    assert seen > 100_000
    assert taken > 300
