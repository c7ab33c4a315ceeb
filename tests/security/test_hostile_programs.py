"""Documents of programs that were made to run code, to read memory, or to take a machine's memory and time."""

from __future__ import annotations

import copy
import json
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from thinwire.errors import CheckpointError
from thinwire.models import program as programs
from thinwire.models.program import OPERATIONS, WHOLE, Program, exported


def packed(document: Any, constants: dict[str, torch.Tensor] | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + (save(constants) if constants else b"")


@pytest.fixture(scope="module")
def true() -> dict[str, Any]:
    """What `exported` wrote of a small network."""
    data = exported(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [torch.randn(7, 4)])
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size])


def of_nodes(true: dict[str, Any], *nodes: Any, **more: Any) -> bytes:
    """A document of other operations, the last of which is the output."""
    made = [{"op": op, "args": args, "kwargs": kwargs} for op, args, kwargs in ((*node, {})[:3] for node in nodes)]
    return packed(true | {"nodes": made, "output": len(true["inputs"]) + len(made) - 1} | more)


X = {"value": 0}


def test_the_true_document_is_read(true: dict[str, Any]) -> None:
    assert isinstance(Program.read(packed(true)), Program)
    assert isinstance(Program.read(of_nodes(true, ("relu.default", [X]))), Program)


