"""The run as a state machine, and the conditions of its end: which workers hold the final model, what has arrived."""

from __future__ import annotations

from enum import Enum, unique

from thinwire.coordinator.membership import Membership
from thinwire.coordinator.model_chunks import ModelChunks
from thinwire.coordinator.ports import Send
from thinwire.protocol.messages import Conclude, Result
from thinwire.protocol.transitions import Row, Transitions


@unique
class RunState(Enum):
    """How far a run has come. While it trains or ends, generations form: see the states of a generation."""

    GATHERING = "No generation has formed yet."
    TRAINING = "Workers train in one generation after another."
    ENDING = "All rows are done; the workers agree on the final model. A group that lost a member needs a new one."
    CLOSED = "The workers that are here can end without another worker: a worker that joins now is told to leave."
    OVER = "Every worker that still has a seat has said good-bye."


@unique
class RunEvent(Enum):
    """What moves a run on."""

    FORM = "a generation has formed"
    ROWS_DONE = "the workers that are here have done their rows, and no other worker is awaited"
    SUFFICE = "a replica needs one worker alone, or all members of one group hold the final model, or it has come in"
    REOPEN = "the only group that held the final model has lost a member, and the model has not come in"
    FAREWELL = "the last worker with a seat has said good-bye"


S, E = RunState, RunEvent
TRANSITIONS = Transitions(
    S.GATHERING,
    [
        Row((S.GATHERING, S.TRAINING), E.FORM, S.TRAINING),
        Row((S.ENDING,), E.FORM, S.ENDING),
        Row((S.CLOSED,), E.FORM, S.CLOSED),
        Row((S.TRAINING,), E.ROWS_DONE, S.ENDING),
        Row((S.ENDING,), E.SUFFICE, S.CLOSED),
        Row((S.CLOSED,), E.REOPEN, S.ENDING),
        Row((S.GATHERING, S.TRAINING, S.ENDING, S.CLOSED), E.FAREWELL, S.OVER),
    ],
)


class Ending:
    """The only owner of the run's state."""

    def __init__(self, membership: Membership, group_size: int, send: Send) -> None:
        self._membership, self._group_size, self._send = membership, group_size, send
        self._state = TRANSITIONS.initial
        self.chunks = ModelChunks(group_size)
        self.trained_from: float | None = None
        """When the first generation formed."""
        self.since: float | None = None
        """When all rows were done."""
        self._agreed: set[int] = set()
        """Workers that hold the final model, its verdict, and the rest of what its checkpoint and the user get."""
        self._late: set[int] = set()
        """Members of groups that joined after all rows were done."""

    def _move(self, cause: RunEvent) -> None:
        self._state = TRANSITIONS.after(self._state, cause)

    @property
    def begun(self) -> bool:
        """Whether all rows are done."""
        return self.since is not None

    @property
    def closed(self) -> bool:
        """Whether the run can end without any worker that joins now.

        Unless another group holds the final model, a group that has lost a member needs a new one: a successor of the
        member takes its last steps again, and its group ends with a different model.
        """
        return self._state in (RunState.CLOSED, RunState.OVER)

    # -- events -----------------------------------------------------------------------------------------------------

    def formed(self, now: float) -> None:
        """A generation has formed."""
        self._move(RunEvent.FORM)
        self.trained_from = self.trained_from or now

    def begin(self, now: float) -> None:
        """All rows are done."""
        self._move(RunEvent.ROWS_DONE)
        self.since = now
        self._close_or_reopen()

    def joined(self, worker: int, *, back: bool) -> None:
        """A worker has a seat; `back` says that the same attempt had a seat before."""
        if self.begun and not back:
            self._late.add(worker)

    def agreed(self, worker: int) -> None:
        """Notes that a worker holds the final model."""
        self._agreed.add(worker)
        self._close_or_reopen()

    def lost(self, worker: int) -> None:
        """Notes that a worker was lost, together with its final model."""
        self._agreed.discard(worker)
        self._close_or_reopen()

    def take(self, result: Result, payload: memoryview) -> bool:
        """Takes in a piece of the trained model; returns whether the model is complete."""
        whole = self.chunks.take(result, payload)
        self._close_or_reopen()
        return whole

    def over(self, left: set[int]) -> bool:
        """Whether all workers that still have seats have said good-bye."""
        ended = bool(left or self.chunks.whole) and set(self._membership.seats) <= left
        if ended and self._state is not RunState.OVER:
            self._move(RunEvent.FAREWELL)
        return self._state is RunState.OVER

    def _close_or_reopen(self) -> None:
        """Closes or reopens the run, after the set of workers that hold the final model has changed."""
        groups = [worker // self._group_size for worker in self._agreed]
        agreed = any(groups.count(group) == self._group_size for group in set(groups))
        suffices = self.chunks.whole or self._group_size == 1 or agreed
        if self._state is RunState.ENDING and suffices:
            self._move(RunEvent.SUFFICE)
        elif self._state is RunState.CLOSED and not suffices:
            self._move(RunEvent.REOPEN)

    # -- what follows -----------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Tells each worker the largest number of rounds landed in its lane; the worker waits for these rounds."""
        seats, lane_of = list(self._membership.seats.values()), self._membership.groups.lane_of
        landed: dict[int, int] = {}
        for seat in seats:
            landed[lane_of(seat.worker)] = max(seat.landed, landed.get(lane_of(seat.worker), 0))
        for seat in seats:
            self._send(seat.worker, seat.attempt, Conclude(landed=landed[lane_of(seat.worker)]))

    def not_awaited(self) -> set[int]:
        """Workers not to wait for once the model has arrived: members of groups that joined late or are incomplete."""
        present, working = self._membership.roster.present, self._membership.working
        return (self._late & present) - self._agreed | (present - working) if self.chunks.whole else set()
