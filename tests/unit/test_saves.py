"""Checkpoints that are being committed while the run goes on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.coordinator.checkpoints import CheckpointCommits
from thinwire.coordinator.outcome import Outcome
from thinwire.errors import CheckpointError
from thinwire.protocol.messages import Saved
from thinwire.run.driver import Run
from thinwire.worker.publisher import Publisher

PART = {"name": "joint", "size_bytes": 1, "digest": "0" * 64}


class Store:
    """Commits when it is told to."""

    def __init__(self) -> None:
        self.commits: dict[str, Future[int]] = {}

    def __call__(self, name: str, step: int, parts: list[dict[str, Any]], meta: dict[str, Any]) -> Future[int]:
        return self.commits.setdefault(name, Future())


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def saves(store: Store) -> CheckpointCommits:
    return CheckpointCommits(1, store, iter(range(1000)).__next__)


def hear(saves: CheckpointCommits, *names: str) -> None:
    for name in names:
        saves.hear(0, Saved(attempt=0, name=name, steps=4, parts=[PART], fails=False))
    saves.begin({0}, dict)


def test_what_takes_its_time_is_told_when_it_is_done_and_in_order(store: Store, saves: CheckpointCommits) -> None:
    hear(saves, "000001-step-4", "000002-step-8")
    assert [*store.commits] == ["000001-step-4", "000002-step-8"]
    assert not [*saves.ended()]
    store.commits["000002-step-8"].set_result(7)
    assert not [*saves.ended()]
    store.commits["000001-step-4"].set_result(7)
    assert [(event.kind, event.name) for event in saves.ended()] == [
        ("checkpoint_saved", "000001-step-4"),
        ("checkpoint_saved", "000002-step-8"),
    ]
    assert not [*saves.ended()]


def test_one_older_than_what_is_being_committed_is_given_up(store: Store, saves: CheckpointCommits) -> None:
    hear(saves, "000002-step-8")
    hear(saves, "000001-step-4")
    assert [*store.commits] == ["000002-step-8"]


def test_one_older_than_what_failed_is_not(store: Store, saves: CheckpointCommits) -> None:
    hear(saves, "000002-step-8")
    store.commits["000002-step-8"].set_exception(CheckpointError("the disk is full"))
    (failed,) = saves.ended()
    assert isinstance(failed, events.CheckpointFailed)
    assert failed.reason == "the disk is full"
    hear(saves, "000001-step-4")
    assert "000001-step-4" in store.commits


def test_at_the_end_a_store_has_so_long_and_no_longer(store: Store, saves: CheckpointCommits) -> None:
    hear(saves, "000001-step-4", "000002-step-8")
    store.commits["000002-step-8"].set_result(7)
    late, saved = saves.ended(patience_s=0.5)
    assert isinstance(late, events.CheckpointFailed)
    assert "the store is slow" in late.reason
    assert isinstance(saved, events.CheckpointSaved)


@pytest.mark.parametrize(
    ("saved", "failed", "told"),
    [
        ("000003-step-21", "000003-final", True),
        ("000003-step-21", "000004-step-30", True),
        ("000003-final", "000003-step-21", False),
        ("000003-step-21", "000003-step-18", False),
        ("000003-step-21", "000003-step-24", False),
    ],
)
def test_a_last_checkpoint_that_failed_is_told_of_whatever_was_saved_beside_it(
    saved: str, failed: str, told: bool
) -> None:
    """One that was never begun has the next one's number; the last has what it has."""
    outcome = Outcome()
    outcome.record(events.CheckpointSaved(name=saved, steps=21, size_bytes=1))
    outcome.record(events.CheckpointFailed(name=failed, reason="no room"))
    assert (outcome.unsaved is not None) == told


def test_lanes_that_count_differently_save_under_one_name() -> None:
    """A group that was lost had announced a publication in one lane only: numbers differ there from then on."""
    names = []
    for number in (5, 4):
        lane: Any = Publisher.__new__(Publisher)
        lane.number, lane._in_group = number, True
        lane.publish = lambda number, model, joint, *, save, evaluate: names.append(save)
        lane.take_up({"publish": 6, "save": 20, "evaluate": True}, torch.zeros(1), None)
    assert names == ["000006-step-20"] * 2


def test_what_is_written_of_the_last_checkpoint_stays_when_one_of_its_number_is_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    part = store.write_part("000003-step-21", "joint", {"x": torch.zeros(1)})
    last = store.write_part("000003-final", "joint", {"x": torch.ones(1)})
    run: Any = SimpleNamespace(_store=store, _needed=(), _unfit=(), _committed=set())
    Run._commit(run, "000003-step-21", 21, [asdict(part)], {})
    Run._commit(run, "000003-final", 24, [asdict(last)], {})
    newest = store.latest()
    assert newest is not None
    assert newest.name == "000003-final"
