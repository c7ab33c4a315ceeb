"""What a strategy is: a frozen dataclass of knobs whose methods say what replicas tell each other.

The engine owns the loop. For one worker, with every place marked where the strategy is asked::

    joint, worker = strategy.open(x)                      # x: the replica's flat vector
    for batch in shard:
        strategy.before_step(worker, x, cycle)            # main thread, writes x in place
        loss.backward() ; strategy.gradient_term(...)     # main thread
        optimizer.step()
        if strategy.due(progress):                        # main thread
            s = x[fragment].clone()
            d = strategy.contribute(joint[fragment], s)   # exchange thread, as are the next two lines
            mean = Σ wᵢ dᵢ / Σ wᵢ                          # the mesh; wᵢ = strategy.weight(share)
            reply, joint[fragment] = strategy.merge(joint[fragment], mean, cycle, setting)
            x[fragment], worker[fragment] = strategy.adopt(worker[fragment], x[fragment], s, reply)   # main

A strategy with a `joint_optimizer` contributes gradients, summed since it last contributed the fragment. All workers
take the same steps of that optimizer by their mean, and replicas run ahead of it by their own steps::

            d = Σ wₜ gₜ                                   # since this fragment's last d; wₜ: rows of the step
            joint[fragment] = strategy.joint_optimizer.optimize(joint[fragment], mean, taken)
            x[fragment] = joint[fragment].model           # main, and then the steps made since d was copied, again

`timing` says what stepping does meanwhile: "barrier" stops until the reply is adopted, "overlap" goes on,
"async" goes on too, and each worker exchanges alone: its contribution goes to the servers that hold the joint
model, "mean" is that contribution, and only this worker hears the reply.

State is a NamedTuple of full-length tensors and plain numbers, element for element beside the flat vector, and all
arithmetic is element by element: the engine slices both, by fragment and into pieces that fit the cache, moves state to
a worker that joins, and writes it to checkpoints, with no strategy code.
Every method but `before_step` leaves its arguments as they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from thinwire.parameters import FlatParameters
from thinwire.rules import averaging
from thinwire.rules.compression import codec as codec_by_name
from thinwire.rules.period import Link
from thinwire.strategies.joint_optimizer import JointOptimizer

Timing = Literal["barrier", "overlap", "async"]
Subject = Literal["parameters", "gradients"]


class Joint(NamedTuple):
    """The least a joint state holds: the joint model x̃. A strategy's own begins with the same field."""

    model: Tensor


class Nothing(NamedTuple):
    """The state of a worker that keeps none."""


@dataclass(frozen=True)
class Progress:
    """What a worker knows when it asks whether its next round is due."""

    round: int
    """Number of the round that would be launched, from 0."""
    steps: int
    """Optimizer steps this worker has made."""
    steps_since: int
    """Steps since it launched its last round."""
    seconds_since: float
    loss_since: float
    """Training loss summed since then."""
    lead: bool
    """Whether this is the first worker of the generation."""
    first_loss: float | None = None
    """Training loss summed before it launched its first round; None until then."""


@dataclass(frozen=True)
class Share:
    """What a worker did since it last contributed this fragment; never without a step."""

    round: int
    steps: int
    rows: float
    """Of a gradient, the sum of the rows' weights where they have weights."""
    lead: bool


@dataclass(frozen=True)
class Setting:
    """How rounds are cut and packed from here on; the same on every worker."""

    fragments: int = 1
    codec: str | None = None
    """None leaves it to the exchange's own codec."""
    momentum: float | None = None
    pull: float | None = None
    cycles: float | None = None
    """Exchange cycles that the run is expected to have in all."""
    wait: bool = False
    """Whether stepping waits for each reply, under a strategy whose timing is "overlap"."""
    caution: int = 0
    """How often exchanging was found to hurt, and was made tighter for it."""

    def __post_init__(self) -> None:
        if self.codec is not None:  # a checkpoint of an earlier version may spell it otherwise
            object.__setattr__(self, "codec", codec_by_name(self.codec).name)


