"""Layers written as SINGA has them: a feature forward, a gradient backward, both by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class FeatureLayer(nn.Module, ABC):
    """A layer whose gradient is written, not derived. It trains among others as any module does."""

    as_one_layer: ClassVar[bool] = True
    """A plan and a placement call it and do not look into it."""

    @abstractmethod
    def compute_feature(self, *inputs: Tensor) -> Tensor:
        """The layer's output; without autograd."""

    @abstractmethod
    def compute_gradient(
        self, gradient: Tensor, inputs: Sequence[Tensor], feature: Tensor
    ) -> tuple[Sequence[Tensor | None], Mapping[str, Tensor]]:
        """Gradients of the inputs, in their order, and of parameters by name, from that of the output."""

    def forward(self, *inputs: Tensor) -> Tensor:
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        held = [p for p in self.parameters() if p.requires_grad]
        found: Tensor = _ByHand.apply(self, names, len(inputs), *inputs, *held)  # type: ignore[no-untyped-call]
        return found


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: FeatureLayer, names: list[str], count: int, *tensors: Tensor) -> Tensor:
        feature = layer.compute_feature(*tensors[:count])
        ctx.save_for_backward(*tensors[:count], feature)
        ctx.layer, ctx.names, ctx.count = layer, names, count
        return feature

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *inputs, feature = ctx.saved_tensors
        of_inputs, of_parameters = ctx.layer.compute_gradient(gradients[0], inputs, feature)
        if len(of_inputs) != ctx.count:
            raise ValueError(f"compute_gradient gave {len(of_inputs)} gradients of inputs; the layer has {ctx.count}")
        return (None, None, None, *of_inputs, *(of_parameters.get(name) for name in ctx.names))
