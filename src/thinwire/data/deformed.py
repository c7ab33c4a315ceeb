"""Random deformations of images, in any number: made when a worker needs them, and never stored.

Disk and network carry only the number of each row and its label, sixteen bytes. The transform makes the image from
from the number: the same image for the same number and seed, on whatever worker, in whatever epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.data.columns import dense
from thinwire.errors import ConfigError, DataError
from thinwire.values import check_fields, number, whole

Array = np.ndarray[Any, Any]
PIXELS, LABEL = "pixels", "label"
BATCH = 1 << 16
Before = Callable[[dict[str, Any]], dict[str, Any]] | None
GRID = 5
"""Control points of the elastic field in each direction."""


OPEN: list[Callable[[Any], Any]] = []
"""The function that opens a source. `thinwire.data.sources` sets it, because that module imports this one."""


@final
@dataclass(frozen=True, kw_only=True)
class Deform:
    """The transform of a `Deformed` set: makes images from row numbers.

    Row i comes from image i modulo the number of images. The first rows are the images unchanged. The other rows are
    rotated, scaled, sheared and shifted, and bent by a smooth random field (Simard et al. 2003).
    """

    images: Array
    before: Before
    """Transform of the source's images into a network's input, such as a division by 255."""
    held: Array | None
    """Validation images, which are not deformed: row -1 is the first."""
    held_before: Before
    seed: int
    degrees: float
    scale: float
    shift: float
    bend: float

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        rows = np.asarray(columns[PIXELS]).astype(np.int64)
        if self.held is not None and len(rows) and rows[0] < 0:  # a batch has rows of one kind only
            found = {**columns, PIXELS: torch.from_numpy(self.held[-1 - rows])}
            return found if self.held_before is None else self.held_before(found)
        found = {**columns, PIXELS: torch.from_numpy(self.images[rows % len(self.images)])}
        found = found if self.before is None else self.before(found)
        return {**found, PIXELS: self._deformed(found[PIXELS].float(), rows)}

    def _deformed(self, images: Tensor, rows: Array) -> Tensor:
        drawn = uniform(self.seed, rows, 6 + 2 * GRID * GRID) * 2 - 1
        drawn[rows < len(self.images)] = 0.0
        angle = drawn[:, 0] * (self.degrees * torch.pi / 180)
        wide, high = 1 + drawn[:, 1] * self.scale, 1 + drawn[:, 2] * self.scale
        shear = drawn[:, 3] * self.scale
        turned = torch.stack(
            [
                torch.stack([wide * angle.cos(), shear - angle.sin(), drawn[:, 4] * 2 * self.shift], 1),
                torch.stack([angle.sin(), high * angle.cos(), drawn[:, 5] * 2 * self.shift], 1),
            ],
            1,
        )
        grid = functional.affine_grid(turned, list(images.shape), align_corners=False)
        bent = drawn[:, 6:].view(-1, 2, GRID, GRID) * (2 * self.bend)
        field = functional.interpolate(bent, images.shape[-2:], mode="bicubic", align_corners=True)
        where = grid + field.permute(0, 2, 3, 1)
        found = functional.grid_sample(images, where, mode="bilinear", padding_mode="zeros", align_corners=False)
        as_is = torch.from_numpy(rows < len(self.images))
        found[as_is] = images[as_is]
        return found


@final
@dataclass(frozen=True)
class Deformed:
    """A source with any number of rows, made from a set of images (columns `pixels` and `label`).

    Args:
        source: a set's name, such as "mnist:DIR" or "digits", files, or other data that `fit` takes; its images have
        one
            shape (channels, height, width).
        rows: number of rows; the first ones are the images unchanged.
        seed: of the deformations.
        degrees: largest rotation.
        scale: largest relative change of scale and shear.
        shift: largest shift, relative to the image's size.
        bend: largest displacement of a point by the elastic field, relative to the image's size.
    """

    source: Any
    rows: int = field(kw_only=True)
    seed: int = field(default=0, kw_only=True)
    degrees: float = field(default=12.0, kw_only=True)
    scale: float = field(default=0.12, kw_only=True)
    shift: float = field(default=0.06, kw_only=True)
    bend: float = field(default=0.05, kw_only=True)
    apart: Any = field(default=None, kw_only=True, repr=False)
    """Validation rows, as opened by `with_validation`."""

    def __post_init__(self) -> None:
        shares = dict.fromkeys(("degrees", "scale", "shift", "bend"), number(least=0))
        check_fields(self, "deformed", rows=whole(1), seed=whole(0), **shares)
        if self.scale >= 1:
            raise ConfigError(f"deformed.scale = {self.scale} turns images inside out; use a share from 0 to 0.9")

    @property
    def schema(self) -> Any:
        return pa.schema([(PIXELS, pa.int64()), (LABEL, pa.int64())])

    @property
    def num_rows(self) -> int:
        return self.rows

    @property
    def transform(self) -> Callable[..., Any]:
        images, _, before = self._held
        held, _, held_before = (None, None, None) if self.apart is None else self.apart
        return Deform(
            images=images,
            before=before,
            held=held,
            held_before=held_before,
            seed=self.seed,
            degrees=self.degrees,
            scale=self.scale,
            shift=self.shift,
            bend=self.bend,
        )

    def batches(self) -> Iterator[Any]:
        """Row numbers and labels, which are all that is stored."""
        _, labels, _ = self._held
        for start in range(0, self.rows, BATCH):
            rows = np.arange(start, min(self.rows, start + BATCH))
            columns = [pa.array(rows), pa.array(labels[rows % len(labels)])]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def with_validation(self, given: Any) -> tuple[Deformed, Numbered]:
        """This set with validation images, and the source of their row numbers; the images are used unchanged."""
        if isinstance(given, Deformed):
            raise DataError(
                "validation rows of a deformed set are images without deformation; name the set alone, without rows"
            )
        images, _, _ = self._held
        apart = read(given)
        if apart[0].shape[1:] != images.shape[1:]:
            raise DataError(
                f"the validation images have the shape {apart[0].shape[1:]}, and the training images "
                f"{images.shape[1:]}; "
                "give images of one shape"
            )
        return replace(self, apart=apart), Numbered(apart[1])

    @cached_property
    def _held(self) -> tuple[Array, Array, Any]:
        return read(OPEN[0](self.source))


@final
@dataclass(frozen=True)
class Numbered:
    """Validation rows of a `Deformed` set, which holds the images: row numbers from -1 down, and labels."""

    labels: Array
    transform: Any = None

    @property
    def schema(self) -> Any:
        return pa.schema([(PIXELS, pa.int64()), (LABEL, pa.int64())])

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    def batches(self) -> Iterator[Any]:
        numbers = pa.array(-1 - np.arange(len(self.labels)))
        yield pa.RecordBatch.from_arrays([numbers, pa.array(self.labels)], schema=self.schema)


def read(source: Any) -> tuple[Array, Array, Any]:
    """All images and labels of a source, and its transform."""
    lacking = [name for name in (PIXELS, LABEL) if name not in source.schema.names]
    if lacking:
        raise DataError(
            f"a deformed set has no column {lacking[0]!r} to be made from; its source has "
            f"{', '.join(source.schema.names)}. Name the columns of images and labels 'pixels' and 'label'."
        )
    batches = [batch for batch in source.batches() if batch.num_rows]
    if not batches:
        raise DataError("a deformed set is made from images, and its source has no rows; give a source with images")
    images = np.concatenate([dense(batch.column(PIXELS)) for batch in batches])
    if images.ndim != 4:
        raise DataError(
            f"a deformed set is made from images of shape (channels, height, width), and 'pixels' has the shape "
            f"{images.shape[1:]} a row; reshape them"
        )
    labels = np.concatenate([dense(batch.column(LABEL)) for batch in batches])
    return images, labels.astype(np.int64), source.transform


def uniform(seed: int, rows: Array, count: int) -> Tensor:
    """For each row, numbers from 0 to 1 that depend only on the seed and the row's number (SplitMix64).

    >>> one, other = uniform(3, np.array([7, 9]), 2), uniform(3, np.array([9]), 2)
    >>> torch.equal(one[1:], other), bool((one[0] == one[1]).any())
    (True, False)
    """
    with np.errstate(over="ignore"):
        start = _mixed(np.uint64(seed & (2**64 - 1)) + np.uint64(0x9E3779B97F4A7C15))
        each = _mixed(rows.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64) + start)
    return torch.from_numpy(((each >> np.uint64(40)).astype(np.float32)) / np.float32(1 << 24))


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
