"""The joint model of one round on its way to be evaluated, saved, or both, as a state machine."""

from __future__ import annotations

from enum import Enum, unique
from typing import Any, final

from torch import Tensor

from thinwire.protocol.transitions import Row, Transitions


@unique
class PublicationState(Enum):
    """How far a worker is with a publication."""

    CAPTURED = "The worker has a copy of the joint model, and has asked for the mean of all workers' buffers."
    BUFFERED = "The buffers are here; a member of a group waits until all members are as far."
    EVALUATED = "The worker has reported its metrics; the verdict may come at any time from here on."
    SAVED = "The worker has given its part of the checkpoint to the writer."
    SKIPPED = "No checkpoint is made of it."
    DROPPED = "The worker publishes something else in its place, or nothing."


@unique
class PublicationEvent(Enum):
    """What changes a publication."""

    BUFFER = "the mean of the buffers comes"
    EVALUATE = "an evaluation was asked for"
    SAVE = "a checkpoint was asked for"
    SKIP = "no checkpoint was asked for"
    DROP = "a peer's joint state comes, the group comes together anew, or some members will never hear of it"


S, E = PublicationState, PublicationEvent
TRANSITIONS = Transitions(
    S.CAPTURED,
    [
        Row((S.CAPTURED,), E.BUFFER, S.BUFFERED),
        Row((S.BUFFERED,), E.EVALUATE, S.EVALUATED),
        # the last checkpoint is saved again by a worker that becomes the first one
        Row((S.BUFFERED, S.EVALUATED, S.SAVED), E.SAVE, S.SAVED),
        Row((S.BUFFERED, S.EVALUATED), E.SKIP, S.SKIPPED),
        Row((S.CAPTURED, S.BUFFERED), E.DROP, S.DROPPED),
    ],
)


@final
class Publication:
    """One publication at one worker, which has the same copy of the joint model as all others.

    Args:
        number: by which all workers name it.
        model: the copy.
        joint: the joint state, where it is saved.
        save: the checkpoint's name; None where it is not saved.
        own: this worker's part of the checkpoint.
        evaluate: whether it is evaluated.
    """

    def __init__(
        self,
        number: int,
        model: Tensor,
        joint: dict[str, Any] | None = None,
        *,
        save: str | None = None,
        own: dict[str, Any] | None = None,
        evaluate: bool = False,
    ) -> None:
        self.number, self.model, self.joint, self.save, self.own = number, model, joint, save, own
        self.evaluate = evaluate
        self._state = TRANSITIONS.initial
        self._buffers: dict[str, Tensor] | None = None

    def move(self, cause: PublicationEvent) -> None:
        """Something has been done with it."""
        self._state = TRANSITIONS.after(self._state, cause)

    @property
    def is_buffered(self) -> bool:
        """Whether its buffers are here."""
        return self._buffers is not None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The mean of all workers' buffers, once it is here."""
        assert self._buffers is not None
        return self._buffers

    def give(self, buffers: dict[str, Tensor]) -> None:
        """The mean of the buffers has come."""
        self.move(PublicationEvent.BUFFER)
        self._buffers = buffers
