"""The simulated cluster as a run sees it: see `thinwire.cluster.base`."""

from __future__ import annotations

import functools
import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from thinwire.cluster.base import Dealt, DriverData, Entry, Expected
from thinwire.cluster.simulated.fault_injection import FaultInjection
from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.cluster.simulated.gradient_batching import GradientBatcher
from thinwire.cluster.simulated.group_transport import GroupTransport
from thinwire.cluster.simulated.links import SimulatedHub, SimulatedWire
from thinwire.cluster.simulated.nan_injection import NanFault, NanInjection
from thinwire.cluster.simulated.network import Network
from thinwire.cluster.simulated.steps import StepTimes
from thinwire.coordinator.ports import Exit
from thinwire.errors import ConfigError, nearest
from thinwire.placement import GroupReplica
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.observation import Observer, unobserved
from thinwire.replicas import TorchReplica
from thinwire.rules import placement
from thinwire.rules.period import Link
from thinwire.transport.ports import Hub, Wire
from thinwire.units import rate_bytes
from thinwire.values import check_fields, number, optional, truth, whole

TASK_S = 0.5
"""Seconds after which Spark runs a failed task again."""
STORES = ("checkpoint", "commit")
"""Names of the executors that write checkpoints: a worker's and the driver's."""
Kind = Literal["kill", "pause", "cut", "link", "lose", "repeat", "shuffle", "part", "twin", "nan"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at a moment of a simulated run.

    Args:
        at_s: time of the fault.
        kind: "kill" ends a worker, "pause" stops it like SIGSTOP, and "cut" disconnects its machine. "link" changes the
        speed
            of every machine's link. "lose", "repeat" and "shuffle" drop, repeat or delay a share of the worker's
        messages.
            "part" drops all messages between two workers. "twin" starts another attempt of a worker that still runs, as
            Spark may do. "nan" makes the loss, the gradient or the parameters not finite in a share of the worker's
        steps.
        worker: the affected worker.
        seconds: duration of the fault; for "kill", the time until a replacement starts.
        link: the new speed.
        share: share of the messages, or of the steps.
        other: the second worker; the coordinator by default.
    """

    at_s: float
    kind: Kind = "kill"
    worker: int = 0
    seconds: float = 10.0
    link: str | float = "1gbit"
    share: float = 0.1
    other: int | None = None


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Workers in virtual time, in this process: predicts the results of a run, and their times, on other machines.

    Args:
        workers: number of workers, each on a machine of its own.
        link: speed of each machine's full-duplex link, as "1gbit" or in bytes a second.
        latency_s: latency of a message.
        step_s: duration of a worker's step; None measures it here.
        ratio: in place of `step_s`, the number of steps in whose time the whole float32 model crosses a link and back.
        spread: standard deviation of a step's time over its mean.
        slow: factors of the step time, by worker.
        contention: relative increase of a step's time while the worker's link is busy: 0.2 for a fifth.
        handling: bytes a second that a worker's processor packs, encrypts and adds up, as a rate or a number; by
        default
            without limit.
        store_s: duration of writing a worker's part of a checkpoint, and of committing one.
        faults: faults with their times.
        max_restarts: number of lost workers that are replaced.
        revives: whether lost workers are started again as on Spark: by the cluster, without notice to the coordinator.
        A
            worker that only could not be heard then takes its own place back.
        seed: seed of the step times and of the faults of messages.
    """

    workers: int = 4
    link: str | float = "1gbit"
    latency_s: float = 1e-4
    step_s: float | None = None
    ratio: float | None = None
    spread: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    contention: float = 0.0
    handling: str | float | None = None
    store_s: float = 0.0
    faults: Sequence[Fault] = ()
    max_restarts: int = 1000
    revives: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {name: number(least=0) for name in ("latency_s", "spread", "contention", "store_s")}
        above = {name: optional(number(above=0)) for name in ("step_s", "ratio")}
        counts = {"workers": whole(1), "max_restarts": whole(0), "seed": whole(0)}
        check_fields(self, "cluster", **least, **above, **counts, revives=truth)
        if self.step_s is not None and self.ratio is not None:
            raise ConfigError("cluster.step_s and cluster.ratio both set the duration of a step; give one of them")
        for worker, factor in self.slow.items():
            if not (0 <= worker < self.workers and 0 < factor < math.inf):
                raise ConfigError(
                    f"cluster.slow = {dict(self.slow)} is not possible; give workers from 0 to {self.workers - 1} "
                    "factors above 0"
                )
        for fault in self.faults:
            if fault.kind not in get_args(Kind):
                raise ConfigError(
                    f"a fault's kind = {fault.kind!r} is not known. {nearest(fault.kind, get_args(Kind))}"
                )
            if not (0 <= fault.at_s < math.inf and 0 <= fault.seconds < math.inf):
                raise ConfigError(f"{fault} is not possible; give at_s and seconds as numbers of 0 or more")
            rate_bytes(fault.link, "a fault's link")
            if not 0 <= fault.share <= 1:
                raise ConfigError(f"a fault's share = {fault.share} is not possible; use a number from 0 to 1")
            for worker in [fault.worker, *([] if fault.other is None else [fault.other])]:
                if fault.kind != "link" and not 0 <= worker < self.workers:
                    raise ConfigError(f"a fault names worker {worker}; give a worker from 0 to {self.workers - 1}")
        rate_bytes(self.link)
        if self.handling is not None:
            rate_bytes(self.handling, "cluster.handling")

    def site(self, data: Any) -> SimulatedSite:
        """A new cluster for each run, at the beginning of its time."""
        return SimulatedSite(self)


class SimulatedSite:
    """See `thinwire.cluster.base.Site`."""

    in_process = True
    prefetch = 0  # a thread would draw from the generators at random moments

    def __init__(self, cluster: Simulated) -> None:
        self._cluster = cluster
        self.workers = cluster.workers
        self.ahead = list(cluster.faults)
        """Faults that have not happened yet; a run that resumes from a checkpoint launches its workers again."""
        self.time = VirtualTime(dict.fromkeys(STORES, cluster.store_s))
        link = Link(cluster.latency_s, rate_bytes(cluster.link))
        self._link = link
        self.network = Network(self.time, link, cluster.workers + 1)
        steps = StepTimes(
            step_s=cluster.step_s,
            ratio=cluster.ratio,
            link=link,
            spread=cluster.spread,
            slow=cluster.slow,
            contention=cluster.contention,
            busy=self.network.busy,
            seed=cluster.seed,
        )
        self.batcher = GradientBatcher(self.time, steps, cluster.workers)
        nan_faults = [
            NanFault(f.worker, f.at_s, f.at_s + f.seconds, f.share) for f in cluster.faults if f.kind == "nan"
        ]
        self.nan_injection = NanInjection(self.time, nan_faults, cluster.seed)
        self.replica: Callable[..., TorchReplica] = self._replica
        self.part: Callable[..., GroupReplica] = self._part
        self._message_faults = FaultInjection(cluster.seed)
        self.group_transport = GroupTransport(self.time, self.network, self._message_faults, cluster.seed)
        self.crew = self.group_transport.crew
        self.observe: Observer = unobserved
        self._wire: SimulatedWire | None = None

    def _replica(self, model: Any, spec: Any, worker: int = 0) -> TorchReplica:
        found: TorchReplica = self.nan_injection.around(worker, self.batcher.replica(model, spec, worker))
        return found

    def _part(self, placement: Any, model: Any, spec: Any, worker: int, **given: Any) -> GroupReplica:
        found: GroupReplica = self.nan_injection.around(
            worker, self.batcher.part(placement, model, spec, worker, **given)
        )
        return found

    def expect(self) -> Expected:
        return Expected(placement.Wire(self._link.latency_s, self._link.bytes_per_s), self.batcher.expected_s)

    def deadlines(self, given: Deadlines | None) -> Deadlines:
        return given or Deadlines()

    def open(self, data: Any, validation: Any) -> DriverData:
        return DriverData(data, validation, self.workers, shared_disk=True)

    def look(self, out: str | None, *, ports: bool = True) -> None:
        """Checks nothing: a simulated cluster is always ready."""

    def needs_jobs(self) -> Any:
        raise ConfigError("exchange = 'spark' cannot be simulated; use 'mesh'")

    def wire(self) -> tuple[Hub, Wire]:
        handling = self._cluster.handling
        rate = math.inf if handling is None else rate_bytes(handling)
        self._wire = SimulatedWire(self.time, self.network, self.workers, rate, self._message_faults)
        return SimulatedHub(self._wire), self._wire

    def launch(self, entry: Entry, dealt: Dealt, wire: Wire, helpers: int = 0) -> SimulatedWorkforce:
        """Starts the workers, and helpers on the driver's machine."""
        assert self._wire is not None
        force = SimulatedWorkforce(self, self._cluster, self._wire, entry)
        for worker in range(self.workers + helpers):
            force.start(worker, 0)
        return force


class SimulatedWorkforce:
    """Workers as fibers; see `thinwire.coordinator.ports.Workforce`."""

    def __init__(self, site: SimulatedSite, cluster: Simulated, wire: SimulatedWire, entry: Entry) -> None:
        self._time, self._network, self._cluster = site.time, site.network, cluster
        self._group_transport = site.group_transport
        self._group_transport.reset()
        self._wire, self._entry = wire, entry
        self.revives = cluster.revives
        self._attempts: dict[int, int] = {}
        self._running: set[tuple[int, int]] = set()
        self._exits: list[Exit] = []
        self._away: dict[int, float] = {}
        self._restarts, self._stopped = 0, False
        self._ahead = site.ahead
        for fault in self._ahead:
            self._time.at(fault.at_s, functools.partial(self._happen, fault))
        self._earlier: Any = None
        # in another thread KeyboardInterrupt would not pass on the turn
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGINT, lambda number, frame: self._time.interrupt())

    def start(self, worker: int, attempt: int) -> None:
        if self._stopped:
            return
        self._attempts[worker] = attempt
        self._running.add((worker, attempt))
        act = functools.partial(self._live, worker, attempt)
        self._time.fiber(act, f"worker-{worker}.{attempt}", (worker, attempt)).start()

    def _live(self, worker: int, attempt: int) -> None:
        done = self._entry(worker, attempt, first=attempt == 0, gpu=0)
        self._running.discard((worker, attempt))
        if not done and self._starts_itself(worker) and self._attempts[worker] == attempt:
            self._start_later(worker, TASK_S)

    def _starts_itself(self, worker: int) -> bool:
        """Whether the cluster restarts the worker unasked; the driver restarts the helpers beside it."""
        return self.revives and worker < self._cluster.workers

    def _start_later(self, worker: int, seconds: float) -> None:
        attempt = self._attempts[worker] + 1
        self._attempts[worker] = attempt
        self._time.at(self._time.now() + seconds, lambda: self.start(worker, attempt))

    def exits(self) -> list[Exit]:
        found, self._exits = self._exits, []
        return found

    def replace(self, worker: int, attempt: int) -> bool:
        if self._starts_itself(worker):
            return True
        if self._restarts >= self._cluster.max_restarts:
            return False
        self._restarts += 1
        self._end(worker)  # a lost worker may still run, and must not come back
        self._time.at(self._time.now() + self._away.pop(worker, 0.0), lambda: self.start(worker, attempt))
        return True

    def stop(self) -> None:
        self._stopped = True
        if self._earlier is not None:
            signal.signal(signal.SIGINT, self._earlier)
        self._time.stop(spared=(None,))  # the driver completes its commits

    def _happen(self, fault: Fault) -> None:
        if self._stopped:
            return
        self._ahead.remove(fault)
        worker, until = fault.worker, self._time.now() + fault.seconds
        if fault.kind == "nan":
            return  # the replicas inject these values
        if fault.kind == "link":
            self._network.set_speed(rate_bytes(fault.link))
        elif fault.kind == "cut":
            self._network.cut(worker, fault.seconds)
        elif fault.kind == "pause":
            self._time.freeze((worker, self._attempts[worker]), fault.seconds)
        elif fault.kind == "part":
            other = self._cluster.workers if fault.other is None else fault.other
            self._wire.message_faults.begin("part", {worker, other}, 1.0, until)
        elif fault.kind in ("lose", "repeat", "shuffle"):
            self._wire.message_faults.begin(fault.kind, {worker}, fault.share, until)
        elif (worker, self._attempts[worker]) not in self._running:
            return  # the worker has ended, or its successor has not started
        elif fault.kind == "twin" and self._starts_itself(worker):
            self._start_later(worker, 0.0)
        elif fault.kind == "kill":
            self._kill(fault)

    def _kill(self, fault: Fault) -> None:
        worker, attempt = fault.worker, self._attempts[fault.worker]
        self._end(worker)
        if self._starts_itself(worker):
            self._start_later(worker, fault.seconds)
        else:
            self._away[worker] = fault.seconds
            self._exits.append(Exit(worker, attempt, f"killed by the simulation's fault at {fault.at_s:g} s"))

    def _end(self, worker: int) -> None:
        attempt = self._attempts[worker]
        self._running.discard((worker, attempt))
        self._wire.kill(worker, attempt)
        self._group_transport.kill(worker, attempt)
        self._time.kill((worker, attempt))
