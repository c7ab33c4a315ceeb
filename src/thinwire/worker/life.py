"""A worker's life as a state machine, from joining a run to leaving it. `Life` is the only owner of the state."""

from __future__ import annotations

from enum import Enum, unique
from typing import final

from thinwire.protocol.transitions import Row, Transitions


@unique
class LifeState(Enum):
    """How far a worker is."""

    JOINING = "No generation has formed yet with this worker."
    SYNCING = "The worker waits for the joint state, and for its group where its replica spans one."
    TRAINING = "The worker takes steps."
    DRAINING = "The last step is taken; the worker contributes what no round has taken yet, and waits for its rounds."
    FOLLOWING = "The worker has told the coordinator that it is done, and takes part in the others' rounds."
    CONCLUDING = "All workers are done; they agree on the final model, evaluate it, save it and hand it back."
    LEFT = "The driver has the final model, and the worker has said good-bye."


@unique
class LifeEvent(Enum):
    """What changes a worker's life."""

    FORM = "the first generation forms"
    SYNC = "the joint state is here, and the group is whole"
    DRAIN = "the worker's rows are done, or a publication or a verdict has told workers to stop"
    FINISH = "all of the worker's steps are in rounds that have landed"
    CONCLUDE = "the coordinator has said that all workers are done, and their last rounds have landed here"
    LEAVE = "the driver has the final model"
    BREAK = "a member of the worker's group is lost, or the group comes together anew"


S, E = LifeState, LifeEvent
TRANSITIONS = Transitions(
    S.JOINING,
    [
        Row((S.JOINING,), E.FORM, S.SYNCING),
        Row((S.SYNCING,), E.SYNC, S.TRAINING),
        Row((S.TRAINING,), E.DRAIN, S.DRAINING),
        Row((S.DRAINING,), E.FINISH, S.FOLLOWING),
        Row((S.FOLLOWING,), E.CONCLUDE, S.CONCLUDING),
        Row((S.CONCLUDING,), E.LEAVE, S.LEFT),
        Row((S.SYNCING, S.TRAINING, S.DRAINING, S.FOLLOWING, S.CONCLUDING), E.BREAK, S.SYNCING),
    ],
)


@final
class Life:
    """The state of one worker, and what the coordinator has told it, which it may hear in any state."""

    def __init__(self) -> None:
        self._state = TRANSITIONS.initial
        self.stopping = False
        """Whether a publication or a verdict has told workers to stop: the step under way is the last."""
        self.num_rounds: int | None = None
        """Rounds in all, once the coordinator has said that all workers are done."""
        self.model_arrived = False
        """Whether the driver has the final model."""

    def move(self, cause: LifeEvent) -> None:
        """Something has happened to this worker."""
        self._state = TRANSITIONS.after(self._state, cause)

    def form(self) -> None:
        """A generation has formed; only the first one changes anything."""
        if self._state is LifeState.JOINING:
            self.move(LifeEvent.FORM)

    def stop(self) -> None:
        """Makes the step under way the last one."""
        self.stopping = True

    @property
    def finished(self) -> bool:
        """Whether the worker has told the coordinator that it is done."""
        return self._state in (LifeState.FOLLOWING, LifeState.CONCLUDING)
