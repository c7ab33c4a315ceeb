"""The interface of a cluster to a run: it holds the run's data, starts workers, and replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from thinwire.coordinator.ports import Workforce
from thinwire.data import Deformed, ShardFiles, Source, open_source, select, split
from thinwire.data.feeds import Beside, Feed, Fetched, Server, Wanted
from thinwire.placement import Crew, GroupReplica
from thinwire.protocol.clock import Time
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.observation import Observer
from thinwire.replicas import TorchReplica
from thinwire.replicas.labels import Labels
from thinwire.rules import placement
from thinwire.transport.ports import Hub, Wire


class Entry(Protocol):
    """The function that a worker runs."""

    def __call__(
        self,
        worker: int,
        attempt: int,
        *,
        first: bool = True,
        given: Iterable[Any] | None = None,
        gpu: int | None = None,
    ) -> bool:
        """Runs one worker until it leaves; False where its work is not done, because it was cut off or replaced.

        Args:
            worker: its number.
            attempt: larger than the attempts of all earlier workers with this number.
            first: whether no earlier worker had this number.
            given: record batches of its rows, where the cluster passes them.
            gpu: the GPU that the cluster has reserved for it, if any.
        """


Transform = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Dealt:
    """Data as it is dealt to workers."""

    feed: Feed
    labels: Labels
    """The labels that the loss takes, measured with the model's output for one row."""
    rows: int | None = None
    """Training rows, where they are known before workers have read them."""
    validation_rows: int | None = None
    server: Server | None = None
    """Answers workers that fetch their rows."""
    frame: Any = None
    """A Spark DataFrame with one partition for each worker."""


class Opened(Protocol):
    """Data whose schema is known and whose rows are not yet read."""

    names: list[str]
    transform: Transform | None
    indicator: str | None
    """Name of a column that is true for validation rows, where the data has one."""

    def deal(self, wanted: Wanted, folder: str) -> Dealt: ...


class Cluster(Protocol):
    """A user's description of where workers are to run."""

    def site(self, data: Any) -> Site:
        """The place itself, as it is now, for this data."""


def unmeasured(parameters: int) -> float | None:
    """No estimate of a step: the site knows none."""
    return None


class Expected(NamedTuple):
    """Estimates of a site's links and steps before a run."""

    wire: placement.Wire | None = None
    """The link between two workers; None where it is not measured."""
    step_s: Callable[[int], float | None] = unmeasured
    """Seconds of a worker's step, for a network with this number of parameters."""


class Site(Protocol):
    """The place where workers run."""

    @property
    def workers(self) -> int: ...

    @property
    def time(self) -> Time:
        """The time by which workers run and wait there."""

    @property
    def prefetch(self) -> int | None:
        """Batches that a thread of a worker transforms ahead; None leaves the number to the loader."""

    @property
    def replica(self) -> Callable[..., TorchReplica]:
        """Builds a worker's replica there."""

    @property
    def crew(self) -> Callable[..., Crew] | None:
        """Builds a worker's end of its group there; None where workers cannot form groups."""

    @property
    def part(self) -> Callable[..., GroupReplica]:
        """Builds a worker's part of a replica that spans its group."""

    @property
    def observe(self) -> Observer:
        """Observer of a test harness, where workers run in its process."""

    @property
    def in_process(self) -> bool:
        """Whether workers are threads of this process."""

    def expect(self) -> Expected:
        """Estimates of links and steps, given by the user or measured now."""

    def deadlines(self, given: Deadlines | None) -> Deadlines:
        """The deadlines of a run here: those given, or the site's defaults."""

    def open(self, data: Any, validation: Any) -> Opened: ...

    def look(self, out: str | None, *, ports: bool = True) -> None:
        """Raises ConfigError where workers could not run or could not write to the run's folder.

        Args:
            out: the run's folder.
            ports: whether workers reach the driver and each other by ports of their own.
        """

    def wire(self) -> tuple[Hub, Wire]:
        """The coordinator's end of a run's wire, and the object from which workers make their ends."""

    def needs_jobs(self) -> Any:
        """The session that runs jobs beside the workers; raises ConfigError where there is none."""

    def launch(self, entry: Entry, dealt: Dealt, wire: Wire, helpers: int = 0) -> Workforce:
        """Starts the workers, and helpers on this machine; helpers have the numbers after the workers'.

        `wire` serves workers that fail before they can read `entry`.
        """


def sockets(host: str, peer_host: str | None) -> tuple[Hub, Wire]:
    """Both ends of a wire of sockets, with keys made for it.

    Args:
        host: address of this machine at which workers reach the coordinator.
        peer_host: address at which other workers reach a worker; None lets each worker find its own.
    """
    from thinwire.transport.zmq import Keys, ZmqHub, ZmqWire  # imported here: threads and simulations need no sockets

    keys = Keys.make()
    hub = ZmqHub(keys=keys, host=host)
    return hub, ZmqWire(keys, hub.address, peer_host)


class DriverData:
    """Data that the driver reads and deals out: arrays, tables, files, built-in data sets."""

    def __init__(self, data: Any, validation: Any, workers: int, *, shared_disk: bool) -> None:
        self._source: Source = open_source(data)
        share = validation is None or isinstance(validation, float | int)
        self._held = validation if share else open_source(validation)
        if not share and isinstance(self._source, Deformed):
            self._source, self._held = self._source.with_validation(self._held)
        self._workers, self._shared_disk = workers, shared_disk
        self.names: list[str] = list(self._source.schema.names)
        self.transform = self._source.transform
        self.indicator: str | None = None

    def deal(self, wanted: Wanted, folder: str) -> Dealt:
        wanted = wanted.measured(self._first(wanted) if wanted.measure is not None else None)
        held = wanted.validation if self._held is None or isinstance(self._held, float | int) else self._held
        files: list[ShardFiles] = split(
            self._source,
            workers=self._workers,
            directory=folder,
            validation=held,
            seed=wanted.seed,
            columns=wanted.columns,
            label=wanted.label,
            labels=wanted.labels,
            nullable=wanted.nullable,
            weight=wanted.weight,
        )
        rows = sum(f.num_rows for f in files), sum(f.num_validation_rows for f in files)
        if self._shared_disk:
            return Dealt(Beside(tuple(files)), wanted.labels, *rows)
        return Dealt(Fetched(files[0].validation is not None), wanted.labels, *rows, server=Server(files))

    def _first(self, wanted: Wanted) -> Any | None:
        source = self._source if wanted.columns is None else select(self._source, wanted.columns)
        return next((batch for batch in source.batches() if batch.num_rows), None)
