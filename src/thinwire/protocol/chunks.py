"""Splits byte strings that are too long for one message into pieces."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.errors import ProtocolError

PIECE_BYTES = 4 << 20
MOST_PIECES = 1 << 16
"""256 GiB: a longer announcement cannot be a joint state, and is refused."""


def pieces(data: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Yields each piece after its number and the number of pieces."""
    count = max(1, -(-len(data) // PIECE_BYTES))
    for index in range(count):
        yield index, count, memoryview(data)[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]


class Reassembly:
    """Collects pieces until all are there. The name tells its pieces from those of another byte string.

    >>> reassembly = Reassembly(1)
    >>> [reassembly.add(i, n, piece) for i, n, piece in pieces(b"abc")]
    [b'abc']
    """

    def __init__(self, name: int = 0) -> None:
        self.name = name
        self._pieces: dict[int, bytes] = {}

    def add(self, index: int, count: int, piece: memoryview) -> bytes | None:
        """All bytes, with the last missing piece; None before that."""
        if not 0 <= index < count <= MOST_PIECES or len(piece) > PIECE_BYTES:
            raise ProtocolError(f"piece {index} of {count} with {len(piece)} bytes is not possible")
        self._pieces[index] = bytes(piece)
        if len(self._pieces) < count:
            return None
        found = b"".join(self._pieces[i] for i in sorted(self._pieces))
        self._pieces = {}
        return found
