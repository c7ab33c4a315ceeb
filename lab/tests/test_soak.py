"""`thinwire testbed soak` and what it judges: real processes killed again and again, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli.main import main
from thinwire_lab.soak import judge
from thinwire_lab.soak.gauges import files, of_process
from thinwire_lab.soak.judge import Done, grown
from thinwire_lab.testbed import Testbed


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_soak_keeps_its_rows_and_says_what_grew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arena", "local", "--minutes", "0.5", "--every", "10", "--out", str(tmp_path), "--json"]
    assert main(["testbed", "soak", *words]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["deaths"] >= 1
    assert told["complete"]
    assert told["summary"]["workers_lost"] >= told["deaths"]
    assert told["wrong"] == []
    assert {"driver threads", "driver descriptors", "worker memory_mb", "machine files"} <= set(told["gauges"])
    assert told["goodput"] > 0
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert len(kept["looks"]) >= 5


def order(**more: Any) -> dict[str, Any]:
    return {"quiet_s": 40.0, "minutes": 1.0, **more}


def told(rate: float, until: float, since: float = 0.0) -> list[tuple[float, int, int]]:
    """A worker's reports, one a second."""
    return [(float(t), 0, int(rate * (t - since))) for t in range(int(since), int(until) + 1)]


SUMMARY = {
    "complete": True,
    "rows": 1,
    "workers_lost": 0,
    "generations": 1,
    "rounds": 1,
    "val_loss": None,
    "reason": "",
}


def test_goodput_is_the_rows_that_stay_over_those_before() -> None:
    undisturbed = told(100, 40)
    dead = [(t, w, rows) for t, w, rows in told(100, 100) if 40 < t <= 70]  # then it begins where it was at 50 s
    again = [(float(t), 0, 5000 + 100 * (t - 80)) for t in range(80, 101)]
    found = {"order": order(), "rows": undisturbed + dead + again, "deaths": [{}], "looks": [], "summary": SUMMARY}
    assert judge(found).goodput == pytest.approx((7000 - 4000) / 60 / 100, abs=0.001)


def test_what_grows_with_every_death_is_told_and_what_jumps_about_is_not() -> None:
    looks = [
        {"at_s": 10.0 * i, "deaths": i, "driver descriptors": 20 + i, "driver memory_mb": 200 + 5 * (i % 3)}
        for i in range(60)
    ]
    found = grown(looks)
    assert not found["driver descriptors"].flat
    assert found["driver memory_mb"].flat
    summary = {**SUMMARY, "complete": False}
    wrong = judge({"order": order(minutes=20.0), "rows": [], "deaths": [], "looks": looks, "summary": summary}).wrong
    assert len(wrong) == 2


def test_rows_between_two_reports_are_in_proportion() -> None:
    done = Done([(0.0, 0, 0), (10.0, 0, 100), (20.0, 0, 60)])
    assert [done.at(t) for t in (0.0, 5.0, 10.0, 15.0, 30.0)] == [0.0, 50.0, 100.0, 80.0, 60.0]


def test_gauges_see_what_a_process_opens_and_what_lies_in_a_folder(tmp_path: Path) -> None:
    before = of_process(os.getpid())
    kept = [open(tmp_path / str(number), "w") for number in range(5)]  # noqa: SIM115
    after = of_process(os.getpid())
    assert after["descriptors"] - before["descriptors"] == 5
    assert after["memory_mb"] > 10
    for file in kept:
        file.close()
    assert of_process(2**22 + 1) == {}
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one").touch()
    (tmp_path / "work1").mkdir()
    (tmp_path / "work1" / "stderr").touch()
    assert files(str(tmp_path)) == 7, "five, a folder and what is in it; logs of executors are Spark's"


@pytest.mark.parametrize(
    "words", [["--arena", "bett"], ["--strategy", "relais"], ["--exchange", "mash"], ["--minutes", "0"]]
)
def test_what_cannot_be_soaked_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "soak", *words]) == 2
    assert "not" in capsys.readouterr().err


@pytest.mark.skipif(Testbed.why_not() is not None, reason=str(Testbed.why_not()))
@pytest.mark.long
def test_a_testbed_that_is_ended_from_outside_leaves_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "there"
    inside = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(100)"
    words = [sys.executable, "-m", "thinwire", "testbed", "run", "--nodes", "1", "--", sys.executable, "-c", inside]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    made = f"tw{process.pid}-"
    assert made in subprocess.check_output(["ip", "netns", "list"], text=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert made not in subprocess.check_output(["ip", "netns", "list"], text=True)


def test_empty_folders_of_dead_executors_do_not_count_and_files_do(tmp_path: Path) -> None:
    assert files(str(tmp_path)) == 0
    (tmp_path / "spark-1" / "blockmgr-1" / "0d").mkdir(parents=True)
    (tmp_path / "work1" / "app-1").mkdir(parents=True)
    (tmp_path / "work1" / "app-1" / "stderr").touch()
    assert files(str(tmp_path)) == 1, "the application's own folder"
    (tmp_path / "spark-1" / "blockmgr-1" / "0d" / "broadcast_1").touch()
    (tmp_path / "thinwire-1").mkdir()
    assert files(str(tmp_path)) == 3
