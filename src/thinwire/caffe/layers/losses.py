"""Losses and accuracy, normalised as Caffe normalises them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from thinwire.caffe.blobs import read_mean
from thinwire.caffe.layers.base import Layer, axis_of, enum, layer
from thinwire.errors import ConfigError


class _Loss(Layer):
    """What losses have in common."""

    is_loss = True
    needs_labels = True
    bottoms = (2, 2)
    tops = (0, 1)


class _Normalised(_Loss):
    """Losses with a LossParameter: rows to ignore, and what the sum is divided by."""

    def __init__(self, spec: Any, default: str) -> None:
        super().__init__(spec)
        given = spec.loss_param
        self.ignored = given.ignore_label if given.HasField("ignore_label") else None
        self.mode = default
        if given.HasField("normalization"):
            self.mode = enum(given, "normalization")
        elif given.HasField("normalize"):  # the older switch
            self.mode = "VALID" if given.normalize else "BATCH_SIZE"

    def _mean(self, losses: Tensor, labels: Tensor, rows: int) -> Tensor:
        """The losses summed and divided; `losses` and `labels` have the same shape."""
        valid = torch.ones_like(losses) if self.ignored is None else (labels != self.ignored).to(losses.dtype)
        total = (losses * valid).sum()
        if self.mode == "NONE":
            return total
        if self.mode == "VALID":
            return total / valid.sum().clamp_min(1)
        return total / max(1, losses.numel() if self.mode == "FULL" else rows)


def _spread(x: Tensor, axis: int, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    """Scores as (outer, classes, inner), labels as (outer, inner), and the outer number."""
    axis = axis_of(axis, x.dim())
    outer = math.prod(x.shape[:axis])
    scores = x.reshape(outer, x.shape[axis], -1)
    if labels.numel() != scores.shape[0] * scores.shape[2]:
        raise ConfigError(
            f"its labels have the shape {tuple(labels.shape)} for scores of {tuple(x.shape)}; one each is needed"
        )
    return scores, labels.reshape(outer, -1).long(), outer


def _no_less_than(logs: Tensor, least: float) -> Tensor:
    """Logarithms held above a limit, with the gradient that they have without it: Caffe holds only values."""
    return logs + (logs.clamp_min(least) - logs).detach()


@layer("SoftmaxWithLoss")
class SoftmaxWithLoss(_Normalised):
    tops = (0, 2)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, "VALID")
        self.axis = spec.softmax_param.axis

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores, wanted, rows = _spread(x, self.axis, labels)
        logs = _no_less_than(F.log_softmax(scores, 1), math.log(torch.finfo(torch.float32).tiny))
        places = wanted if self.ignored is None else wanted.masked_fill(wanted == self.ignored, 0)
        loss = self._mean(-logs.gather(1, places[:, None]).squeeze(1), wanted, rows)
        return (loss, torch.softmax(x.detach(), axis_of(self.axis, x.dim()))) if self.num_tops > 1 else loss


@layer("InfogainLoss")
class InfogainLoss(_Normalised):
    bottoms = (2, 3)
    tops = (0, 2)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, "VALID")
        self.axis = spec.infogain_loss_param.axis
        self.matrix: Tensor | None = None
        if len(spec.bottom) < 3:
            if not spec.infogain_loss_param.source:
                raise ConfigError("it needs a third bottom, or infogain_loss_param.source")
            self.matrix = read_mean(spec.infogain_loss_param.source)

    def forward(self, x: Tensor, labels: Tensor, matrix: Tensor | None = None) -> Any:
        scores, wanted, rows = _spread(x, self.axis, labels)
        gains = matrix if matrix is not None else self.matrix
        assert gains is not None
        gains = gains.detach().to(x.device, x.dtype).reshape(scores.shape[1], scores.shape[1])
        logs = _no_less_than(F.log_softmax(scores, 1), math.log(1e-20))
        places = wanted if self.ignored is None else wanted.masked_fill(wanted == self.ignored, 0)
        loss = self._mean(-(gains[places].movedim(2, 1) * logs).sum(1), wanted, rows)
        return (loss, torch.softmax(x.detach(), axis_of(self.axis, x.dim()))) if self.num_tops > 1 else loss


@layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(_Normalised):
    tops = (0, 2)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, "BATCH_SIZE")

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        losses = F.binary_cross_entropy_with_logits(x, targets.detach().reshape(x.shape).to(x.dtype), reduction="none")
        loss = self._mean(losses, targets.detach().reshape(x.shape).trunc(), x.shape[0])  # Caffe looks at whole labels
        return (loss, torch.sigmoid(x.detach())) if self.num_tops > 1 else loss


@layer("EuclideanLoss")
class EuclideanLoss(_Loss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.numel() != y.numel():
            raise ConfigError(f"its bottoms have the shapes {tuple(x.shape)} and {tuple(y.shape)}; they must agree")
        return (x - y.reshape(x.shape)).square().sum() / (2 * x.shape[0])


@layer("HingeLoss")
class HingeLoss(_Loss):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.squared = enum(spec.hinge_loss_param, "norm") == "L2"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = x.flatten(1)
        signs = torch.ones_like(rows).scatter(1, labels.reshape(-1, 1).long(), -1.0)
        margins = F.relu(1 + signs * rows)
        return (margins.square() if self.squared else margins).sum() / x.shape[0]


@layer("MultinomialLogisticLoss")
class MultinomialLogisticLoss(_Loss):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chosen = x.flatten(1).gather(1, labels.reshape(-1, 1).long())
        held = chosen.detach().clamp_min(1e-20)
        term = -chosen / held  # has the gradient that Caffe gives even below its limit
        return (term + (-held.log() - term).detach()).sum() / x.shape[0]


@layer("ContrastiveLoss")
class ContrastiveLoss(_Loss):
    bottoms = (3, 3)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.contrastive_loss_param
        self.margin, self.legacy = given.margin, given.legacy_version

    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        apart = (a - b).flatten(1)
        squared = apart.square().sum(1)
        alike = same.flatten().trunc() != 0
        if self.legacy:
            margins = F.relu(self.margin - squared)
            return torch.where(alike, squared, margins).sum() / (2 * a.shape[0])
        distance = squared.detach().sqrt()
        missing = F.relu(self.margin - distance)
        # Caffe divides by the distance plus 1e-4 going backward: the same factor on a term with that very gradient
        slope = torch.where(alike, torch.ones_like(distance), -missing / (distance + 1e-4))
        term = slope * squared
        value = torch.where(alike, squared, missing.square())
        return (term + (value - term).detach()).sum() / (2 * a.shape[0])


@layer("Accuracy")
class Accuracy(Layer):
    needs_labels = True
    bottoms = (2, 2)
    tops = (1, 2)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.accuracy_param
        self.top_k, self.axis = given.top_k, given.axis
        self.ignored = given.ignore_label if given.HasField("ignore_label") else None

    @torch.no_grad()
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores, wanted, _ = _spread(x, self.axis, labels)
        if self.top_k > scores.shape[1]:
            raise ConfigError(f"top_k = {self.top_k} of {scores.shape[1]} classes is not possible")
        valid = torch.ones_like(wanted) if self.ignored is None else (wanted != self.ignored).long()
        places = wanted * valid
        own = scores.gather(1, places[:, None])
        right = ((scores >= own).sum(1) <= self.top_k).long() * valid  # an equal score of another class counts against
        accuracy = right.sum() / valid.sum().clamp_min(1)
        if self.num_tops == 1:
            return accuracy.to(x.dtype)
        each = x.new_zeros(2, scores.shape[1])
        each[0].index_add_(0, places.flatten(), right.flatten().to(x.dtype))
        each[1].index_add_(0, places.flatten(), valid.flatten().to(x.dtype))
        return accuracy.to(x.dtype), each[0] / each[1].clamp_min(1)
