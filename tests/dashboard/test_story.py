"""What a run's events are folded into."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from thinwire.dashboard.follow import Follower
from thinwire.dashboard.prometheus import exposition
from thinwire.dashboard.series import Series
from thinwire.dashboard.story import Reader, Story
from thinwire.errors import ConfigError

from .logs import BEGAN, events, write


def told(*args: object, **more: object) -> Story:
    story = Story()
    for event in events(*args, **more):  # type: ignore[arg-type]
        story.feed(event)
    return story


def test_a_series_keeps_its_ends_however_long_it_gets() -> None:
    series = Series(most=100)
    for t in range(100_000):
        series.add(float(t), 2.0 * t)
    assert len(series.points) < 100
    assert series.points[0][0] < 5_000
    assert series.points[-1][0] > 95_000
    assert all(v == 2 * t for t, v in series.points)


def test_a_reader_gets_each_point_once_and_all_of_it_after_a_fold() -> None:
    series, seen, mine = Series(most=50), None, []
    for t in range(500):
        series.add(float(t))
        if t % 7 == 0 and (new := series.since(seen)) is not None:
            points, at = new["p"], new["at"]
            mine = [*mine[:at], *points]  # type: ignore[misc,has-type]
            seen = series.mark
            assert mine == [list(p) for p in series.points]
    assert series.since(seen) is None or seen != series.mark


def test_the_table_says_who_was_lost_and_came_back() -> None:
    story = told(4, 60, lost=2)
    rows = {row.worker: row for row in story.workers.values()}
    assert rows[2].lost == 1
    assert rows[2].host == "node-new"
    assert rows[2].attempt == 1
    assert rows[0].lost == 0
    assert {row.state for row in rows.values()} == {"done"}
    kinds = [mark["kind"] for mark in story.marks]
    assert kinds.count("lost") == kinds.count("reborn") == 1


def test_counters_go_on_where_an_attempt_starts_anew() -> None:
    story = told(2, 60, lost=1)
    assert story.workers[0].sent == 60_000
    assert story.workers[1].sent == 1000 * (29 + 30)  # the second of its death is not told
    assert story.workers[1].stepped == pytest.approx(0.9 * 59)
    assert story.workers[1].rows == 640 * 60


def test_totals_and_losses_are_told_once_a_second() -> None:
    story = told(8, 100)
    last = story.series["total"].points[-1]
    assert last[1] == pytest.approx(8 * 640 * 100)
    assert last[2] == pytest.approx(8 * 100_000)
    assert last[3] == pytest.approx(2 * 8 * 100_000)
    assert 90 <= len(story.series["train"].points) <= 101
    assert 0 < story.newest["rows_per_s"] <= 8 * 640  # type: ignore[operator]
    assert story.series["m:val_accuracy"].points[-1][2] == pytest.approx(0.98)
    assert story.fragments[1] == {"late": 1.0, "period": 4.0, "seconds": 0.05}


def test_what_is_damaged_is_counted_and_left() -> None:
    story = told(2, 10)
    before = story.workers[0].rows
    for bad in ({"kind": "progressed"}, {"kind": "progressed", "time": "x", "worker": 0}, {"time": 1.0}, {"kind": 3}):
        story.feed(bad)
    story.feed({"kind": "progressed", "time": 1.0, "worker": "?", "rows": 1, "steps": 1})
    assert story.workers[0].rows == before
    assert story.head["unread"] == 4


def test_a_reader_is_told_the_rest_only() -> None:
    story, reader = Story(), Reader()
    every = list(events(3, 40, lost=1))
    for event in every[:60]:
        story.feed(event)
    first = reader.news(story)
    assert first is not None
    assert reader.news(story) is None
    for event in every[60:]:
        story.feed(event)
    second = reader.news(story)
    assert second is not None
    whole = Reader().news(story)
    assert whole is not None
    assert len(json.dumps(second)) < len(json.dumps(whole))
    assert [*first["marks"], *second["marks"]] == whole["marks"]
    for name, part in whole["series"].items():
        mine = first["series"].get(name, {"v": 0, "p": []})
        rest = second["series"].get(name)
        assert rest is None or rest["v"] == mine["v"]
        assert [*mine["p"][: rest["at"] if rest else None], *(rest["p"] if rest else [])] == part["p"]
    assert "workers" not in (Reader().news(story, detail=False) or {})


def test_a_file_is_followed_line_by_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", events(2, 5, ends=False))
    follower, story = Follower(str(folder)), Story()
    for event in follower.new():
        story.feed(event)
    assert story.head["state"] == "running"
    count = story.count
    with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
        line = json.dumps({"kind": "run_ended", "time": BEGAN + 9, "reason": "x", "summary": {}})
        file.write(line[:20])
        file.flush()
        assert list(follower.new()) == []
        file.write(line[20:] + "\n{not json}\n")
    assert [e["kind"] for e in follower.new()] == ["run_ended"]
    assert count == story.count
    write(folder, events(2, 1))  # someone began anew in the same place
    assert next(iter(follower.new()))["kind"] == "run_started"


def test_a_long_file_is_thinned_out_and_nothing_rare_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", events(64, 2_000, lost=7))
    assert os.path.getsize(folder / "events.jsonl") > 30e6
    story = Story()
    for event in Follower(str(folder)).new():
        story.feed(event)
    assert story.count < 90_000
    whole = 640 * 2_000
    assert {row.rows for row in story.workers.values()} == {whole}
    assert story.workers[7].lost == 1
    assert len(story.series["m:val_loss"].points) == 200
    assert story.head["state"] == "ended"
    assert all(len(row.lane.points) > 50 for row in story.workers.values())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; name the out folder"):
        Follower(str(tmp_path / "nowhere"))
    (tmp_path / "soon").mkdir()
    assert list(Follower(str(tmp_path / "soon")).new()) == []


def test_prometheus_gets_every_counter() -> None:
    text = exposition([('a"b\n', told(2, 20, ends=False), threading.Lock())])
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert 'thinwire_rows_total{run="a\\"b\\n"} 25600' in lines
    assert 'thinwire_run_active{run="a\\"b\\n"} 1' in lines
    assert any(line.startswith("thinwire_worker_loss{") for line in lines)
    assert 'thinwire_metric{run="a\\"b\\n",name="val_accuracy"} 0.2' in lines
    assert all(text.count(f"# TYPE {name} ") == 1 for name in {line.split("{")[0] for line in lines})
