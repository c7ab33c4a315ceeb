"""Bytes too long for one message, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.errors import ProtocolError

PIECE_BYTES = 4 << 20
MOST_PIECES = 1 << 16
"""256 GiB: what is announced to be longer is nobody's joint state."""


def pieces(data: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Each piece with its number and how many there are."""
    count = max(1, -(-len(data) // PIECE_BYTES))
    for index in range(count):
        yield index, count, memoryview(data)[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]


class Reassembly:
    """Pieces that come in, until all are there. Its name tells them from those of another.

    >>> parcel = Reassembly(1)
    >>> [parcel.add(i, n, piece) for i, n, piece in pieces(b"abc")]
    [b'abc']
    """

    def __init__(self, name: int = 0) -> None:
        self.name = name
        self._pieces: dict[int, bytes] = {}

    def add(self, index: int, count: int, piece: memoryview) -> bytes | None:
        """The whole, with the last of its pieces."""
        if not 0 <= index < count <= MOST_PIECES or len(piece) > PIECE_BYTES:
            raise ProtocolError(f"piece {index} of {count} with {len(piece)} bytes is not possible")
        self._pieces[index] = bytes(piece)
        if len(self._pieces) < count:
            return None
        found = b"".join(self._pieces[i] for i in sorted(self._pieces))
        self._pieces = {}
        return found
