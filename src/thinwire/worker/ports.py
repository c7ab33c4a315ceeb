"""The ports of the stepping thread: a worker's rows, its replica, its group, and how it waits.

What it calls of the exchange thread is in `thinwire.exchange.ports`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Tree
from thinwire.exchange.signals import Formed, GroupBrokenError, Landed
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Buffers, FlatParameters, Fragment
from thinwire.replicas.flaws import Flaw
from thinwire.replicas.torch import TrainSpec


class Batch(Protocol):
    """Rows of one step."""

    @property
    def num_rows(self) -> int: ...

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the batch's number in it."""


class Batches(Protocol):
    """A worker's rows, batch by batch."""

    num_rows: int
    batches_per_epoch: int

    def training(self, start: tuple[int, int], epochs: int | None) -> Iterator[Batch]:
        """Batches from a position on, in the order that the seed gives."""

    def validation(self) -> Iterator[Batch]:
        """The validation rows, in order."""


class Wait(Protocol):
    """How a collaborator of the worker waits."""

    def __call__(self, until: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Takes up signals until a condition holds.

        Raises:
            TimedOutError: It did not hold in time; the message names `what`.
        """


# -- the replica ----------------------------------------------------------------------------------------------------


class ModelPort(Protocol):
    """A replica's tensors."""

    steps: int
    spec: TrainSpec
    parameters: FlatParameters
    buffers: Buffers
    optimizer: torch.optim.Optimizer

    @property
    def vector(self) -> Tensor:
        """All trainable parameters, one after the other."""

    @property
    def is_finite(self) -> bool: ...


class StepsPort(Protocol):
    """How a replica takes a step; `thinwire.replicas.TorchReplica` documents each method."""

    def gradient(self, batch: Batch) -> float: ...

    def gradient_norm(self) -> float: ...

    def clip(self) -> None: ...

    def update(self, evaluate: Callable[[], Tensor] | None = None) -> None: ...

    def take_step(self, evaluate: Callable[[], Tensor] | None = None) -> None: ...

    def again(self) -> Tensor: ...

    def advance(self) -> None: ...

    def end_epoch(self) -> None: ...

    def finish(self) -> None: ...


class EvaluationPort(Protocol):
    """How a replica weighs a batch, evaluates a model, and puts it into the form in which it is handed back."""

    def weight_of(self, batch: Batch) -> float: ...

    def evaluate(
        self, batches: Iterable[Batch], model: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float], int]: ...

    def end_evaluation(self, metrics: dict[str, float]) -> None: ...

    def recalibrate(self, batches: Iterator[Batch], model: Tensor) -> None: ...

    def state_of(self, model: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]: ...

    def pieces_of(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]: ...


class LearningPort(Protocol):
    """What a replica has learnt, as checkpoints and other workers are given it."""

    def tree(self) -> Tree: ...

    def load(self, tree: Tree) -> None: ...

    def shared(self) -> Tree: ...

    def load_shared(self, tree: Tree) -> None: ...

    def schedule(self) -> Tree: ...

    def load_schedule(self, tree: Tree) -> None: ...

    def begin_anew(self) -> None: ...

    @property
    def rates(self) -> list[float]: ...


class FlawsPort(Protocol):
    """What of a step is not finite, and what the members of a group make of it."""

    def flaw(self, loss: float) -> Flaw | None: ...

    def owed_flaw(self) -> Flaw | None: ...

    def agree(self, *said: bool) -> tuple[bool, ...]: ...


class Replica(ModelPort, StepsPort, EvaluationPort, LearningPort, FlawsPort, Protocol):
    """All of a replica."""

    searches: bool
    """Whether its optimizer evaluates loss and gradient as often as it likes."""


# -- a group --------------------------------------------------------------------------------------------------------


