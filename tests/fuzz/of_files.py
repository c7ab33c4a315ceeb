"""Files that come from elsewhere: checkpoints, recipes, rows."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.target import Target
from thinwire import recipe, units
from thinwire.checkpoint import decode, encode
from thinwire.checkpoint.manifest import Manifest, Part
from thinwire.checkpoint.structure import flatten, restore
from thinwire.data import builtin
from thinwire.data.files import open_files
from thinwire.data.shards import Shard, write_shard
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.strategies.registry import strategy

_FOLDER = tempfile.TemporaryDirectory(prefix="thinwire-fuzz-")


def written(name: str, data: bytes) -> str:
    """A file of this process's own that holds some bytes."""
    path = os.path.join(_FOLDER.name, f"{os.getpid()}-{name}")
    with open(path, "wb") as file:
        file.write(data)
    return path


# -- checkpoints ------------------------------------------------------------------------------------------------------

TREE = {
    "w": torch.arange(4.0),
    "k": np.arange(3),
    "raw": b"abc",
    "n": 3,
    "deep": [({1: None},)],
    "s": np.float32(2),
    "big": 2**80,
}
TENSORS = {"t": torch.zeros(2), "u": torch.zeros(4).byte()}


def _checkpoint(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        decode(data)


def _structure(data: bytes) -> None:
    draw = Draw(data)
    node, tensors = _FLAT
    with contextlib.suppress(CheckpointError):
        found = restore(draw.changed(node) if draw.byte() % 4 else draw.value(4), tensors)
        flatten(found)


_FLAT = flatten(TREE)
MANIFEST = Manifest(
    "000001-step-4", 4, (Part("joint", 3, "0" * 64),), {"history": [{"loss": 0.5}], "best": None}
).to_json()


def _manifest(data: bytes) -> None:
    draw = Draw(data)
    raw = draw.byte() % 2
    text = draw.rest() if raw else json.dumps(draw.changed(json.loads(MANIFEST))).encode()
    with contextlib.suppress(CheckpointError):
        Manifest.from_json(text).to_json()


# -- recipes ----------------------------------------------------------------------------------------------------------

RECIPES = Path(__file__).parent.parent.parent / "recipes"


def _recipe(data: bytes) -> None:
    text, _, change = data.partition(b"\x00")
    with contextlib.suppress(ConfigError):
        changes = [change.decode("utf-8", "replace")] if change else []
        found = recipe.load(written("recipe.toml", text), changes)
        units.rate_bytes(found.cluster.link)
        knobs = dict(found.strategy)
        strategy(knobs.pop("name", "synchronous"), knobs)


def _recipe_seeds() -> list[bytes]:
    found = [path.read_bytes() for path in sorted(RECIPES.glob("*.toml"))]
    return [
        *(text for text in found if len(text) < 1000),
        b"\x00train.epochs=5",
        b"[strategy]\nname='mpca'\n\x00strategy.pull=0.5",
    ]


def _units(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ConfigError):
        found = units.rate_bits(text)
        assert 0 < found < float("inf")
    with contextlib.suppress(ConfigError):
        assert 0 < units.quantity("--memory", text, units.SIZES) < float("inf")


# -- rows -------------------------------------------------------------------------------------------------------------


def _batches() -> list[pa.RecordBatch]:
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype=np.float32)), 4)
    tensor = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), (2, 2)), pixels)
    columns = {
        "x": pa.array([1.0, 2.0], pa.float32()),
        "label": pa.array([0, 1]),
        "ragged": pa.array([[1], [2, 3]]),
        "word": pa.array(["a", "b"]),
        "sure": pa.array([True, False]),
        "pixels": tensor,
        "kind": pa.array(["u", "v"]).dictionary_encode(),
    }
    return [pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))]


def _narrow(*names: str) -> list[pa.RecordBatch]:
    return [batch.select(list(names)) for batch in _batches()]


def _arrow(batches: list[pa.RecordBatch]) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def _parquet_bytes(batches: list[pa.RecordBatch], **how: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_batches(batches), sink, **how)
    return sink.getvalue()


