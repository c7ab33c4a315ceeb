"""Workers die; the run goes on, and its accounts stay right.

Under every strategy in virtual time, where it can be said what was learnt; and by `kill -9` on real processes, where a
death is what the system and the sockets make of it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import LostWorkersError, WorkerError
from thinwire.models import cnn8, mlp
from thinwire.strategies.registry import STRATEGIES as REGISTERED

WORKERS, EPOCHS, BATCH = 4, 8, 16
ROWS = 1438
LONGER = 12
"""Epochs of runs with real processes, which are to be there when the first of them are killed."""
STEP_S, KILLED_S = 0.1, 6.0
"""In virtual time: of a step, and of the deaths, in the third epoch of eight."""

STRATEGIES = {
    "synchronous": tw.Synchronous(),
    "sparknet": tw.SparkNet(period=5),
    "mpca": tw.MPCA(),
    "diloco": tw.DiLoCo(period=10, momentum=0.5),
    "easgd": tw.EASGD(period=5),
    "deepspark": tw.DeepSpark(period=5),
    "parameter-table": tw.ParameterTable(),
    "parameter-table-strict": tw.ParameterTable(consistency="strict"),
    "relay": tw.Relay(),
    "auto": tw.Auto(),
}


class Slow(nn.Module):
    """Steps of 10 ms at least, so that a run of real processes is under way when the driver hears of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = cnn8()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.01)
        return self.layers(pixels)


class Killer:
    """Kills workers with SIGKILL when the run has come so far, and writes down everything that happens."""

    def __init__(self, *victims: int, after_steps: int = 20, again: bool = False) -> None:
        self.victims, self.after_steps = list(victims), after_steps
        self.again = again
        self.log: list[events.Event] = []
        self.pids: dict[int, int] = {}

    def __call__(self, event: events.Event) -> None:
        self.log.append(event)
        if isinstance(event, events.WorkerJoined):
            self.pids[event.worker] = event.pid
            if event.attempt and self.again:
                self.again = False
                os.kill(event.pid, signal.SIGKILL)
        if isinstance(event, events.Progressed) and event.steps >= self.after_steps and len(self.pids) >= WORKERS:
            for victim in self.victims:
                os.kill(self.pids[victim], signal.SIGKILL)
            self.victims = []

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.log if isinstance(e, kind)]


def fit(strategy: tw.Strategy, killer: Killer, *, model: Any = mlp, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.0 if strategy == tw.ParameterTable() else 0.9),
        "strategy": strategy,
        "cluster": tw.Local(workers=WORKERS),
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "validation": 0.2,
        "callbacks": [killer],
        "deadlines": tw.Deadlines(rejoin_s=40.0, round_s=60.0, join_s=60.0, conclude_s=60.0),
        "progress": False,
    }
    try:
        return tw.fit(model, "digits", **(settings | changes))
    except BaseException:
        for event in killer.log[-100:]:  # pytest shows it with the failure
            print(event)
        raise


def best(result: tw.Result) -> float:
    return max(row["val_accuracy"] for row in result.history)


def virtual(*faults: tw.Fault, **given: Any) -> tw.Simulated:
    return tw.Simulated(workers=WORKERS, step_s=STEP_S, link="100mbit", spread=0.2, faults=faults, **given)


def die(*workers: int, at_s: float = KILLED_S, seconds: float = 1.0) -> list[tw.Fault]:
    return [tw.Fault(worker=worker, at_s=at_s, seconds=seconds) for worker in workers]


def test_the_server_beside_the_driver_is_killed_and_the_run_goes_on() -> None:
    killer = Killer(WORKERS)
    result = fit(tw.EASGD(period=5, servers="driver"), killer, model=Slow, epochs=LONGER)
    assert result.summary["complete"]
    assert result.summary["workers"] == WORKERS
    assert [e.worker for e in killer.of(events.WorkerLost)] == [WORKERS]
    assert [e.attempt for e in killer.of(events.WorkerJoined) if e.worker == WORKERS] == [0, 1]
    assert result.summary["rows"] == LONGER * ROWS


VICTIMS = [
    ("relay", 0),
    ("relay", 2),
    ("auto", 3),
    ("sparknet", 0),
    ("synchronous", 2),
    ("mpca", 0),
    ("diloco", 2),
    ("easgd", 0),
    ("easgd", 2),
    ("deepspark", 1),
    ("parameter-table", 0),
    ("parameter-table-strict", 2),
]
VARIANTS = [("relay", 2), ("easgd", 2), ("parameter-table", 0), ("deepspark", 1)]
"""The same strategies and kinds of strategies again: for `make test-all`, in virtual time too."""
REAL = [("relay", 0), ("synchronous", 2), ("easgd", 2)]
"""The default and its first worker; one that stops for its rounds; one whose workers are servers too."""


def test_every_strategy_has_a_victim() -> None:
    assert {type(STRATEGIES[name]) for name, _ in VICTIMS} == set(REGISTERED.values())
    assert {STRATEGIES[name].timing for name, _ in REAL} == {strategy.timing for strategy in STRATEGIES.values()}