class Pending(Protocol):
    """Numbers that members of a group tell each other, under way."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> list[Tensor]: ...


class Crew(Protocol):
    """A worker's end of its group; `thinwire.placement.crew` documents each method."""

    rows: list[int]
    sent_bytes: int

    def form(self, address: str, name: str, timeout_s: float) -> None: ...

    def disband(self) -> None: ...

    def close(self) -> None: ...

    def telling(self, values: Sequence[float]) -> Pending: ...

    def tell(self, values: Sequence[float]) -> list[list[float]]: ...


class PartOfReplica(Replica, Protocol):
    """A member's part of a replica that spans a group."""

    crew: Crew
    spare: Batch
    """Rows to step with when the own ones are done."""

    def stand_in(self, batch: Batch) -> None:
        """Sets `spare`."""

    def meet(self, batch: Batch | None, *said: float) -> list[list[float]]:
        """Begins a pass: members tell each other their rows, the rows' weight, and what else is said."""


class Loop(Protocol):
    """How a worker goes through its batches: by itself, or in step with the members of its group."""

    def train(self) -> None:
        """Takes steps until this worker's rows are done or the run stops."""

    def await_others(self, patience_s: float) -> None:
        """Waits until all workers are done; the others' rounds and publications go on meanwhile."""

    def clear_publications(self) -> None:
        """Sees publications through that were announced before the end."""

    def consider_round(self) -> None:
        """Between two steps: takes up publications, and launches the next round where it is due."""

    def announcement(self, round: int) -> Note:
        """What the first worker announces with a round; empty for nothing."""

    def weigh(self, batch: Batch) -> float:
        """The weight of a step's rows."""

    def holds(self, landed: Landed) -> bool:
        """Whether a round that has landed is kept until members take it over together."""

    @property
    def may_hand_over(self) -> bool:
        """Whether a peer that asks for the joint state may be given it now."""

    def dissolve(self) -> None:
        """The group is broken: drops what was under way in it."""
        return


class Rendezvous(Protocol):
    """How the members of a group come together; a worker with a replica of its own is a group of one."""

    def begin(self) -> bool:
        """Returns once a generation has formed, the joint state is here, and the group is whole.

        Returns: whether the replica goes on from this worker's own part of a checkpoint.
        """

    def take(self, formed: Formed) -> None:
        """A generation has formed: begins it, or holds it until members meet."""

    def catch_up(self) -> None:
        """The joint state of a peer was taken over."""
        return

    def lose_member(self) -> None:
        """The coordinator has said that a member of the group is lost."""
        return

    def part_ways(self, why: GroupBrokenError) -> None:
        """The group is broken."""

    @property
    def again(self) -> bool:
        """Whether the group was broken and has not come together since."""

    @property
    def replaces_joint(self) -> bool:
        """Whether the replica is the joint model, or becomes it with a generation that is yet to begin here."""

    @property
    def sent_bytes(self) -> int:
        """What was sent to other members beside the exchange."""


# -- rounds ---------------------------------------------------------------------------------------------------------


class Synchronizer(Protocol):
    """What workers exchange, and how a step is taken with it: one class for each way.

    `take` is called once a step, with the gradient in the parameters. A hook that a way has no use for does nothing.
    """

    @property
    def mid_step(self) -> bool:
        """Whether a round that lands now lands within a step."""
        return False

    def prepare(self) -> None:
        """Before a step: waits for what the step needs."""
        return

    def begin(self, batch: Batch) -> None:
        """The gradient of a batch is about to be computed; there are other workers."""
        return

    def take(self, batch: Batch, *, takes: bool, together: bool) -> None:
        """Takes the step, or leaves it out; `together` where there are other workers."""

    def pause(self) -> None:
        """After a step: waits where the replica is too far ahead of the joint model; there are other workers."""
        return

    def launch_if_due(self) -> None:
        """Between two steps: launches the next round where the strategy says so; there are other workers."""
        return

    def land(self, landed: Landed, fragment: Fragment, snapshot: Snapshot | None) -> None:
        """Takes over what a round gave; `snapshot` is what this worker launched it with."""

    def finish(self) -> None:
        """The last step is taken: contributes what no round has taken yet."""
        return

    def drop(self) -> None:
        """The step under way was broken off."""
        return
