"""LMDB folders of Datum messages, and what data layers do to raw images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from PIL import Image

from thinwire.caffe import save, schema
from thinwire.caffe.prototxt import parse
from thinwire.caffe.sources import DatumSource, write_lmdb
from thinwire.caffe.training import training
from thinwire.caffe.transforms import Transformer
from thinwire.data.columns import dense
from thinwire.errors import ConfigError, DataError


def _rows(count: int = 2500) -> list[tuple[np.ndarray[Any, Any], int]]:
    chance = np.random.default_rng(0)
    return [(chance.integers(0, 256, (3, 4, 5)).astype(np.uint8), i % 7) for i in range(count)]


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    rows = _rows()
    assert write_lmdb(tmp_path / "set", rows) == 2500
    source = DatumSource(tmp_path / "set")
    assert (source.num_rows, source.shape) == (2500, (3, 4, 5))
    for _ in range(2):  # they may be read again
        batches = list(source.batches())
        images = np.concatenate([dense(b.column("data")) for b in batches])
        labels = np.concatenate([dense(b.column("label")) for b in batches])
        assert np.array_equal(images, np.stack([image for image, _ in rows]))
        assert labels.tolist() == [label for _, label in rows]
    with pytest.raises(DataError, match="is already there"):
        write_lmdb(tmp_path / "set", rows)


def test_floats_and_pictures_are_read(tmp_path: Path) -> None:
    write_lmdb(tmp_path / "floats", [(np.full((1, 2, 2), 0.25, np.float32), 1)])
    (batch,) = DatumSource(tmp_path / "floats").batches()
    assert dense(batch.column("data")).ravel().tolist() == [0.25] * 4
    red = io.BytesIO()
    Image.new("RGB", (3, 2), (255, 10, 0)).save(red, "PNG")
    with lmdb.open(str(tmp_path / "pictures")) as opened, opened.begin(write=True) as writing:
        datum = schema.message("Datum")(encoded=True, data=red.getvalue(), label=4)
        writing.put(b"0", datum.SerializeToString())
    (batch,) = DatumSource(tmp_path / "pictures").batches()
    image = dense(batch.column("data"))[0]
    assert image.shape == (3, 2, 3)
    assert image[:, 0, 0].tolist() == [0, 10, 255]  # blue, green, red


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\xff\xff", "no Datum"),
        (schema.message("Datum")(channels=1, height=2, width=2, data=b"abc").SerializeToString(), "holds 3 values"),
        (schema.message("Datum")(channels=1 << 20, height=1 << 20, width=1).SerializeToString(), "not possible"),
        (schema.message("Datum")(encoded=True, data=b"no picture").SerializeToString(), "cannot be read as one"),
    ],
)
def test_damaged_rows_are_named_by_their_number(value: bytes, said: str, tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as opened, opened.begin(write=True) as writing:
        writing.put(b"00000007", value)
    with pytest.raises(DataError, match=rf"entry \d+: .*{said}"):
        DatumSource(tmp_path)


def test_folders_that_are_no_lmdb_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no data\.mdb"):
        DatumSource(tmp_path)
    (tmp_path / "000005.ldb").write_bytes(b"")
    with pytest.raises(DataError, match="It is LevelDB"):
        DatumSource(tmp_path)
    (tmp_path / "data.mdb").write_bytes(b"not one" * 1000)
    with pytest.raises(DataError, match="cannot be read as LMDB"):
        DatumSource(tmp_path)


def _transformer(text: str) -> Transformer:
    return Transformer(parse("TransformationParameter", text, "test"))


def test_the_mean_goes_before_the_scale_and_crops_are_in_the_middle_when_testing() -> None:
    x = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
    transformer = _transformer("scale: 0.5 mean_value: 2 crop_size: 2").eval()
    assert transformer(x)[0, 0].tolist() == [[1.5, 2.0], [3.5, 4.0]]


def test_crops_and_mirrors_are_drawn_row_by_row_when_training() -> None:
    torch.manual_seed(0)
    x = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4).repeat(500, 1, 1, 1)
    found = _transformer("crop_size: 3 mirror: true")(x)
    corners = {(int(a), int(b)) for a, b in zip(found[:, 0, 0, 0], found[:, 0, 0, 1], strict=True)}
    assert corners == {(c, c + 1) for c in (0, 1, 4, 5)} | {(c, c - 1) for c in (2, 3, 6, 7)}
    with pytest.raises(DataError, match="crop_size 9 is larger than the images, 4 × 4"):
        _transformer("crop_size: 9")(x)


def test_a_mean_file_is_found_beside_the_net(tmp_path: Path) -> None:
    blob = schema.message("BlobProto")(num=1, channels=1, height=2, width=2, data=[1, 2, 3, 4])
    (tmp_path / "mean.binaryproto").write_bytes(blob.SerializeToString())
    given = parse("TransformationParameter", 'mean_file: "elsewhere/mean.binaryproto"', "test")
    assert Transformer(given, str(tmp_path))(torch.zeros(1, 1, 2, 2)).flatten().tolist() == [-1, -2, -3, -4]
    with pytest.raises(ConfigError, match="is neither here nor in"):
        Transformer(given, str(tmp_path / "nowhere"))


NET = """
layer { name: "d" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.1 crop_size: 4 } data_param { source: "train" batch_size: 8 backend: LMDB } }
layer { name: "d" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { scale: 0.1 crop_size: 4 } data_param { source: "test" batch_size: 5 backend: LMDB } }
layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param { num_output: 7 } }
layer { name: "a" type: "Accuracy" bottom: "i" bottom: "label" top: "top1" include { phase: TEST } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "loss" }
"""


def test_a_net_and_its_solver_say_all_that_a_run_needs(tmp_path: Path) -> None:
    write_lmdb(tmp_path / "train", _rows(20))
    (tmp_path / "net.prototxt").write_text(NET)
    text = 'net: "far/net.prototxt" base_lr: 0.1 max_iter: 30 test_interval: 10 iter_size: 2'
    (tmp_path / "solver.prototxt").write_text(text)
    found = training(None, str(tmp_path / "solver.prototxt"))
    assert (found.steps, found.evaluate_every, found.batch_size) == (30, 10, 16)
    assert (found.inputs, list(found.metrics)) == (("data", "label"), ["top1"])
    assert found.source is not None
    assert found.validation is None  # its folder is not here
    model = found.model()
    image, label = torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.zeros(2)
    assert model(image, label).loss is not None
    assert model.net.blobs["data"].shape == (2, 3, 4, 4)
    save(model.net, tmp_path / "x.caffemodel")
    again = training(str(tmp_path / "net.prototxt"), weights=str(tmp_path / "x.caffemodel")).model()
    assert torch.equal(again.net.params["i"][0], model.net.params["i"][0])


def test_a_net_without_rows_or_shapes_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET)
    with pytest.raises(ConfigError, match="does not tell the shape of data; give shapes"):
        training(str(tmp_path / "net.prototxt"))
    with pytest.raises(ConfigError, match="name a network, or a solver that names one"):
        training(None)
