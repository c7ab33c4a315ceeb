"""Disks that are full or slow while a run writes to them: it goes on, says so, and loses nothing that was there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore, Manifest
from thinwire.cli.main import main
from thinwire.models import mlp
from thinwire.run.run_log import RunLog


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Path:
    """A disk of 2 MiB."""
    return small_disk(2 << 20)


def fill(disk: Path) -> None:
    """To the last byte."""
    with open(disk / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def kinds(out: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()]


def fit(out: Path, **more: Any) -> tw.Result:
    given = {"strategy": tw.SparkNet(period=5), "cluster": tw.Local(workers=2), "epochs": 8, "checkpoint_every": 10}
    return tw.fit(mlp, "digits", inputs=["pixels"], out=str(out), progress=False, **(given | more))


def test_a_run_goes_on_while_the_disk_is_full_and_saves_again_when_it_is_not(disk: Path) -> None:
    out = disk / "run"
    seen: list[str] = []

    def act(event: events.Event) -> None:
        seen.append(event.kind)
        if seen.count("checkpoint_saved") == 1 and event.kind == "checkpoint_saved":
            fill(disk)
        elif seen.count("checkpoint_failed") == 1 and event.kind == "checkpoint_failed":
            (disk / "filler").unlink()

    result = fit(out, callbacks=[act])
    assert result.summary["complete"]
    assert result.summary["unsaved"] is None
    assert any("the disk is full" in why for why in result.summary["unwritten"].values())
    assert seen.index("checkpoint_failed") < len(seen) - 1 - seen[::-1].index("checkpoint_saved")
    assert kinds(out) == seen, "what happened meanwhile is in the file too"
    newest = CheckpointStore(f"{out}/checkpoints").latest()
    assert newest is not None
    assert newest.name == result.summary["checkpoint"]
    assert newest.name.endswith("final")


def test_a_disk_that_stays_full_costs_what_came_after_the_last_checkpoint_and_no_more(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = disk / "run"

    def act(event: events.Event) -> None:
        if event.kind == "checkpoint_saved":
            fill(disk)

    result = fit(out, callbacks=[act])
    assert result.summary["complete"], "the model is handed back all the same"
    assert "the disk is full" in result.summary["unsaved"]
    (disk / "filler").unlink()
    kept = CheckpointStore(f"{out}/checkpoints").latest()  # the next may have been on its way when the disk was filled
    assert kept is not None
    assert not kept.name.endswith("final")
    recipe = disk / "recipe.toml"
    recipe.write_text(
        '[model]\nzoo = "mlp"\n[data]\nsource = "digits"\ninputs = ["pixels"]\n[train]\nepochs = 8\n'
        '[strategy]\nname = "sparknet"\nperiod = 5\n[run]\ncheckpoint_every = 100000\n'
    )
    train = ["train", str(recipe), "--json", "--resume", str(out)]
    fill(disk)
    assert main(train) == 8
    assert "the disk is full" in capsys.readouterr().err
    (disk / "filler").unlink()
    assert main(train) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["resumed_from"] == kept.name


def test_a_store_slower_than_checkpoints_come_is_not_given_more_and_more(tmp_path: Path) -> None:
    log: list[events.Event] = []
    slow = tw.Simulated(workers=2, step_s=0.05, store_s=0.4)
    result = fit(tmp_path / "run", cluster=slow, checkpoint_every=5, callbacks=[log.append])
    told = [event.reason for event in log if isinstance(event, events.CheckpointFailed)]
    assert told
    assert all("earlier ones are still being written" in reason for reason in told)
    assert result.summary["unsaved"] is None, "the last one is waited for"
    assert sum(isinstance(event, events.CheckpointSaved) for event in log) >= 3, (
        "one decides for all which to leave out"
    )


def test_what_was_written_of_a_checkpoint_that_failed_does_not_take_the_room_of_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    whole = store.write_part("000001-step-5", "joint", 1)
    store.commit(Manifest("000001-step-5", 5, (whole,)))
    store.write_part("000002-step-10", "worker-0", 1)
    for name in ("000001-step-5", "000002-step-10", "000003-step-15"):
        store.discard(name)
    assert os.listdir(tmp_path) == ["000001-step-5"], "one that is whole stays"


def test_half_a_line_from_before_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "progr')
    for _ in range(2):
        log = RunLog(str(tmp_path))
        log.close(events.CheckpointSaved(name="a", steps=0, size_bytes=0))
    half, *lines = path.read_text().splitlines()
    assert half == '{"kind": "progr'
    assert [json.loads(line)["name"] for line in lines] == ["a", "a"]


def test_lines_wait_for_room_in_their_order(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(str(disk))
    log.emit(events.CheckpointSaved(name="a", steps=0, size_bytes=0))
    fill(disk)
    for step in range(300):
        log.emit(events.CheckpointSaved(name="b", steps=step, size_bytes=0))
    assert sum("kept until it can" in record.getMessage() for record in caplog.records) == 1
    (disk / "filler").unlink()
    log.close(events.CheckpointSaved(name="c", steps=300, size_bytes=0))
    lines = [json.loads(line) for line in (disk / "events.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["a"] + ["b"] * 300 + ["c"]
    assert [line["steps"] for line in lines[1:]] == list(range(301))


def test_a_store_that_takes_long_to_commit_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator goes on hearing workers: the store is done when it has heard of them three times more."""
    commit, began, heard = CheckpointStore.commit, threading.Event(), threading.Semaphore(0)

    def slow(self: CheckpointStore, manifest: Manifest) -> None:
        if not began.is_set():
            began.set()
            for _ in range(3):
                heard.acquire(timeout=5.0)  # a run may be over before a worker says more
        commit(self, manifest)

    monkeypatch.setattr(CheckpointStore, "commit", slow)

    def see(event: events.Event) -> None:
        if began.is_set() and event.kind == "progressed":
            heard.release()

    result = fit(tmp_path, epochs=40, callbacks=[see])
    assert began.is_set()
    assert result.summary["workers_lost"] == 0
    assert result.summary["complete"]
    assert result.summary["unsaved"] is None
    assert result.summary["checkpoint"].endswith("final")
