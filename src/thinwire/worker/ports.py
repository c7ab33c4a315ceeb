"""The ports through which a worker's rows reach its stepping thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Batches(Protocol):
    """A worker's rows, batch by batch."""

    num_rows: int
    batches_per_epoch: int

    def training(self, start: tuple[int, int], epochs: int | None) -> Iterator[Any]:
        """Batches from a position on, in the order that the seed gives; each has `num_rows` and `position`."""

    def validation(self) -> Iterator[Any]:
        """The validation rows, in order."""
