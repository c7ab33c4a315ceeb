"""The joint model of one worker: merged from the same means on all of them, hence the same on all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import CheckpointError, DivergedError
from thinwire.exchange.cuts import Cut, Cuts
from thinwire.parameters import Fragment
from thinwire.protocol.observation import Observer, StateLoaded, unobserved
from thinwire.rules.finite import count_not_finite, is_finite
from thinwire.rules.noise import Spread
from thinwire.strategies import Measured, Setting, Strategy, Taken

MODEL, BESIDE = "the joint model", "what the strategy keeps beside the joint model"
PIECE = 1 << 16
"""Elements that a strategy's arithmetic is given at once: temporaries of this size stay in the cache, where those of a
whole fragment would be new memory each time, and touching new memory costs more than the arithmetic."""


def pieces(fragment: Fragment, state: Any, size: int) -> Iterator[tuple[Fragment, Fragment]]:
    """The pieces of a fragment to give to a strategy, each in the flat vector and within the fragment.

    There is one only, the whole, where the state has numbers: they change once a round.
    """
    fields = state if isinstance(state, tuple) else ()
    step = PIECE if all(_full(v, size) for v in fields) else max(1, fragment.size)
    for start in range(0, fragment.size, step):
        stop = min(fragment.size, start + step)
        yield Fragment(fragment.start + start, fragment.start + stop), Fragment(start, stop)


def slice_state(state: Any, fragment: Fragment, size: int) -> Any:
    """A state with its full-length tensors cut to a fragment (views); numbers stay."""
    if not isinstance(state, tuple) or not state:
        return state
    return type(state)(*(fragment.of(v) if _full(v, size) else v for v in state))


def write_state(state: Any, fragment: Fragment, size: int, piece: Any) -> Any:
    """The state with a fragment's new values written into its tensors, and the new numbers."""
    if not isinstance(state, tuple) or not state:
        return piece if not isinstance(piece, tuple) else state
    fresh = []
    for whole, part in zip(state, piece, strict=True):
        if _full(whole, size):
            target = fragment.of(whole)
            if target.data_ptr() != part.data_ptr() or target.shape != part.shape:
                target.copy_(part)
            fresh.append(whole)
        else:
            fresh.append(part)
    return type(state)(*fresh)