@pytest.mark.parametrize(
    "op",
    [
        "os.system", "system", "aten.relu.default", "relu", "relu.out", "relu.__class__", "__class__.default", "eval",
        "getattr", "item.default", "int.pow", "_local_scalar_dense.default", "as_strided.default", "resize_.default",
        "set_.source_Storage", "empty.memory_format", "from_file.default", "relu_.default", "copy_.default", "add.out",
        "rand.default", "save.default", "", ".", "relu.default ", "RELU.default", "prim.device.default",
        None, 3, ["relu.default"], {"op": "relu.default"},
    ],
    ids=repr,
)  # fmt: skip
def test_an_operation_that_is_not_listed_is_refused_by_name(true: dict[str, Any], op: Any) -> None:
    with pytest.raises(CheckpointError, match="none of those that a program may consist of"):
        Program.read(of_nodes(true, (op, [X])))


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("relu.default", [], {}),
        ("relu.default", [X, X], {}),
        ("relu.default", [X], {"out": X}),
        ("relu.default", [X], {"self": X}),
        ("relu.default", ["text"], {}),
        ("relu.default", [None], {}),
        ("relu.default", [[X]], {}),
        ("add.Tensor", [X, X], {"alpha": X}),
        ("add.Tensor", [X, X], {"alpha": 1, "device": "cuda"}),
        ("full.default", [[2, 3], 1.0], {"device": "meta"}),
        ("view.default", [X, ["a"]], {}),
        ("view.default", [X, [-1, X]], {}),
        ("cat.default", [X], {}),
        ("item", [X, 0], {}),
        ("item", [X], {}),
        ("item", [X, "__class__"], {}),
        ("int.add", [X, 1], {}),
        ("int.mul", ["a", 3], {}),
        ("int.floordiv", [1, 0], {}),
        ("int.mul", [1 << 62, 1 << 62], {}),
    ],
    ids=repr,
)
def test_arguments_of_another_number_or_kind_are_refused(true: dict[str, Any], op: str, args: Any, kwargs: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be used"):
        Program.read(of_nodes(true, (op, args, kwargs), ("relu.default", [X])))


NESTED: Any = [1]
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "argument",
    [
        {"value": 1}, {"value": 99}, {"value": -1}, {"value": True}, {"value": "0"}, {"value": None}, {"value": [0]},
        {"state": "nothing"}, {"state": "__class__"}, {"state": 0}, {"constant": "c0"}, {"constant": "_plan"},
        {"dtype": "float33"}, {"dtype": "Tensor"}, {"dtype": ["float32"]}, {"float": "1"}, {"memory_format": "x"},
        {"layout": "sparse"}, {"device": "cuda"}, {}, {"value": 0, "state": "0.weight"}, {"pickle": "gAU="},
        1 << 63, -(1 << 70), NESTED,
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_an_argument_that_refers_to_nothing_known_is_refused(true: dict[str, Any], argument: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be used"):
        Program.read(of_nodes(true, ("relu.default", [argument])))


@pytest.mark.parametrize(
    "nodes",
    [
        [("full.default", [[2, 1 << 40], 1.0])],
        [("repeat.default", [X, [1 << 20, 1 << 20]])],
        [("arange.start_step", [0, 1 << 62, 1])],
        [("constant_pad_nd.default", [X, [0, 1 << 40]])],
        [("expand.default", [{"state": "0.bias"}, [1 << 40, 3]])],
        [("cat.default", [[X] * 1000, 1])] + [("cat.default", [[{"value": i}] * 1000, 1]) for i in range(1, 8)],
        [("upsample_nearest2d.vec", [X, [1 << 30, 1 << 30], None])],
    ],
    ids=lambda nodes: nodes[0][0],
)
def test_values_without_measure_are_refused_before_memory_is_taken(true: dict[str, Any], nodes: Any) -> None:
    with pytest.raises(CheckpointError):
        Program.read(of_nodes(true, *nodes))


@pytest.mark.parametrize("side", range(1, 5))
def test_statistics_of_fewer_channels_are_never_read_beyond_their_end(true: dict[str, Any], side: int) -> None:
    """torch's own kernel of batch normalisation takes their size on trust."""
    args: list[Any] = [X, *[{"state": "s"}] * 4, 0.1, 1e-5]
    args[side] = {"state": "short"}
    state = [
        {"name": name, "dtype": "float32", "shape": [size], "trained": False} for name, size in (("s", 4), ("short", 1))
    ]
    op, names = "_native_batch_norm_legit_no_training.default", ["weight", "bias", "running_mean", "running_var"]
    rest = {"momentum": 0.1, "eps": 1e-5}
    told = dict(zip(names, args[1:5], strict=True)) | rest
    for node in ((op, args), (op, [X], told), (op, [], told | {"input": X})):
        with pytest.raises(CheckpointError, match="another number than its 4 channels"):
            Program.read(of_nodes(true, node, ("item", [{"value": 1}, 0]), state=state))


@pytest.mark.parametrize("sizes", [(2, 4, 1000), (1000, 4, 1), (2, 400, 1), (2, 4, 1, 3), (2, 4, 1, 0)], ids=str)
def test_groups_are_of_the_values_that_are_there(true: dict[str, Any], sizes: tuple[int, ...]) -> None:
    n, channels, area, groups = (*sizes, 2)[:4]
    node = ("native_group_norm.default", [X, None, None, n, channels, area, groups, 1e-5])
    with pytest.raises(CheckpointError, match="native_group_norm"):
        Program.read(of_nodes(true, node, ("item", [{"value": 1}, 0])))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"format": True}, {"format": None}, {"inputs": []}, {"inputs": {}}, {"inputs": [{}]},
        {"inputs": [{"dtype": "float32", "shape": [-1]}]}, {"inputs": [{"dtype": "float32", "shape": [True]}]},
        {"inputs": [{"dtype": "float32", "shape": [1] * 100}]}, {"inputs": [{"dtype": "complex64", "shape": []}]},
        {"state": [{"name": "a", "dtype": "float32", "shape": [1], "trained": True}] * 2},
        {"constants": ["c0"]}, {"constants": None}, {"transform": None}, {"nodes": {}}, {"nodes": [None]},
        {"nodes": [{"op": "relu.default", "args": [X]}]}, {"nodes": [], "output": 5}, {"output": -1},
        {"output": None}, {"output": 1.0}, {"more": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_another_document_is_refused(true: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be used"):
        Program.read(packed(true | change))


@pytest.mark.parametrize(
    "name",
    ["forward", "training", "__class__", "_parameters", "state_dict", "_plan.x", "", ".", "a..b", "a" * 600, 3],
)
def test_a_parameter_takes_no_name_that_a_module_has(true: dict[str, Any], name: Any) -> None:
    """Nor does one stand below another that is a tensor."""
    state = [*true["state"], {"name": name, "dtype": "float32", "shape": [1], "trained": True}]
    with pytest.raises(CheckpointError, match="cannot be used"):
        Program.read(packed(true | {"state": state}))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00" * 7, b"\xff" * 8, struct.pack("<Q", 100) + b"{}", packed(b"[" * 100_000), packed(b"\xff\xfe"),
        packed([]), packed(None), packed({}), packed(b"{}" + b" " * 100), packed(b'{"format": NaN}'),
        packed({"format": 1}) + b"no safetensors", struct.pack("<Q", (64 << 20) + 1) + b" " * 100,
    ],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be used"):
        Program.read(data)


def test_too_many_operations_are_refused(true: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST_NODES", 3)
    chain = [("relu.default", [{"value": i}]) for i in range(4)]
    with pytest.raises(CheckpointError, match="a list of at most 3"):
        Program.read(of_nodes(true, *chain))
    assert isinstance(Program.read(of_nodes(true, *chain[:3])), Program)


def test_rows_are_not_chosen_by_their_values(true: dict[str, Any]) -> None:
    """An index that is a mask would give as many rows as it likes."""
    nodes = [("gt.Scalar", [X, 0]), ("index.Tensor", [X, [{"value": 1}]])]
    with pytest.raises(CheckpointError, match="cannot be carried out"):
        Program.read(of_nodes(true, *nodes))


def test_an_output_without_rows_is_refused(true: dict[str, Any]) -> None:
    for nodes in (
        [("sum.dim_IntList", [X, [0]])],
        [("alias.default", [{"state": "0.weight"}])],
        [("sort.default", [X])],
    ):
        with pytest.raises(CheckpointError, match="it gives"):
            Program.read(of_nodes(true, *nodes))


CALLS = ("compile", "exec", "import", "open", "os.system", "os.exec", "os.fork", "pickle.find_class", "socket.connect")


@pytest.fixture
def acts() -> Iterator[list[str]]:
    """What is done meanwhile that a list of tensor operations has no need of, as Python itself tells of it."""
    found: list[str] = []
    watching = True

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if watching and (event in CALLS or event.startswith(("subprocess.", "ctypes.", "shutil."))):
            found.append(f"{event} {args!r:.100}")

    sys.addaudithook(audit)
    yield found
    watching = False


def test_reading_and_running_a_program_opens_imports_and_unpickles_nothing(
    true: dict[str, Any], acts: list[str]
) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    for _ in range(2):  # the first time torch imports parts of its own
        acts.clear()
        program = Program.read(packed(true))
        program.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        program(torch.randn(5, 4))
    assert acts == []


def test_no_listed_operation_changes_its_arguments_draws_or_has_another_output() -> None:
    """So says torch of each, in the schema by which it is called."""
    for name in sorted(OPERATIONS - set(WHOLE)):
        op = programs._overload(name)
        schema = op._schema
        assert not schema.is_mutable, name
        assert torch.Tag.nondeterministic_seeded not in op.tags, name
        assert torch.Tag.data_dependent_output not in op.tags, name
        assert torch.Tag.dynamic_output_shape not in op.tags or name == "index.Tensor", name
        kinds = {str(argument.type) for argument in schema.arguments}
        assert not {kind for kind in kinds if "Generator" in kind or "Storage" in kind or "Any" in kind}, name
