"""`thinwire plan` with measured times: the papers' models of speed-up, by hand."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import thinwire as tw
from thinwire.cli.gains import _of_a_run
from thinwire.cli.main import main
from thinwire.errors import ConfigError

PLAN = ["plan", "digits", "--workers", "5", "--gflops", "10"]
MEASURED = ["--step", "2", "--exchange", "20"]


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*PLAN, "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_naive_parallelisation_is_amdahl_s_law_of_measured_times(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *MEASURED)
    assert found["speedup"]["naive"] == pytest.approx(2 / (2 / 5 + 20))
    assert found["speedup"]["naive_limit"] == pytest.approx(0.1)
    assert found["shared_batch_speedup"] == found["speedup"]["naive"]
    assert found["sparknet_period"] == 50, "the rule of thumb, 5 S / C(b)"
    assert found["exchange_s"] == 20


def test_the_best_period_is_that_of_least_seconds_by_equation_2(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {1: 9000, 10: 950, 50: 220, 250: 90}
    text = ",".join(f"{period}:{count}" for period, count in rounds.items())
    told = planned(capsys, *MEASURED, "--alone", "10000", "--rounds", text)["speedup"]
    assert told["alone_s"] == 20_000
    for row in told["sparknet"]:
        period, count = row["period"], rounds[row["period"]]
        assert row["seconds"] == (period * 2 + 20) * count
        assert row["speedup"] == pytest.approx(20_000 / row["seconds"])
        assert row["free_speedup"] == pytest.approx(10_000 / (period * count))
    assert (told["best_period"], told["best_speedup"]) == (50, pytest.approx(20_000 / 26_400))
    none = planned(capsys, "--step", "2", "--exchange", "0", "--alone", "10000", "--rounds", text)["speedup"]
    assert none["best_period"] == 1, "another S has another best τ"
    assert none["naive_limit"] is None


def test_deepspark_s_equations_2_to_4(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, *MEASURED, "--alone", "1000", "--discrepancy", "100:2,500:2.5")["speedup"]
    first, second = told["deepspark"]
    assert first["compute_s"] == pytest.approx(1000 * 2 * 2 / 5)
    assert first["communicate_s"] == pytest.approx(5 * 2 * 1000 * 20 / 100)
    assert first["speedup"] == pytest.approx(2 / (2 * (2 / 5 + 5 * 20 / 100)))
    assert second["limit"] == 2.0
    assert planned(capsys, *MEASURED, "--discrepancy", "100:2")["speedup"]["deepspark"][0]["limit"] == 2.5


def test_a_plan_without_measurements_has_no_such_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert "speedup" not in planned(capsys)


def test_what_is_told_in_words_names_the_equations(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--alone", "10000", "--rounds", "10:950,50:220", "--discrepancy", "100:2"]
    assert main([*PLAN, *MEASURED, *options]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "one machine alone: 20,000 s to the target (SparkNet eq. 1)" in told
    assert (
        "τ = 50: 26,400 s, 0.76 times as fast (eq. 2); 0.91 times if exchanges took no time, the best of these." in told
    )
    assert (
        "τ = 100, d = 2: 8,000 s computing and 20,000 s exchanging (DeepSpark eq. 2), 0.71 times as fast (eq. 3)"
        in told
    )
    assert "2.5 times as τ grows (eq. 4)" in told


def test_a_run_tells_what_its_steps_and_exchanges_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In virtual time a step is 0.1 s, and an exchange of 12,000 bytes at 10 kB/s there and back some seconds."""
    random = np.random.default_rng(0)
    rows = {"x": random.normal(size=(64, 300)).astype(np.float32), "label": random.integers(0, 10, 64)}
    cluster = tw.Simulated(workers=2, step_s=0.1, link="80kbit", latency_s=0.001)
    settings: dict[str, Any] = {"cluster": cluster, "batch_size": 8, "epochs": 4, "out": str(tmp_path)}
    summary = tw.fit(lambda: nn.Linear(300, 10), rows, strategy=tw.SparkNet(period=4), **settings).summary
    told = planned(capsys, "--run", str(tmp_path))["speedup"]
    assert told["step_s"] == pytest.approx(0.1, rel=0.05)
    assert told["exchange_s"] == pytest.approx((summary["train_seconds"] - 16 * 0.1) / summary["rounds"], rel=0.2)
    assert told["exchange_s"] > 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "1:9"], "--rounds needs measured times"),
        ([*MEASURED, "--rounds", "1:9"], "--rounds needs --alone"),
        (["--discrepancy", "1:9"], "--discrepancy needs measured times"),
        (
            [*MEASURED, "--rounds", "ten:9", "--alone", "9"],
            "--rounds 'ten:9' is not understood; write it as 1:900,10:110",
        ),
        ([*MEASURED, "--discrepancy", "0:9"], "--discrepancy '0:9' is not possible"),
        (["--step", "0", "--exchange", "1"], "--step 0 is not possible"),
        (["--step", "nan", "--exchange", "1"], "--step nan is not possible"),
        (["--run", "nowhere"], "--run 'nowhere' has no summary.json"),
        (["--run", "nowhere", "--step", "1"], "leave --step and --exchange out"),
    ],
)
def test_measurements_that_cannot_be_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


RUN = {"strategy": "sparknet", "rounds": 5, "step_s": 0.1, "train_seconds": 9.0, "busy": 0.5, "evaluated_s": 0.0}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, "[]", '{"step_s": ' + "9" * 5000 + "}", json.dumps(RUN | {"step_s": math.nan}), " " * (1 << 21),
        json.dumps(RUN | {"step_s": "x"}), json.dumps(RUN | {"rounds": 1e400}), json.dumps(RUN | {"busy": -math.inf}),
        json.dumps(RUN | {"step_s": 10**400}), json.dumps(RUN | {"rounds": "5"}),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_summary_that_is_none_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=r"has no summary\.json of a run"):
        _of_a_run(str(tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_summary_is_a_plain_file(tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for without end, and a device read."""
    if kind == "pipe":
        os.mkfifo(tmp_path / "summary.json")
    else:
        (tmp_path / "summary.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is no plain file"):
        _of_a_run(str(tmp_path))
