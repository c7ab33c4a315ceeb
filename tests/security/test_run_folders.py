"""A run's folder that somebody else has made: links and pipes in it, and a log without end."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire import events
from thinwire.checkpoint import CheckpointStore, Manifest
from thinwire.dashboard import follow
from thinwire.dashboard.event_reducer import LONGEST, MOST_METRICS, MOST_ROWS, EventReducer, Reader
from thinwire.dashboard.follow import Follower
from thinwire.errors import CheckpointError, ConfigError
from thinwire.run.run_log import RunLog


def test_events_are_not_appended_to_a_file_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "out").mkdir()
    os.symlink(tmp_path / "precious", tmp_path / "out" / "events.jsonl")
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        RunLog(str(tmp_path / "out"))
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_events_do_not_wait_for_the_reader_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match="it is no plain file"):
        RunLog(str(tmp_path))


def test_a_plain_log_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "x"}\n{"ki')
    log = RunLog(str(tmp_path))
    log.close(events.RoundStalled(worker=0, host="h", rounds=(), waited_for=(), hosts=(), seconds=1.0))
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [line[:6] for line in lines] == ['{"kind', '{"ki', '{"kind']


def test_a_summary_goes_into_the_folder_whatever_a_link_says(tmp_path: Path) -> None:
    from thinwire.checkpoint import write_file

    (tmp_path / "precious").write_text("mine\n")
    os.symlink(tmp_path / "precious", tmp_path / "summary.json")
    write_file(tmp_path / "summary.json", b"{}")
    assert (tmp_path / "precious").read_text() == "mine\n"
    assert not (tmp_path / "summary.json").is_symlink()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("file", ["manifest.json", "part"])
def test_a_checkpoint_with_a_pipe_or_a_device_for_a_file_is_none(tmp_path: Path, kind: str, file: str) -> None:
    """A pipe is read for as long as nobody writes to it, and /dev/zero has no end; both have a length of 0."""
    store = CheckpointStore(tmp_path)
    parts = {step: store.write_part(f"step-{step}", "joint", {"x": torch.zeros(step)}) for step in (1, 2)}
    store.commit(Manifest("step-1", 1, (parts[1],)))
    path = tmp_path / "step-2" / (parts[2].file_name if file == "part" else file)
    if file == "part":
        path.unlink()
        manifest = Manifest("step-2", 2, (dataclasses.replace(parts[2], size_bytes=0),))
        (tmp_path / "step-2" / "manifest.json").write_bytes(manifest.to_json())
        with pytest.raises(CheckpointError, match="it is missing"):
            _lay(path, kind) or store.read_part(manifest, "joint")
    else:
        _lay(path, kind)
    assert store.latest() == store.load("step-1")
    found, passed_over = store.newest_whole()
    assert found == store.load("step-1")
    assert list(passed_over) == ["step-2"]
    store.prune(1)
    assert store.latest() == found


def _lay(path: Path, kind: str) -> None:
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")


def test_a_line_without_end_is_let_go_and_the_events_after_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(follow, "MOST_LINE_BYTES", 1 << 14)
    with open(tmp_path / "events.jsonl", "wb") as file:
        file.write(b'{"kind": "x", "text": "' + b"y" * (1 << 20) + b'"}\n{"kind": "after"}\n')
    found, follower = [], Follower(str(tmp_path))
    for event in follower.new():
        assert len(follower._rest) <= (1 << 14) + (1 << 10)
        found.append(event)
    assert found == [{"kind": "after"}]


@pytest.mark.parametrize("kind", ["worker_joined", "worker_lost", "progressed", "round_landed"])
def test_a_log_that_names_workers_and_fragments_without_end_fills_no_page(kind: str) -> None:
    story = EventReducer()
    more: dict[str, Any] = {"rows": 1, "steps": 1, "fragments": 1, "codec": "float32"}
    for number in range(MOST_ROWS + 1000):
        story.feed({"kind": kind, "time": float(number), "worker": number, "fragment": number, **more})
    assert max(len(story.workers), len(story.fragments)) == MOST_ROWS
    news = Reader().news(story)
    assert news is not None
    assert len(news["workers"]) + len(news["fragments"]) == MOST_ROWS
    assert story.head["unread"] == 1000
    json.dumps(news)


def test_a_log_that_names_metrics_without_end_fills_no_page() -> None:
    story = EventReducer()
    for number in range(MOST_METRICS + 1000):
        metrics = {f"{number}" + "m" * 1000: 0.5}
        story.feed({"kind": "evaluated", "time": float(number), "number": number, "steps": 1, "metrics": metrics})
    assert len(story.series) == MOST_METRICS
    assert max(map(len, story.series)) < LONGEST + 10
    assert story.head["unread"] > 1000
    assert story.head["metrics"], "that of the last one that was taken in"


TEXT = "<b>" + "x" * 500_000
LONG_EVENTS: tuple[dict[str, Any], ...] = (
    {"kind": "run_started", "strategy": TEXT, "knobs": {str(n): TEXT for n in range(3)}, "version": [[[[[[TEXT]]]]]]},
    {"kind": "run_started", "resumed_from": TEXT, "passed_over": {TEXT: TEXT}},
    {"kind": "worker_joined", "worker": 0, "host": TEXT, "again": True},
    {"kind": "worker_lost", "worker": 0, "reason": TEXT},
    {"kind": "worker_failed", "worker": 0, "error": TEXT},
    {"kind": "generation_formed", "generation": TEXT, "members": [0]},
    {"kind": "round_stalled", "worker": 0, "waited_for": [TEXT]},
    {"kind": "round_stalled", "worker": TEXT, "waited_for": [1]},
    {"kind": "round_landed", "round": TEXT, "codec": TEXT, "fragments": [TEXT]},
    {"kind": "setting_changed", "why": TEXT},
    {"kind": "tried", "steps": 1, "hurts": TEXT},
    {"kind": "evaluated", "number": TEXT, "steps": 1, "metrics": {TEXT: 0.5}},
    {"kind": "evaluated", "number": 1, "steps": 1, "metrics": {f"{n}{TEXT[:500]}": 0.5 for n in range(200)}},
    {"kind": "checkpoint_saved", "name": TEXT},
    {"kind": "checkpoint_failed", "name": TEXT, "reason": TEXT},
    {"kind": "run_ended", "reason": TEXT, "summary": {str(n): n for n in range(100_000)}},
)


@pytest.mark.parametrize("event", LONG_EVENTS, ids=lambda event: event["kind"])
def test_what_a_log_says_at_length_is_told_to_browsers_in_short(event: dict[str, Any]) -> None:
    """Each open page is sent the head of a run again and again, and keeps its marks."""
    story = EventReducer()
    for number in range(20):
        story.feed(event | {"time": float(number)})
    news = Reader().news(story)
    assert len(json.dumps(news)) < 500_000
    assert all(len(mark["text"]) <= LONGEST for mark in story.marks)


def test_a_flood_of_events_is_told_to_a_browser_in_one_answer_of_bounded_length() -> None:
    """However many come between two looks at them, and however many browsers look."""
    story, readers = EventReducer(), [Reader() for _ in range(3)]
    kinds = ("progressed", "round_landed", "worker_lost", "worker_joined", "evaluated", "checkpoint_saved")
    for number in range(60_000):
        more = {"rows": number, "steps": number, "fragment": number % 8, "fragments": 8, "codec": "int8", "loss": 0.5}
        event = {"kind": kinds[number % 6], "time": number * 0.01, "worker": number % 4, "metrics": {"a": 0.5}, **more}
        story.feed(event)
        if number % 20_000 == 0:
            readers[0].news(story)
    told = [json.dumps(reader.news(story)) for reader in readers]
    assert all(len(text) < 1 << 20 for text in told)
    assert [reader.news(story) for reader in readers] == [None] * 3, "each has had all of it"
