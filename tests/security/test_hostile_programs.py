"""Documents of programs that were made to run code, to read memory, or to take a machine's memory and time."""

from __future__ import annotations

import copy
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from thinwire.errors import CheckpointError
from thinwire.models import budget
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


def many(count: int, *node: Any) -> list[Any]:
    return [node] * count


def deeper(count: int, op: str, *args: Any) -> list[Any]:
    """Each operation takes what the one before it gave."""
    return [(op, [{"value": i}, *args]) for i in range(count)]


SIDE = 1 << 14
SQUARE = ("full.default", [[SIDE, SIDE], 1.0])
LAST = ("relu.default", [X])
PICTURE = ("full.default", [[1, 1, 4, 4], 1.0])


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        (
            [*many(6, *SQUARE), ("cat.default", [[{"value": i} for i in range(1, 7)], 0]), LAST],
            "bytes in one value|bytes at one time",
        ),
        ([*many(6, *SQUARE), *[("sum.default", [{"value": i}]) for i in range(1, 7)], LAST], "bytes at one time"),
        (many(10, "split_with_sizes.default", [X, [4] + [0] * 60_000, 1]), "tensors"),
        (deeper(100, "unsqueeze.default", 1), "dimensions"),
        ([PICTURE, *many(300, "upsample_nearest2d.vec", [{"value": 1}, [4, 4], None])], "resize"),
        ([SQUARE, *many(40, "mm.default", [{"value": 1}, {"value": 1}]), LAST], "elements visited"),
        ([SQUARE, *many(40, "_cdist_forward.default", [{"value": 1}, {"value": 1}, 1.0, None]), LAST], "visited"),
        (
            [
                ("full.default", [[1, 1, SIDE, SIDE], 1.0]),
                ("avg_pool2d.default", [{"value": 1}, [SIDE // 2, SIDE // 2], [1, 1]]),
                LAST,
            ],
            "elements visited",
        ),
        (
            [
                ("full.default", [[1, 1, 2, SIDE * 1000], 1.0]),
                ("_adaptive_avg_pool2d.default", [{"value": 1}, [SIDE * 1000, 1]]),
                LAST,
            ],
            "elements visited",
        ),
        (
            [
                ("full.default", [[1, 1, 2048, 2048], 1.0]),
                ("full.default", [[1, 1, 1024, 1024], 1.0]),
                ("convolution.default", [{"value": 1}, {"value": 2}, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]),
                LAST,
            ],
            "patches",
        ),
    ],
    ids=["one", "alive", "tensors", "dimensions", "resized", "products", "distances", "windows", "adaptive", "patches"],
)
def test_memory_and_time_have_limits_that_the_error_tells(true: dict[str, Any], nodes: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        Program.read(of_nodes(true, *nodes))


def test_parameters_lie_in_so_many_modules_at_most(true: dict[str, Any]) -> None:
    names = [f"n{i}." + ".".join("a" * 240) for i in range(300)]
    state = [{"name": name, "dtype": "float32", "shape": [1], "trained": True} for name in names]
    with pytest.raises(CheckpointError, match="more modules than"):
        Program.read(of_nodes(true, LAST, state=state))


def test_more_rows_than_have_room_are_computed_after_one_another(
    true: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program.read(of_nodes(true, ("mul.Tensor", [X, X]), ("relu.default", [{"value": 1}])))
    given, ran = torch.randn(1001, 4), []
    run = Program._run

    def seen(self: Program, inputs: Any, *more: Any) -> torch.Tensor:
        ran.append((inputs[0].device.type, len(inputs[0])))
        return run(self, inputs, *more)

    monkeypatch.setattr(Program, "_run", seen)
    monkeypatch.setattr(budget, "MOST_LIVE_BYTES", 100 * 2 * 4 * 4)  # two values of a hundred rows
    assert torch.equal(program(given), given.square())
    rows = [rows for device, rows in ran if device == "cpu"]
    assert sum(rows) == 1001
    assert max(rows) <= 100
    ran.clear()
    program(given[:50])
    assert ran == [("cpu", 50)], "what has room is looked at once"


def test_a_program_with_a_square_of_all_rows_has_a_limit_too(
    true: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows and three say little of a thousand."""
    nodes = [("t.default", [X]), ("mm.default", [X, {"value": 1}]), ("sum.dim_IntList", [{"value": 2}, [1], True])]
    program = Program.read(of_nodes(true, *nodes))
    monkeypatch.setattr(budget, "MOST_LIVE_BYTES", 1 << 16)
    assert program(torch.randn(1000, 4)).shape == (1000, 1)
    assert program._rows_at_once < 128


@pytest.mark.parametrize(
    "op",
    [
        ("div.Tensor_mode", [{"value": 1}, {"value": 2}], {"rounding_mode": "trunc"}),
        ("div.Scalar_mode", [{"value": 1}, -1], {"rounding_mode": "trunc"}),
    ],
    ids=["tensor", "number"],
)
def test_the_least_whole_number_divided_by_minus_one_does_not_end_the_process(
    true: dict[str, Any], op: Any, tmp_path: Path
) -> None:
    """As torch's own division does, by a signal that nothing can catch."""
    least = ("full.default", [[1, 4], -(1 << 63) + 1], {"dtype": {"dtype": "int64"}})
    data = of_nodes(
        true,
        least,
        ("sub.Scalar", [{"value": 1}, 1]),
        ("full.default", [[1, 4], -1], {"dtype": {"dtype": "int64"}}),
        (op[0], [{"value": 2}, {"value": 3} if isinstance(op[1][1], dict) else -1], op[2]),
        ("_to_copy.default", [X], {"dtype": {"dtype": "int64"}}),
        ("add.Tensor", [{"value": 4}, {"value": 5}]),
    )
    (tmp_path / "program").write_bytes(data)
    code = (
        "import sys, torch; from pathlib import Path; from thinwire.models.program import Program\n"
        "program = Program.read(Path(sys.argv[1]).read_bytes())\n"
        "program.load_state_dict({n: torch.zeros(v.shape) for n, v in program.state_dict().items()}, assign=True)\n"
        "print(program(torch.zeros(2, 4)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "program")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.float32])
def test_division_rounded_to_zero_is_torch_s_own_otherwise(kind: torch.dtype) -> None:
    own = programs._overload("div.Tensor_mode")
    a, b = torch.arange(-20 if kind.is_signed else 1, 21).to(kind), torch.tensor([3]).to(kind)
    for divisor in (b, -b if kind.is_signed else b, torch.tensor(-1).to(kind)):
        found = programs._called("div.Tensor_mode", [a, divisor], {"rounding_mode": "trunc"}, torch.device("cpu"))
        expected = own(a, divisor, rounding_mode="trunc")
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    for number in (3, -1, 2.5):
        found = programs._called("div.Scalar_mode", [a, number], {"rounding_mode": "trunc"}, torch.device("cpu"))
        expected = torch.div(a, number, rounding_mode="trunc")
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("modes", [(3, 0), (-1, 0), (0, 3), (0, -1), (True, 0), (0.0, 0)], ids=str)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_sampler_knows_its_modes(true: dict[str, Any], modes: Any, dimensions: int) -> None:
    """torch's kernels give memory as they find it for others."""
    picture = ("full.default", [[2, 3, *[4] * dimensions], 1.0])
    grid = ("full.default", [[2, *[3] * dimensions, dimensions], 0.5])
    sampler = f"grid_sampler_{dimensions}d.default"
    nodes = [picture, grid, (sampler, [{"value": 1}, {"value": 2}, *modes, True])]
    with pytest.raises(CheckpointError, match="_mode = "):
        Program.read(of_nodes(true, *nodes))
    good = (sampler, [{"value": 1}, {"value": 2}, 1, 2, True])
    Program.read(of_nodes(true, picture, grid, good, LAST))


@pytest.mark.parametrize("divisor", [-1, 0, -(1 << 40)])
def test_a_mean_over_windows_has_a_divisor_above_zero(true: dict[str, Any], divisor: int) -> None:
    """Whole numbers divided by -1 end the process in torch's kernel."""
    nodes = [("unsqueeze.default", [X, 1]), ("unsqueeze.default", [{"value": 1}, 1])]
    pool = ("avg_pool2d.default", [{"value": 2}, [1, 2], [1, 1], [0, 0], False, True, divisor])
    with pytest.raises(CheckpointError, match="divisor_override"):
        Program.read(of_nodes(true, *nodes, pool))


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
