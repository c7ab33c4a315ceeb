"""Rows of Datum messages in an LMDB folder, as `fit` takes them; and writing such a folder."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np
import pyarrow as pa
import torch
from google.protobuf.message import DecodeError

from thinwire.caffe import schema
from thinwire.errors import DataError

BATCH_BYTES = 8 << 20
MAX_DATUM = 64 << 20


@final
class DatumSource:
    """The images and labels of an LMDB folder: columns `data`, of one shape, and `label`.

    Args:
        path: the folder that holds data.mdb, or that file.
    """

    transform = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with self._opened() as (found, _):
            self.num_rows = int(found.stat()["entries"])
        if not self.num_rows:
            raise DataError(f"{self.path!r} holds no Datum; is it the right folder?")
        first = next(self._rows())[0]
        self.shape, self._dtype = first.shape, first.dtype
        self.schema = _schema(self.shape, self._dtype)

    def batches(self) -> Iterator[Any]:
        """Record batches of some 8 MiB, in the order of the keys."""
        return _batches(self.path, self.schema, self.shape, self._dtype, self._rows())

    def _rows(self) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        with self._opened() as (_, cursor):
            for number, (_, value) in enumerate(cursor):
                try:
                    yield decoded(value)
                except DataError as error:  # a key is not shown: it is another's text where this is another's LMDB
                    raise DataError(f"{self.path!r}, entry {number}: {error}") from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        lmdb = _lmdb()
        file = os.path.isfile(self.path)
        if not file and not os.path.isfile(os.path.join(self.path, "data.mdb")):
            old = (
                any(name.endswith((".ldb", ".sst")) for name in os.listdir(self.path))
                if os.path.isdir(self.path)
                else False
            )
            more = " It is LevelDB: convert it with Caffe's convert tools to LMDB." if old else ""
            raise DataError(f"{self.path!r} is no LMDB folder: it has no data.mdb.{more}")
        try:
            opened = lmdb.open(self.path, subdir=not file, readonly=True, lock=False, readahead=False)
            with opened:
                needed = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
                there = os.path.getsize(self.path if file else os.path.join(self.path, "data.mdb"))
                if there < needed:  # LMDB would look for the rest in memory that is not there, which ends the process
                    raise DataError(f"{self.path!r} is cut short: {there} bytes of {needed}. Copy it again.")
                with opened.begin() as reading, reading.cursor() as cursor:
                    yield opened, cursor
        except lmdb.Error as error:
            raise DataError(f"{self.path!r} cannot be read as LMDB: {error}") from error


@final
class ImageListSource:
    """The pictures that a text file lists, a path and a label a line: columns `data`, of one shape, and `label`.

    Args:
        path: the text file, as an ImageData layer names it.
        root: what each path begins with.
        size: height and width that pictures are brought to; None leaves them as they are.
        color: three channels, blue before green before red, or one of grey.
    """

    transform = None

    def __init__(self, path: str, root: str = "", size: tuple[int, int] | None = None, *, color: bool = True) -> None:
        self.path, self._root, self._size, self._color = path, root, size, color
        self._listed = _listed(path)
        self.num_rows = len(self._listed)
        self.shape = next(self._rows())[0].shape
        self.schema = _schema(self.shape, np.dtype(np.uint8))

    def batches(self) -> Iterator[Any]:
        """Record batches of some 8 MiB, in the order of the list; each picture is read when its batch is."""
        return _batches(self.path, self.schema, self.shape, np.dtype(np.uint8), self._rows())

    def _rows(self) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        for number, (name, label) in enumerate(self._listed, 1):
            try:
                yield self._picture(self._root + name), label
            except (DataError, OSError) as error:
                why = error if isinstance(error, DataError) else type(error).__name__
                raise DataError(f"{self.path!r}, line {number}: its picture cannot be read: {why}") from None

    def _picture(self, name: str) -> np.ndarray[Any, Any]:
        if not os.path.isfile(name):
            raise DataError("there is no such file; paths begin with root_folder, or else in the current folder")
        if os.path.getsize(name) > MAX_DATUM:
            raise DataError(f"it has {os.path.getsize(name)} bytes; at most {MAX_DATUM} are read")
        with open(name, "rb") as file:
            return resized(_picture(file.read(), color=self._color), self._size)


def _listed(path: str) -> list[tuple[str, int]]:
    """Paths and labels; nothing of a file that is no such list is shown, as another file may have named it."""
    if not os.path.isfile(path) or os.path.getsize(path) > MAX_DATUM:
        raise DataError(f"{path!r} is no list of pictures; it is a text file with a path and a label a line")
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.rsplit(None, 1) for line in file if line.strip()]
    for number, parts in enumerate(lines, 1):
        if len(parts) != 2 or not parts[1].lstrip("-").isdigit():
            raise DataError(f"{path!r}, line {number}, is no path and label; write: pictures/a.jpg 3")
    if not lines:
        raise DataError(f"{path!r} lists no pictures; write a path and a label a line")
    return [(name, int(label)) for name, label in lines]


def resized(image: np.ndarray[Any, Any], size: tuple[int, int] | None) -> np.ndarray[Any, Any]:
    """A picture, channels first, brought to a height and width as OpenCV does it for Caffe: bilinear, no smoothing."""
    if size is None or image.shape[1:] == size:
        return image
    given = torch.from_numpy(np.ascontiguousarray(image)).float()[None]
    found = torch.nn.functional.interpolate(given, size=size, mode="bilinear", align_corners=False)[0]
    return found.round().clamp(0, 255).to(torch.uint8).numpy()


def _schema(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return pa.schema([("data", pa.fixed_shape_tensor(pa.from_numpy_dtype(dtype), shape)), ("label", pa.int64())])


def _batches(
    path: str,
    schema: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows: Iterator[tuple[np.ndarray[Any, Any], int]],
) -> Iterator[Any]:
    size = max(1, BATCH_BYTES // max(1, int(np.prod(shape)) * dtype.itemsize))
    while some := list(itertools.islice(rows, size)):
        for image, _ in some:
            if image.shape != shape or image.dtype != dtype:
                raise DataError(
                    f"{path!r}: an image is {image.dtype}{image.shape}, the first was {dtype}{shape}; they must be "
                    "alike: write the set with one size (resize_height, resize_width), or name one (new_height and "
                    "new_width)"
                )
        flat = pa.array(np.concatenate([image.reshape(-1) for image, _ in some]))
        storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
        images = pa.ExtensionArray.from_storage(schema.field("data").type, storage)
        labels = pa.array([label for _, label in some], pa.int64())
        yield pa.RecordBatch.from_arrays([images, labels], schema=schema)


def decoded(value: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """A Datum's image, channels first, and its label."""
    try:
        datum = schema.message("Datum").FromString(value)
    except DecodeError as error:
        raise DataError(f"this is no Datum: {error}") from error
    if datum.encoded:
        return _picture(datum.data), int(datum.label)
    shape = (datum.channels, datum.height, datum.width)
    number = int(np.prod(shape, dtype=np.int64)) if min(shape) > 0 else 0
    if not 0 < number <= MAX_DATUM:
        raise DataError(f"a Datum of {shape} is not possible; channels, height and width are at least 1")
    if datum.data:
        values: np.ndarray[Any, Any] = np.frombuffer(datum.data, np.uint8)
    else:
        values = np.asarray(datum.float_data, np.float32)
    if values.size != number:
        raise DataError(f"a Datum of {shape} holds {values.size} values; it is damaged")
    return values.reshape(shape), int(datum.label)


