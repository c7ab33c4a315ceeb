"""What the asynchronous strategies share: a joint model on servers, which each worker meets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from thinwire.parameters import Fragment
from thinwire.rules import elastic
from thinwire.strategies.base import Joint, Measured, Setting, Strategy, Timing
from thinwire.strategies.checks import count_or, within
from thinwire.strategies.handlers import Eventual, TableHandlers

MOST_TUPLE = 4_000_000
"""Elements: with an optimizer's state beside them they still fit into one message."""


@dataclass(frozen=True, kw_only=True)
class Served(Strategy):
    """A strategy whose joint model lives on table servers; `merge` is what a server does with one contribution.

    Args:
        servers: on how many workers the joint model lives, a share each; "spread" is on all of them, "driver" on a
            process beside the driver, which has no rows.
        tuple_size: elements of the largest tuple, the piece of the joint model that is sent and updated as one.
        log_every: updates of a tuple between two checkpoints of it (n_cp), which a server lost is recovered from;
            "auto" is 16, or twice the workers where that is more.
    """

    timing: ClassVar[Timing] = "async"

    servers: int | Literal["spread", "driver"] = "spread"
    tuple_size: int = 1_000_000
    log_every: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        count_or(self, "spread", "driver", servers=self.servers)
        count_or(self, "auto", log_every=self.log_every)
        within(self, 1, MOST_TUPLE, tuple_size=self.tuple_size)

    @property
    def helpers(self) -> int:
        return int(self.servers == "driver")

    def servers_of(self, workers: int) -> int:
        """How many servers there are."""
        if isinstance(self.servers, int):
            return min(self.servers, workers)
        return self.helpers or workers

    @property
    def handlers(self) -> TableHandlers:
        """What servers do with requests."""
        return Eventual()

    @property
    def strict(self) -> bool:
        """Whether an update waits for all workers, and all read the same version."""
        return self.handlers.strict

    def group_of(self, worker: int) -> int:
        """The group whose contributions are merged together."""
        return worker

    def correct(self, values: Tensor, now: Tensor, then: Tensor | None) -> Tensor:
        """A contribution, corrected for what has changed since; `then` is what its sender was last sent."""
        return values

    def parameters_in(self, fragment: Fragment) -> Sequence[int]:
        """The parameters of a tuple, by number, where servers count the steps of each."""
        return ()

    @property
    def exchangers(self) -> int:
        """Threads that a server updates its tuples with, without locks; 0 updates them one by one."""
        return 0

    def log_period(self, workers: int) -> int:
        """n_cp: more than the workers, so that checkpoints are complete one after the other (SINGA §5.5)."""
        return max(16, 2 * workers) if self.log_every == "auto" else max(self.log_every, workers + 1)

    def contribute(self, joint: Any, snapshot: Tensor) -> Tensor:
        return snapshot


@dataclass(frozen=True, kw_only=True)
class Elastic(Served):
    """EASGD's rule, whatever decides when: replica and joint model pull at each other.

    Args:
        pull: α, the share of the distance by which both move; None is 0.9 over the number of workers.
    """

    pull: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, 0, 1, pull=self.pull)

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        return Setting(pull=elastic.symmetric_pull(measured.workers) if self.pull is None else self.pull)

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, Joint]:
        moved = elastic.difference(joint.model, mean, setting.pull or 0.0)
        return moved, Joint(joint.model + moved)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return x - reply, worker