def check_replaced(result: tw.Result, log: Killer, victim: int, epochs: int = EPOCHS) -> None:
    """One was lost and replaced, its successor began at the joint model, and the others made every step of theirs."""
    (lost,) = log.of(events.WorkerLost)
    assert lost.worker == victim
    assert result.summary["workers_lost"] == 1
    reborn = [e for e in log.of(events.WorkerJoined) if e.attempt == 1]
    assert [e.worker for e in reborn] == [victim]
    rejoined = [e for e in log.of(events.Rejoined) if e.worker == victim]
    given = {(e.peer, e.landed): e.digest for e in log.of(events.HandedOver)}
    assert rejoined
    first = rejoined[0]
    assert first.digest == given[first.worker, first.landed], "it starts from the joint model"
    steps_each = -(-ROWS // WORKERS // BATCH)
    ended = log.of(events.EpochEnded)
    for worker in set(range(WORKERS)) - {victim}:
        rows = [e.rows for e in ended if e.worker == worker]
        assert len(rows) == epochs, f"worker {worker} ended {len(rows)} epochs"
        assert len(set(rows)) == 1
        assert rows[0] in (ROWS // WORKERS, ROWS // WORKERS + 1)
    assert result.summary["steps"] >= epochs * steps_each
    # the successor starts where the last heartbeat was: rows may be done twice by what came after it, never left out
    assert epochs * ROWS - BATCH <= result.summary["rows"] <= epochs * ROWS


@pytest.mark.parametrize(
    ("name", "victim"), [pytest.param(*case, marks=pytest.mark.long if case in VARIANTS else []) for case in VICTIMS]
)
def test_a_killed_worker_is_replaced_and_costs_the_others_no_step(name: str, victim: int) -> None:
    log = Killer()
    result = fit(STRATEGIES[name], log, cluster=virtual(*die(victim)))
    check_replaced(result, log, victim)
    assert best(result) >= 0.9


@pytest.mark.parametrize(
    ("name", "victim"),
    [pytest.param(*case, marks=[] if case in REAL else pytest.mark.long) for case in VICTIMS],
)
def test_a_worker_process_killed_by_sigkill_is_replaced_and_costs_the_others_no_step(name: str, victim: int) -> None:
    killer = Killer(victim)
    result = fit(STRATEGIES[name], killer, model=Slow, epochs=LONGER)
    check_replaced(result, killer, victim, LONGER)
    (lost,) = killer.of(events.WorkerLost)
    assert "SIGKILL" in lost.reason or "connection broke" in lost.reason  # whichever is heard first


def test_two_at_once_and_a_replacement_that_dies_too() -> None:
    log = Killer()
    faults = [*die(1, 3), *die(1, at_s=KILLED_S + 3.0)]
    result = fit(tw.Relay(), log, cluster=virtual(*faults))
    assert [e.worker for e in log.of(events.WorkerLost)] == [1, 3, 1]
    assert result.summary["workers_lost"] == 3
    assert result.summary["complete"]
    assert best(result) >= 0.9


@pytest.mark.long
def test_two_processes_killed_at_once_and_a_replacement_that_is_killed_too() -> None:
    killer = Killer(1, 3, again=True)
    result = fit(tw.Relay(), killer, model=Slow, epochs=LONGER)
    assert result.summary["workers_lost"] == 3
    assert result.summary["complete"]


CLUSTERS = [pytest.param("virtual"), pytest.param("processes", marks=pytest.mark.long)]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_without_replacements_the_others_finish(cluster: str) -> None:
    log = Killer(*([2] if cluster == "processes" else []))
    where = tw.Local(workers=WORKERS, max_restarts=0) if log.victims else virtual(*die(2), max_restarts=0)
    result = fit(tw.Relay(), log, cluster=where)
    assert result.summary["workers_lost"] == 1
    assert not result.summary["complete"]
    assert result.summary["rows"] < EPOCHS * ROWS
    for worker in (0, 1, 3):
        assert sum(e.worker == worker for e in log.of(events.EpochEnded)) == EPOCHS


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("max_restarts", [0, 8])
def test_when_all_are_lost_the_error_says_what_to_do(max_restarts: int, cluster: str) -> None:
    """Also where replacements come: none of them has the joint model, and to start over would undo the run."""
    all_of_them = range(WORKERS)
    killer = Killer(*(all_of_them if cluster == "processes" else []))
    where: Any = virtual(*die(*all_of_them), max_restarts=max_restarts)
    if killer.victims:
        where = tw.Local(workers=WORKERS, max_restarts=max_restarts)
    with pytest.raises(LostWorkersError, match="resume"):
        fit(tw.Relay(), killer, cluster=where)


def test_a_mistake_in_what_the_exchange_thread_calls_is_shown_with_its_traceback() -> None:
    """The thread that has just failed is the one that must still tell of it."""
    with pytest.raises(WorkerError, match="no such word") as caught:
        tw.fit(
            cnn8, "digits", inputs=["pixels"], epochs=2, strategy=_Mistaken(period=5), cluster=tw.Local(workers=2),
            progress=False,
        )  # fmt: skip
    assert "in merge" in str(caught.value)


class _Mistaken(tw.SparkNet):
    def merge(self, joint: Any, mean: torch.Tensor, cycle: int, setting: Any) -> tuple[torch.Tensor, Any]:
        raise KeyError("no such word")
