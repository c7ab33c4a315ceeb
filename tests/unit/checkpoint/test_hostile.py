"""Data no thinwire wrote: each must end in a CheckpointError, never in a crash or in a call."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import decode, encode
from thinwire.checkpoint.structure import restore
from thinwire.errors import CheckpointError

TREE = {"weights": torch.arange(4.0), "keys": np.arange(3), "raw": b"abc", "step": 3, "deep": [({1: None},)]}


def file(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def forged(tree: object, body: bytes = b"", **fields: object) -> bytes:
    """A file of the right form whose structure is `tree`, with two tensors to refer to."""
    header: dict[str, Any] = {
        "__metadata__": {"thinwire": json.dumps({"version": 1, "needs": "0.1.0", "tree": tree, **fields})},
        "bytes": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "float": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    return file(header, body or bytes(8))


def test_the_forger_can_also_write_good_files() -> None:
    assert decode(forged({"a": {"$": "bytes", "name": "bytes"}})) == {"a": bytes(4)}


def test_every_truncation_is_found() -> None:
    data = encode(TREE)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            decode(data[:length])


def test_bytes_added_at_the_end_are_found() -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        decode(encode(TREE) + b"\0")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_byte_gives_a_tree_or_a_checkpoint_error(data: st.DataObject) -> None:
    whole = bytearray(encode(TREE))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        decode(bytes(whole))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(data)


_names = st.sampled_from(["$", "items", "name", "dtype", "shape", "hex", "bits", "x"])
_words = st.sampled_from(
    [
        "tensor",
        "bytes",
        "array",
        "scalar",
        "int",
        "float",
        "tuple",
        "dict",
        "Counter",
        "t",
        "u",
        "<f4",
        "|S0",
        "ff",
    ]
)
_nodes = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _words | st.text(max_size=4),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(_names, children | _words, max_size=4),
    max_leaves=10,
)


@settings(max_examples=250, deadline=None)
@given(_nodes)
def test_any_json_as_structure_gives_a_tree_or_a_checkpoint_error(node: object) -> None:
    with contextlib.suppress(CheckpointError):
        restore(node, {"t": torch.zeros(2), "u": torch.zeros(4).byte()})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        file(b"{"),
        file(b"[]"),
        file(b"\xff\xfe"),
        file(b"[" * 100_000),
        file(b'{"a":' * 100_000),
        file({}),
        file({"__metadata__": []}),
        file({"__metadata__": {"thinwire": 1}}),
        file({"__metadata__": {"thinwire": "{"}}),
        file({"__metadata__": {"thinwire": "[" * 100_000}}),
        file({"__metadata__": {"thinwire": "[]"}}),
        file({"__metadata__": {"thinwire": "{}"}}),
        file({"__metadata__": {"thinwire": '{"version": 1}'}}),
        file({"__metadata__": {"thinwire": '{"version": 1, "tree": ' + "9" * 5000 + "}"}}),
        forged(None, version=0),
        forged(None, version=True),
        forged(None, version="1"),
    ],
    ids=range(20),
)
def test_a_file_of_the_wrong_form_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"damaged.*Resume from another checkpoint"):
        decode(data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [2**62, 4], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]},
        {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1], "data_offsets": [0, 2**60]},
        {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1]},
        {},
    ],
    ids=range(9),
)
def test_a_tensor_that_does_not_fit_the_file_is_refused(entry: object) -> None:
    metadata = {"thinwire": json.dumps({"version": 1, "tree": {"$": "tensor", "name": "t"}})}
    with pytest.raises(CheckpointError, match="damaged"):
        decode(file({"__metadata__": metadata, "t": entry}, b"\0"))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"$": "tensor", "name": "absent"}, "'absent', which is not there"),
        ({"$": "tensor", "name": 3}, "has no 'name'"),
        ({"$": "tensor"}, "has no 'name'"),
        ({"$": "bytes", "name": "float"}, "does not hold plain bytes"),
        ({"$": "os.system", "items": ["true"]}, "unknown kind 'os.system'"),
        ({"$": ["tuple"], "items": []}, "unknown kind"),
        ({"$": "tuple", "items": "abc"}, "unknown kind"),
        ({"$": "dict", "items": [1]}, "keys and values"),
        ({"$": "dict", "items": [[[], 1]]}, "has the key"),
        ({"$": "dict", "items": [[True, 1]]}, "has the key True"),
        ({"$": "int", "hex": "zz"}, "cannot be rebuilt"),
        ({"$": "float", "bits": "00"}, "cannot be rebuilt"),
        ({"$": "scalar", "dtype": "<f4", "hex": "00"}, "1 bytes for one value"),
        ({"$": "scalar", "dtype": "<f3", "hex": "000000"}, "cannot be rebuilt"),
        ({"$": "scalar", "dtype": "<U1", "hex": "ffffffff"}, "cannot be rebuilt"),
        ({"$": "array", "name": "bytes", "dtype": "|O8", "shape": [1]}, "dtype '|O8'"),
        ({"$": "array", "name": "bytes", "dtype": "f4,f4", "shape": [1]}, "dtype 'f4,f4'"),
        ({"$": "array", "name": "bytes", "dtype": "<f4", "shape": [2]}, "4 bytes for an array"),
        ({"$": "array", "name": "bytes", "dtype": "<f4", "shape": [-1]}, "shape"),
        ({"$": "array", "name": "bytes", "dtype": "<f4", "shape": [0, 2**80]}, "4 bytes for an array"),
        ({"$": "array", "name": "bytes", "dtype": "|u1", "shape": [4] + [1] * 100}, "cannot be rebuilt"),
    ],
)
def test_a_structure_that_means_nothing_is_refused(node: object, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decode(forged([node]))
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
def test_nesting_past_the_limit_is_refused_on_reading_too(kind: str) -> None:
    tree: object = None
    for _ in range(101):
        tree = {"list": [tree], "dict": {"a": tree}, "tuple": {"$": "tuple", "items": [tree]}}[kind]
    with pytest.raises(CheckpointError, match="nested more than 100 levels"):
        decode(forged(tree))


def test_a_newer_format_says_which_thinwire_reads_it() -> None:
    with pytest.raises(CheckpointError, match=r"format version 2\..*reads versions 1 to 1\..*thinwire 7\.3\.0 or"):
        decode(forged({"$": "quantum"}, version=2, needs="7.3.0"))


def test_a_newer_format_that_does_not_say_still_asks_for_a_newer_thinwire() -> None:
    with pytest.raises(CheckpointError, match="Install a newer thinwire"):
        decode(forged(None, version=2, needs=None))


def test_a_pickle_is_refused_without_being_run() -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        decode(b"cos\nsystem\n(S'exit 1'\ntR.")
