"""Checkpoints that are being committed while the run goes on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from thinwire import events
from thinwire.engine.saves import Saves
from thinwire.errors import CheckpointError

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
def saves(store: Store) -> Saves:
    return Saves(1, store, iter(range(1000)).__next__)


def hear(saves: Saves, *names: str) -> None:
    for name in names:
        saves.hear(0, {"t": "saved", "a": 0, "name": name, "steps": 4, "parts": [PART]})
    saves.begin({0}, dict)


def test_what_takes_its_time_is_told_when_it_is_done_and_in_order(store: Store, saves: Saves) -> None:
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


def test_one_older_than_what_is_being_committed_is_given_up(store: Store, saves: Saves) -> None:
    hear(saves, "000002-step-8")
    hear(saves, "000001-step-4")
    assert [*store.commits] == ["000002-step-8"]


def test_one_older_than_what_failed_is_not(store: Store, saves: Saves) -> None:
    hear(saves, "000002-step-8")
    store.commits["000002-step-8"].set_exception(CheckpointError("the disk is full"))
    (failed,) = saves.ended()
    assert isinstance(failed, events.CheckpointFailed)
    assert failed.reason == "the disk is full"
    hear(saves, "000001-step-4")
    assert "000001-step-4" in store.commits


def test_at_the_end_a_store_has_so_long_and_no_longer(store: Store, saves: Saves) -> None:
    hear(saves, "000001-step-4", "000002-step-8")
    store.commits["000002-step-8"].set_result(7)
    late, saved = saves.ended(patience_s=0.5)
    assert isinstance(late, events.CheckpointFailed)
    assert "the store is slow" in late.reason
    assert isinstance(saved, events.CheckpointSaved)
