"""The schedule of a seed: a strategy, a number of workers, and the faults with their times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from thinwire.cluster.simulated import Fault
from thinwire.cluster.simulated.cluster import Kind
from thinwire.strategies import (
    EASGD,
    MPCA,
    Auto,
    DeepSpark,
    DiLoCo,
    ParameterTable,
    Relay,
    SparkNet,
    Strategy,
    Synchronous,
)

MENU: dict[str, Callable[[], Strategy]] = {
    "synchronous": Synchronous,
    "synchronous in int8": lambda: Synchronous(codec="int8"),
    "sparknet": lambda: SparkNet(period=2),
    "diloco": lambda: DiLoCo(period=2),
    "diloco, fragments in flight": lambda: DiLoCo(period=4, fragments=2, overlap=True),
    "mpca": MPCA,
    "relay": Relay,
    "relay with a quorum": lambda: Relay(bits=8, fragments=2, quorum=0.5, grace_s=0.05),
    "auto": Auto,
    "easgd": lambda: EASGD(period=2, tuple_size=128),
    "deepspark": lambda: DeepSpark(tuple_size=128),
    "table, strict": lambda: ParameterTable(consistency="strict", tuple_size=128, log_every=4),
    "table, eventual": lambda: ParameterTable(tuple_size=128, log_every=4),
    "table, bounded": lambda: ParameterTable(staleness=2, tuple_size=128, log_every=4),
    "table on the driver": lambda: ParameterTable(servers="driver", tuple_size=128, log_every=4),
}
JOINT: dict[str, Callable[[], Strategy]] = {
    "relay of gradients": lambda: Relay(sends="gradients"),
    "relay of gradients with a quorum": lambda: Relay(sends="gradients", bits=8, fragments=2, quorum=0.5, grace_s=0.05),
    "auto of gradients": lambda: Auto(sends="gradients"),
}
"""Strategies with a joint optimizer, which is Adam."""
STEP_S, EPOCHS = 0.1, 6
"""Seconds of a step, and epochs. Six epochs of four steps take a worker 2.4 s without faults."""
WINDOW_S = 3.5
"""Faults begin before this time."""
MOST_S = 4.0
"""Longest duration of most faults; equal to a worker's longest allowed silence."""
LONGER_FROM, LONGER, LONGEST_S = 10_000, 0.3, 22.0
"""From this seed on, this share of schedules has an absence that lasts longer, so that a worker that was given up comes
back. The schedules of earlier seeds stay the same."""
CLOSER_FROM, CLOSER = 39_000, 0.25
"""From this seed on, in this share of schedules a worker dies while another is absent whose last messages were lost."""
AWAITED_S, BACK_S = 9.0, 1.0
"""Absences up to this length end while the run still waits for the worker; and the time to rejoin."""
GROUPS_FROM = 200_000
"""From this seed on, replicas span groups of workers."""
GRIDS = ((4, 2), (4, 2), (6, 2), (6, 3))
"""Numbers of workers, and of workers in a group."""
UNGROUPED = ("table on the driver",)
"""Strategies that no placement supports."""
HARSH = 0.15
"""Share of schedules without spared workers, so that all holders of the model may be lost, and the run with them."""
NAN_FROM, GROUPED, OFTEN = 300_000, 0.3, (0.1, 0.3, 1.0)
"""From this seed on, workers produce values that are not finite, in one of these shares of their steps; in the given
share of schedules replicas span groups."""
JOINT_FROM, FLAWED = 400_000, 0.1
"""From this seed on, strategies are those of `JOINT`. Groups are as frequent as after `NAN_FROM`, and in this share of
schedules workers produce values that are not finite."""
MESSAGES: tuple[Kind, ...] = ("lose", "repeat", "shuffle")
STORES_S, SLOWER_S = (0.0, 0.0, 0.02, 0.3, 1.0, 2.5), 8.0
"""Durations for which a store may take to write a part of a checkpoint."""
AWAY: tuple[Kind, ...] = ("kill", "pause", "cut", "part")
"""Kinds of faults that keep a worker away."""
WORKER_FAULTS: tuple[Kind, ...] = ("kill", "kill", "kill", "pause", "cut", "part", "twin")


