import gzip
import pickle
import struct

import numpy as np
import pyarrow as pa
import pytest
import torch

from thinwire.data import open_source
from thinwire.errors import DataError


def column(source, name) -> np.ndarray:
    (batch,) = source.batches()
    array = batch.column(name)
    return array.to_numpy_ndarray() if isinstance(array, pa.ExtensionArray) else array.to_numpy()


def write_idx(path, array) -> None:
    raw = struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_mnist(folder, end="", joint="-") -> np.ndarray:
    folder.mkdir(exist_ok=True)
    images = np.arange(5 * 28 * 28).astype(np.uint8).reshape(5, 28, 28)
    for prefix, count in (("train", 5), ("t10k", 2)):
        write_idx(folder / f"{prefix}-images{joint}idx3-ubyte{end}", images[:count])
        write_idx(folder / f"{prefix}-labels{joint}idx1-ubyte{end}", np.arange(count, dtype=np.uint8))
    return images


def write_cifar(folder) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    table = np.arange(6 * 3073).astype(np.uint8).reshape(6, 3073)
    table[:, 0] = np.arange(6)
    table[:4].tofile(folder / "data_batch_1.bin")
    table[4:5].tofile(folder / "data_batch_2.bin")
    table[5:].tofile(folder / "test_batch.bin")
    return table


def test_digits_are_1797_images_of_ten_classes_from_zero_to_one():
    source = open_source("digits")
    pixels, label = column(source, "pixels"), column(source, "label")
    assert source.schema.field("pixels").type == pa.fixed_shape_tensor(pa.float32(), (1, 8, 8))
    assert source.num_rows == 1797
    assert np.bincount(label).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (pixels.min(), pixels.max()) == (0.0, 1.0)
    assert (pixels[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert source.transform is None


@pytest.mark.parametrize("text", ["digits?split=test", "digits:/some/where"])
def test_digits_are_one_whole_set(text):
    with pytest.raises(DataError, match="digits has no"):
        open_source(text)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("joint", ["-", "."])
@pytest.mark.parametrize("name", ["mnist:", "fashion-mnist:", ""])
def test_idx_files_are_read_plain_and_packed_by_name_and_by_folder(tmp_path, end, joint, name):
    images = write_mnist(tmp_path / "set", end, joint)
    train, test = (open_source(f"{name}{tmp_path / 'set'}{split}") for split in ("", "?split=test"))
    assert train.schema.field("pixels").type == pa.fixed_shape_tensor(pa.uint8(), (1, 28, 28))
    assert train.schema.field("label").type == pa.int64()
    assert (column(train, "pixels")[:, 0] == images).all()
    assert column(train, "label").tolist() == [0, 1, 2, 3, 4]
    assert test.num_rows == 2


@pytest.mark.parametrize("place", ["set", "set/cifar-10-batches-bin"])
@pytest.mark.parametrize("name", ["cifar10:", ""])
def test_cifar_batches_are_read_by_name_and_by_folder(tmp_path, place, name):
    table = write_cifar(tmp_path / place)
    train = open_source(f"{name}{tmp_path / 'set'}?split=train")
    assert (column(train, "pixels").reshape(5, -1) == table[:5, 1:]).all()
    assert column(train, "pixels").shape == (5, 3, 32, 32)
    assert column(train, "label").tolist() == [0, 1, 2, 3, 4]
    assert column(open_source(f"{name}{tmp_path / 'set'}?split=test"), "label").tolist() == [5]


def test_the_transform_of_image_sets_pickles_and_scales_bytes_to_one(tmp_path):
    write_mnist(tmp_path / "set")
    transform = pickle.loads(pickle.dumps(open_source(f"mnist:{tmp_path / 'set'}").transform))
    given = {"pixels": torch.tensor([[0, 51, 255]], dtype=torch.uint8), "label": torch.tensor([1])}
    scaled = transform(given)
    assert torch.equal(scaled["pixels"], torch.tensor([[0.0, 0.2, 1.0]]))
    assert scaled["label"] is given["label"]
    assert given["pixels"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digit", "'digit' is neither .* Did you mean 'digits'"),
        ("minst:/data", "'minst' is neither .* Did you mean 'mnist'"),
        ("mnist", "'mnist' needs a folder; mnist:DIR"),
        ("zzzz", "'zzzz' is neither .* Allowed: cifar10, digits, fashion-mnist, mnist"),
        ("mnist:/nowhere", "no file train-images-idx.-ubyte in '/nowhere'"),
        ("cifar10:/nowhere?split=test", "no file test_batch.bin in '/nowhere'"),
        ("mnist:/nowhere?split=tset", "asks for 'tset'. Did you mean 'test'"),
        ("mnist:/nowhere?part=test", "asks for an option 'part'"),
        ("/nowhere/a.parquet?split=test", "asks for a split; only the sets"),
    ],
)
def test_a_name_that_is_not_understood_is_refused_with_the_nearest(text, message):
    with pytest.raises(DataError, match=message):
        open_source(text)


def test_a_folder_with_the_name_of_a_set_is_that_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist")
    monkeypatch.chdir(tmp_path)
    assert open_source("mnist").num_rows == 5


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cannot be read"),
        (b"\0\0\x08\x03", "cannot be read"),
        (struct.pack(">4I", 0x803, 2, 28, 28) + b"\0" * 100, "is damaged"),
        (struct.pack(">4I", 0xD03, 1, 1, 1) + b"\0" * 4, "is damaged"),
    ],
    ids=["empty", "cut in its head", "cut", "of floats"],
)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_damaged_idx_files_are_named(tmp_path, raw, message, end):
    write_mnist(tmp_path / "set", end)
    path = tmp_path / "set" / f"train-images-idx3-ubyte{end}"
    path.write_bytes(gzip.compress(raw) if end else raw)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte{end}' {message}"):
        open_source(f"mnist:{tmp_path / 'set'}")


def test_other_damage_to_image_sets_is_named(tmp_path):
    write_mnist(tmp_path / "set")
    write_idx(tmp_path / "set" / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="has 5 train images and 3 labels"):
        open_source(f"mnist:{tmp_path / 'set'}")
    (tmp_path / "set" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no file train-labels"):
        open_source(f"mnist:{tmp_path / 'set'}")
    write_cifar(tmp_path / "cifar")
    (tmp_path / "cifar" / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"test_batch.bin' has 3 bytes; a multiple of 3073"):
        open_source(f"cifar10:{tmp_path / 'cifar'}?split=test")
    (tmp_path / "set" / "t10k-images-idx3-ubyte").write_bytes(b"not packed")
    (tmp_path / "set" / "t10k-images-idx3-ubyte").rename(tmp_path / "set" / "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"ubyte.gz' cannot be read"):
        open_source(f"mnist:{tmp_path / 'set'}?split=test")
