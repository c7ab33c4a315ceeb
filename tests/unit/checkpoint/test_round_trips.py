from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinwire.checkpoint import decode, encode
from thinwire.errors import CheckpointError

Same = Callable[[object, object], bool]
TENSOR_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs with payloads included; only 0 and 1 where the dtype is bool."""
    numbers = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=int))
    if dtype == torch.bool:
        return torch.from_numpy(numbers.integers(0, 2, count).astype(bool)).reshape(shape)
    raw = bytearray(numbers.bytes(count * dtype.itemsize))
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)


_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_tensors = st.builds(random_tensor, _shapes, st.sampled_from(TENSOR_DTYPES), st.integers(0, 2**31))
_numpy_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(max_len=4),
    hnp.unicode_string_dtypes(endianness="?", max_len=4),
)
_arrays = hnp.arrays(_numpy_dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
_scalars = st.one_of(
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.complex_numbers().map(np.complex128),
    st.text(max_size=4).map(np.str_),
    st.binary(max_size=4).map(np.bytes_),
)
_text = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["$", "__metadata__", "a.b"])
_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.floats(),
    _text,
    st.binary(max_size=20),
    _tensors,
    _arrays,
    _scalars,
)
trees = st.recursive(
    _leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(_text, children, max_size=4),
        st.dictionaries(_text | st.integers(-(2**70), 2**70), children, max_size=4),
    ),
    max_leaves=12,
)


class Moments(NamedTuple):
    mean: torch.Tensor
    count: int


class Phase(enum.IntEnum):
    TRAIN = 1


class Word(str):
    def __str__(self) -> str:
        return "something else"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees)
def test_any_tree_comes_back_equal_to_the_last_bit(tree: object, same: Same) -> None:
    assert same(decode(encode(tree)), tree)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees)
def test_the_same_tree_gives_the_same_bytes(tree: object) -> None:
    assert encode(tree) == encode(tree)


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_of_every_type_and_shape_come_back(shape: tuple[int, ...], dtype: torch.dtype, same: Same) -> None:
    tensor = random_tensor(shape, dtype, seed=1)
    assert same(decode(encode({"x": tensor})), {"x": tensor})


def test_views_and_shared_storage_come_back_as_tensors_of_their_own() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "base": base,
        "again": base,
        "row": base[1],
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[0].expand(5, 4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "imaginary": torch.tensor([1 + 2j]).conj().imag,
    }
    result = decode(encode(tree))
    assert isinstance(result, dict)
    assert list(result) == list(tree)
    for name, tensor in tree.items():
        assert torch.equal(result[name], tensor)
        assert result[name].is_contiguous()
    assert len({tensor.data_ptr() for tensor in result.values()}) == len(tree)
    result["base"].add_(1)  # writable, and nobody else's
    assert torch.equal(result["again"], base)


def test_encoding_leaves_the_tree_as_it_was() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3).T)
    encode({"p": parameter, "q": parameter})
    assert parameter.requires_grad
    assert not parameter.is_contiguous()
    assert torch.equal(parameter, torch.ones(3, 2))


def test_integer_keys_stay_integers_beside_equal_looking_strings(same: Same) -> None:
    tree = {1: "int", "1": "str", -5: torch.zeros(1), "-5": torch.ones(1), 2**80: None}
    assert same(decode(encode(tree)), tree)


def test_keys_that_look_like_paths_do_not_collide(same: Same) -> None:
    tree = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "b#1": torch.tensor(3)},
        "a.b#1": torch.tensor(4),
        "__metadata__": torch.tensor(5),
        "tree": torch.tensor(6),
        "": torch.tensor(7),
        "$": {"$": "tensor", "name": "a.b"},
        "x": [torch.tensor(8)],
        "x[0]": torch.tensor(9),
    }
    assert same(decode(encode(tree)), tree)


def test_numpy_text_keeps_the_nuls_it_ends_in(same: Same) -> None:
    tree = [np.str_("a\0"), np.bytes_(b"a\0"), np.str_(""), np.array(["a\0", "b"]), np.longdouble("0.1")]
    assert same(decode(encode(tree)), tree)


def test_arrays_come_back_writable() -> None:
    result = decode(encode(np.arange(3)))
    assert isinstance(result, np.ndarray)
    result[0] = 7
    assert result.tolist() == [7, 1, 2]


def test_integers_longer_than_python_prints_come_back() -> None:
    assert decode(encode(-(7**20_000))) == -(7**20_000)


def test_subclasses_come_back_as_their_plain_base(same: Same) -> None:
    tree = {
        "named": Moments(torch.ones(2), 3),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(int, a=1),
        "enum": Phase.TRAIN,
        "word": Word("plain"),
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "counter": Counter({3: 2}),
    }
    assert same(
        decode(encode(tree)),
        {
            "named": (torch.ones(2), 3),
            "ordered": {"b": 1, "a": 2},
            "default": {"a": 1},
            "enum": 1,
            "word": "plain",
            "size": (2, 3),
            "parameter": torch.ones(2),
            "counter": Counter({3: 2}),
        },
    )


def test_any_safetensors_reader_sees_the_tensors_under_their_paths() -> None:
    tree = {"optimizer": {"state": {3: {"exp_avg": torch.ones(2)}}}, "model": {"0.weight": torch.zeros(1)}}
    assert set(safetensors.torch.load(encode(tree))) == {"optimizer.state[3].exp_avg", "model.0.weight"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimizer": {"state": {3: {"hook": lambda: None}}}}, r"optimizer\.state\[3\]\.hook is a function"),
        ([1, (2, {"a b": {1, 2}})], r"\[1\]\[1\]\['a b'\] is a set \(\{1, 2\}\)"),
        (object(), r"the tree is an object"),
        ({"len": len}, r"len is a builtin_function_or_method"),
        ({"a": {(1, 2): 0}}, r"a key of a is a tuple \(\(1, 2\)\)"),
        ({True: 0}, r"a key of the tree is a bool"),
        ({1.5: 0}, r"a key of the tree is a float"),
        ({"m": torch.nn.Linear(1, 1)}, r"m is a torch\.nn\.modules\.linear\.Linear"),
        ({"d": torch.float32}, r"d is a torch\.dtype"),
        ({"o": np.array([None])}, r"o is a NumPy value of dtype object"),
        ({"s": np.zeros(1, [("x", "f4")])}, r"s is a NumPy value of dtype \[\('x'"),
        ({"m": np.ma.masked_array([1], [True])}, r"m is a numpy\.ma\S*MaskedArray"),
        ({"c": torch.zeros(1, dtype=torch.complex128)}, r"c is a Tensor of torch\.complex128"),
        ({"c": torch.zeros(1, device="meta")}, r"c is a Tensor of .* on meta"),
        ({"c": torch.eye(2).to_sparse()}, r"c is a Tensor of .*sparse"),
        ({"c": torch.nn.UninitializedParameter()}, r"c is a"),
        ({"c": 1j}, r"c is a complex"),
        ({"c": bytearray(b"x")}, r"c is a bytearray"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_path(tree: object, message: str) -> None:
    with pytest.raises(CheckpointError, match="^" + message):
        encode(tree)


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="holds itself"):
        encode(tree)


def test_a_structure_longer_than_safetensors_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.checkpoint.format._MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="Store long lists of numbers as tensors"):
        encode(list(range(1000)))
