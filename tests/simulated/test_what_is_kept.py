"""What the driver keeps of a run does not grow with the run: what its parts hold is counted, entry by entry."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import fsspec
import numpy as np
import pytest
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.coordinator import evaluations as jury
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Outcome
from thinwire.coordinator.stopping import Verdict
from thinwire.protocol.messages import Evaluated
from thinwire.run.run_log import RunLog
from thinwire.transport.reliable import ReliableHub

ONCE = ("history",)
"""Attributes that hold an entry an evaluation because the user is given them at the end."""


def entries(thing: Any, seen: set[int] | None = None) -> int:
    """How many entries containers have that can be reached from here through thinwire's own objects."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        return len(thing) + sum(entries(key, seen) + entries(value, seen) for key, value in thing.items())
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return len(thing) + sum(entries(each, seen) for each in thing)
    if not type(thing).__module__.startswith("thinwire.") or ".simulated." in type(thing).__module__:
        return 0
    return sum(entries(value, seen) for name, value in vars(thing).items() if name not in ONCE)


class Counts:
    """Counts at two moments of a run what driver, hub and log hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *at: int) -> None:
        self._at, self._held, self.found = at, {}, dict[int, dict[str, int]]()  # type: ignore[var-annotated]
        for kind in (Coordinator, ReliableHub, RunLog):
            made = kind.__init__

            def noted(one: Any, *args: Any, made: Any = made, **settings: Any) -> None:
                self._held[type(one).__name__] = one
                made(one, *args, **settings)

            monkeypatch.setattr(kind, "__init__", noted)

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.EpochEnded) and event.worker == 0 and event.epoch in self._at:
            coordinator = self._held["Coordinator"]
            parts = {**vars(coordinator), **{k: v for k, v in self._held.items() if k != "Coordinator"}}
            self.found[event.epoch] = {
                name: entries(part) for name, part in parts.items() if name not in ("_hub", "_workforce", "_time")
            }


def test_the_driver_keeps_no_more_of_a_run_that_is_twice_as_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(jury, "MOST_OPEN", 4)
    x, y = np.random.default_rng(0).standard_normal((16, 4)).astype("f4"), np.arange(16) % 3
    counts = Counts(monkeypatch, 10, 20)
    result = tw.fit(
        lambda: nn.Linear(4, 3),
        (x, y),
        cluster=tw.Simulated(workers=2, step_s=0.4),
        strategy=tw.SparkNet(period=2),
        validation=0.25,
        epochs=22,
        batch_size=4,
        evaluate_every=2,
        checkpoint_every=2,
        out=str(tmp_path),
        callbacks=[counts],
        progress=False,
    )
    assert len(result.history) >= 20
    early, late = counts.found[10], counts.found[20]
    grown = {name: (early[name], late[name]) for name in late if late[name] > early[name] + 16}
    assert not grown


def report(number: int) -> Evaluated:
    sums, weights = {"val_loss": 1.0}, {"val_loss": 1.0}
    return Evaluated(attempt=0, number=number, sums=sums, weights=weights, done=4, steps=number, rows=2)


def test_a_report_that_comes_after_the_verdict_is_not_judged_again() -> None:
    judges = jury.Evaluations(Verdict(None, None))
    found = []
    for number in range(1, 3 * jury.MOST_OPEN):
        for worker in (0, 1):
            judges.hear(worker, report(number))
        judges.hear(2, report(max(1, number - 1)))  # one that was lost meanwhile
        judges.hear(2, report(1))
        found += [judged.event.number for judged in judges.ready({0, 1}, {}, 8, None)]
    assert found == [*range(1, 3 * jury.MOST_OPEN)]
    assert entries(judges) < 100 * jury.MOST_OPEN


def test_of_warnings_the_last_few_are_kept() -> None:
    outcome = Outcome()
    for number in range(100):
        outcome.record(
            events.Tried(
                steps=1,
                joint=2.0,
                replicas=1.0,
                best=1.0,
                joint_there=2.0,
                alone=None,
                joint_beside=None,
                hurts=f"it hurts {number}",
            )
        )
    assert outcome.warnings == [f"it hurts {number}" for number in range(92, 100)]


def test_events_for_a_store_that_cannot_append_come_there_whole_at_the_end() -> None:
    log = RunLog("memory://events-of-a-run")
    for number in range(3):
        log.emit(events.EpochEnded(worker=number, attempt=0, epoch=0, rows=1, loss=None))
    log.close(events.RunEnded(reason="done", summary={}))
    lines = fsspec.filesystem("memory").cat("/events-of-a-run/events.jsonl").decode().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["epoch_ended"] * 3 + ["run_ended"]
