"""JPEG and PNG files in a column of bytes, as tensors: a transform for `fit` that workers run on each batch."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire.errors import ConfigError, DataError

MOST_PIXELS = 1 << 26
"""Most pixels of a picture; a file of a few bytes may claim any number."""


@dataclass(frozen=True)
class Pictures:
    """Decodes a column of encoded pictures to float32 tensors of channels × height × width, in RGB, from 0 to 1.

    Args:
        column: the column of bytes, which the tensors replace.
        resize: height and width; a single number is the length of the shorter side, and the aspect ratio is kept.
        crop: height and width of a central window after resizing; a single number is both.
        color: three channels if true, one grey channel if false.
    """

    column: str = "image"
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    color: bool = True

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            given = getattr(self, name)
            sides = () if given is None else given if isinstance(given, tuple | list) else (given,)
            if len(sides) > 2 or any(type(side) is not int or side < 1 for side in sides):
                raise ConfigError(
                    f"Pictures.{name} = {given!r} is not possible; use 1 pixel or more, or a pair of such numbers"
                )

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self.column not in columns:
            raise DataError(f"column {self.column!r} is not in the data, which has {', '.join(columns)}; name another")
        decoded = [self._decoded(number, data) for number, data in enumerate(columns[self.column])]
        shapes = {each.shape for each in decoded}
        if len(shapes) > 1:
            shown = ", ".join("×".join(map(str, shape)) for shape in sorted(shapes)[:3])
            raise DataError(
                f"column {self.column!r} has pictures of different sizes ({shown}); a batch needs one size: give "
                "resize=(height, width), or resize and crop"
            )
        stacked = torch.from_numpy(np.stack(decoded)) if decoded else torch.zeros(0, 3 if self.color else 1, 1, 1)
        return {**columns, self.column: stacked.float() / 255}

    def _decoded(self, number: int, data: Any) -> np.ndarray[Any, Any]:
        try:
            from PIL import Image
        except ImportError as error:
            raise DataError("reading JPEG and PNG files needs Pillow: pip install pillow") from error
        try:
            with Image.open(io.BytesIO(bytes(data)), formats=("JPEG", "PNG")) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise DataError(f"{image.width} × {image.height} are too many pixels; at most {MOST_PIXELS}")
                shown = image.convert("RGB" if self.color else "L")
                size = self._size(shown.width, shown.height)
                pixels = np.asarray(shown if size is None else shown.resize(size, Image.Resampling.BILINEAR))
        except Exception as error:  # Pillow's readers raise errors of many kinds
            raise DataError(
                f"column {self.column!r}, picture {number} of a batch, cannot be read as JPEG or PNG: {error}. Drop "
                "such rows, or give the column that holds the files' bytes."
            ) from error
        return np.ascontiguousarray(self._window(pixels.reshape(*pixels.shape[:2], -1)).transpose(2, 0, 1))

    def _size(self, wide: int, high: int) -> tuple[int, int] | None:
        """Width and height to resize to."""
        if self.resize is None:
            return None
        if isinstance(self.resize, int):
            scale = self.resize / min(wide, high)
            return max(self.resize, round(wide * scale)), max(self.resize, round(high * scale))
        return self.resize[1], self.resize[0]

    def _window(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.crop is None:
            return pixels
        tall, broad = (self.crop, self.crop) if isinstance(self.crop, int) else self.crop
        high, wide = pixels.shape[:2]
        if tall > high or broad > wide:
            raise DataError(
                f"Pictures.crop = {self.crop!r} is larger than a picture of {high} × {wide}; resize them first"
            )
        top, left = (high - tall) // 2, (wide - broad) // 2
        return pixels[top : top + tall, left : left + broad]
