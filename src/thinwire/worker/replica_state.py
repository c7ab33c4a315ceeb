"""What a strategy keeps beside a replica, fragment by fragment, so that landing a reply copies none of it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.joint import pieces, slice_state
from thinwire.exchange.snapshot import brought
from thinwire.parameters import Fragment
from thinwire.strategies import Setting, Strategy
from thinwire.strategies.base import under


class ReplicaState:
    """The worker state of a strategy, cut into the fragments that rounds exchange."""

    def __init__(self, strategy: Strategy, x: Tensor) -> None:
        self._strategy, self._size = strategy, x.numel()
        self._cut: dict[Fragment, Any] = {}
        self.open(x)

    def open(self, x: Tensor) -> None:
        """Starts from a replica's vector."""
        self.put(self._strategy.open(x)[1])

    def put(self, whole: Any) -> None:
        """Takes a state as long as the vector."""
        self._cut = {Fragment(0, self._size): whole}

    def whole(self) -> Any:
        """The state as one, as long as the vector."""
        if len(self._cut) == 1:
            return next(iter(self._cut.values()))
        parts = [self._cut[fragment] for fragment in sorted(self._cut)]
        return type(parts[0])(*(torch.cat(v) if isinstance(v[0], Tensor) else v[-1] for v in zip(*parts, strict=True)))

    def before_step(self, x: Tensor, cycle: int, setting: Setting) -> None:
        """Lets the strategy shift the replica."""
        strategy = under(self._strategy, setting)
        for fragment, state in self._cut.items():
            strategy.before_step(state, fragment.of(x), cycle)

    def gradient_term(self, x: Tensor, cycle: int, setting: Setting) -> Tensor | None:
        """The strategy's term to the gradient, if it has one."""
        strategy = under(self._strategy, setting)
        terms = [strategy.gradient_term(self._cut[f], f.of(x), cycle) for f in sorted(self._cut)]
        found = [term for term in terms if term is not None]
        return torch.cat(found) if found else None

    def adopt(self, fragment: Fragment, x: Tensor, base: Tensor, reply: Tensor) -> None:
        """Lands a reply on a fragment of the replica."""
        base, reply = brought(base, x.device), brought(reply, x.device)
        if any(self._cut.values()):
            state = self._state_of(fragment)
            value, self._cut[fragment] = self._strategy.adopt(state, fragment.of(x), base, reply)
            _write(fragment.of(x), value)
            return
        for piece, near in pieces(fragment, (), self._size):  # no state is kept: temporaries can stay small
            value, _ = self._strategy.adopt(self.whole(), piece.of(x), near.of(base), near.of(reply))
            _write(piece.of(x), value)

    def _state_of(self, fragment: Fragment) -> Any:
        """A fragment's own state: the piece that holds it is split; where none holds it, all are joined first."""
        if fragment not in self._cut:
            if not any(f.start <= fragment.start and fragment.stop <= f.stop for f in self._cut):
                self.put(self.whole())
            holder = next(f for f in self._cut if f.start <= fragment.start and fragment.stop <= f.stop)
            state = self._cut.pop(holder)
            for start, stop in itertools.pairwise((holder.start, *fragment, holder.stop)):
                if stop > start:
                    near = Fragment(start - holder.start, stop - holder.start)
                    self._cut[Fragment(start, stop)] = slice_state(state, near, holder.size)
        return self._cut[fragment]


def _write(target: Tensor, value: Tensor) -> None:
    if value.data_ptr() != target.data_ptr():
        target.copy_(value)
