"""Numba loops behind `thinwire.rules.compression`: whole blocks only, one thread, the GIL released.

Imported only when a codec first needs it, because importing numba takes most of a second. The functions are
plain Python until `load` compiles them, so a test may also call them as they stand.

Why they vectorise: elements that share a byte lie a half, a quarter or an eighth of a block apart, so every
load and store is contiguous; a block is sliced out first, so that indices start at zero (numba wraps negative
ones around, and LLVM gives up on an index it cannot prove positive: five times slower); the largest magnitude
is found on the bits as integers (the order of the floats, NaN on top, and no floating-point reduction to
reorder); magnitudes are added up in a fixed order, as a block is folded in half again and again; every integer
is cast back to 32 bits, since numba widens ``int32 + int32`` to 64. A block's 1 KiB stays in L1 between the
passes over it. No fastmath: the bytes are those of the obvious NumPy code, on every machine.

Shared arguments: `values` are float32, a multiple of `BLOCK` long. `work`, with `keep`, is the residual, as
long as `values` and overwritten with the new one; without, a scratch of one block. `out` and `packed` are
bytes, one row a block. `real` is how many elements of each block are values: the zeros after them are padding,
which no mean may count. With `fresh`, `total` is overwritten rather than added to.
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
SIGN = np.uint32(0x80000000)
TOO_LARGE = np.int32(0x7E800000)  # 2**126: below it scale, inverse and q * scale are finite; past it inf, NaN
TOO_LARGE_TO_SUM = np.int32(0x7A800000)  # 2**118: below it a block's magnitudes add up to less than 2**126
SPLIT = np.float32(1.23)  # in mean magnitudes: where the two of a Gaussian part best (Max 1960: 0.98 rms)


class Kernels(NamedTuple):
    """One codec's compiled loops."""

    encode: Callable[[Floats, Floats, bool, Bytes, int], None]
    accumulate: Callable[[Bytes, np.float32, bool, Floats], None]


