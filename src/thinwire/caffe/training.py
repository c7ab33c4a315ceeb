"""A Caffe network and solver as what `fit` takes: a module fed by columns, a loss, metrics, an optimizer, defaults."""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from thinwire.caffe import schema
from thinwire.caffe.blobs import found_file, keeping, only
from thinwire.caffe.graph import Node
from thinwire.caffe.layers import InputLayer, Shape
from thinwire.caffe.net import CaffeNet, Outputs
from thinwire.caffe.prototxt import Definition, definition, parse_net, read_named_net, read_net, read_solver, written
from thinwire.caffe.solver import Settings, SolverFactory
from thinwire.caffe.sources import DatumSource, ImageListSource
from thinwire.caffe.transforms import Transformer
from thinwire.caffe.weights import fill
from thinwire.errors import ConfigError, DataError, nearest
from thinwire.replicas.metrics import MeanOfBatch

Rows = DatumSource | ImageListSource
"""What data layers name."""
UNREAD = {
    "HDF5Data": "HDF5 files",
    "ImageData": "lists of image files that are not here",
    "WindowData": "lists of windows in image files",
}
"""Data layers whose files are not read, and what those are."""


@fx.wrap
def as_pixels(transform: nn.Module, value: Tensor) -> Tensor:
    """An input after its transform, where it is raw, in whole numbers: one step where torch.fx reads it."""
    found: Tensor = value if value.is_floating_point() else transform(value)
    return found


@fx.wrap
def as_blob(value: Tensor, shape: Shape) -> Tensor:
    """An input whose rows are flat, as vectors are, in the shape of its blob: one step where torch.fx reads it."""
    fits = value.dim() == 2 and len(shape) > 2 and value.shape[1] == math.prod(shape[1:])
    return value.reshape(-1, *shape[1:]) if fits else value


class Fed(nn.Module):
    """A net with its data layers' transforms in front: whole numbers are transformed, others taken as they are.

    Rows that are flat, as vectors of Spark ML are, are seen in the shapes that the prototxt tells.
    """

    def __init__(self, net: CaffeNet, folder: str = ".") -> None:
        super().__init__()
        self.net = net
        self.shapes = net.known_shapes("TEST") | net.known_shapes("TRAIN")
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
            value = as_blob(value, self.shapes[name]) if name in self.shapes else value
            given[name] = as_pixels(self.transforms[key], value) if key in self.transforms else value
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

    model: NetFactory
    optimizer: SolverFactory | None
    inputs: tuple[str, ...]
    shapes: Mapping[str, Shape]
    metrics: Mapping[str, Any]
    steps: int | None
    batch_size: int | None
    evaluate_every: int | None
    source: Rows | None
    validation: Rows | None


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
    source, validation = (_source(probe, phase, folder, shapes or {}) for phase in ("TRAIN", "TEST"))
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
        model=NetFactory(
            described.net.SerializeToString(), described.file, known, os.path.abspath(folder), weights=weights
        ).whole(),
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


class ChosenBlob(NamedTuple):
    """A blob as what a prediction gives.

    Attributes:
        name: of the blob.
        classifies: whether it holds scores of classes.
        size: numbers of one row.
    """

    name: str
    classifies: bool
    size: int