def _ingested(path: str) -> None:
    """As a driver reads a file: measures it, and writes what it holds to a shard, which is opened and read."""
    source = open_files([path])
    shard = os.path.join(_FOLDER.name, f"{os.getpid()}-shard")
    write_shard(shard, source.batches(), source.schema)
    _read(shard)


def _read(path: str) -> None:
    found = Shard.open(path)
    if found.num_rows:
        found.take(np.array([0, found.num_rows - 1]))


def _arrow_file(data: bytes) -> None:
    with contextlib.suppress(DataError):
        _ingested(written("rows.arrow", data))


def _parquet_file(data: bytes) -> None:
    with contextlib.suppress(DataError):
        _ingested(written("rows.parquet", data))


def _shard_file(data: bytes) -> None:
    with contextlib.suppress(DataError):
        _read(written("shard", data))


def _shard_seeds() -> list[bytes]:
    found = []
    for batches in (_narrow("x", "label"), _narrow("ragged"), _narrow("word"), _narrow("sure", "pixels")):
        path = os.path.join(_FOLDER.name, "seed")
        write_shard(path, batches, batches[0].schema)
        found.append(Path(path).read_bytes())
    return found


def _sets(data: bytes) -> None:
    draw = Draw(data)
    kind, packed = draw.pick(("idx3", "idx1", "cifar", "text")), draw.byte() % 2
    body = draw.rest()
    with contextlib.suppress(DataError):
        if kind.startswith("idx"):
            found = builtin._read_idx(written("idx.gz" if packed else "idx", body), int(kind[-1]))
            assert found.ndim == int(kind[-1])
            builtin.table_of_arrays({"pixels": found[:, None]})
        elif kind == "cifar":
            written("data_batch_1.bin", body)
            builtin._text(written("text", body * 40), "train")
        else:
            builtin._text(written("text", body * 40), "test" if packed else "train")


def _sets_seeds() -> list[bytes]:
    images = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 1, 2, 3, 4])
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2])
    packed = gzip.compress(images, mtime=0)
    return [
        b"\x00\x00" + images,
        b"\x01\x00" + labels,
        b"\x00\x01" + packed,
        b"\x02\x00abc",
        b"\x03\x01" + b"a text" * 9,
    ]


TARGETS = (
    Target(
        "checkpoint", _checkpoint, lambda: [encode(TREE), encode({"a": (1,)}), encode([])], "a checkpoint's parts", 1024
    ),
    Target(
        "structure",
        _structure,
        lambda: [b"\x01\x00", b"\x01\x01\x05\x03\x09", b"\x00\x0a\x03"],
        "the structure inside a part",
        128,
    ),
    Target("manifest", _manifest, lambda: [b"\x01" + MANIFEST, b"\x00\x00"], "a checkpoint's manifest", 1024),
    Target(
        "recipe",
        _recipe,
        _recipe_seeds,
        "recipes, changes to them, and a strategy's knobs",
        1024,
        (
            b"[strategy]",
            b"[train]",
            b"[cluster]",
            b"name = ",
            b"'mpca'",
            b"= [",
            b"{}",
            b"1e400",
            b"[[",
            b"nan",
            b"link",
        ),
    ),
    Target("units", _units, lambda: [b"100mbit", b"1.5 GiB", b"1gbit"], "quantities as people write them", 64),
    Target(
        "arrow",
        _arrow_file,
        lambda: [
            _arrow(_narrow("x", "label")),
            _arrow(_narrow("ragged", "word")),
            _arrow(_narrow("sure", "kind")),
            _arrow(_narrow("pixels")),
        ],
        "Arrow files of rows",
        4096,
        changes=500,
    ),
    Target(
        "parquet",
        _parquet_file,
        lambda: [
            _parquet_bytes(_narrow("x", "label"), compression="none"),
            _parquet_bytes(_narrow("ragged", "word"), compression="none"),
            _parquet_bytes(_narrow("sure"), use_dictionary=False),
        ],
        "Parquet files of rows",
        4096,
        changes=500,
    ),
    Target("shard", _shard_file, _shard_seeds, "a worker's own rows", 4096),
    Target("sets", _sets, _sets_seeds, "sets known by name: idx, packed or not, and text", 512),
)
