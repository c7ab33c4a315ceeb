"""`exchange="spark"`: training over Spark's own jobs alone, on a cluster with a second slot on every executor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire.errors import ConfigError

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the runs in `spark_exchange.py` saw."""
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    script = Path(__file__).with_name("spark_exchange.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=380,
        env=environment,
        cwd=tmp_path_factory.mktemp("spark-exchange"),
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("said: ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(found[0].removeprefix("said: ")))


def test_sparknet_trains_and_comes_to_what_it_comes_to_on_a_mesh(said: dict[str, Any]) -> None:
    summary = said["sparknet"]
    assert summary["complete"]
    assert summary["rounds"] > 0
    assert summary["refused"] == 0
    assert said["differs"] < 1e-4, "the same rows, steps and means, summed in another order"


def test_a_contribution_that_is_not_finite_is_left_out_and_told(said: dict[str, Any]) -> None:
    assert said["flawed"]["complete"]
    assert said["flawed_is_finite"]
    assert {flaw["worker"] for flaw in said["flaws"]} == {1}
    assert {"contribution", "parameters"} <= {flaw["what"] for flaw in said["flaws"]}
    assert said["flawed"]["nonfinite"] == sum(flaw["times"] for flaw in said["flaws"])


def test_mpca_trains_with_its_fragments_in_flight(said: dict[str, Any]) -> None:
    summary = said["mpca"]
    assert summary["complete"]
    assert summary["rounds"] >= 6
    assert summary["steps"] > 1.2 * summary["rounds"], "a round is due after every step: others were made meanwhile"


def test_contributions_are_packed_where_the_strategy_says_so(said: dict[str, Any]) -> None:
    summary = said["relay"]
    assert summary["complete"]
    assert summary["rounds"] >= 6
    assert max(said["accuracies"]["relay"]) >= 0.9


def test_large_contributions_are_read_and_summed_by_a_shuffle(said: dict[str, Any]) -> None:
    assert said["shuffled"]["complete"]
    assert said["shuffled"]["rounds"] == said["sparknet"]["rounds"]
    assert said["shuffled_differs"] < 1e-4


def test_executors_on_machines_of_their_own_are_visited_each(said: dict[str, Any]) -> None:
    assert said["apart"]["complete"]
    assert said["apart"]["rounds"] == said["sparknet"]["rounds"]
    assert said["apart_differs"] < 1e-4


def test_many_rounds_leave_nothing_behind(said: dict[str, Any]) -> None:
    """No file of a broadcast on the driver, and no cached rows but the caller's own."""
    assert said["many"]["rounds"] >= 100
    assert said["left"] == 0
    assert said["cached"] == 1


def test_only_spark_s_own_ports_listen(said: dict[str, Any]) -> None:
    """From the sockets of every process below the driver, while rounds were landing."""
    assert said["ports"], "Spark's own are seen"
    for pid, command, parent in said["ports"]:
        java = "java" in command.split()[0]
        daemon = "pyspark.daemon" in command and "java" in said["commands"].get(str(parent), "java")
        assert java or daemon, f"process {pid} listens: {command}"


def test_rounds_whose_members_are_all_on_one_machine_are_settled_there(said: dict[str, Any]) -> None:
    assert said["settled"] > 100


def test_broadcasts_are_destroyed_once_all_have_them(said: dict[str, Any]) -> None:
    assert said["broadcasts"] > 0
    assert said["kept"] == 0


def test_an_executor_that_dies_takes_its_agent_with_it_and_the_run_goes_on(said: dict[str, Any]) -> None:
    assert said["killed"] == 1
    summary = said["died"]
    assert summary["complete"]
    assert summary["workers_lost"] >= 1
    assert summary["val_accuracy"] >= 0.9


def test_what_it_cannot_carry_is_refused_with_the_reason(said: dict[str, Any]) -> None:
    assert "exchange='table'" in said["refused"]["easgd"]
    assert "quorum=1" in said["refused"]["quorum"]


def test_on_this_machine_alone_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tw\.Spark"):
        tw.fit("mlp", "digits", inputs=["pixels"], strategy=tw.SparkNet(), exchange="spark")