@dataclass(frozen=True)
class Measured:
    """What the first worker of a generation has measured when a setting is chosen."""

    size: int
    """Elements of the flat vector."""
    workers: int
    rounds: int
    link: Link | None
    step_s: float | None
    handling_s: float | None = None
    """What snapshot and landing of the whole vector cost the stepping thread."""
    rest_s: float = 0.0
    """What a round takes beside the link, where that is known: processors, and waiting for peers."""
    run_steps: float | None = None
    """Steps of the run in all, where they are known."""
    steps: int = 0
    """Steps that the first worker has made."""
    hurts: bool = False
    """Whether the joint model was found worse than replicas are without it, under the current setting."""


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """Base of all strategies; see the module's docstring for when each method is called."""

    timing: ClassVar[Timing]
    subject: ClassVar[Subject] = "parameters"
    settles: ClassVar[bool] = True
    """Whether adopting a reply takes the contribution out of the replica, so that one left out must be sent again."""
    ends_in_mean: ClassVar[bool] = False
    """Whether the run ends with one float32 mean of the replicas; otherwise the joint model is the result."""

    guards: ClassVar[bool] = False
    """Whether it wants the joint model compared with replicas early in a run (`Measured.hurts`)."""

    joint_optimizer: ClassVar[JointOptimizer | None] = None
    """What takes the joint optimizer's steps, where contributions are gradients, or sums of them."""

    searches: ClassVar[bool] = False
    """Whether an optimizer may evaluate loss and gradient over all workers' rows as often as it likes, a round each:
    what is adopted of a round is the mean gradient itself."""

    @property
    def replicated(self) -> bool:
        """Whether replicas never differ, the optimizer's state with them: each one is the joint model."""
        return self.subject == "gradients" and self.timing != "async"

    def with_optimizer(self, factory: Callable[[Any], Any]) -> Strategy:
        """The strategy itself, with what makes the run's optimizer, where it has use for one."""
        return self

    def laid_out(self, parameters: FlatParameters, make: Callable[[Callable[[Any], Any]], Any]) -> Strategy:
        """The strategy itself, with what it needs to know of the parameters in a worker's flat vector.

        Args:
            parameters: where each lies.
            make: makes an optimizer of these parameters from a factory.
        """
        return self

    def follows(self, factory: Callable[[Any], Any]) -> bool:
        """Whether servers step by what this factory makes, hence at the learning rates that workers' schedules give."""
        return False

    @property
    def helpers(self) -> int:
        """Members beside the workers, on the driver and without rows, that it needs."""
        return 0

    @property
    def in_flight(self) -> int:
        """Rounds that may be under way at once."""
        return 1

    @property
    def quorum(self) -> float:
        """Share of the workers whose contributions complete a round once the grace time has passed."""
        return 1.0

    @property
    def grace_s(self) -> float:
        """Seconds an owner waits for the rest after a quorum has contributed."""
        return 0.0

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        """How to cut and pack rounds; asked at the start (current None) and now and then on the first worker."""
        return current or Setting()

    def probe(self, setting: Setting) -> Setting:
        """One to hold for a few rounds whose size differs: latency and bandwidth are told apart by it. Or the same."""
        return setting

    def explain(self, measured: Measured, setting: Setting) -> str:
        """Why a setting was chosen, in one line for people; empty where there is nothing to say."""
        return ""

    @abstractmethod
    def due(self, progress: Progress) -> bool:
        """Whether to launch the next round now, after a step (and before the first one)."""

    def open(self, x: Tensor) -> tuple[Any, Any]:
        """The joint state and the worker state at the start of a run, from the replica's flat vector."""
        return Joint(x.clone()), Nothing()

    def before_step(self, worker: Any, x: Tensor, cycle: int) -> None:
        """Shifts the replica before its gradient is computed; the one method that writes its arguments."""
        return

    def gradient_term(self, worker: Any, x: Tensor, cycle: int) -> Tensor | None:
        """A flat term to add to the gradient."""
        return None

    def contribute(self, joint: Any, snapshot: Tensor) -> Tensor:
        """What this worker sends, from the joint state and its own snapshot of a fragment."""
        return averaging.displacement(joint.model, snapshot)

    def weight(self, share: Share) -> float:
        """How much the contribution counts in the mean."""
        return 1.0

    @abstractmethod
    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, Any]:
        """The reply and the new joint state, from the weighted mean of the contributions."""

    @abstractmethod
    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        """The replica's fragment and the worker state once the reply has landed."""


def by_time(strategy: Strategy) -> bool:
    """Whether rounds are due by the clock (`period_s`), so that fast workers do more rows than slow ones."""
    return getattr(strategy, "period_s", None) is not None


def follows_run(strategy: Strategy) -> bool:
    """Whether a strategy has schedules whose lengths are shares of the run."""
    return bool(getattr(strategy, "shares", ()))


def unsettled(strategy: Strategy, rounds: int) -> str:
    """What of its schedules a run of so many rounds ended before, in words; empty where there is none left."""
    told = getattr(strategy, "unsettled", None)
    return "" if told is None else str(told(rounds))


def under(strategy: Strategy, setting: Setting) -> Strategy:
    """The strategy with those of its knobs that a setting says; itself where none is left to measurements."""
    ruled: Callable[[Setting], Strategy] | None = getattr(strategy, "under", None)
    return strategy if ruled is None else ruled(setting)