@dataclass(frozen=True)
class Schedule:
    """One run and its faults."""

    seed: int
    name: str
    """Name of the strategy in `MENU` or `JOINT`."""
    workers: int
    revives: bool
    harsh: bool
    spread: float
    faults: tuple[Fault, ...]
    store_s: float = 0.0
    group_size: int = 1

    @classmethod
    def draw(cls, seed: int, only: str | None = None) -> Schedule:
        """The schedule of a seed; `only` replaces its strategy."""
        chance = random.Random(f"thinwire {seed}")
        if seed >= NAN_FROM:
            if seed >= JOINT_FROM:
                only = only or chance.choice(list(JOINT))
            made = (cls._of_groups if chance.random() < GROUPED else cls._of_workers)(seed, chance, only)
            if seed >= JOINT_FROM and chance.random() > FLAWED:
                return made
            flaws = [_nan_fault(chance, made.workers) for _ in range(chance.choice((1, 1, 2, 3)))]
            return replace(made, faults=(*made.faults, *flaws))
        return (cls._of_groups if seed >= GROUPS_FROM else cls._of_workers)(seed, chance, only)

    @classmethod
    def _of_workers(cls, seed: int, chance: random.Random, only: str | None) -> Schedule:
        """A schedule without groups; one worker is spared, unless the schedule is harsh."""
        name = chance.choice(list(MENU))
        workers, revives, harsh = chance.choice((2, 3, 3, 4)), chance.random() < 0.4, chance.random() < HARSH
        spared = frozenset(() if harsh else (chance.randrange(workers),))
        faults = [_worker_fault(chance, workers, spared) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4)))]
        faults += [_message_fault(chance, workers) for _ in range(chance.choice((0, 0, 1, 2, 3)))]
        spread, store_s = chance.choice((0.0, 0.3)), chance.choice(STORES_S)
        if seed >= LONGER_FROM and chance.random() < LONGER:
            faults.append(_absence(chance, workers, spared))
            store_s = chance.choice((store_s, SLOWER_S))
        if seed >= CLOSER_FROM and chance.random() < CLOSER:
            faults += _death_during_absence(chance, [w for w in range(workers) if w not in spared])
        return cls(seed, only or name, workers, revives, harsh, spread, tuple(faults), store_s)

    @classmethod
    def _of_groups(cls, seed: int, chance: random.Random, only: str | None) -> Schedule:
        """A schedule with groups; unless it is harsh, one group is spared, so that each part of the model survives."""
        name = chance.choice([name for name in MENU if name not in UNGROUPED])
        workers, size = chance.choice(GRIDS)
        revives, harsh = chance.random() < 0.4, chance.random() < HARSH
        first = chance.randrange(workers // size) * size
        spared = frozenset(() if harsh else range(first, first + size))
        faults = [_worker_fault(chance, workers, spared) for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3)))]
        faults += [_message_fault(chance, workers) for _ in range(chance.choice((0, 0, 0, 1, 2)))]
        spread, store_s = chance.choice((0.0, 0.3)), chance.choice(STORES_S)
        if chance.random() < LONGER / 2:
            faults.append(_absence(chance, workers, spared))
        return cls(seed, only or name, workers, revives, harsh, spread, tuple(faults), store_s, size)

    @property
    def unawaited(self) -> set[int]:
        """Workers that may be away for longer than the run waits, so that it ends without their rows."""
        away = {worker for worker in range(self.workers) if self._longest_s(worker) > AWAITED_S}
        groups = {worker // self.group_size for worker in away}  # members of a group train only together
        return {worker for worker in range(self.workers) if worker // self.group_size in groups}

    def _longest_s(self, worker: int) -> float:
        """The longest continuous absence of a worker; an absence may begin before another one has ended."""
        away = [fault for fault in self.faults if fault.worker == worker and fault.other is None and fault.kind in AWAY]
        longest, began, until = 0.0, 0.0, -math.inf
        for fault in sorted(away, key=lambda fault: fault.at_s):
            if fault.at_s > until + BACK_S:
                began = fault.at_s
            until = max(until, fault.at_s + fault.seconds)
            longest = max(longest, until - began)
        return longest

    @property
    def calm_at(self) -> float:
        """The end of the last fault."""
        return max((fault.at_s + fault.seconds for fault in self.faults), default=0.0)

    def lines(self) -> list[str]:
        """The schedule as lines of text."""
        how = "as Spark starts them again" if self.revives else "replaced by the coordinator"
        store = f", a store that takes {self.store_s:g} s" if self.store_s else ""
        grid = f" in groups of {self.group_size}" if self.group_size > 1 else ""
        rest = f"{how}{store}{', harsh' if self.harsh else ''}"
        head = f"seed {self.seed}: {self.name}, {self.workers} workers{grid}, {rest}"
        return [head, *(f"  {_told(fault)}" for fault in sorted(self.faults, key=lambda fault: fault.at_s))]


def _worker_fault(chance: random.Random, workers: int, spared: Collection[int]) -> Fault:
    worker = chance.choice([w for w in range(workers) if w not in spared])
    kind = chance.choice(WORKER_FAULTS)
    seconds = chance.uniform(0.05, MOST_S) if kind != "kill" else chance.choice((0.0, 0.3, 1.5, MOST_S))
    other = None
    if kind == "part" and chance.random() < 0.7:
        other = chance.choice([w for w in range(workers) if w != worker])
    at_s = round(chance.uniform(0.0, WINDOW_S), 3)
    return Fault(kind=kind, worker=worker, at_s=at_s, seconds=round(seconds, 3), other=other)


def _absence(chance: random.Random, workers: int, spared: Collection[int]) -> Fault:
    worker = chance.choice([w for w in range(workers) if w not in spared])
    at_s, seconds = round(chance.uniform(0.0, WINDOW_S), 3), round(chance.uniform(MOST_S, LONGEST_S), 3)
    return Fault(kind=chance.choice(("pause", "cut")), worker=worker, at_s=at_s, seconds=seconds)


def _death_during_absence(chance: random.Random, workers: list[int]) -> list[Fault]:
    away, dies = chance.sample(workers, 2) if len(workers) > 1 else (workers[0], workers[0])
    at_s = round(chance.uniform(0.4, 2.0), 3)
    return [
        Fault(kind="lose", worker=away, at_s=round(at_s - 0.3, 3), seconds=0.4, share=0.3),
        Fault(kind="cut", worker=away, at_s=at_s, seconds=round(chance.uniform(MOST_S, AWAITED_S), 3)),
        Fault(
            kind="kill",
            worker=dies,
            at_s=round(at_s + chance.uniform(0.05, MOST_S), 3),
            seconds=chance.choice((0.0, 0.3, 1.5)),
        ),
    ]


def _message_fault(chance: random.Random, workers: int) -> Fault:
    kind, share = chance.choice(MESSAGES), round(chance.choice((0.02, 0.1, 0.3)), 3)
    at_s, seconds = round(chance.uniform(0.0, WINDOW_S), 3), round(chance.uniform(0.1, MOST_S), 3)
    return Fault(kind=kind, worker=chance.randrange(workers), at_s=at_s, seconds=seconds, share=share)


def _nan_fault(chance: random.Random, workers: int) -> Fault:
    at_s, seconds = round(chance.uniform(0.0, WINDOW_S), 3), round(chance.uniform(0.1, 1.0), 3)
    return Fault(
        kind="nan", worker=chance.randrange(workers), at_s=at_s, seconds=seconds, share=chance.choice(OFTEN)
    )  # fmt: skip


def _told(fault: Fault) -> str:
    whom = f"{fault.at_s:6.3f} s  {fault.kind} worker {fault.worker}"
    if fault.kind == "part":
        whom += f" from {'the driver' if fault.other is None else f'worker {fault.other}'}"
    elif fault.kind in MESSAGES:
        whom += f"'s messages, {fault.share:.0%}"
    elif fault.kind == "nan":
        whom += f" in {fault.share:.0%} of its steps"
    return f"{whom}, {fault.seconds:g} s"
