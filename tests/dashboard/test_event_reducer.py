"""What a run's events are folded into."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from thinwire.dashboard.event_reducer import EventReducer, Reader
from thinwire.dashboard.follow import Follower
from thinwire.dashboard.prometheus import exposition
from thinwire.dashboard.series import Series
from thinwire.errors import ConfigError

from .logs import BEGAN, events, write


def told(*args: object, **more: object) -> EventReducer:
    story = EventReducer()
    for event in events(*args, **more):  # type: ignore[arg-type]
        story.feed(event)
    return story


def test_a_series_keeps_its_ends_however_long_it_gets() -> None:
    series = Series(most=100)
    for t in range(100_000):
        series.add(float(t), 2.0 * t)
    assert len(series.points) < 100
    assert series.points[0][0] < 5_000
    newest = series.since(None)
    assert newest is not None
    assert newest.get("last", newest["p"][-1]) == [99_999.0, 199_998.0]  # type: ignore[index]
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
            assert new.get("last", points[-1:][0] if points else None) in ([float(t)], None) or t in mine[-1]
            assert series.since(seen) is None
    assert [499.0] in (mine[-1:][0], (series.since(None) or {}).get("last"))  # the newest is always told


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
    story.feed({"kind": "evaluated", "time": 2.0, "metrics": [1]})
    assert story.head["unread"] == 5


def test_one_who_was_only_not_heard_for_a_while_is_not_counted_twice() -> None:
    story = told(2, 20, ends=False)
    story.feed({"kind": "worker_lost", "time": BEGAN + 21, "worker": 1, "attempt": 0, "host": "a", "reason": "silent"})
    story.feed({"kind": "worker_joined", "time": BEGAN + 40, "worker": 1, "attempt": 0, "host": "a", "again": True})
    last = [e for e in events(2, 41, ends=False) if e["kind"] == "progressed" and e["worker"] == 1][-1]
    story.feed(last)
    assert story.workers[1].sent == 41_000
    assert story.series["total"].points[-1][5] <= 20 + 20 + 2  # the time in which it was not there does not count


def test_a_run_that_is_resumed_goes_on_and_one_that_begins_anew_starts_anew() -> None:
    story, reader = EventReducer(), Reader()
    first = list(events(2, 50, lost=1))
    for event in first:
        story.feed(event)
    reader.news(story)
    day = 86_400.0
    for event in events(2, 50):
        resumed = event["kind"] == "run_started"
        story.feed(event | {"time": event["time"] + day} | ({"resumed_from": "000001"} if resumed else {}))
    assert story.workers[1].lost == 1
    assert story.head["now"] - story.head["began"] < 110, "the day between is no part of it"
    assert (story.newest["busy"] or 1) > 0.5
    rows, alive = story.series["total"].points[-1][1], story.series["total"].points[-1][5]
    assert rows == 2 * 640 * 50
    assert alive is not None
    assert alive < 2 * 110
    for event in events(3, 10):
        story.feed(event)
    assert len(story.workers) == 3
    assert story.workers[1].lost == 0
    news = reader.news(story)
    assert news is not None
    assert news["fresh"]
    assert all(part["at"] == 0 for part in news["series"].values())


def test_deaths_outlive_what_happens_often() -> None:
    story = told(2, 20, lost=1, ends=False)
    for number in range(2000):
        story.feed({"kind": "checkpoint_saved", "time": BEGAN + 30 + number, "name": str(number), "steps": 1})
    kinds = [mark["kind"] for mark in story.marks]
    assert kinds.count("lost") == kinds.count("reborn") == 1
    assert len(kinds) < 1000


def test_fragments_that_were_cut_anew_leave_no_old_ones() -> None:
    story = EventReducer()
    landed = {"kind": "round_landed", "time": 1.0, "codec": "int4", "seconds": 0.1, "late": 1, "period": 8}
    for number in range(8):
        story.feed(landed | {"fragments": 8, "fragment": number, "round": number})
    story.feed({"kind": "setting_changed", "time": 2.0, "why": "faster", "since": 9})
    for number in range(4):
        story.feed(landed | {"fragments": 4, "fragment": number, "round": 9 + number})
    assert sorted(story.fragments) == [0, 1, 2, 3]


def test_a_reader_is_told_the_rest_only() -> None:
    story, reader = EventReducer(), Reader()
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
    follower, story = Follower(str(folder)), EventReducer()
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
    story = EventReducer()
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
    text = exposition([('a"b\n', told(2, 20, ends=False), threading.Lock(), 0.0)])
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert 'thinwire_rows_total{run="a\\"b\\n"} 25600' in lines
    assert 'thinwire_run_active{run="a\\"b\\n"} 1' in lines
    assert any(line.startswith("thinwire_worker_loss{") for line in lines)
    assert 'thinwire_metric{run="a\\"b\\n",name="val_accuracy"} 0.2' in lines
    assert all(text.count(f"# TYPE {name} ") == 1 for name in {line.split("{")[0] for line in lines})


def test_a_line_that_is_repeated_is_one_line_with_its_number() -> None:
    story, reader = EventReducer(), Reader()
    stalled = {"kind": "round_stalled", "worker": 1, "waited_for": [2]}
    for second in range(500):
        story.feed(stalled | {"time": float(second)})
        story.feed(stalled | {"time": float(second), "worker": 0})
        if second == 3:
            first = reader.news(story)
    assert [(mark["worker"], mark["times"]) for mark in story.marks] == [(1, 500), (0, 500)]
    assert story.marks[0]["t"] == 499.0
    second_news = reader.news(story)
    assert first is not None
    assert second_news is not None
    assert [mark["id"] for mark in first["marks"]] == [mark["id"] for mark in second_news["marks"]], (
        "it takes its place"
    )


def test_losses_that_read_alike_stay_apart() -> None:
    story = EventReducer()
    for second in range(3):
        story.feed({"kind": "worker_joined", "worker": 0, "host": "a", "attempt": second, "time": second + 0.0})
        story.feed({"kind": "worker_lost", "worker": 0, "reason": "killed", "time": second + 0.5})
    assert [mark["t"] for mark in story.marks if mark["kind"] == "lost"] == [0.5, 1.5, 2.5]


def test_start_up_is_no_part_of_rows_a_second_or_of_the_timeline() -> None:
    story = EventReducer()
    story.feed({"kind": "run_started", "workers": 1, "strategy": "relay", "time": 0.0})
    story.feed({"kind": "worker_joined", "worker": 0, "host": "a", "attempt": 0, "time": 50.0})
    story.feed({"kind": "generation_formed", "generation": 1, "members": [0], "time": 60.0})
    for second in range(1, 11):
        story.feed(
            {
                "kind": "progressed",
                "worker": 0,
                "attempt": 0,
                "steps": second,
                "rows": 100 * second,
                "time": 60.0 + second,
            }
        )
    story.feed({"kind": "generation_formed", "generation": 2, "members": [0], "time": 70.5})
    story.feed({"kind": "run_ended", "reason": "done", "summary": {}, "time": 500.0})
    assert story.head["stepping"] == 60.0
    assert story.head["rows_per_s"] == pytest.approx(100.0)


def test_rows_of_a_first_report_of_unknown_length_are_not_counted_over_no_time() -> None:
    story = EventReducer()
    for second in range(1, 5):
        story.feed(
            {
                "kind": "progressed",
                "worker": 0,
                "attempt": 0,
                "steps": second,
                "rows": 100 * second,
                "time": float(second),
            }
        )
    assert story.head["rows_per_s"] == pytest.approx(100.0)
