"""Wire codecs: what a vector of float32 becomes between two machines, and what stays behind as error.

All codecs but float32 and bfloat16 work on blocks of 256 elements. The integer codecs quantise a block
symmetrically, on a scale of its own::

    scale = max|d| / levels          levels = 127, 7 for int8, int4
    q     = rint(d / scale)          half to even, in -levels .. levels
    deq   = scale · q

so the error of an element is at most half its block's scale. With fewer levels the largest value would decide
over all others, of which next to nothing would be sent. The sign codecs send every sign, and how large the
elements of a block are on average; sign2 tells two sides apart, and has a mean for each::

    sign1    deq = sign(d) · mean|d|
    sign2    deq = sign(d) · (high if |d| > 1.23 · mean|d| else low)
             high, low = the means of |d| over the elements of the block past that bound, and of the others

A mean is the magnitude with the least squared error, whatever the distribution. At 1.23 the two sides of a
Gaussian part best. Zero has a sign too, which is that of its bits: what should not move goes back and forth by a
mean, and error feedback keeps its sum within it.

**Packed layout.** One row a block: a header of four bytes, then ``32 · bits`` bytes of codes. The header is the
scale, or the mean, as a little-endian float32; in sign2 it is low and then high as bfloat16, rounded half to
even. The code of an integer codec is ``q + levels + 1``, that of a sign codec 1 for a negative element, and 2
more for a large one. Elements that share a byte lie far apart: int4 holds k and k + 128, sign2 k, k + 64, k +
128 and k + 192, sign1 eight that are 32 apart, lowest bits first. A short last block is padded with zeros, which
count in no mean, and bytes that would hold padding alone are not sent. float32 and bfloat16 are the plain
little-endian numbers. Packing blocks one after the other is the same as packing them at once, so a vector may be
encoded in pieces that start at multiples of `BLOCK`.

**Values out of the ordinary.** In blocks: a block holding NaN, infinity or a magnitude of 2**126 or more (2**118
in the sign codecs, which add magnitudes up) decodes to NaN throughout and leaves a residual of zero, so divergence
is seen but does not outlive the step; other blocks are untouched. A block whose scale or mean would be below
2**-126 (all zeros, or next to it) decodes to zeros, and its residual keeps the values. bfloat16: NaN and infinity
pass, numbers past its range become infinite, and these elements alone leave a residual of zero. Any bytes of the
right length decode to something.

Attribution: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014 (error feedback); Karimireddy et al., "Error feedback
fixes SignSGD and other gradient compression schemes", ICML 2019 (EF-SGD).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError, ProtocolError, nearest
from thinwire.rules.finite import is_finite

if TYPE_CHECKING:
    from thinwire.rules._kernels import Bytes, Floats, Kernels

__all__ = ["BLOCK", "CODECS", "SPELLINGS", "Codec", "codec", "feedback", "is_codec", "warm_up"]

BLOCK: Final = 256
"""Elements that share one header."""


@final
@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to write float32 vectors as bytes; take it from `codec`.

    Vectors are float32, packed data uint8, both one-dimensional, contiguous and on the CPU; anything else
    is a `ConfigError`, and packed data of the wrong length a `ProtocolError`. The loops run on the calling
    thread with the GIL released.

    Attributes:
        name: As a recipe spells it.
        bits: Bits an element takes, apart from headers.
    """

    name: str
    bits: int

    @property
    def lossy(self) -> bool:
        """Whether decoding gives back other numbers than were encoded."""
        return self.bits < 32

    def size_bytes(self, count: int) -> int:
        """Exact size of `count` packed elements.

        >>> [each.size_bytes(1_000) for each in CODECS.values()]  # float32, bfloat16, int8, int4, sign2, sign1
        [4000, 2000, 1016, 528, 272, 144]
        >>> codec("int4").size_bytes(3)  # a scale, and three bytes whose upper halves are padding
        7
        """
        if count < 0:
            raise ConfigError(f"count is {count}; a vector has 0 elements or more. Pass values.numel().")
        blocks, rest = divmod(count, BLOCK)
        lanes, lane_bytes = BLOCK * min(self.bits, 8) // 8, max(self.bits // 8, 1)
        return blocks * self._row_bytes + (self._header_bytes + min(rest, lanes) * lane_bytes if rest else 0)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """`values` packed, without error feedback.

        >>> codec("int8").encode(torch.tensor([127.0, 0.4, -2.6])).tolist()  # 1.0 as float32, then q + 128
        [0, 0, 128, 63, 255, 128, 125]

        Args:
            values: What to send; left as it is.
            out: Where to write; a new tensor if None.
        """
        return self._encode(_vector(values, "values"), None, out)

    def encode_feedback(self, values: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        """`values` plus what was left unsent, packed; **overwrites `residual`** with what is now left unsent.

        The hot path of `feedback`, which has the equation and mutates nothing.

        Args:
            values: What to send; left as it is. Must not share memory with `residual`.
            residual: The error of earlier calls, as long as `values`; updated in place.
            out: Where to write; a new tensor if None.
        """
        if residual.shape != values.shape:
            raise ConfigError(
                f"residual has shape {tuple(residual.shape)} and values {tuple(values.shape)}; they must be "
                "equally long. Start a vector's residual as torch.zeros_like(values)."
            )
        return self._encode(_vector(values, "values"), _vector(residual, "residual"), out)

    def decode(self, packed: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        """The `count` elements in `packed`.

        >>> codec("int8").decode(torch.tensor([0, 0, 128, 63, 255, 128, 125], dtype=torch.uint8), 3).tolist()
        [127.0, 0.0, -3.0]

        Args:
            packed: What `encode` made of as many elements.
            count: How many elements.
            out: Where to write; a new tensor if None.
        """
        data = self._packed(packed, count)
        values = torch.empty(count) if out is None else _vector(out, "out", count)
        self._accumulate(data, 1.0, values, fresh=True)
        return values if out is None else out

    def accumulate(self, packed: Tensor, weight: float, total: Tensor) -> None:
        """Add ``weight · decode(packed)`` to `total`, in place and in one pass.

        >>> total = torch.ones(3)
        >>> codec("sign1").accumulate(codec("sign1").encode(torch.tensor([4.0, 1.0, -4.0])), 0.5, total)
        >>> total.tolist()  # 1 ± 0.5 · 3
        [2.5, 2.5, -0.5]
        """
        total = _vector(total, "total")
        self._accumulate(self._packed(packed, total.numel()), weight, total, fresh=False)

    def is_finite(self, packed: Tensor, count: int) -> bool:
        """Whether all of `packed` decodes to finite numbers.

        Of the codecs in blocks only the headers are looked at, one word a block.

        >>> packed = codec("int8").encode(torch.tensor([1.0, float("inf")]))
        >>> codec("int8").is_finite(packed, 2), codec("int8").is_finite(codec("int8").encode(torch.ones(2)), 2)
        (False, True)
        """
        data = self._aligned(self._packed(packed, count)).numpy()
        if self.bits == 32:
            return is_finite(torch.from_numpy(data.view(np.float32)))
        if self.bits == 16:
            return _are_finite(data.view(np.uint16))
        whole = count // BLOCK * self._row_bytes
        heads = data[:whole].view(np.uint32)[:: self._row_bytes // 4]
        last = data[whole : whole + self._header_bytes].view(np.uint32)
        if self.bits == 2:
            return all(_are_finite(half) for head in (heads, last) for half in (head, head >> np.uint32(16)))
        largest = np.float32(2 ** (self.bits - 1))  # a code that no encoder makes is as far from zero as this
        with np.errstate(over="ignore", invalid="ignore"):
            return all(bool(np.isfinite(head.view(np.float32) * largest).all()) for head in (heads, last))

    @property
    def _header_bytes(self) -> int:
        return 4 if self.bits <= 8 else 0

    @property
    def _row_bytes(self) -> int:
        return self._header_bytes + BLOCK * self.bits // 8

    @property
    def _kernels(self) -> Kernels:
        # Through importlib so that importing this module stays free of numba, which takes most of a second.
        kernels: Kernels = importlib.import_module("thinwire.rules._kernels").load(self.name)
        return kernels

    def _encode(self, values: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        size = self.size_bytes(values.numel())
        given = torch.empty(size, dtype=torch.uint8) if out is None else _plain(out, "out", torch.uint8, size)
        packed = self._aligned(given)
        if self.lossy:
            left = None if residual is None else residual.numpy()
            self._encode_blocks(values.numpy(), left, packed.numpy())
        elif residual is None:
            _floats(packed).copy_(values)
        else:
            torch.add(values, residual, out=_floats(packed))
            residual.zero_()
        if packed is not given:
            given.copy_(packed)
        return given if out is None else out

    def _encode_blocks(self, values: Floats, residual: Floats | None, packed: Bytes) -> None:
        encode = self._kernels.encode
        blocks, rest = divmod(len(values), BLOCK)
        whole, rows = blocks * BLOCK, blocks * self._row_bytes
        keep = residual is not None
        work = np.empty(BLOCK, np.float32) if residual is None else residual
        encode(values[:whole], work[:whole] if keep else work, keep, packed[:rows], BLOCK)
        if rest:
            last, last_work = np.zeros((2, BLOCK), np.float32)
            last_row = np.empty(self._row_bytes, np.uint8)
            last[:rest] = values[whole:]
            if keep:
                last_work[:rest] = work[whole:]
            encode(last, last_work, keep, last_row, rest)
            packed[rows:] = last_row[: len(packed) - rows]
            if keep:
                work[whole:] = last_work[:rest]

    def _accumulate(self, packed: Tensor, weight: float, total: Tensor, *, fresh: bool) -> None:
        packed = self._aligned(packed)
        if self.lossy:
            self._accumulate_blocks(packed.numpy(), np.float32(weight), fresh, total.numpy())
        elif fresh:
            total.copy_(_floats(packed))
        else:
            total.add_(_floats(packed), alpha=weight)

    def _accumulate_blocks(self, packed: Bytes, weight: np.float32, fresh: bool, total: Floats) -> None:
        accumulate = self._kernels.accumulate
        blocks, rest = divmod(len(total), BLOCK)
        whole, rows = blocks * BLOCK, blocks * self._row_bytes
        accumulate(packed[:rows], weight, fresh, total[:whole])
        if rest:
            last, last_row = np.zeros(BLOCK, np.float32), np.zeros(self._row_bytes, np.uint8)
            last[:rest] = total[whole:]
            last_row[: len(packed) - rows] = packed[rows:]
            accumulate(last_row, weight, fresh, last)
            total[whole:] = last[:rest]

    def _packed(self, packed: Tensor, count: int) -> Tensor:
        size = self.size_bytes(count)
        data = _plain(packed, "packed", torch.uint8)
        if data.numel() != size:
            raise ProtocolError(
                f"{count} elements came as {data.numel()} bytes; in {self.name} they take {size}. The peer "
                "has another model, codec or version: give all workers the same recipe and thinwire."
            )
        return data

    def _aligned(self, packed: Tensor) -> Tensor:
        """`packed` itself, or a copy if it lies where numbers wider than a byte must not."""
        return packed.clone() if self.bits > 8 and packed.data_ptr() % 4 else packed


CODECS: Final[dict[str, Codec]] = {
    name: Codec(name=name, bits=bits)
    for name, bits in {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "sign2": 2, "sign1": 1}.items()
}
"""Every codec by its name, widest first."""

SPELLINGS: Final = {"int2": "sign2"}
"""Names that recipes and checkpoints of earlier versions have, and what they stand for."""


def is_codec(name: str) -> bool:
    """Whether there is a codec called `name`, now or in earlier versions."""
    return name in CODECS or name in SPELLINGS


def codec(name: str) -> Codec:
    """The codec called `name`.

    >>> codec("int4").bits, codec("int2").name
    (4, 'sign2')
    """
    found = CODECS.get(SPELLINGS.get(name, name))
    if found is None:
        raise ConfigError(f"There is no codec {name!r}. {nearest(name, CODECS)} Set one of these names.")
    return found


def feedback(values: Tensor, residual: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """What to send, and the error to add to the next send; the inputs are left as they are.

    ::

        d  = v + e
        m  = Q(d)
        e' = d − deq(m)

    The sum of all that was ever sent is then the sum of all values less one residual: quantisation delays,
    and loses nothing.

    >>> values, residual = torch.tensor([1.0, 0.25, -0.5]), torch.tensor([0.0, 0.5, 0.0])
    >>> packed, left = feedback(values, residual, codec("sign1"))
    >>> codec("sign1").decode(packed, 3).tolist()  # mean of 1, 0.75 and 0.5
    [0.75, 0.75, -0.75]
    >>> left.tolist()
    [0.25, 0.0, 0.25]

    Seide et al. 2014, and EF-SGD (Karimireddy et al. 2019) with the learning rate already inside v.

    Args:
        values: v, the update to send.
        residual: e, what earlier sends left over; zeros at first.
        codec: Q and deq.
    """
    left = residual.clone()
    return codec.encode_feedback(values, left), left


def warm_up(codec: Codec) -> None:
    """Compile `codec`'s loops, or load them from numba's cache, before the first send has to wait for it."""
    if codec.lossy:
        _ = codec._kernels


def _vector(values: Tensor, name: str, count: int | None = None) -> Tensor:
    return _plain(values, name, torch.float32, count)


def _plain(tensor: Tensor, name: str, dtype: torch.dtype, count: int | None = None) -> Tensor:
    """`tensor` without its gradient history, if it is what every codec takes."""
    flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not flat or tensor.dtype != dtype or count not in (None, tensor.numel()):
        length = "" if count is None else f" with {count} elements"
        raise ConfigError(
            f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}; it must "
            f"be {dtype}, one-dimensional{length}, contiguous and on the CPU. Flatten or convert it first."
        )
    return tensor.detach()


def _floats(packed: Tensor) -> Tensor:
    """The same bytes as float32; through NumPy, which asks nothing of the storage's offset."""
    return torch.from_numpy(packed.numpy().view(np.float32))


def _are_finite(halves: Any) -> bool:
    """Whether the lower halves of some integers are all finite as bfloat16."""
    exponent = halves.dtype.type(0x7F80)
    return not bool(((halves & exponent) == exponent).any())
