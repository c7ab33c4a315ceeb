"""Weights in Caffe's binary form: caffemodels read and written, and what a net takes from them."""

from __future__ import annotations

import logging
import math
import os

import torch

from thinwire.caffe import schema
from thinwire.caffe.blobs import Blob, blob_of, parsed, read_bytes
from thinwire.caffe.graph import Node
from thinwire.caffe.layers import Layer
from thinwire.caffe.net import CaffeNet
from thinwire.caffe.prototxt import Definition, definition
from thinwire.errors import ConfigError, DataError

log = logging.getLogger("thinwire.caffe")


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
                    net.furnishing.furnish(node, shapes)
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
