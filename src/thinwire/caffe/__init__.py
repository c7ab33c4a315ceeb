"""Caffe's networks, weights and solvers: `load`, `save`, `load_solver`, and a registry for layers of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from thinwire.caffe.blobs import read_mean, save_mean
from thinwire.caffe.layers import Layer, layer
from thinwire.caffe.net import CaffeNet, Outputs
from thinwire.caffe.prototxt import Definition, parse_net, read_net
from thinwire.caffe.solver import CaffeSolver, load_solver, parse_solver
from thinwire.caffe.weights import fill, read_weights, save
from thinwire.errors import ConfigError

Phase = Literal["TRAIN", "TEST"]


def load(
    path: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    phase: Phase = "TRAIN",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    stages: Sequence[str] = (),
    level: int = 0,
) -> CaffeNet:
    """The network of a prototxt file, as a torch module.

    Args:
        path: the prototxt; of any age.
        weights: a caffemodel whose blobs go to the layers of the same names.
        phase: which of its phases it starts in; `net.train()` and `net.eval()` change it.
        shapes: of input blobs whose shapes the prototxt does not tell, such as {"data": (64, 3, 32, 32)}.
        stages: stages of the net's state, for layers with rules about them.
        level: of the net's state.
    """
    return build(read_net(path), weights, phase, shapes=shapes, stages=stages, level=level)


def loads(
    text: str,
    weights: str | os.PathLike[str] | None = None,
    phase: Phase = "TRAIN",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    stages: Sequence[str] = (),
    level: int = 0,
) -> CaffeNet:
    """The network of a prototxt's text; otherwise as `load`."""
    return build(parse_net(text), weights, phase, shapes=shapes, stages=stages, level=level)


def build(
    described: Definition,
    weights: str | os.PathLike[str] | None = None,
    phase: Phase = "TRAIN",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    stages: Sequence[str] = (),
    level: int = 0,
) -> CaffeNet:
    """The network of a definition; otherwise as `load`."""
    if phase not in ("TRAIN", "TEST"):
        raise ConfigError(f"phase = {phase!r} is not known; use 'TRAIN' or 'TEST'")
    net = CaffeNet(described, phase, stages=stages, level=level)
    given = {name: tuple(int(d) for d in shape) for name, shape in (shapes or {}).items()}
    net.prepare(given)
    if weights is not None:
        fill(net, weights)
    elif net.is_ready:
        net.materialise()
    return net


__all__ = [
    "CaffeNet",
    "CaffeSolver",
    "Definition",
    "Layer",
    "Outputs",
    "build",
    "fill",
    "layer",
    "load",
    "load_solver",
    "loads",
    "parse_net",
    "parse_solver",
    "read_mean",
    "read_net",
    "read_weights",
    "save",
    "save_mean",
]
