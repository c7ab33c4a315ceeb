"""What the exchange thread tells the main thread, to be acted on between two steps."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from thinwire.parameters import Fragment
from thinwire.protocol.forms import Body


class LeftError(Exception):
    """The coordinator told this worker to leave."""

    def __init__(self, why: str, done: bool) -> None:
        super().__init__(why)
        self.done = done
        """Whether its work is done; otherwise another has taken its place."""


class GroupBrokenError(Exception):
    """A worker of this one's group is gone, and what they did together with it."""


class CutOffError(Exception):
    """The coordinator can no longer be heard."""


class Formed(NamedTuple):
    """A generation has begun."""

    generation: int
    members: tuple[int, ...]
    lead: bool
    needs_state: bool
    """Whether the joint state is still on its way to this worker."""
    restart: bool
    """Whether the joint model was lost, and this worker's replica takes its place."""
    position: tuple[int, int] | None
    """Where a predecessor left off, for a worker that takes its place."""
    steps: int
    first_loss: float | None
    totals: dict[int, int]
    """Rows done by every worker of the run as the coordinator knows them."""
    total_rows: int
    """Training rows over all workers, which make an epoch of the run."""
    group: dict[str, Any]
    """How often this worker's group has come together, and where it meets; nothing where it has none."""


class Landed(NamedTuple):
    """A round was merged; its reply is to be adopted."""

    round: int
    fragment: Fragment
    reply: Tensor
    snapshot: Tensor | None
    """The old joint model, where this worker did not contribute."""
    notes: dict[int, dict[str, Any]]
    model: Tensor | None
    """A copy of the whole joint model as of this round, when it is to be published."""
    joint: dict[str, Any] | None
    """The whole joint state as of this round, when it is to be saved."""
    seconds: float
    size_bytes: int
    empty: bool = False
    """Whether nobody contributed: the reply is of a mean of zero."""


class LeftOut(NamedTuple):
    """What this worker had for a round is not finite, and is not in its mean."""

    round: int
    values: int
    told: bool
    """Whether another worker has told of it."""


class Published(NamedTuple):
    """The joint model is to be published: every worker has the same copy of it."""

    name: tuple[int, int]
    note: dict[str, Any]
    model: Tensor
    joint: dict[str, Any] | None
    """The whole joint state, where this worker is to save it."""


class Missed(NamedTuple):
    """A publication was made without this worker, which has taken over what came of it."""

    note: dict[str, Any]


class Noted(NamedTuple):
    """A worker says how far it is."""

    worker: int
    note: dict[str, Any]


class Averaged(NamedTuple):
    """A one-off mean has come."""

    key: str
    mean: Tensor
    notes: dict[int, dict[str, Any]]
    empty: bool = False
    """Whether nobody contributed: the mean is zero."""


class Caught(NamedTuple):
    """The joint state has arrived from a peer."""

    tree: dict[str, Any]
    old_model: Tensor | None
    """The joint model as this worker had it before."""


class Asked(NamedTuple):
    """A peer needs the joint state, in a generation: in the next one it asks anew."""

    peer: int
    generation: int


class Told(NamedTuple):
    """The coordinator says something."""

    body: Body


class Broken(NamedTuple):
    """The exchange cannot go on."""

    error: Exception


Signal = Formed | Landed | LeftOut | Published | Missed | Noted | Averaged | Caught | Asked | Told | Broken