def _picture(data: bytes, *, color: bool | None = None) -> np.ndarray[Any, Any]:
    """A JPEG or PNG as Caffe sees it: channels first, blue before green before red; as many as it has unless said."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("this is a JPEG or PNG; install Pillow to read it") from error
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MAX_DATUM // 3:
                raise DataError(f"a picture of {image.width} × {image.height} is too large")
            grey = image.mode == "L" if color is None else not color
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except DataError:
        raise
    except Exception as error:  # each of Pillow's many readers has errors of its own
        raise DataError(f"this says that it is a JPEG or PNG, and cannot be read as one: {error}") from error
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))


def write_lmdb(path: str | os.PathLike[str], rows: Iterable[tuple[np.ndarray[Any, Any], int]]) -> int:
    """Writes images and labels as Datum messages into a new LMDB folder; returns how many."""
    lmdb, name, count = _lmdb(), os.fspath(path), 0
    if os.path.exists(name):
        raise DataError(f"{name!r} is already there; name a new folder")
    size, datum = 1 << 24, schema.message("Datum")
    with lmdb.open(name, map_size=size) as opened:
        for some in _thousands(rows):
            packed = [_packed(datum, image, label) for image, label in some]
            while size < 4 * (opened.info()["last_pgno"] + 16) * 4096 + 2 * sum(map(len, packed)):
                size *= 2
                opened.set_mapsize(size)
            with opened.begin(write=True) as writing:
                for offset, value in enumerate(packed):
                    writing.put(f"{count + offset:08d}".encode(), value)
            count += len(packed)
    return count


def _thousands(rows: Iterable[tuple[np.ndarray[Any, Any], int]]) -> Iterator[list[tuple[np.ndarray[Any, Any], int]]]:
    left = iter(rows)
    while some := list(itertools.islice(left, 1000)):
        yield some


def _packed(datum: Any, image: np.ndarray[Any, Any], label: int) -> bytes:
    channels, height, width = image.shape
    made = datum(channels=channels, height=height, width=width, label=int(label))
    if image.dtype == np.uint8:
        made.data = image.tobytes()
    else:
        made.float_data.extend(image.astype(np.float32).ravel().tolist())
    found: bytes = made.SerializeToString()
    return found


def _lmdb() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise DataError("reading LMDB folders needs lmdb: pip install 'thinwire[caffe]'") from error
    return lmdb
