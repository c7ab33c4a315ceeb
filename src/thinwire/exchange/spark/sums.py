"""The driver's part in rounds: contributions that came with letters are added up here, larger ones by a shuffle."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import TimedOutError
from thinwire.exchange.round import MOST_WEIGHT
from thinwire.exchange.spark.link import EXACT, SparkWire
from thinwire.exchange.spark.tasks import read_parts, sum_parts
from thinwire.protocol.forms import Header
from thinwire.rules.compression import CODECS, Codec, codec
from thinwire.rules.finite import is_finite

MEAN = "bfloat16"
"""How means are packed of what was packed with loss."""
SLICE_BYTES = 8 << 20
AGAIN_S, PATIENCE_S = 0.1, 90.0
LONGEST = 1 << 34
"""Numbers of a round's fragment."""


@dataclass
class Gathering:
    """Who has launched a round, and the sum of what came along."""

    fragment: tuple[int, int]
    codec: Codec
    total: Tensor | None = None
    weights: dict[int, float] = field(default_factory=dict)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Who gave what is not finite, which is left out where it comes from."""
    may_be_infinite: bool = False

    def add(self, part: memoryview, weight: float) -> None:
        """A contribution; those of one machine come as one, weighed, where they are float32."""
        if self.codec.name == EXACT:
            values = torch.frombuffer(part, dtype=torch.float32)
            self.total = values if self.total is None else self.total.add_(values)
        else:
            if self.total is None:
                self.total = torch.zeros(self.fragment[1] - self.fragment[0])
            self.codec.accumulate(torch.frombuffer(part, dtype=torch.uint8), weight, self.total)

    def checked(self, mean: bytes) -> bytes | None:
        """A float32 mean, or None where it is not finite."""
        fits = self.may_be_infinite or is_finite(torch.frombuffer(bytearray(mean), dtype=torch.float32))
        return mean if fits else None

    @property
    def packing(self) -> str:
        """The codec of the mean."""
        return MEAN if self.codec.lossy else EXACT

    def mean(self) -> Any:
        """The mean of what came along, packed; None where it is not finite, or of nothing."""
        assert self.total is not None
        weight = sum(self.weights.values())
        if weight <= 0:
            return None
        found = self.total.div_(weight)
        packing = codec(self.packing)
        packed = packing.encode(found) if self.codec.lossy else found.view(torch.uint8)
        if not self.may_be_infinite and not packing.is_finite(packed, found.numel()):
            return None
        return packed.numpy() if self.codec.lossy else found.numpy()


def is_possible(header: Header, fragment: tuple[int, int], payload: memoryview | None) -> bool:
    """Whether a contribution is of a fragment that can be, in a codec there is, and as long as that makes it."""
    if not 0 <= fragment[0] < fragment[1] <= LONGEST or header["k"] not in CODECS:
        return False
    weight = header["w"]
    if not isinstance(weight, int | float) or not 0.0 <= weight <= MOST_WEIGHT or not isinstance(header["n"], dict):
        return False
    return payload is None or payload.nbytes == codec(header["k"]).size_bytes(fragment[1] - fragment[0])


def shuffled(
    marker: Callable[[], Any], wire: SparkWire, key: str, generation: int, names: list[str], size: int
) -> bytes | None:
    """The mean of contributions that lie in boxes; None where `marker`, whose rows lie on their machines, has none."""
    slices = max(1, -(-4 * size // SLICE_BYTES))
    deadline, failed = time.monotonic() + PATIENCE_S, "no task came there"
    while (places := marker()) is not None:
        task = functools.partial(read_parts, wire, uuid.uuid4().hex, key, generation, names, size, slices)
        try:
            parts = places.mapPartitions(task).partitionBy(slices, int).mapPartitions(sum_parts)
            rows = sorted(parts.collect(), key=lambda row: int(row[0]))
        except Exception as error:  # an executor died under it
            rows, failed = [], str(error)[:300]
        whole = [set(row[2]) == set(names) for row in rows]  # a task that ran again found nothing
        if len(whole) == slices and all(whole):
            return b"".join(row[1] for row in rows)
        if time.monotonic() > deadline and marker() is not None:
            raise TimedOutError(
                f"round {key} was not read from all of {sorted(names)} within {PATIENCE_S:.0f} s ({failed}); "
                "exchange='spark' needs a slot on each machine beside those of its workers"
            )
        time.sleep(AGAIN_S)
    return None
