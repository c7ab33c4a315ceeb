"""The agreement of workers on a generation, as a state machine. `Agreement` is the only owner of the state."""

from __future__ import annotations

from enum import Enum, unique

from thinwire.protocol.transitions import Row, Transitions


@unique
class GenerationState(Enum):
    """How far the agreement on the newest generation has come."""

    EMPTY = "No worker has a seat."
    CHANGED = "A worker has joined, was lost or stalls; the coordinator waits for further changes and for whole groups."
    CALLING = "The coordinator has sent `prepare` to all workers and waits for their answers."
    WAITING = "All have answered, but each worker that holds a part of the joint model is in a group that is not whole."
    RUNNING = "The coordinator has sent `commit`: the members agree and exchange."


@unique
class GenerationEvent(Enum):
    """What changes the agreement."""

    CHANGE = "a worker joins or is lost, a group falls apart, or rounds stall"
    CALL = "the wait is over, and a whole group is here"
    DESERT = "the wait is over, and no worker has a seat"
    STAND_BY = "the last answer is in, and a part of the joint model is held by groups alone that are not whole"
    COMMIT = "the last answer is in, and whole groups hold each part of the joint model"


S, E = GenerationState, GenerationEvent
TRANSITIONS = Transitions(
    S.EMPTY,
    [
        Row((S.EMPTY, S.CHANGED, S.CALLING, S.WAITING, S.RUNNING), E.CHANGE, S.CHANGED),
        Row((S.CHANGED,), E.CALL, S.CALLING),
        Row((S.CHANGED,), E.DESERT, S.EMPTY),
        Row((S.CALLING,), E.STAND_BY, S.WAITING),
        Row((S.CALLING,), E.COMMIT, S.RUNNING),
    ],
)


class Agreement:
    """The newest generation, its members, and how far the agreement on it has come."""

    def __init__(self) -> None:
        self._state = TRANSITIONS.initial
        self._changed_at = 0.0
        self.generation = 0
        self.members: tuple[int, ...] = ()
        """Members of the newest generation that has formed; empty before the first."""

    def _move(self, cause: GenerationEvent) -> None:
        self._state = TRANSITIONS.after(self._state, cause)

    def change(self, now: float) -> None:
        """A change of membership: the workers have to agree on a new generation."""
        self._move(GenerationEvent.CHANGE)
        self._changed_at = now

    def call(self) -> None:
        """Calls all workers to a new generation."""
        self._move(GenerationEvent.CALL)
        self.generation += 1

    def desert(self) -> None:
        """Notes that no worker has a seat."""
        self._move(GenerationEvent.DESERT)

    def stand_by(self) -> None:
        """Waits for a whole group: all have answered, but only incomplete groups hold some part of the joint model."""
        self._move(GenerationEvent.STAND_BY)

    def commit(self, members: tuple[int, ...]) -> None:
        """Makes these workers the members of the generation that was called."""
        self._move(GenerationEvent.COMMIT)
        self.members = members

    def is_due(self, now: float, settle_s: float) -> bool:
        """Whether a generation is to be called: the last change was at least `settle_s` seconds ago."""
        return self._state is GenerationState.CHANGED and now - self._changed_at >= settle_s

    @property
    def called(self) -> bool:
        """Whether the coordinator waits for answers to its call."""
        return self._state is GenerationState.CALLING

    @property
    def formed(self) -> bool:
        """Whether a generation has ever formed."""
        return bool(self.members)

    @property
    def waits(self) -> bool:
        """Whether no generation can form, because only incomplete groups hold some part of the joint model."""
        return self._state is GenerationState.WAITING

    @property
    def changing(self) -> bool:
        """Whether the next generation is about to be called."""
        return self._state is GenerationState.CHANGED and self.formed

    @property
    def settled(self) -> bool:
        """Whether a generation has formed, and no further one is about to."""
        return self.formed and self._state not in (GenerationState.CHANGED, GenerationState.CALLING)
