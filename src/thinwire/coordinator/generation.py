"""How workers come to agree on a generation, as a table. `Membership` is the only owner of the state."""

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
