"""What servers of a parameter table do with requests; a consistency model is a class that overrides them.

A request waits until its handler has dealt with it. A worker's gradient is an update. The read that follows it is
answered once the update is applied and `handle_get` lets it go (SINGA, §5.3, §5.4, Algorithms 3 and 4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.rules.table import may_run_ahead, ready


class TableTuple(Protocol):
    """One tuple of the table, as handlers see it: its value, its requests, and what can be done with them."""

    @property
    def key(self) -> int: ...

    @property
    def version(self) -> int:
        """Updates that are in the value."""

    @property
    def wanted(self) -> Mapping[int, Collection[int]]:
        """By group, the workers that train."""

    @property
    def heard(self) -> Mapping[int, Collection[int]]:
        """By group, the workers whose updates wait to be applied."""

    @property
    def clocks(self) -> Mapping[int, int]:
        """By worker, its updates that are in the value."""

    def get(self) -> Tensor:
        """A copy of the value."""

    def put(self, value: Tensor) -> None:
        """Writes the value; it makes no new version."""

    def collect(self, groups: Collection[int]) -> Tensor | None:
        """The weighted mean of the updates of these groups that wait; None where they have nothing to give."""

    def update(self, groups: Collection[int]) -> None:
        """Applies the updates of these groups that wait, as one, and answers their senders: the next version."""

    def checkpoint(self) -> None:
        """Keeps this version, whatever `checkpoint_now` says."""


class TableHandlers:
    """Base of consistency models. A server calls these methods one after the other, never two at once for one tuple.

    They keep no state of their own: where a server is lost, another one goes on with the tuples alone.
    """

    strict: ClassVar[bool] = False
    """Whether an update takes all workers, so that the parameters are those of one worker with all their rows."""

    def handle_put(self, tuple: TableTuple, value: Tensor) -> None:
        """A value is put in, from outside of training."""
        tuple.put(value)

    def handle_update(self, tuple: TableTuple) -> None:
        """An update has come, or a worker has left or come: applies what is to be applied now."""
        for group in ready(tuple.heard, tuple.wanted, False):
            tuple.update([group])

    def handle_get(self, tuple: TableTuple, worker: int) -> bool:
        """Whether a worker, whose update is applied, may read now; it is asked again with every update."""
        return True

    def checkpoint_now(self, tuple: TableTuple, every: int) -> bool:
        """Whether this version is kept. It must depend on the version alone: tuples are restored to the same one.

        Args:
            tuple: it was just updated.
            every: versions between two checkpoints, as the strategy says.
        """
        return tuple.version % every == 0


@dataclass(frozen=True)
class Eventual(TableHandlers):
    """Each group's updates are applied as one, once its workers have all sent theirs; groups do not wait for another.

    Args:
        staleness: by how many updates a worker may be ahead of the slowest; None: any.
    """

    staleness: int | None = None

    def handle_get(self, tuple: TableTuple, worker: int) -> bool:
        counted = {worker for workers in tuple.wanted.values() for worker in workers}
        slowest = min((tuple.clocks[each] for each in counted if each in tuple.clocks), default=0)
        clock = tuple.clocks.get(worker, slowest)
        return worker not in counted or may_run_ahead(clock, slowest, self.staleness)


@dataclass(frozen=True)
class Strict(TableHandlers):
    """The updates of all workers are applied as one: all read the same version."""

    strict: ClassVar[bool] = True

    def handle_update(self, tuple: TableTuple) -> None:
        if whole := ready(tuple.heard, tuple.wanted, True):
            tuple.update(whole)


def handlers_of(consistency: object, staleness: int | None) -> TableHandlers:
    """What a strategy's `consistency` means: "strict", "eventual", or handlers of one's own."""
    if isinstance(consistency, TableHandlers):
        if staleness is not None:
            raise ConfigError(
                f"ParameterTable.staleness = {staleness} has no effect beside handlers of your own; leave it out, and "
                f"bound it in handle_get of {type(consistency).__name__}"
            )
        return consistency
    if consistency not in ("strict", "eventual"):
        raise ConfigError(
            f"ParameterTable.consistency = {consistency!r} is not known; use 'strict', 'eventual', or an object whose "
            "class derives from thinwire.strategies.TableHandlers"
        )
    return Strict() if consistency == "strict" else Eventual(staleness)
