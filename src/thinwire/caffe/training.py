"""A Caffe network and solver as what `fit` takes: a module fed by columns, a loss, metrics, an optimizer, defaults."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from thinwire.caffe.graph import Node
from thinwire.caffe.layers import InputLayer, Shape
from thinwire.caffe.net import CaffeNet, Outputs
from thinwire.caffe.prototxt import Definition, definition, read_named_net, read_net, read_solver
from thinwire.caffe.solver import Settings, SolverFactory
from thinwire.caffe.sources import DatumSource
from thinwire.caffe.transforms import Transformer, found_file
from thinwire.caffe.weights import fill
from thinwire.errors import ConfigError
from thinwire.replicas.metrics import MeanOfBatch

UNREAD = {
    "HDF5Data": "HDF5 files",
    "ImageData": "lists of image files",
    "WindowData": "lists of windows in image files",
}
"""Data layers whose files are not read, and what those are."""


@fx.wrap
def as_pixels(transform: nn.Module, value: Tensor) -> Tensor:
    """An input after its transform, where it is raw bytes: one step where torch.fx reads it."""
    found: Tensor = transform(value) if value.dtype == torch.uint8 else value
    return found


class Fed(nn.Module):
    """A net with its data layers' transforms in front: raw bytes are transformed, other numbers taken as they are."""

    def __init__(self, net: CaffeNet, folder: str = ".") -> None:
        super().__init__()
        self.net = net
        self.transforms = nn.ModuleDict()
        for phase in ("TRAIN", "TEST"):
            for node in net.nodes_in(phase):
                spec = net.definition.net.layer[node.index]
                if isinstance(net.layer_of(node), InputLayer) and spec.HasField("transform_param"):
                    self.transforms[f"{phase}_{node.tops[0]}"] = Transformer(spec.transform_param, folder)

    def forward(self, *columns: Tensor) -> Outputs:
        given = dict(zip(self.net.inputs, columns, strict=False))
        for name, value in given.items():
            key = f"{'TRAIN' if self.training else 'TEST'}_{name}"
            if key in self.transforms:
                given[name] = as_pixels(self.transforms[key], value)
        found: Outputs = self.net(**given)
        return found


def whole_loss(output: Outputs) -> Tensor:
    """A net's losses together, as `fit` calls for them."""
    if output.loss is None:
        raise ConfigError("the net has no loss in this phase; end it in a loss layer such as SoftmaxWithLoss")
    return output.loss


def output_blob(name: str, output: Outputs, label: Any) -> Tensor:
    """One output of a net as a metric."""
    return output[name]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a prototxt and a solver say about a run; each is None where they leave it open.

    Attributes:
        model: makes the module that `fit` trains.
        optimizer: makes the solver.
        inputs: the net's input blobs, in their order.
        shapes: of the TRAIN phase's input blobs, rows first, as far as they are known.
        metrics: the single numbers that the TEST phase gives, but for losses.
        steps: max_iter.
        batch_size: rows of one step, those of all its iter_size batches together.
        evaluate_every: test_interval.
        source: the rows that the TRAIN phase's data layer names, where they can be read.
        validation: likewise those of the TEST phase.
    """

    model: Any
    optimizer: SolverFactory | None
    inputs: tuple[str, ...]
    shapes: Mapping[str, Shape]
    metrics: Mapping[str, Any]
    steps: int | None
    batch_size: int | None
    evaluate_every: int | None
    source: DatumSource | None
    validation: DatumSource | None


def training(
    net: str | None,
    solver: str | None = None,
    *,
    weights: str | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> Training:
    """What a run of a network by a solver is; the solver's own `net` where none is named.

    Args:
        net: the prototxt.
        solver: the solver's prototxt.
        weights: a caffemodel to begin from.
        shapes: of one row of input blobs, where nothing else tells them.
    """
    given = None if solver is None else read_solver(solver)
    described = _described(net, given, solver)
    folder = os.path.dirname(described.file) or "."
    settings = None if given is None else Settings.of(given, solver or "solver")
    probe = CaffeNet(described)
    source, validation = (_source(probe, phase, folder) for phase in ("TRAIN", "TEST"))
    rows = _batch_size(probe)
    known = _shapes(probe, folder, {"TRAIN": source, "TEST": validation}, shapes or {}, rows or 1)
    probe.prepare(known)
    if not probe.is_ready and weights is None:
        lacking = [name for name in probe.inputs if name not in known | probe.known_shapes()]
        raise ConfigError(_unknown_shapes(probe, described.file, lacking))
    metrics = _metrics(probe)
    probe.train()
    size = None if rows is None else rows * (settings.iter_size if settings else 1)
    return Training(
        model=functools.partial(
            fed_net, described.net.SerializeToString(), described.file, weights, known, os.path.abspath(folder)
        ),
        optimizer=None if settings is None else SolverFactory(_merged(settings)),
        inputs=tuple(probe.inputs),
        shapes=known | probe.known_shapes("TRAIN"),
        metrics=metrics,
        steps=int(given.max_iter) if given is not None and given.max_iter else None,
        batch_size=size,
        evaluate_every=int(given.test_interval) if given is not None and given.test_interval else None,
        source=source,
        validation=validation,
    )


def _unknown_shapes(net: CaffeNet, file: str, lacking: list[str]) -> str:
    """What to do where neither a network nor rows tell the shapes of inputs."""
    types = {
        net.definition.net.layer[node.index].type for phase in ("TRAIN", "TEST") for node in _data_nodes(net, phase)
    }
    found = f"{file} does not tell the shape of {', '.join(lacking)}"
    if unread := sorted(types & UNREAD.keys()):
        kind = unread[0]
        return (
            f"{found}: its data layer is of type {kind}, and {UNREAD[kind]} are not read. Convert the rows to Parquet "
            "and name them in data.source, with their columns in data.inputs and data.label; or to LMDB: lmdb:FOLDER"
        )
    return f"{found}; give shapes, or rows that tell them: name rows in data.source, also lmdb:FOLDER"


def fed_net(packed: bytes, file: str, weights: str | None, shapes: Mapping[str, Shape], folder: str) -> Fed:
    """The module that a worker trains, from what travels to it."""
    from thinwire.caffe import schema

    net = CaffeNet(definition(schema.message("NetParameter").FromString(packed), file))
    net.prepare(shapes)
    if weights is not None:
        fill(net, weights)
    else:
        net.materialise()
    return Fed(net, folder)


def input_names(net: str | None, solver: str | None) -> list[str]:
    """The input blobs of a network, in their order; the solver's own where none is named."""
    return CaffeNet(_described(net, None if solver is None else read_solver(solver), solver)).inputs


