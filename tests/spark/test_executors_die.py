"""`kill -9` of executor JVMs in the middle of a fit: the others go on, the lost come back at the joint model."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark import TaskContext
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.models import cnn8

from .conftest import PATIENT, executor_of

pytestmark = pytest.mark.timeout(1800)
EPOCHS, BATCH, WORKERS = 12, 16, 3


class Paced(nn.Module):
    """Steps slowly until a file is there, so that new executors come before the others have done all their rows."""

    def __init__(self, signal: str) -> None:
        super().__init__()
        self.signal = signal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not os.path.exists(self.signal):
            time.sleep(0.1)
        return x.view(-1, 1, 8, 8)


def event_steps(log: list[events.Event]) -> int:
    return max((e.steps for e in log if isinstance(e, events.Progressed)), default=0)


class Killer:
    """Kills executors when the run has come so far, each time once all workers are there; writes everything down."""

    def __init__(self, *rounds: tuple[int, ...]) -> None:
        self.rounds = list(rounds)
        self.log: list[events.Event] = []
        self.pids: dict[int, int] = {}
        self.next_at = 20
        self.rejoined, self.lost = 0, sum(map(len, rounds))
        self.done = tempfile.mktemp(prefix="thinwire-test-")

    def __call__(self, event: events.Event) -> None:
        self.log.append(event)
        if isinstance(event, events.WorkerJoined):
            self.pids[event.worker] = event.pid
        elif isinstance(event, events.WorkerLost):
            self.pids.pop(event.worker, None)
        elif isinstance(event, events.Rejoined):
            self.rejoined += 1
            if self.rounds:
                self.next_at = event_steps(self.log) + 20
            elif self.rejoined >= self.lost:
                Path(self.done).touch()
        elif isinstance(event, events.Progressed) and event.steps >= self.next_at and len(self.pids) == WORKERS:
            for executor in {executor_of(self.pids[worker]) for worker in self.rounds.pop(0)}:
                os.kill(executor, signal.SIGKILL)
            self.next_at += 10**9

    def model(self) -> Callable[[], nn.Module]:
        """What makes the module."""
        signal = self.done
        return lambda: nn.Sequential(Paced(signal), cnn8())

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.log if isinstance(e, kind)]

    def steps_while_away(self, worker: int) -> int:
        """How many steps a worker has told of between the first loss and the first return."""
        kinds = [type(event) for event in self.log]
        away = self.log[kinds.index(events.WorkerLost) : kinds.index(events.Rejoined)]
        steps = [e.steps for e in away if isinstance(e, events.Progressed) and e.worker == worker]
        return steps[-1] - steps[0] if steps else 0


def fit(frame: Any, strategy: tw.Strategy, killer: Killer, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "strategy": strategy,
        "cluster": tw.Spark(workers=WORKERS),
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "validation": 0.2,
        "callbacks": [killer],
        "deadlines": PATIENT,
        "progress": False,
    }
    try:
        return tw.fit(killer.model(), frame, **(settings | changes))
    except BaseException:
        for event in killer.log[-80:]:
            print(event)
        raise
    finally:
        for mark in Path(killer.done).parent.glob(f"{Path(killer.done).name}*"):
            mark.unlink()


def assert_survived(killer: Killer, result: tw.Result, lost: int, *, uneven: int = 0) -> None:
    """Nothing was lost but the killed; with `uneven`, an epoch may have so many rows more or fewer."""
    assert result.summary["workers_lost"] == lost
    assert result.summary["complete"]
    rejoined = killer.of(events.Rejoined)
    given = {(e.peer, e.landed): e.digest for e in killer.of(events.HandedOver)}
    assert len(rejoined) >= lost
    assert all(e.digest == given[e.worker, e.landed] for e in rejoined), "it starts from the joint model"
    rows = 1797 - 360
    least, most = EPOCHS * (rows - uneven) - 3 * BATCH * lost, EPOCHS * (rows + uneven) + 3
    assert least <= result.summary["rows"] <= most
    for worker in range(WORKERS):
        told = [e.rows for e in killer.of(events.Progressed) if e.worker == worker]
        assert told == sorted(told), f"a successor of worker {worker} began behind what had been heard of it"
    ever_lost = {e.worker for e in killer.of(events.WorkerLost)}
    for worker in set(range(WORKERS)) - ever_lost:
        assert killer.steps_while_away(worker) > 0, "a survivor waited for the lost"


@pytest.mark.long
def test_twice_in_one_run(spark: Any, digits: Any) -> None:
    killer = Killer((1,), (2,))
    result = fit(digits.select("pixels", "label"), tw.Relay(), killer)
    assert_survived(killer, result, lost=2)


def test_two_at_once_under_a_barrier(spark: Any, digits: Any) -> None:
    killer = Killer((0, 2))
    result = fit(digits.select("pixels", "label"), tw.SparkNet(period=5), killer)
    assert_survived(killer, result, lost=2)


def test_a_worker_that_cannot_be_heard_for_a_while_takes_its_place_back(spark: Any, digits: Any) -> None:
    """As when a link is cut and healed: the task lives on, so Spark starts no other."""
    paused: list[int] = []
    log: list[events.Event] = []

    def pause(event: events.Event) -> None:
        log.append(event)
        if isinstance(event, events.Progressed) and event.worker == 1 and event.steps >= 20 and not paused:
            paused.append(next(e.pid for e in log if isinstance(e, events.WorkerJoined) and e.worker == 1))
            os.kill(paused[0], signal.SIGSTOP)
        if isinstance(event, events.GenerationFormed) and event.members == (0, 2):  # the others go on without it
            os.kill(paused[0], signal.SIGCONT)
        if isinstance(event, events.Rejoined):
            Path(killer.done).touch()

    killer = Killer()
    deadlines = replace(PATIENT, silence_s=10.0)
    result = fit(digits.select("pixels", "label"), tw.Relay(), killer, callbacks=[pause], deadlines=deadlines)
    assert result.summary["workers_lost"] == 1
    assert [e.pid for e in log if isinstance(e, events.WorkerJoined) and e.again] == paused
    assert any(e.worker == 1 for e in log if isinstance(e, events.Rejoined))
    assert result.summary["rows"] == EPOCHS * (1797 - 360)


class Undertaker(Killer):
    """Kills an executor under a shuffle, so that Spark starts all tasks anew beside the old; then one of the old."""

    def __call__(self, event: events.Event) -> None:
        self.log.append(event)
        if isinstance(event, events.WorkerJoined):
            self.pids[event.worker] = event.pid
            self.attempts.setdefault(event.worker, []).append(event.attempt)
        elif isinstance(event, events.Progressed) and event.steps >= 20 and len(self.pids) == WORKERS:
            if not self.killed:
                self.kill(2)
        elif isinstance(event, events.Rejoined):
            old = [w for w in (0, 1) if len(self.attempts[w]) == 1]
            if event.worker != 2 and len(old) == 1 and len(self.killed) == 1:
                self.kill(old[0])
                Path(f"{self.done}.killed").touch()
            if all(len(self.attempts[w]) > 1 for w in range(WORKERS)):
                Path(self.done).touch()

    def model(self) -> Callable[[], nn.Module]:
        """Worker 1's newer attempt comes last, so that its older one is there until it is killed."""
        signal = self.done

        def make() -> nn.Module:
            context = TaskContext.get()
            if context is not None and context.partitionId() == 1:
                mark = Path(f"{signal}.1")
                while mark.exists() and not Path(f"{signal}.killed").exists():
                    time.sleep(0.1)
                mark.touch()
            return nn.Sequential(Paced(signal), cnn8())

        return make

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[int] = []
        self.attempts: dict[int, list[int]] = {}

    def kill(self, worker: int) -> None:
        self.killed.append(worker)
        os.kill(executor_of(self.pids[worker]), signal.SIGKILL)


@pytest.mark.long
def test_zombies_leave_and_the_executor_that_holds_one_may_die(spark: Any, digits: Any) -> None:
    killer = Undertaker()
    plain = digits.select("pixels", "label")  # its rows lie in a cache: after a death, an executor may hold none
    spread = spark.sparkContext.parallelize(plain.collect(), 4 * WORKERS)  # each holds a part of the shuffle
    frame = spark.createDataFrame(spread, plain.schema).repartition(WORKERS)
    result = fit(frame, tw.Relay(), killer, cluster=tw.Spark(workers=WORKERS, repartition=False))
    assert len(killer.killed) == 2, "no zombie was there to be killed"
    reasons = [e.reason for e in killer.of(events.WorkerLost)]
    assert "replaced by a newer attempt" in reasons
    assert_survived(killer, result, lost=len(reasons), uneven=WORKERS)  # parts differ by a row, and so what is held out