def _full(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == size


def check_order(round: int, landed: int) -> None:
    """Raises where a round is not the next one to land."""
    if round != landed:
        raise AssertionError(f"round {round} lands out of order: {landed} is next")


class JointState:
    """The joint state, the number of rounds merged into it, and the cuts those rounds follow.

    Merged on the exchange thread, read and replaced on the main thread: every method takes the lock, save those asked
    at every step, which must not wait for a merge that goes on. They read cuts and a count that are replaced whole.
    """

    def __init__(self, strategy: Strategy, x: Tensor, workers: int, observe: Observer = unobserved) -> None:
        self.strategy, self.observe = strategy, observe
        self.size = x.numel()
        self.lock = threading.RLock()
        self.landed = 0
        self.version = 0
        """Updates that servers had merged when a checkpoint was made; steps that the joint optimizer has taken."""
        self.spread = Spread()
        """How far workers' gradients differ, as seen here: for what this worker says, not for what it does."""
        self.noise = 1.0
        """Of the round that landed last; see `Taken`."""
        self.behind: dict[int, int] = {}
        """By parameter, in how many of them it took no step."""
        self.state, _ = strategy.open(x)
        first = strategy.setting(Measured(self.size, workers, 0, None, None), None)
        self.cuts = Cuts(Cut(self.size, first))

    @property
    def model(self) -> Tensor | None:
        """The joint model x̃; None where the replica itself is the joint model."""
        return getattr(self.state, "model", None)

    def fragment(self, round: int) -> Fragment:
        return self.cuts.at(round).fragment(round)

    def cycle(self) -> int:
        """The cycle that the newest reply belongs to."""
        landed = self.landed
        return self.cuts.at(landed).cycle(landed)

    def setting(self) -> Setting:
        """The setting that the newest reply was cut by."""
        return self.cuts.at(self.landed).setting

    def contribution(self, fragment: Fragment, snapshot: Tensor, out: Tensor | None = None) -> Tensor | None:
        """What a snapshot contributes, or None where that is not finite.

        It is written to `out` where that is given, and then `out` is returned. Each piece is checked while it is in the
        cache.
        """
        with self.lock:
            if not self.state:  # nothing beside the vector: what comes back may be the snapshot itself
                given = self.strategy.contribute(self.state, snapshot)
                return given if is_finite(given) else None
            values = torch.empty_like(snapshot) if out is None else out
            finite = True
            for piece, near in pieces(fragment, self.state, self.size):
                part = self.strategy.contribute(slice_state(self.state, piece, self.size), near.of(snapshot))
                near.of(values).copy_(part)
                finite = finite and is_finite(near.of(values))
            return values if finite else None

    def old_model(self, fragment: Fragment) -> Tensor | None:
        """A copy of the joint model's fragment: the snapshot of a worker that did not contribute."""
        with self.lock:
            return None if self.model is None else fragment.of(self.model).clone()

    def land(self, round: int, fragment: Fragment, mean: Tensor, out: Tensor | None = None) -> Tensor:
        """Merges a round's mean; returns the reply, in `out` where it is given, which may be the mean itself."""
        with self.lock:
            check_order(round, self.landed)
            cut = self.cuts.at(round)
            reply = self.merge(fragment, mean, cut.cycle(round), cut.setting, out)
            self.landed = round + 1
            return reply

    def merge(
        self, fragment: Fragment, mean: Tensor, cycle: int, setting: Setting, out: Tensor | None = None
    ) -> Tensor:
        """Merges a mean, or one worker's contribution, into a fragment; takes no lock of its own.

        Raises:
            DivergedError: The joint model, or what the strategy keeps beside it, is not finite after it.
        """
        if not self.state:
            self._check(mean, fragment)
            reply, merged = self.strategy.merge(self.state, mean, cycle, setting)
            self.state = write_state(self.state, fragment, self.size, merged)
            return reply
        reply = torch.empty_like(mean) if out is None else out
        for piece, near in pieces(fragment, self.state, self.size):
            state = slice_state(self.state, piece, self.size)
            part, merged = self.strategy.merge(state, near.of(mean), cycle, setting)
            for index, values in enumerate(merged):
                if _full(values, piece.size):
                    self._check(values, fragment, BESIDE if index else MODEL)
            near.of(reply).copy_(part)
            self.state = write_state(self.state, piece, self.size, merged)
        return reply

    def optimize(self, gradients: Tensor, taken: Taken, out: Tensor | None = None) -> Tensor:
        """Takes the joint optimizer's steps by a mean of gradients; takes no lock of its own.

        Returns: the new model of that stretch, in `out` where it is given, which may be the mean itself.

        Raises:
            DivergedError: The joint model, or the optimizer's state, is not finite after it.
        """
        reply, optimizer = torch.empty_like(gradients) if out is None else out, self.strategy.joint_optimizer
        assert optimizer is not None
        for piece, near in pieces(taken.fragment, self.state, self.size):
            state = slice_state(self.state, piece, self.size)
            merged = optimizer.optimize(state, near.of(gradients), replace(taken, fragment=piece))
            for index, values in enumerate(merged):
                self._check(values, taken.fragment, BESIDE if index else MODEL)
            near.of(reply).copy_(merged.model)
            self.state = write_state(self.state, piece, self.size, merged)
        return reply

    def land_steps(
        self,
        round: int,
        fragment: Fragment,
        gradients: Tensor,
        taken: Taken | None,
        out: Tensor | None = None,
        *,
        square: float | None = None,
    ) -> Tensor:
        """Takes the steps of a round, none where there are none; returns the new model, in `out` where it is given.

        Args:
            round: its number, the next one.
            fragment: of the flat vector.
            gradients: the mean of the workers' sums.
            taken: what the sums are of.
            out: where the new model is to be written.
            square: the mean square norm of one worker's mean gradient.
        """
        with self.lock:
            check_order(round, self.landed)
            optimizer = self.strategy.joint_optimizer
            if taken is None:
                reply = torch.empty_like(gradients) if out is None else out
                reply.copy_(fragment.of(self.state.model))
            else:
                self.noise = taken.noise
                if square is not None:
                    mean = gradients / taken.rows
                    self.spread.see(square, float(mean @ mean))
                reply = self.optimize(gradients, replace(taken, behind=self.behind), out)
                self.version = max(self.version, taken.before + taken.steps)
                for number in taken.absent:
                    if optimizer is not None and optimizer.rule.begins(number, fragment):
                        self.behind[number] = self.behind.get(number, 0) + taken.steps
            self.landed = round + 1
            return reply

    def _check(self, values: Tensor, fragment: Fragment, what: str = MODEL) -> None:
        if not is_finite(values):
            raise DivergedError(
                f"{what} is not finite any more after {self.landed} rounds: {count_not_finite(values)} values "
                f"from {fragment.start} to {fragment.stop} of it"
            )

    def set_model(self, x: Tensor) -> None:
        """The only worker's replica is the joint model."""
        with self.lock:
            if self.model is not None:
                self.model.copy_(x)

    def set_kept(self, kept: Sequence[Tensor], steps: int) -> None:
        """What its optimizer keeps after so many steps is what is kept beside the joint model."""
        with self.lock:
            self.version = steps
            for own, values in zip(self.state[1:], kept, strict=True):
                own.copy_(values)

    def parts(self, fragment: Fragment) -> list[Tensor]:
        """A copy of what the strategy keeps beside the joint model, of a fragment."""
        with self.lock:
            return [fragment.of(values).clone() for values in self.state[1:]]

    def change(self, setting: dict[str, Any], since: int) -> None:
        with self.lock:
            self.cuts.change(Setting(**setting), since)

    def tree(self) -> dict[str, Any]:
        """Everything a worker that joins, or a checkpoint, needs of the joint state; a copy."""
        with self.lock:
            values = [v.clone() if isinstance(v, Tensor) else v for v in self.state]
            behind = {str(number): versions for number, versions in self.behind.items()}
            told = {"landed": self.landed, "version": self.version, "behind": behind}
            return {**told, "state": values, "cuts": self.cuts.to_json()}

    def load(self, tree: dict[str, Any]) -> None:
        """Takes a tree's values over; the tree keeps its own, which the main thread has yet to read."""
        fresh = [v.to(torch.float32, copy=True) if isinstance(v, Tensor) else v for v in tree["state"]]
        landed, version, cuts = int(tree["landed"]), int(tree.get("version", 0)), Cuts.from_json(tree["cuts"])
        behind = {int(number): int(versions) for number, versions in tree.get("behind", {}).items()}
        with self.lock:  # all of it or nothing
            if not self._fits(fresh) or cuts.newest.size != self.size:
                raise CheckpointError(
                    f"a joint state does not fit this model of {self.size} parameters and its strategy; that of the "
                    "same model and strategy does. Give all workers, and the run that goes on, the same recipe."
                )
            self.state, self.landed, self.version, self.cuts = type(self.state)(*fresh), landed, version, cuts
            self.behind = behind
            self.observe(StateLoaded())

    def _fits(self, fresh: list[Any]) -> bool:
        """Whether a state's values are what the strategy keeps, tensors of the same lengths where it keeps tensors."""
        if not isinstance(self.state, tuple) or len(fresh) != len(self.state):
            return False
        for own, new in zip(self.state, fresh, strict=True):
            shape = own.shape if isinstance(own, Tensor) else None
            if (new.shape if isinstance(new, Tensor) else None) != shape:
                return False
            if shape is None and not isinstance(new, bool | int | float | type(None)):
                return False
        return True