@cache
def load(name: str) -> Kernels:
    """The loops of the codec called `name`, compiled, or read from numba's cache on disk."""
    floats, packed = types.float32[::1], types.uint8[::1]
    encode, accumulate = SOURCES[name]
    return Kernels(
        encode=_compiled(types.void(floats, floats, types.boolean, packed, types.int64), encode),
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
def _write_word(word: Any, row: Bytes) -> None:
    for k in range(HEADER):
        row[k] = np.uint8((word >> np.uint32(8 * k)) & np.uint32(255))


@register_jitable
def _read_word(row: Bytes) -> Any:
    word = np.uint32(0)
    for k in range(HEADER):
        word = np.uint32(word | (np.uint32(row[k]) << np.uint32(8 * k)))
    return np.uint32(word)


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
    _write_word(np.float32(sent).view(np.uint32), row)
    return scale, inverse


@register_jitable
def _read_scale(row: Bytes) -> Any:
    return np.uint32(_read_word(row)).view(np.float32)


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


def encode_int8(values: Floats, work: Floats, keep: bool, out: Bytes, real: int) -> None:
    """Row: scale, then 256 bytes of level + 128."""
    for b in range(values.size // BLOCK):
        row = out[b * 260 : b * 260 + 260]
        home = _home(work, keep, b)
        top = _gather(values[b * BLOCK : b * BLOCK + BLOCK], home)
        scale, inverse = _choose_scale(top, np.float32(127), home, row)
        codes = row[HEADER:]
        for k in range(256):
            codes[k] = np.uint8(_quantise(home, k, scale, inverse) + np.int32(128))


def encode_int4(values: Floats, work: Floats, keep: bool, out: Bytes, real: int) -> None:
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


@register_jitable
def _fold(sums: Floats) -> Any:
    """The sum of 64 numbers, halves added to each other; overwrites them."""
    for k in range(32):
        sums[k] = sums[k] + sums[k + 32]
    for k in range(16):
        sums[k] = sums[k] + sums[k + 16]
    for k in range(8):
        sums[k] = sums[k] + sums[k + 8]
    for k in range(4):
        sums[k] = sums[k] + sums[k + 4]
    return np.float32(np.float32(sums[0] + sums[2]) + np.float32(sums[1] + sums[3]))


@register_jitable
def _gather_mean(block: Floats, home: Floats, sums: Floats, real: int) -> tuple[Any, Any]:
    """Bring d = block + home to `home`, and give the bits of the largest |d|, and the mean |d|."""
    top = _gather(block, home)
    for k in range(64):
        first = np.float32(np.abs(home[k]) + np.abs(home[k + 64]))
        second = np.float32(np.abs(home[k + 128]) + np.abs(home[k + 192]))
        sums[k] = np.float32(first + second)
    return top, np.float32(_fold(sums) / np.float32(real))


@register_jitable
def _signed(magnitude: Any, d: Any) -> Any:
    """`magnitude` with the sign of `d`."""
    bits = np.float32(magnitude).view(np.uint32) | np.uint32(np.float32(d).view(np.uint32) & SIGN)
    return np.uint32(bits).view(np.float32)


@register_jitable
def _take_sign(home: Floats, k: int, magnitude: Any) -> Any:
    """Leave the error of element `k` in `home`, and give 1 where it is negative."""
    d = home[k]
    home[k] = d - _signed(magnitude, d)
    return np.uint32(np.float32(d).view(np.uint32) >> np.uint32(31))


def encode_sign1(values: Floats, work: Floats, keep: bool, out: Bytes, real: int) -> None:
    """Row: mean magnitude, then 32 bytes of sign bits for elements k (lowest), k + 32, … k + 224."""
    sums = np.empty(64, np.float32)
    for b in range(values.size // BLOCK):
        row = out[b * 36 : b * 36 + 36]
        home = _home(work, keep, b)
        top, mean = _gather_mean(values[b * BLOCK : b * BLOCK + BLOCK], home, sums, real)
        sent = mean
        if top >= TOO_LARGE_TO_SUM:
            home[:] = ZERO
            sent, mean = NAN, ZERO
        elif mean < SMALLEST_SCALE:
            sent, mean = ZERO, ZERO
        _write_word(np.float32(sent).view(np.uint32), row)
        codes = row[HEADER:]
        for k in range(32):
            low = _take_sign(home, k, mean) | _take_sign(home, k + 32, mean) << np.uint32(1)
            low |= _take_sign(home, k + 64, mean) << np.uint32(2) | _take_sign(home, k + 96, mean) << np.uint32(3)
            high = _take_sign(home, k + 128, mean) | _take_sign(home, k + 160, mean) << np.uint32(1)
            high |= _take_sign(home, k + 192, mean) << np.uint32(2) | _take_sign(home, k + 224, mean) << np.uint32(3)
            codes[k] = np.uint8(low | high << np.uint32(4))


@register_jitable
def _at_most(magnitude: Any, split: Any) -> Any:
    return ZERO if magnitude > split else magnitude


@register_jitable
def _past(magnitude: Any, split: Any, instead: Any) -> Any:
    return instead if magnitude > split else ZERO


@register_jitable
def _side_means(home: Floats, split: Any, lows: Floats, highs: Floats, counts: Floats, real: int) -> tuple[Any, Any]:
    """The mean of the magnitudes up to `split`, and of those past it; zero where there are none."""
    one = np.float32(1)
    for k in range(64):
        a, b = np.abs(home[k]), np.abs(home[k + 64])
        c, d = np.abs(home[k + 128]), np.abs(home[k + 192])
        low = np.float32(_at_most(a, split) + _at_most(b, split))
        lows[k] = low + np.float32(_at_most(c, split) + _at_most(d, split))
        high = np.float32(_past(a, split, a) + _past(b, split, b))
        highs[k] = high + np.float32(_past(c, split, c) + _past(d, split, d))
        count = np.float32(_past(a, split, one) + _past(b, split, one))
        counts[k] = count + np.float32(_past(c, split, one) + _past(d, split, one))
    low, high, past = _fold(lows), _fold(highs), _fold(counts)
    return np.float32(low / max(np.float32(real) - past, one)), np.float32(high / max(past, one))


@register_jitable
def _half_word(magnitude: Any) -> Any:
    """The upper half of a positive float32, rounded half to even: a bfloat16."""
    bits = np.uint32(np.float32(magnitude).view(np.uint32))
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@register_jitable
def _widened(half: Any) -> Any:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@register_jitable
def _take_side(home: Floats, k: int, low: Any, high: Any, split: Any) -> Any:
    """Leave the error of element `k` in `home`; give 1 where it is negative, and 2 more where it is large."""
    d = home[k]
    past = np.abs(d) > split
    home[k] = d - _signed(high if past else low, d)
    negative = np.uint32(np.float32(d).view(np.uint32) >> np.uint32(31))
    return np.uint32(negative | (np.uint32(2) if past else np.uint32(0)))


def encode_sign2(values: Floats, work: Floats, keep: bool, out: Bytes, real: int) -> None:
    """Row: two magnitudes as bfloat16, then 64 bytes of sign and size of elements k (lowest), k + 64, … k + 192."""
    lows, highs, counts = np.empty(64, np.float32), np.empty(64, np.float32), np.empty(64, np.float32)
    for b in range(values.size // BLOCK):
        row = out[b * 68 : b * 68 + 68]
        home = _home(work, keep, b)
        top, mean = _gather_mean(values[b * BLOCK : b * BLOCK + BLOCK], home, lows, real)
        split = np.float32(mean * SPLIT)
        low, high = _side_means(home, split, lows, highs, counts, real)
        word = np.uint32(_half_word(low) | _half_word(high) << np.uint32(16))
        if top >= TOO_LARGE_TO_SUM:
            home[:] = ZERO
            word = np.uint32(0x7FC07FC0)
            low, high = ZERO, ZERO
        elif mean < SMALLEST_SCALE:
            word = np.uint32(0)
            low, high = ZERO, ZERO
        else:
            low, high = _widened(word & np.uint32(0xFFFF)), _widened(word >> np.uint32(16))
        _write_word(word, row)
        codes = row[HEADER:]
        for k in range(64):
            first = _take_side(home, k, low, high, split) | _take_side(home, k + 64, low, high, split) << np.uint32(2)
            second = _take_side(home, k + 128, low, high, split)
            second |= _take_side(home, k + 192, low, high, split) << np.uint32(2)
            codes[k] = np.uint8(first | second << np.uint32(4))


def encode_bfloat16(values: Floats, work: Floats, keep: bool, out: Bytes, real: int) -> None:
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


@register_jitable
def _negated(magnitude: Any, code: Any) -> Any:
    """`magnitude`, with the other sign where the lowest bit of `code` is set."""
    bits = np.float32(magnitude).view(np.uint32) ^ np.uint32(np.uint32(code) << np.uint32(31))
    return np.uint32(bits).view(np.float32)


@register_jitable
def _side(low: Any, high: Any, code: Any) -> Any:
    return _negated(high if np.uint32(code) & np.uint32(2) else low, code)


def accumulate_sign1(packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
    """Inverse of `encode_sign1`."""
    for b in range(total.size // BLOCK):
        block, row = total[b * BLOCK : b * BLOCK + BLOCK], packed[b * 36 : b * 36 + 36]
        scale, codes = np.float32(weight * _read_scale(row)), row[HEADER:]
        if fresh:
            block[:] = ZERO
        for k in range(32):
            byte = np.uint32(codes[k])
            block[k] += _negated(scale, byte)
            block[k + 32] += _negated(scale, byte >> np.uint32(1))
            block[k + 64] += _negated(scale, byte >> np.uint32(2))
            block[k + 96] += _negated(scale, byte >> np.uint32(3))
            block[k + 128] += _negated(scale, byte >> np.uint32(4))
            block[k + 160] += _negated(scale, byte >> np.uint32(5))
            block[k + 192] += _negated(scale, byte >> np.uint32(6))
            block[k + 224] += _negated(scale, byte >> np.uint32(7))


def accumulate_sign2(packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
    """Inverse of `encode_sign2`."""
    for b in range(total.size // BLOCK):
        block, row = total[b * BLOCK : b * BLOCK + BLOCK], packed[b * 68 : b * 68 + 68]
        word, codes = _read_word(row), row[HEADER:]
        low = np.float32(weight * _widened(word & np.uint32(0xFFFF)))
        high = np.float32(weight * _widened(word >> np.uint32(16)))
        if fresh:
            block[:] = ZERO
        for k in range(64):
            byte = np.uint32(codes[k])
            block[k] += _side(low, high, byte)
            block[k + 64] += _side(low, high, byte >> np.uint32(2))
            block[k + 128] += _side(low, high, byte >> np.uint32(4))
            block[k + 192] += _side(low, high, byte >> np.uint32(6))


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
    "sign2": (encode_sign2, accumulate_sign2),
    "sign1": (encode_sign1, accumulate_sign1),
}
