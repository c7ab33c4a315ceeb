"""Weights in Caffe's binary form: caffemodels read and written, mean files, and what a net takes from them."""

from __future__ import annotations

import contextlib
import logging
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
from thinwire.caffe.graph import Node
from thinwire.caffe.layers import MAX_ELEMENTS, Layer
from thinwire.caffe.net import CaffeNet
from thinwire.caffe.prototxt import Definition, definition
from thinwire.errors import ConfigError, DataError

MAX_BYTES = (1 << 31) - 1
"""Protobuf reads no more."""
_kept: ContextVar[dict[str, bytes] | None] = ContextVar("kept", default=None)
_only: ContextVar[dict[str, bytes] | None] = ContextVar("only", default=None)
log = logging.getLogger("thinwire.caffe")


class Blob:
    """Numbers from a file with their shape; `legacy` where only the four old dimensions tell it."""

    def __init__(self, values: np.ndarray[Any, Any], shape: tuple[int, ...], *, legacy: bool) -> None:
        self.values, self.shape, self.legacy = values, shape, legacy

    def tensor(self, shape: tuple[int, ...] | None = None) -> Tensor:
        return torch.from_numpy(self.values.astype(np.float32, copy=True)).view(self.shape if shape is None else shape)


def read_weights(path: str | os.PathLike[str]) -> dict[str, list[Blob]]:
    """The blobs of every layer in a caffemodel, by the layer's name."""
    described = read_model(path)
    found: dict[str, list[Blob]] = {}
    for layer in described.net.layer:
        if layer.blobs:
            try:
                blobs = [blob_of(blob) for blob in layer.blobs]
            except DataError as error:
                raise DataError(f"{os.fspath(path)}: layer {layer.name!r}: {error}") from error
            found.setdefault(layer.name, blobs)
    return found


def read_model(path: str | os.PathLike[str]) -> Definition:
    """A caffemodel's network in the current form, its blobs' numbers as bytes."""
    name = os.fspath(path)
    net = parsed("NetParameter", read_bytes(name), name)
    try:
        return definition(net, name)
    except ConfigError as error:
        raise DataError(str(error)) from error


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


def fill(net: CaffeNet, path: str | os.PathLike[str]) -> list[str]:
    """Copies a caffemodel's blobs into the layers of the same names; returns layers of the net that got none.

    Where the net does not know its shapes yet, the blobs tell them.
    """
    blobs = read_weights(path)
    held = [node for node in net.all_nodes() if net.layer_of(node).kept]
    given = {node.index: blobs[node.name] for node in held if node.name in blobs}
    if blobs and not given:
        raise DataError(
            f"no layer of {net.definition.file} has weights in {os.fspath(path)}, which holds {', '.join(blobs)}; "
            "are they of the same network?"
        )

    def misfit(node: Node, error: ConfigError) -> DataError:
        return DataError(f"{os.fspath(path)} does not fit {net.definition.error(node.index, str(error))}")

    for node in held:
        made = net.layer_of(node)
        if node.index in given:
            own = given[node.index]
            try:
                if len(own) != len(made.kept):
                    raise ConfigError(
                        f"it has {len(made.kept)} blobs ({', '.join(made.kept)}), and the file {len(own)}"
                    )
                if not made.is_ready:
                    shapes = [made.legacy_shape(i, b.shape) if b.legacy else b.shape for i, b in enumerate(own)]
                    _check(made, shapes)
                    net.furnish(node, shapes)
            except ConfigError as error:
                raise misfit(node, error) from error
    net.materialise()
    for node in held:
        try:
            _copy(net.layer_of(node), given.get(node.index, []))
        except ConfigError as error:
            raise misfit(node, error) from error
    lacking = list(dict.fromkeys(node.name for node in held if node.index not in given))
    if lacking:
        log.info("layers without weights in %s: %s", os.fspath(path), ", ".join(lacking))
    return lacking


def _check(made: Layer, shapes: list[tuple[int, ...]]) -> None:
    """Refuses blobs that a layer with its settings could not have, whatever its bottoms."""
    if any(not shape for shape in shapes) or (len(shapes[0]) < 2 and made.implied_bottoms([(1, 1)]) is not None):
        return
    bottoms = made.implied_bottoms(shapes)
    if bottoms is None:
        return
    wanted = [tuple(shape) for shape in made.blob_shapes(*bottoms)]
    for name, have, want in zip(made.kept, shapes, wanted, strict=True):
        if tuple(have) != want:
            raise ConfigError(f"its {name} would have the shape {want}, and the file's is {tuple(have)}")


@torch.no_grad()
def _copy(made: Layer, given: list[Blob]) -> None:
    for index, blob in enumerate(given):
        mine = made.blob(index)
        if not _agree(tuple(mine.shape), blob):
            raise ConfigError(
                f"its {made.kept[index]} has the shape {tuple(mine.shape)}, and the file's is {blob.shape}"
            )
        mine.copy_(blob.tensor(tuple(mine.shape)))


def _agree(shape: tuple[int, ...], blob: Blob) -> bool:
    """Whether a blob is of a shape; an old one is when it is after leading ones are left out."""
    if not blob.legacy:
        return shape == blob.shape or (math.prod(shape) == math.prod(blob.shape) == 1)
    return (1,) * (4 - len(shape)) + shape == blob.shape if len(shape) <= 4 else False


def save(net: CaffeNet, path: str | os.PathLike[str]) -> None:
    """Writes a net as a caffemodel: its training phase in the current form, with all its blobs."""
    if not net.is_ready:
        raise ConfigError("the net has no parameters yet; call it once, or load it with shapes=")
    made = schema.message("NetParameter", raw=True)()
    made.name = net.name
    for node in net.nodes_in("TRAIN"):
        layer = made.layer.add()
        layer.ParseFromString(net.definition.net.layer[node.index].SerializeToString())
        layer.ClearField("blobs")
        own = net.layer_of(node)
        for index in range(len(own.kept)):
            values = own.blob(index).detach().to("cpu", torch.float32).contiguous()
            blob = layer.blobs.add()
            blob.shape.SetInParent()
            blob.shape.dim.extend(values.shape)
            blob.data = values.numpy().astype("<f4", copy=False).tobytes()
    name = os.fspath(path)
    partial = f"{name}.part"
    with open(partial, "wb") as file:
        file.write(made.SerializeToString())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, name)
