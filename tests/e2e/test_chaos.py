"""Real runs whose processes are killed and stopped at random, as `thinwire testbed chaos` does it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli.main import main
from thinwire.errors import WorkerError
from thinwire.testing.chaos.bout import Report, raise_if_wrong
from thinwire.testing.chaos.deeds import ARENAS, Target, draw, executor_of, kill_worker, pause_worker


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


@pytest.mark.slow
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
    "words", [["--arenas", "locla"], ["--strategies", "relais"], ["--minutes", "0"], ["--kills", "0"]]
)
def test_what_cannot_be_played_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "chaos", *words]) == 2
    assert "not" in capsys.readouterr().err
