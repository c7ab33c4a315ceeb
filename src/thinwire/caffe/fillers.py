"""How Caffe fills a blob before training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError, nearest


@dataclass(frozen=True)
class Filler:
    """A FillerParameter's values."""

    type: str = "constant"
    value: float = 0.0
    min: float = 0.0
    max: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    sparse: int = -1
    norm: str = "FAN_IN"

    @classmethod
    def of(cls, parameter: Any, name: str, default: Filler | None = None) -> Filler:
        """The filler that a layer's parameter has in a field, or the layer's own default."""
        if not parameter.HasField(name):
            return default or cls()
        given = getattr(parameter, name)
        if given.type not in FILLERS:
            raise ConfigError(f"filler type {given.type!r} is not known. {nearest(given.type, FILLERS)}")
        if not all(map(math.isfinite, (given.value, given.min, given.max, given.mean, given.std))):
            raise ConfigError(f"filler {given.type!r} has a number that is not finite")
        if given.min > given.max or given.std < 0:
            raise ConfigError(
                f"filler {given.type!r}: min {given.min} to max {given.max}, std {given.std}: not possible"
            )
        norm = given.DESCRIPTOR.fields_by_name["variance_norm"].enum_type.values_by_number[given.variance_norm].name
        return cls(given.type, given.value, given.min, given.max, given.mean, given.std, given.sparse, norm)

    def fill(self, blob: Tensor) -> None:
        """Fills a blob in place, drawing from torch's generator."""
        with torch.no_grad():
            FILLERS[self.type](self, blob)

    def _fan(self, blob: Tensor) -> float:
        """The n by which xavier and msra scale: inputs, outputs, or their mean."""
        inputs = blob.numel() / (blob.shape[0] if blob.dim() else 1)
        outputs = blob.numel() / (blob.shape[1] if blob.dim() > 1 else 1)
        return {"FAN_IN": inputs, "FAN_OUT": outputs}.get(self.norm, (inputs + outputs) / 2)

    def _constant(self, blob: Tensor) -> None:
        blob.fill_(self.value)

    def _uniform(self, blob: Tensor) -> None:
        blob.uniform_(self.min, self.max)

    def _gaussian(self, blob: Tensor) -> None:
        blob.normal_(self.mean, self.std)
        if self.sparse >= 0:  # so many non-zero inputs of each output, on average
            outputs = blob.shape[0] if blob.dim() else 1
            blob.mul_(torch.bernoulli(torch.full_like(blob, min(1.0, self.sparse / outputs))))

    def _positive_unitball(self, blob: Tensor) -> None:
        blob.uniform_(0, 1)
        rows = blob.view(blob.shape[0] if blob.dim() else 1, -1)
        rows.div_(rows.sum(1, keepdim=True))

    def _xavier(self, blob: Tensor) -> None:
        scale = math.sqrt(3 / self._fan(blob))
        blob.uniform_(-scale, scale)

    def _msra(self, blob: Tensor) -> None:
        blob.normal_(0, math.sqrt(2 / self._fan(blob)))

    def _bilinear(self, blob: Tensor) -> None:
        if blob.dim() != 4 or blob.shape[2] != blob.shape[3]:
            raise ConfigError(f"a bilinear filler fills square 4-d blobs, not {tuple(blob.shape)}")
        size = blob.shape[3]
        factor = math.ceil(size / 2)
        centre = (size - 1) / (2 * factor)
        line = 1 - (torch.arange(size) / factor - centre).abs()
        blob.copy_(line[:, None] * line[None, :])


FILLERS = {
    "bilinear": Filler._bilinear,
    "constant": Filler._constant,
    "gaussian": Filler._gaussian,
    "msra": Filler._msra,
    "positive_unitball": Filler._positive_unitball,
    "uniform": Filler._uniform,
    "xavier": Filler._xavier,
}
