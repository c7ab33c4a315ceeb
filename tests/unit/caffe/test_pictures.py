"""Pictures that a list names, and mean images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from thinwire import caffe
from thinwire.caffe.sources import ImageListSource, resized, write_lmdb
from thinwire.caffe.training import training
from thinwire.data import mean_image
from thinwire.errors import DataError
from thinwire.records import packing_of, sums_of_records

Image = pytest.importorskip("PIL.Image")
NET = """
layer { name: "d" type: "ImageData" top: "data" top: "label"
  transform_param { scale: 0.00390625 mirror: true }
  image_data_param { source: "list.txt" root_folder: "ROOT/" batch_size: 4 new_height: 6 new_width: 5 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def pictures(folder: Path, sizes: list[tuple[int, int]], mode: str = "RGB") -> list[np.ndarray[Any, Any]]:
    """PNG files with a list of them; their pixels, rows first."""
    found, lines = [], []
    for number, (high, wide) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (high, wide, 3)).astype(np.uint8)
        pixels = pixels[..., 0] if mode == "L" else pixels
        Image.fromarray(pixels).save(folder / f"a picture {number}.png")
        lines.append(f"a picture {number}.png {number % 3}")
        found.append(pixels)
    (folder / "list.txt").write_text("\n".join(lines) + "\n")
    return found


def test_listed_pictures_are_rows_of_channels_first_in_blue_green_red(tmp_path: Path) -> None:
    pixels = pictures(tmp_path, [(4, 3)] * 5)
    source = ImageListSource(str(tmp_path / "list.txt"), f"{tmp_path}/")
    table = pa.Table.from_batches(source.batches(), source.schema)
    assert (source.num_rows, source.shape) == (5, (3, 4, 3))
    assert table.column("label").to_pylist() == [0, 1, 2, 0, 1]
    values = table.column("data").combine_chunks().to_numpy_ndarray()
    assert (values == np.stack([each[..., ::-1].transpose(2, 0, 1) for each in pixels])).all()


def test_grey_pictures_are_read_in_one_channel_or_in_three(tmp_path: Path) -> None:
    (pixels,) = pictures(tmp_path, [(4, 3)], "L")
    place = str(tmp_path / "list.txt"), f"{tmp_path}/"
    assert (next(ImageListSource(*place, color=False)._rows())[0] == pixels[None]).all()
    assert ImageListSource(*place).shape == (3, 4, 3)


def test_pictures_of_several_sizes_are_brought_to_one_or_refused(tmp_path: Path) -> None:
    pictures(tmp_path, [(4, 3), (8, 9)])
    place = str(tmp_path / "list.txt"), f"{tmp_path}/"
    assert sum(batch.num_rows for batch in ImageListSource(*place, (6, 5)).batches()) == 2
    with pytest.raises(DataError, match=r"uint8\(3, 8, 9\), the first was uint8\(3, 4, 3\).*new_height and new_width"):
        list(ImageListSource(*place).batches())


def test_resizing_takes_pixel_centres_bilinearly_without_smoothing() -> None:
    """OpenCV's INTER_LINEAR, by hand: halving averages the middle two of four, doubling weighs by quarters."""
    row = np.array([[[0, 100, 200, 100]]], np.uint8)
    assert resized(row, (1, 2)).tolist() == [[[50, 150]]]
    assert resized(np.array([[[0, 100]]], np.uint8), (1, 4)).tolist() == [[[0, 25, 75, 100]]]


def test_an_image_data_layer_trains_on_the_pictures_that_it_lists(tmp_path: Path) -> None:
    pictures(tmp_path, [(4 + i, 7) for i in range(9)])
    (tmp_path / "net.prototxt").write_text(NET.replace("ROOT", str(tmp_path)))
    found = training(str(tmp_path / "net.prototxt"))
    assert found.source is not None
    assert (found.source.num_rows, found.shapes["data"], found.batch_size) == (9, (4, 3, 6, 5), 4)
    batch = next(iter(found.source.batches()))
    images = torch.from_numpy(batch.column("data").to_numpy_ndarray().copy())
    out = found.model().eval()(images[:4])
    assert out["ip"].shape == (4, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no pictures"),
        ("hidden words\n", "line 1, is no path and label"),
        ("gone.png 1\n", "line 1: its picture cannot be read: there is no such file"),
        ("list.txt 1\n", "line 1: its picture cannot be read: .*cannot be read as one"),
    ],
)
def test_a_list_that_is_none_is_refused_by_its_line_and_nothing_of_it_is_shown(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        ImageListSource(str(tmp_path / "list.txt"), f"{tmp_path}/")
    assert "hidden" not in str(caught.value)


ROWS = np.random.default_rng(0).integers(0, 256, (7, 2, 3, 4)).astype(np.uint8)


def test_a_mean_image_is_that_of_all_rows_and_caffe_reads_it(tmp_path: Path) -> None:
    wanted = torch.from_numpy(ROWS.mean(axis=0)).float()
    write_lmdb(tmp_path / "rows", [(row, 0) for row in ROWS])
    for data in (
        {"data": ROWS, "label": np.zeros(7)},
        (ROWS, np.zeros(7)),
        caffe.sources.DatumSource(tmp_path / "rows"),
    ):
        assert torch.allclose(mean_image(data), wanted)
    caffe.save_mean(wanted, tmp_path / "mean.binaryproto")
    assert torch.equal(caffe.read_mean(tmp_path / "mean.binaryproto").view(2, 3, 4), wanted)


def test_the_sums_of_an_rdd_s_records_add_up_to_the_same() -> None:
    records = [(row, 0) for row in ROWS]
    packing = packing_of(records)
    parts = [
        part for some in (records[:3], [], records[3:]) for part in sums_of_records(tuple(packing), "features", some)
    ]
    assert [part[0] for part in parts] == [3, 4]
    total = sum(np.frombuffer(held).reshape(shape) for _, shape, held in parts)
    assert (total == ROWS.astype(np.float64).sum(axis=0)).all()


def test_a_mean_of_no_rows_or_of_no_known_column_is_refused() -> None:
    with pytest.raises(DataError, match="say which holds the images"):
        mean_image({"a": ROWS})
    with pytest.raises(DataError, match="column 'b' is not in the data"):
        mean_image({"a": ROWS}, "b")
    with pytest.raises(DataError, match="no rows to take the mean of"):
        mean_image(pa.table({"data": pa.array([], pa.list_(pa.float32()))}))
