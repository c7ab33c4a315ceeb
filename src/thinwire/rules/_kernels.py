"""Numba loops behind `thinwire.rules.compression`: whole blocks only, one thread, the GIL released.

Imported only when a codec first needs it, because importing numba takes most of a second. The functions are
plain Python until `load` compiles them, so a test may also call them as they stand.

Why they vectorise: elements that share a byte lie a half or a quarter block apart, so every load and store
is contiguous; a block is sliced out first, so that indices start at zero (numba wraps negative ones around,
and LLVM gives up on an index it cannot prove positive: five times slower); the largest magnitude is found
on the bits as integers (the order of the floats, NaN on top, and no floating-point reduction to reorder);
every integer is cast back to 32 bits, since numba widens ``int32 + int32`` to 64. A block's 1 KiB stays in
L1 between the two passes over it. No fastmath: the bytes are those of the obvious NumPy code, on every
machine.

Shared arguments: `values` are float32, a multiple of `BLOCK` long. `work`, with `keep`, is the residual, as
long as `values` and overwritten with the new one; without, a scratch of one block. `out` and `packed` are
bytes, one row a block. With `fresh`, `total` is overwritten rather than added to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import register_jitable

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 256
HEADER = 4
ZERO = np.float32(0.0)
NAN = np.float32(np.nan)
SMALLEST_SCALE = np.float32(2.0**-126)
MAGNITUDE = np.int32(0x7FFFFFFF)
TOO_LARGE = np.int32(0x7E800000)  # 2**126: below it scale, inverse and q * scale are finite; past it inf, NaN


class Kernels(NamedTuple):
    """One codec's compiled loops."""

    encode: Callable[[Floats, Floats, bool, Bytes], None]
    accumulate: Callable[[Bytes, np.float32, bool, Floats], None]


@cache
def load(name: str) -> Kernels:
    """The loops of the codec called `name`, compiled, or read from numba's cache on disk."""
    floats, packed = types.float32[::1], types.uint8[::1]
    encode, accumulate = SOURCES[name]
    return Kernels(
        encode=_compiled(types.void(floats, floats, types.boolean, packed), encode),
        accumulate=_compiled(types.void(packed, types.float32, types.boolean, floats), accumulate),
    )


def _compiled(signature: Any, function: Callable[..., None]) -> Callable[..., None]:
    try:
        compiled: Callable[..., None] = njit(signature, nogil=True, cache=True)(function)
    except RuntimeError as error:
        # Neither the package's folder nor the user's cache is writable: an executor without a home.
        if "cannot cache" not in str(error):
            raise
        compiled = njit(signature, nogil=True)(function)
    return compiled


@register_jitable
def _home(work: Floats, keep: bool, b: int) -> Floats:
    """Where block `b` is worked on: its residual, or zeros."""
    home = work[b * BLOCK : b * BLOCK + BLOCK] if keep else work[:BLOCK]
    if not keep:
        home[:] = ZERO
    return home


@register_jitable
def _gather(block: Floats, home: Floats) -> Any:
    """Bring d = block + home to `home`, and give the bits of the largest |d|."""
    top = np.int32(0)
    for k in range(BLOCK):
        d = np.float32(home[k] + block[k])
        home[k] = d
        top = max(top, np.int32(np.float32(d).view(np.int32) & MAGNITUDE))
    return top


@register_jitable
def _choose_scale(top: Any, levels: np.float32, home: Floats, row: Bytes) -> tuple[Any, Any]:
    """The scale, sent in `row`, and its inverse; zero both if nothing of the block can be sent."""
    peak = np.int32(top).view(np.float32)
    sent = scale = np.float32(peak / levels)
    inverse = ZERO
    if top >= TOO_LARGE:
        home[:] = ZERO
        sent, scale = NAN, ZERO
    elif scale < SMALLEST_SCALE:
        sent, scale = ZERO, ZERO
    else:
        inverse = np.float32(levels / peak)
    word = np.float32(sent).view(np.uint32)
    for k in range(HEADER):
        row[k] = np.uint8((word >> np.uint32(8 * k)) & np.uint32(255))
    return scale, inverse


@register_jitable
def _read_scale(row: Bytes) -> Any:
    word = np.uint32(0)
    for k in range(HEADER):
        word = np.uint32(word | (np.uint32(row[k]) << np.uint32(8 * k)))
    return np.uint32(word).view(np.float32)


@register_jitable
def _quantise(home: Floats, k: int, scale: np.float32, inverse: np.float32) -> Any:
    """Leave the error of element `k` in `home`, and give its level.

    Needs no clamp: |d| <= peak and inverse = levels / peak to one rounding, so their product passes `levels`
    by far less than half a level, and rounds back to it.
    """
    d = home[k]
    q = np.rint(d * inverse)
    home[k] = d - q * scale
    return np.int32(q)