@dataclass(frozen=True)
class NetFactory:
    """Makes the module that a worker trains. It holds all that it needs: no file of its own is read where it is called.

    Attributes:
        net: the NetParameter, packed.
        file: where it was read from, for messages.
        shapes: of its input blobs, where the prototxt does not tell them.
        folder: where files that the prototxt names are looked for.
        files: the binary files of Caffe that it needs, by path: weights, mean images.
        weights: the path of the caffemodel to begin from.
    """

    net: bytes
    file: str
    shapes: Mapping[str, Shape]
    folder: str
    files: Mapping[str, bytes] | None = None
    weights: str | None = None

    def __call__(self) -> Fed:
        with contextlib.nullcontext() if self.files is None else only(dict(self.files)):
            net = CaffeNet(self.described())
            net.prepare(self.shapes)
            if self.weights is not None:
                fill(net, self.weights)
            else:
                net.materialise()
            return Fed(net, self.folder)

    def blob(self, name: str | None = None) -> ChosenBlob:
        """What a prediction gives: the blob of that name, or the one that the net's loss compares with labels."""
        net = CaffeNet(self.described(), "TEST")
        with contextlib.nullcontext() if self.files is None else only(dict(self.files)):
            shapes = net.prepare(self.shapes)
        losses = [node for phase in ("TEST", "TRAIN") for node in net.nodes_in(phase) if net.layer_of(node).is_loss]
        compared = losses[0].bottoms[0] if losses and losses[0].bottoms else None
        chosen = name or compared
        if chosen not in shapes:
            raise ConfigError(
                f"output_blob = {chosen!r} is no blob of {self.file} in its TEST phase. {nearest(str(chosen), shapes)}"
            )
        given = {net.inputs[0]} | {top for node in net.nodes for top in node.tops if self._without_labels(net, node)}
        rows = shapes[net.inputs[0]][0]
        if chosen not in given or not shapes[chosen] or shapes[chosen][0] != rows:
            raise ConfigError(
                f"output_blob = {chosen!r} has the shape {shapes[chosen]} for {rows} rows, or needs labels; choose a "
                f"blob with a row for each row of data, such as {compared!r}"
            )
        classifies = chosen == compared and losses[0].type in ("SoftmaxWithLoss", "HingeLoss", "InfogainLoss")
        return ChosenBlob(chosen, classifies, math.prod(shapes[chosen][1:]))

    @staticmethod
    def _without_labels(net: CaffeNet, node: Node) -> bool:
        """Whether a layer's tops are there when the net is called without labels."""
        return not (net.layer_of(node).needs_labels or isinstance(net.layer_of(node), InputLayer))

    def described(self) -> Definition:
        return definition(schema.message("NetParameter").FromString(self.net), self.file)

    def plain(self) -> dict[str, Any]:
        """What it is in JSON, but for weights."""
        files = {name: base64.b64encode(data).decode() for name, data in (self.files or {}).items()}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"net": written(self.described().net), "file": self.file, "shapes": shapes, "files": files}

    @classmethod
    def of_plain(cls, net: str, file: str, shapes: Mapping[str, Any], files: Mapping[str, str]) -> NetFactory:
        """It again. What it is made of may be anybody's: it reads no file, and has known types of layers only."""
        described = parse_net(net, str(file))
        known = {str(name): tuple(int(size) for size in shape) for name, shape in shapes.items()}
        kept = {str(name): base64.b64decode(data) for name, data in files.items()}
        return cls(described.net.SerializeToString(), described.file, known, ".", kept)

    def whole(self) -> NetFactory:
        """The same with its files in it."""
        with keeping() as files, torch.device("meta"):
            self()
        return replace(self, files=files)

    def without_weights(self) -> NetFactory:
        """The same for weights that come from elsewhere."""
        kept = {name: data for name, data in (self.files or {}).items() if name != self.weights}
        return replace(self, files=kept, weights=None)


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


def _source(net: CaffeNet, phase: str, folder: str, shapes: Mapping[str, Shape]) -> Rows | None:
    """The rows that a phase's data layer names, if they are there and of a kind that is read."""
    for node in _data_nodes(net, phase):
        spec = net.definition.net.layer[node.index]
        if spec.type == "Data" and spec.data_param.source:
            try:
                return DatumSource(found_file(spec.data_param.source, folder))
            except ConfigError:
                return None  # another set is given in its place, or the caller says that there is none
        if spec.type == "ImageData" and spec.image_data_param.source and node.tops[0] not in shapes:
            try:
                return _pictures(spec.image_data_param, folder)
            except ConfigError:
                return None
    return None


def _pictures(given: Any, folder: str) -> ImageListSource:
    """The pictures that an ImageData layer lists."""
    if bool(given.new_height) != bool(given.new_width):
        raise DataError("image_data_param has one of new_height and new_width; give both, or neither")
    size = (int(given.new_height), int(given.new_width)) if given.new_height else None
    return ImageListSource(found_file(given.source, folder), given.root_folder, size, color=given.is_color)


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
    net: CaffeNet, folder: str, sources: Mapping[str, Rows | None], given: Mapping[str, Shape], rows: int
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
