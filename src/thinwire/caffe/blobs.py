"""Caffe's binary form: messages of protobuf, the blobs in them, and mean files."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from thinwire.caffe import schema
from thinwire.errors import ConfigError, DataError

MAX_BYTES = (1 << 31) - 1
"""The largest file that protobuf reads."""
MAX_ELEMENTS = 1 << 27
"""The most numbers that a blob may have: the largest known blob of parameters (VGG's fc6) has 103 million."""


_kept: ContextVar[dict[str, bytes] | None] = ContextVar("kept", default=None)
_only: ContextVar[dict[str, bytes] | None] = ContextVar("only", default=None)


class Blob:
    """Numbers from a file with their shape; `legacy` where only the four old dimensions tell it."""

    def __init__(self, values: np.ndarray[Any, Any], shape: tuple[int, ...], *, legacy: bool) -> None:
        self.values, self.shape, self.legacy = values, shape, legacy

    def tensor(self, shape: tuple[int, ...] | None = None) -> Tensor:
        return torch.from_numpy(self.values.astype(np.float32, copy=True)).view(self.shape if shape is None else shape)


def read_mean(path: str | os.PathLike[str]) -> Tensor:
    """The array in a binaryproto file: a mean image, an infogain matrix."""
    name = os.fspath(path)
    found = blob_of(parsed("BlobProto", read_bytes(name), name))
    return found.tensor()


def save_mean(mean: Any, path: str | os.PathLike[str]) -> None:
    """Writes a mean image, channels first, as a `mean_file` of Caffe (binaryproto)."""
    values = torch.as_tensor(mean).detach().to("cpu", torch.float32)
    values = values[None] if values.dim() == 2 else values
    if values.dim() != 3:
        raise ConfigError(f"a mean image has the shape {tuple(values.shape)}; channels, height and width are written")
    channels, height, width = values.shape
    made = schema.message("BlobProto", raw=True)(num=1, channels=channels, height=height, width=width)
    made.data = values.contiguous().numpy().astype("<f4", copy=False).tobytes()
    with open(os.fspath(path), "wb") as file:
        file.write(made.SerializeToString())


def parsed(message: str, data: bytes, name: str) -> Any:
    """A message from its binary form."""
    made = schema.message(message, raw=True)()
    try:
        made.ParseFromString(data)
        _touch(made)
    except (DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        why = "a text in it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(
            f"{name!r} is not a {message} in Caffe's binary form: {why}; is it damaged or of another kind?"
        ) from error
    return made


def _touch(made: Any) -> None:
    """Looks at every text once: whether it is one shows only then."""
    for descriptor, value in made.ListFields():
        if descriptor.message_type is not None:
            for inner in value if hasattr(value, "__len__") and not hasattr(value, "ListFields") else [value]:
                _touch(inner)


@contextlib.contextmanager
def keeping() -> Iterator[dict[str, bytes]]:
    """Keeps every binary file of Caffe that is read within, by its path."""
    files: dict[str, bytes] = {}
    token = _kept.set(files)
    try:
        yield files
    finally:
        _kept.reset(token)


@contextlib.contextmanager
def only(files: dict[str, bytes]) -> Iterator[None]:
    """Makes these all the binary files of Caffe that there are within: no disk is looked at."""
    token = _only.set(files)
    try:
        yield
    finally:
        _only.reset(token)


def found_file(name: str, folder: str) -> str:
    """A path as Caffe's files name it: from here, as Caffe itself takes it, or else beside the file that names it."""
    files = _only.get()
    for place in (name, os.path.join(folder, name), os.path.join(folder, os.path.basename(name))):
        if os.path.exists(place) if files is None else place in files:
            return place
    raise ConfigError(f"{name!r} is neither here nor in {folder!r}; run from the folder that such paths start in")


def read_bytes(name: str) -> bytes:
    """A binary file of Caffe, whole."""
    files, kept = _only.get(), _kept.get()
    if files is not None and name not in files:
        raise DataError(f"{name!r} has not travelled with the network; give the net that names it again")
    found = _read(name) if files is None else files[name]
    if kept is not None:
        kept[name] = found
    return found


def _read(name: str) -> bytes:
    if not os.path.isfile(name):
        raise DataError(f"{name!r} is not a file; give the path of a caffemodel, solverstate or binaryproto")
    if os.path.getsize(name) > MAX_BYTES:
        raise DataError(f"{name!r} has {os.path.getsize(name)} bytes; such files have at most {MAX_BYTES}")
    with open(name, "rb") as file:
        found = file.read()
    if found.startswith(b"\x89HDF\r\n"):
        raise DataError(f"{name!r} is HDF5; snapshot it with snapshot_format: BINARYPROTO")
    return found


def blob_of(given: Any) -> Blob:
    """A BlobProto's numbers and shape; raises where they do not agree."""
    doubles = bool(given.double_data)
    raw = given.double_data if doubles else given.data
    size = 8 if doubles else 4
    if len(raw) % size:
        raise DataError(f"a blob has {len(raw)} bytes, which are no whole numbers of {size}")
    values = np.frombuffer(raw, dtype="<f8" if doubles else "<f4")
    legacy = any(given.HasField(name) for name in ("num", "channels", "height", "width")) and not given.HasField(
        "shape"
    )
    shape = tuple(int(d) for d in given.shape.dim)
    if legacy:
        shape = (given.num, given.channels, given.height, given.width)
    if any(d < 0 for d in shape) or math.prod(shape) != values.size or values.size > MAX_ELEMENTS:
        raise DataError(f"a blob of shape {shape} holds {values.size} numbers; the file is damaged")
    return Blob(values, shape, legacy=legacy)
