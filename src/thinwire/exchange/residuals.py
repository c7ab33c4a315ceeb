"""What compression has left unsent: by this worker for its contributions, and as an owner for its sums."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.exchange.round import Lane
from thinwire.protocol.identifiers import train_number
from thinwire.rules.compression import codec
from thinwire.strategies import Strategy


def resends(strategy: Strategy) -> bool:
    """Whether a contribution that came too late for its round's quorum is added to the next one."""
    return strategy.settles and strategy.quorum < 1.0


class Residuals:
    """Two vectors as long as the model, made when a round first needs them."""

    def __init__(self, size: int, *, resend: bool) -> None:
        self._size, self._resend = size, resend
        self.own: Tensor | None = None
        self.owed: Tensor | None = None

    def lane(self, key: str, name: str) -> Lane:
        """How a round is packed: training rounds with feedback where something can be left over, others without."""
        chosen = codec(name)
        if train_number(key) is None or not (chosen.lossy or self._resend):
            return Lane(chosen)
        if self.own is None or self.owed is None:
            self.own, self.owed = torch.zeros(self._size), torch.zeros(self._size)
        return Lane(chosen, self.own, self.owed, self._resend)

    def share(self, members: tuple[int, ...], *, stale: bool = False) -> None:
        """What this worker's slices were still owed goes into its own contributions: slices change hands now.

        Without members yet it is what a checkpoint held; stale, where another has gone on from there and sent it.
        """
        if not members and stale:
            self.own = self.owed = None
        elif members and self.own is not None and self.owed is not None:
            self.own.add_(self.owed, alpha=len(members))
            self.owed.zero_()

    def tree(self) -> list[Tensor] | None:
        """A copy for a checkpoint."""
        return None if self.own is None or self.owed is None else [self.own.clone(), self.owed.clone()]

    def load(self, tree: list[Tensor] | None) -> None:
        if tree is not None:
            self.own, self.owed = tree[0].clone(), tree[1].clone()