def encode_int8(values: Floats, work: Floats, keep: bool, out: Bytes) -> None:
    """Row: scale, then 256 bytes of level + 128."""
    for b in range(values.size // BLOCK):
        row = out[b * 260 : b * 260 + 260]
        home = _home(work, keep, b)
        top = _gather(values[b * BLOCK : b * BLOCK + BLOCK], home)
        scale, inverse = _choose_scale(top, np.float32(127), home, row)
        codes = row[HEADER:]
        for k in range(256):
            codes[k] = np.uint8(_quantise(home, k, scale, inverse) + np.int32(128))


def encode_int4(values: Floats, work: Floats, keep: bool, out: Bytes) -> None:
    """Row: scale, then 128 bytes of level + 8 for elements k (low) and k + 128."""
    for b in range(values.size // BLOCK):
        row = out[b * 132 : b * 132 + 132]
        home = _home(work, keep, b)
        top = _gather(values[b * BLOCK : b * BLOCK + BLOCK], home)
        scale, inverse = _choose_scale(top, np.float32(7), home, row)
        codes = row[HEADER:]
        for k in range(128):
            low = _quantise(home, k, scale, inverse) + np.int32(8)
            high = _quantise(home, k + 128, scale, inverse) + np.int32(8)
            codes[k] = np.uint8(low | high << 4)


def encode_int2(values: Floats, work: Floats, keep: bool, out: Bytes) -> None:
    """Row: scale, then 64 bytes of level + 2 for elements k (low), k + 64, k + 128 and k + 192."""
    for b in range(values.size // BLOCK):
        row = out[b * 68 : b * 68 + 68]
        home = _home(work, keep, b)
        top = _gather(values[b * BLOCK : b * BLOCK + BLOCK], home)
        scale, inverse = _choose_scale(top, np.float32(1), home, row)
        codes = row[HEADER:]
        for k in range(64):
            first = _quantise(home, k, scale, inverse) + np.int32(2)
            second = _quantise(home, k + 64, scale, inverse) + np.int32(2)
            third = _quantise(home, k + 128, scale, inverse) + np.int32(2)
            fourth = _quantise(home, k + 192, scale, inverse) + np.int32(2)
            codes[k] = np.uint8(first | second << 2 | third << 4 | fourth << 6)


def encode_bfloat16(values: Floats, work: Floats, keep: bool, out: Bytes) -> None:
    """Row: 256 upper halves of float32, rounded half to even; what is not finite leaves no residual."""
    words = out.view(np.uint16)
    for b in range(values.size // BLOCK):
        block, halves = values[b * BLOCK : b * BLOCK + BLOCK], words[b * BLOCK : b * BLOCK + BLOCK]
        home = _home(work, keep, b)
        for k in range(BLOCK):
            d = np.float32(home[k] + block[k])
            bits = np.float32(d).view(np.uint32)
            magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
            odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint32((magnitude + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))
            if magnitude > np.uint32(0x7F800000):
                rounded = np.uint32(0x7FC00000)
            word = np.uint32(rounded | (bits & np.uint32(0x80000000)))
            error = np.float32(d - np.uint32(word).view(np.float32))
            home[k] = error if rounded < np.uint32(0x7F800000) else ZERO
            halves[k] = np.uint16(word >> np.uint32(16))


def accumulate_int8(packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
    """Inverse of `encode_int8`."""
    for b in range(total.size // BLOCK):
        block, row = total[b * BLOCK : b * BLOCK + BLOCK], packed[b * 260 : b * 260 + 260]
        scale, codes = np.float32(weight * _read_scale(row)), row[HEADER:]
        if fresh:
            block[:] = ZERO
        for k in range(256):
            block[k] += scale * (np.float32(codes[k]) - np.float32(128))


def accumulate_int4(packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
    """Inverse of `encode_int4`."""
    for b in range(total.size // BLOCK):
        block, row = total[b * BLOCK : b * BLOCK + BLOCK], packed[b * 132 : b * 132 + 132]
        scale, codes = np.float32(weight * _read_scale(row)), row[HEADER:]
        if fresh:
            block[:] = ZERO
        for k in range(128):
            byte = codes[k]
            block[k] += scale * (np.float32(np.uint8(byte & 15)) - np.float32(8))
            block[k + 128] += scale * (np.float32(np.uint8(byte >> 4)) - np.float32(8))


def accumulate_int2(packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
    """Inverse of `encode_int2`."""
    for b in range(total.size // BLOCK):
        block, row = total[b * BLOCK : b * BLOCK + BLOCK], packed[b * 68 : b * 68 + 68]
        scale, codes = np.float32(weight * _read_scale(row)), row[HEADER:]
        if fresh:
            block[:] = ZERO
        for k in range(64):
            byte = codes[k]
            block[k] += scale * (np.float32(np.uint8(byte & 3)) - np.float32(2))
            block[k + 64] += scale * (np.float32(np.uint8(byte >> 2 & 3)) - np.float32(2))
            block[k + 128] += scale * (np.float32(np.uint8(byte >> 4 & 3)) - np.float32(2))
            block[k + 192] += scale * (np.float32(np.uint8(byte >> 6)) - np.float32(2))


def accumulate_bfloat16(packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
    """Inverse of `encode_bfloat16`."""
    words = packed.view(np.uint16)
    for b in range(total.size // BLOCK):
        block, halves = total[b * BLOCK : b * BLOCK + BLOCK], words[b * BLOCK : b * BLOCK + BLOCK]
        if fresh:
            block[:] = ZERO
        for k in range(BLOCK):
            word = np.uint32(np.uint32(halves[k]) << np.uint32(16))
            block[k] += weight * np.uint32(word).view(np.float32)


SOURCES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "bfloat16": (encode_bfloat16, accumulate_bfloat16),
    "int8": (encode_int8, accumulate_int8),
    "int4": (encode_int4, accumulate_int4),
    "int2": (encode_int2, accumulate_int2),
}
