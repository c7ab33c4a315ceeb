"""Real runs whose processes are killed and stopped at random, as `thinwire testbed chaos` does it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli.main import main
from thinwire.errors import WorkerError
from thinwire_lab.chaos.campaign import PLACEMENTS, placement_of
from thinwire_lab.chaos.faults import (
    ARENAS,
    Target,
    draw,
    executor_of,
    fill_disk,
    kill_worker,
    pause_worker,
    slow_disk,
    starve_worker,
)
from thinwire_lab.chaos.host import Host
from thinwire_lab.chaos.trial import Report, Trial, raise_if_wrong


@pytest.fixture
def sleeper() -> Any:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def poll(until: Any) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["relay", "parameter_table"])
def test_a_run_under_chaos_ends_with_every_row_and_whole_checkpoints(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["testbed", "chaos", "--seed", "3", "--kills", "1", "--strategies", strategy, "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    totals = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert totals["kills"] >= 1
    assert totals["wrong"] == 0
    told = json.loads((tmp_path / "chaos.json").read_text())["bouts"]
    assert [bout["strategy"] for bout in told] == [strategy] * len(told)
    assert all(bout["deeds"] and bout["rows"] for bout in told)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == totals, "enough had been killed already"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_groups_under_chaos_end_with_every_row_and_whole_checkpoints(tmp_path: Path) -> None:
    words = ["--seed", "4", "--strategies", "synchronous", "--placements", "planned", "--minutes", "0.01"]
    assert main(["testbed", "chaos", *words, "--deeds", "4", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "chaos.json").read_text())
    (bout,) = told["bouts"]
    assert bout["placement"] == "planned"
    assert bout["deeds"]
    assert bout["wrong"] == []
    assert told["totals"]["kills_in_groups"] == bout["kills"]


def test_bouts_draw_placements_by_their_seeds() -> None:
    drawn = [placement_of(seed) for seed in range(200)]
    assert set(drawn) == set(PLACEMENTS)
    assert 60 <= sum(each != "whole" for each in drawn) <= 100
    assert drawn == [placement_of(seed) for seed in range(200)]
    assert {placement_of(seed, ("planned", "pipeline")) for seed in range(20)} == {"planned", "pipeline"}


@pytest.mark.parametrize("text", ["{}", "no", '{"bouts": [{"x": 1}]}'])
def test_a_report_that_is_none_is_not_gone_on_with(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chaos.json").write_text(text)
    assert main(["testbed", "chaos", "--kills", "1", "--out", str(tmp_path)]) == 2
    assert "give another --out" in capsys.readouterr().err
    assert (tmp_path / "chaos.json").read_text() == text


def test_rows_that_fall_are_told(tmp_path: Path) -> None:
    places: dict[str, Any] = {"recipe": "", "out": str(tmp_path), "log": "", "settings": []}
    bout, target = Trial("local", "relay", 0, **places), Target(driver=-1)
    bout._floors = {0: 50}
    told = [{"kind": "run_started"}]
    told += [{"kind": "progressed", "worker": w, "rows": rows, "gap_s": 0.0} for w, rows in ((0, 60), (1, 40), (0, 80))]
    for event in told:
        bout._see(event, target)
    assert not bout.report.wrong
    for event in (*told[:1], {**told[1], "rows": 40}):
        bout._see(event, target)
    assert bout.report.wrong == ["worker 0 fell from 50 rows to 40"]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if (why := Host.why_not()) is not None:
        pytest.skip(why)
    with Host(str(tmp_path / "host")) as made:
        yield made


def test_a_disk_is_full_and_free_again(host: Host) -> None:
    target, chance = Target(driver=-1, host=host), random.Random(0)
    assert fill_disk(target, chance).startswith("fill the disk")
    with pytest.raises(OSError, match="No space left"):
        Path(host.disk, "more").write_bytes(bytes(1 << 16))
    for undo in target.undo:
        undo()
    Path(host.disk, "more").write_bytes(bytes(1 << 16))


def test_a_slow_disk_takes_its_time(host: Host, tmp_path: Path) -> None:
    if not host.throttles:
        pytest.skip("there are no cgroups of version 1 here")
    inside = (
        "import os, sys, time; sys.stdin.readline(); began = time.monotonic(); file = open(sys.argv[1], 'wb');"
        "file.write(bytes(1 << 17)); file.flush(); os.fsync(file.fileno()); print(time.monotonic() - began)"
    )
    words = [sys.executable, "-c", inside, str(Path(host.disk, "large"))]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert slow_disk(Target(driver=process.pid, host=host), random.Random(0)).startswith("slow the disk")
    seconds = float(process.communicate("go\n", timeout=60)[0])
    assert seconds > 1.0, "128 KiB at 64 KiB a second"


def test_a_clock_jumps_and_time_goes_on_as_before(host: Host) -> None:
    if not host.has_clock:
        pytest.skip("there is no C compiler here")
    inside = "import time; print(time.time(), time.monotonic())"
    told = []
    for offset_s in (0, 86_400):
        host.set_clock(offset_s)
        words = [sys.executable, "-c", inside]
        done = subprocess.run(words, env=os.environ | host.environment(), capture_output=True, text=True, check=True)
        told.append([float(word) for word in done.stdout.split()])
    (day, since), (later, still) = told
    assert 86_000 < later - day < 87_000
    assert 0 <= still - since < 600


def test_a_worker_without_memory_to_take_fails_or_dies() -> None:
    inside = "print(1, flush=True); input(); print(len(bytearray(1 << 28)))"
    words = [sys.executable, "-c", inside]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert starve_worker(Target(driver=-1, workers={0: process.pid}), random.Random(0)).startswith("limit worker 0")
    told = process.communicate("go\n", timeout=60)
    assert "MemoryError" in told[1]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_on_a_bad_machine_ends_with_every_row_and_whole_checkpoints(tmp_path: Path) -> None:
    if (why := Host.why_not()) is not None:
        pytest.skip(why)
    words = ["--seed", "5", "--strategies", "relay", "--arenas", "host", "--minutes", "0.01", "--deeds", "8"]
    assert main(["testbed", "chaos", *words, "--out", str(tmp_path)]) == 0
    (bout,) = json.loads((tmp_path / "chaos.json").read_text())["bouts"]
    assert bout["deeds"]
    assert bout["wrong"] == []


def test_the_same_seed_draws_the_same_deeds() -> None:
    for arena in ARENAS:
        drawn = [[draw(arena, chance) for _ in range(30)] for chance in (random.Random(5), random.Random(5))]
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) > 2


def test_a_kill_ends_a_process_and_a_pause_stops_it_for_a_while(sleeper: Any) -> None:
    target = Target(driver=-1, workers={2: sleeper.pid})
    assert pause_worker(target, random.Random(0)).startswith("SIGSTOP worker 2")
    poll(lambda: state_of(sleeper.pid) == "T")
    for undo in target.undo:
        undo()
    poll(lambda: state_of(sleeper.pid) != "T")
    assert kill_worker(target, random.Random(0)) == "kill -9 worker 2"
    assert sleeper.wait(20) == -signal.SIGKILL
    assert kill_worker(target, random.Random(0)) == "", "there is nobody left"
    assert executor_of(os.getpid()) is None


def test_what_went_wrong_ends_the_command() -> None:
    raise_if_wrong([Report("local", "relay", 1)])
    with pytest.raises(WorkerError, match="1 of 2 bouts went wrong, the first: mpca"):
        raise_if_wrong([Report("local", "relay", 1), Report("spark", "mpca", 2, wrong=["exit code 1"])])


@pytest.mark.parametrize(
    "words",
    [
        ["--arenas", "locla"],
        ["--strategies", "relais"],
        ["--minutes", "0"],
        ["--kills", "0"],
        ["--placements", "plannd"],
    ],
)
def test_what_cannot_be_played_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "chaos", *words]) == 2
    assert "not" in capsys.readouterr().err
