"""What a seed stands for: a strategy, a number of workers, and what goes wrong when."""

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
"""Strategies with one joint optimizer, which is Adam."""
STEP_S, EPOCHS = 0.1, 6
"""A worker's six epochs of four steps take 2.4 s where nothing goes wrong."""
WINDOW_S = 3.5
"""Faults begin before this."""
MOST_S = 4.0
"""How long one lasts, at most; as long as a worker may be silent."""
LONGER_FROM, LONGER, LONGEST_S = 10_000, 0.3, 22.0
"""From this seed on, that share of schedules has one that outlasts it: who was given up comes back. Seeds before it are
those of before."""
CLOSER_FROM, CLOSER = 39_000, 0.25
"""From this seed on, that share has somebody die while another is away whose last messages were lost."""
AWAITED_S, BACK_S = 9.0, 1.0
"""Who is back by then is waited for, however its absence ends; and so long it takes to be one of the others again."""
GROUPS_FROM = 200_000
"""From this seed on, replicas span groups of workers."""
GRIDS = ((4, 2), (4, 2), (6, 2), (6, 3))
"""Workers, and how many of them are a group."""
UNGROUPED = ("table on the driver",)
"""Strategies that no placement goes with."""
HARSH = 0.15
"""Share of schedules in which nobody is spared, so that a run may be lost with all who hold its model."""
NAN_FROM, GROUPED, OFTEN = 300_000, 0.3, (0.1, 0.3, 1.0)
"""From this seed on, workers come to numbers that are not finite, in such a share of their steps; in that share of
schedules replicas span groups."""
JOINT_FROM, FLAWED = 400_000, 0.1
"""From this seed on, strategies are those of `JOINT`; groups are as often as after `NAN_FROM`, and in that share of
schedules workers come to numbers that are not finite."""
MESSAGES: tuple[Kind, ...] = ("lose", "repeat", "shuffle")
STORES_S, SLOWER_S = (0.0, 0.0, 0.02, 0.3, 1.0, 2.5), 8.0
"""What a store may take to write a part of a checkpoint."""
AWAY: tuple[Kind, ...] = ("kill", "pause", "cut", "part")
"""Kinds that keep a worker away."""
DEEDS: tuple[Kind, ...] = ("kill", "kill", "kill", "pause", "cut", "part", "twin")


@dataclass(frozen=True)
class Schedule:
    """One run, and what goes wrong in it."""

    seed: int
    name: str
    """Of the strategy, in `MENU` or `JOINT`."""
    workers: int
    revives: bool
    harsh: bool
    spread: float
    faults: tuple[Fault, ...]
    store_s: float = 0.0
    group_size: int = 1

    @classmethod
    def draw(cls, seed: int, only: str | None = None) -> Schedule:
        """The schedule of a seed; `only` replaces the strategy that it would have."""
        chance = random.Random(f"thinwire {seed}")
        if seed >= NAN_FROM:
            if seed >= JOINT_FROM:
                only = only or chance.choice(list(JOINT))
            made = (cls._of_groups if chance.random() < GROUPED else cls._of_workers)(seed, chance, only)
            if seed >= JOINT_FROM and chance.random() > FLAWED:
                return made
            flaws = [_flaw(chance, made.workers) for _ in range(chance.choice((1, 1, 2, 3)))]
            return replace(made, faults=(*made.faults, *flaws))
        return (cls._of_groups if seed >= GROUPS_FROM else cls._of_workers)(seed, chance, only)

    @classmethod
    def _of_workers(cls, seed: int, chance: random.Random, only: str | None) -> Schedule:
        """One worker is spared, unless the schedule is harsh."""
        name = chance.choice(list(MENU))
        workers, revives, harsh = chance.choice((2, 3, 3, 4)), chance.random() < 0.4, chance.random() < HARSH
        spared = frozenset(() if harsh else (chance.randrange(workers),))
        faults = [_deed(chance, workers, spared) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4)))]
        faults += [_weather(chance, workers) for _ in range(chance.choice((0, 0, 1, 2, 3)))]
        spread, store_s = chance.choice((0.0, 0.3)), chance.choice(STORES_S)
        if seed >= LONGER_FROM and chance.random() < LONGER:
            faults.append(_absence(chance, workers, spared))
            store_s = chance.choice((store_s, SLOWER_S))
        if seed >= CLOSER_FROM and chance.random() < CLOSER:
            faults += _at_once(chance, [w for w in range(workers) if w not in spared])
        return cls(seed, only or name, workers, revives, harsh, spread, tuple(faults), store_s)

    @classmethod
    def _of_groups(cls, seed: int, chance: random.Random, only: str | None) -> Schedule:
        """One group is spared, unless the schedule is harsh: somebody holds each part of the joint model."""
        name = chance.choice([name for name in MENU if name not in UNGROUPED])
        workers, size = chance.choice(GRIDS)
        revives, harsh = chance.random() < 0.4, chance.random() < HARSH
        first = chance.randrange(workers // size) * size
        spared = frozenset(() if harsh else range(first, first + size))
        faults = [_deed(chance, workers, spared) for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3)))]
        faults += [_weather(chance, workers) for _ in range(chance.choice((0, 0, 0, 1, 2)))]
        spread, store_s = chance.choice((0.0, 0.3)), chance.choice(STORES_S)
        if chance.random() < LONGER / 2:
            faults.append(_absence(chance, workers, spared))
        return cls(seed, only or name, workers, revives, harsh, spread, tuple(faults), store_s, size)

    @property
    def unawaited(self) -> set[int]:
        """Workers that may be away for longer than they are waited for, so that the run ends without their rows."""
        away = {worker for worker in range(self.workers) if self._longest_s(worker) > AWAITED_S}
        groups = {worker // self.group_size for worker in away}  # none of a group trains without the others
        return {worker for worker in range(self.workers) if worker // self.group_size in groups}

    def _longest_s(self, worker: int) -> float:
        """How long a worker may be away at a stretch; one absence may begin before it is back from another."""
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
        """When the last fault is over."""
        return max((fault.at_s + fault.seconds for fault in self.faults), default=0.0)

    def lines(self) -> list[str]:
        """The schedule for people."""
        how = "as Spark starts them again" if self.revives else "replaced by the coordinator"
        store = f", a store that takes {self.store_s:g} s" if self.store_s else ""
        grid = f" in groups of {self.group_size}" if self.group_size > 1 else ""
        rest = f"{how}{store}{', harsh' if self.harsh else ''}"
        head = f"seed {self.seed}: {self.name}, {self.workers} workers{grid}, {rest}"
        return [head, *(f"  {_told(fault)}" for fault in sorted(self.faults, key=lambda fault: fault.at_s))]


def _deed(chance: random.Random, workers: int, spared: Collection[int]) -> Fault:
    worker = chance.choice([w for w in range(workers) if w not in spared])
    kind = chance.choice(DEEDS)
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


def _at_once(chance: random.Random, workers: list[int]) -> list[Fault]:
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


def _weather(chance: random.Random, workers: int) -> Fault:
    kind, share = chance.choice(MESSAGES), round(chance.choice((0.02, 0.1, 0.3)), 3)
    at_s, seconds = round(chance.uniform(0.0, WINDOW_S), 3), round(chance.uniform(0.1, MOST_S), 3)
    return Fault(kind=kind, worker=chance.randrange(workers), at_s=at_s, seconds=seconds, share=share)


def _flaw(chance: random.Random, workers: int) -> Fault:
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
