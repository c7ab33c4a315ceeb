"""A run's folder that somebody else has made: links and pipes in it, and a log without end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from thinwire import events
from thinwire.dashboard import follow
from thinwire.dashboard.event_reducer import MOST_ROWS, EventReducer, Reader
from thinwire.dashboard.follow import Follower
from thinwire.errors import ConfigError
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
