"""Layers of whole rows: inner products, embeddings, sums and products of several bottoms, reductions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from thinwire.caffe.fillers import Filler
from thinwire.caffe.layers.base import Layer, Shape, axis_of, enum, layer
from thinwire.errors import ConfigError


@layer("InnerProduct")
class InnerProduct(Layer):
    blobs = ("weight", "bias")

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.inner_product_param
        if given.num_output < 1:
            raise ConfigError(f"num_output = {given.num_output} is not possible; at least 1")
        self.num_output, self.axis, self.transpose = int(given.num_output), given.axis, given.transpose
        self.kept = self.blobs if given.bias_term else self.blobs[:1]
        self._fillers = [Filler.of(given, "weight_filler"), Filler.of(given, "bias_filler")]

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        inner = math.prod(bottoms[0][axis_of(self.axis, len(bottoms[0])) :])
        weight = (inner, self.num_output) if self.transpose else (self.num_output, inner)
        return [weight, (self.num_output,)][: len(self.kept)]

    def implied_bottoms(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return [(*[1] * max(1, self.axis), shapes[0][0 if self.transpose else 1])]

    def legacy_shape(self, index: int, shape: Shape) -> Shape:
        return super().legacy_shape(index, shape) if index else tuple(shape[-2:])

    def fillers(self) -> Sequence[Filler]:
        return self._fillers[: len(self.kept)]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blob(0)
        flat = x.flatten(axis_of(self.axis, x.dim()))
        return F.linear(flat, weight.t() if self.transpose else weight, self.blob(1) if len(self.kept) > 1 else None)


@layer("Embed")
class Embed(Layer):
    blobs = ("weight", "bias")

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.embed_param
        if given.num_output < 1 or given.input_dim < 1:
            raise ConfigError("embed_param needs num_output and input_dim of at least 1")
        self.shape = (int(given.input_dim), int(given.num_output))
        self.kept = self.blobs if given.bias_term else self.blobs[:1]
        self._fillers = [Filler.of(given, "weight_filler"), Filler.of(given, "bias_filler")]

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        return [self.shape, self.shape[1:]][: len(self.kept)]

    def implied_bottoms(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return [(1,)]

    def fillers(self) -> Sequence[Filler]:
        return self._fillers[: len(self.kept)]

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x.long(), self.blob(0))
        return found + self.blob(1) if len(self.kept) > 1 else found


@layer("Eltwise")
class Eltwise(Layer):
    bottoms = (2, math.inf)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.eltwise_param
        self.operation, self.coefficients = enum(given, "operation"), tuple(given.coeff)
        if self.coefficients and (self.operation == "PROD" or len(self.coefficients) != len(spec.bottom)):
            raise ConfigError(
                f"{len(self.coefficients)} coeffs are given; a SUM takes one for each of {len(spec.bottom)} bottoms"
            )

    def forward(self, *bottoms: Tensor) -> Tensor:
        if any(x.shape != bottoms[0].shape for x in bottoms):
            raise ConfigError(f"its bottoms have the shapes {[tuple(x.shape) for x in bottoms]}; they must be equal")
        if self.operation == "PROD":
            return functools.reduce(torch.mul, bottoms)
        if self.operation == "MAX":  # of two equal ones the second, of more the earlier has the gradient
            found = torch.where(bottoms[0] > bottoms[1], bottoms[0], bottoms[1])
            return functools.reduce(lambda a, b: torch.where(b > a, b, a), bottoms[2:], found)
        weighted = [x * c for x, c in zip(bottoms, self.coefficients, strict=True)] if self.coefficients else bottoms
        return functools.reduce(torch.add, weighted)


@layer("Reduction")
class Reduction(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.reduction_param
        self.operation, self.axis, self.coefficient = enum(given, "operation"), int(given.axis), float(given.coeff)

    def forward(self, x: Tensor) -> Tensor:
        axis = axis_of(self.axis, x.dim()) if x.dim() else 0
        rows = x.reshape(*x.shape[:axis], -1)
        found = {
            "SUM": lambda: rows.sum(-1),
            "ASUM": lambda: rows.abs().sum(-1),
            "SUMSQ": lambda: rows.square().sum(-1),
            "MEAN": lambda: rows.mean(-1),
        }[self.operation]()
        return found * self.coefficient


@layer("Parameter")
class Parameter(Layer):
    """A blob of its own, as a top."""

    blobs = ("weight",)
    bottoms = (0, 0)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.shape = tuple(spec.parameter_param.shape.dim)

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        return [self.shape]

    def forward(self) -> Tensor:
        return self.blob(0)