def _described(net: str | None, given: Any, solver: str | None) -> Definition:
    """The network of a prototxt, or the one that a solver names or holds."""
    if net is not None:
        return read_net(net)
    if given is None:
        raise ConfigError("name a network, or a solver that names one")
    for field in ("net_param", "train_net_param"):
        if given.HasField(field):
            return definition(getattr(given, field), solver or "solver")
    named = given.net or given.train_net
    if not named:
        raise ConfigError(f"{solver}: it names no net; give the network's prototxt beside it")
    return read_named_net(found_file(named, os.path.dirname(solver or "") or "."))


def _merged(settings: Settings) -> Settings:
    """A solver for batches that hold those of all its iterations of one step; it clips their sum, not their mean."""
    clip = settings.clip_gradients
    return replace(settings, iter_size=1, clip_gradients=clip / settings.iter_size if clip > 0 else clip)


def _data_nodes(net: CaffeNet, phase: str) -> list[Node]:
    return [node for node in net.nodes_in(phase) if isinstance(net.layer_of(node), InputLayer)]


def _source(net: CaffeNet, phase: str, folder: str) -> DatumSource | None:
    """The rows that a phase's data layer names, if they are there and of a kind that is read."""
    for node in _data_nodes(net, phase):
        spec = net.definition.net.layer[node.index]
        if spec.type == "Data" and spec.data_param.source:
            try:
                return DatumSource(found_file(spec.data_param.source, folder))
            except ConfigError:
                return None  # another set is given in its place, or the caller says that there is none
    return None


def _batch_size(net: CaffeNet) -> int | None:
    for node in _data_nodes(net, "TRAIN"):
        spec = net.definition.net.layer[node.index]
        for name in ("data_param", "image_data_param", "hdf5_data_param", "window_data_param", "memory_data_param"):
            if spec.HasField(name) and getattr(spec, name).batch_size:
                return int(getattr(spec, name).batch_size)
        made = net.layer_of(node)
        assert isinstance(made, InputLayer)
        if made.shapes and made.shapes[0]:
            return int(made.shapes[0][0])
    return None


def _shapes(
    net: CaffeNet, folder: str, sources: Mapping[str, DatumSource | None], given: Mapping[str, Shape], rows: int
) -> dict[str, Shape]:
    """Shapes of input blobs: as the prototxt tells them, as given for one row, or as rows have them after a crop."""
    known: dict[str, Shape] = {}
    for phase, source in sources.items():
        told = net.known_shapes(phase)
        for node in _data_nodes(net, phase):
            first, *others = node.tops
            spec = net.definition.net.layer[node.index]
            if first not in known and first not in told:
                shape = tuple(given[first]) if first in given else source.shape if source else None
                crop = spec.transform_param.crop_size
                if shape is not None:
                    known[first] = (rows, shape[0], crop, crop) if crop and len(shape) == 3 else (rows, *shape)
            for name in (other for other in others if other not in told):
                known.setdefault(name, (rows, *given.get(name, ())))
    return known


def _metrics(net: CaffeNet) -> dict[str, Any]:
    """The TEST phase's single numbers: outputs of layers that are no losses."""
    read = {name for node in net.nodes_in("TEST") for name in node.bottoms}
    found = {}
    for node in net.nodes_in("TEST"):
        if node.type == "Accuracy" and node.tops[0] not in read:
            found[node.tops[0]] = MeanOfBatch(functools.partial(output_blob, node.tops[0]))
    return found
