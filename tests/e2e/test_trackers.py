"""Runs that MLflow and TensorBoard keep: read back by their own readers."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError
from thinwire.trackers import MLflow, TensorBoard, Tracker

pytestmark = pytest.mark.timeout(900)
CLUSTER = tw.Simulated(workers=2, step_s=0.2)


def fit(*callbacks: Any, **more: Any) -> tw.Result:
    settings: dict[str, Any] = {"epochs": 3, "validation": 0.2, "cluster": CLUSTER, "seed": 1, "optimizer": "adam"}
    return tw.fit("mlp", "digits", callbacks=callbacks, **(settings | more))


class Kept(Tracker):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[str, Any] = {}
        self.starts = 0
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ends: list[tuple[str, bool]] = []
        self.result: tw.Result | None = None

    def start(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters
        self.starts += 1

    def numbers(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def say(self, text: str, step: int) -> None:
        return

    def end(self, reason: str, summary: dict[str, Any]) -> None:
        self.ends.append((reason, bool(summary)))

    def keep(self, result: tw.Result) -> None:
        self.result = result


def test_a_tracker_gets_settings_numbers_and_the_model() -> None:
    kept = Kept()
    result = fit(kept, strategy=tw.SparkNet(period=5))
    assert kept.parameters["strategy"] == "sparknet"
    assert kept.parameters["strategy.period"] == 5
    assert kept.result is result
    assert len(kept.ends) == 1
    assert kept.ends[0][1]
    last = [values["validation/accuracy"] for _, values in kept.rows if "validation/accuracy" in values][-1]
    assert last == pytest.approx(result.summary["val_accuracy"])
    train = [(step, values) for step, values in kept.rows if "train/loss" in values]
    assert [step for step, _ in train] == sorted(step for step, _ in train)
    assert train[0][1]["train/loss"] > train[-1][1]["train/loss"]
    assert any(0 < values.get("train/busy", 0) <= 1 for _, values in train)
    assert any(values.get("train/rows_per_s", 0) > 0 for _, values in train)


def test_one_that_fails_is_left_out_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Away(Kept):
        def numbers(self, values: dict[str, float], step: int) -> None:
            raise ConnectionError("nobody answers")

    away = Away()
    with caplog.at_level(logging.WARNING):
        result = fit(away)
    assert result.summary["complete"]
    assert away.result is None
    assert sum("nobody answers" in record.message for record in caplog.records) == 1


def test_one_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLflow's client, which tries again for minutes when its server is away."""
    monkeypatch.setattr("thinwire.trackers.END_S", 0.5)

    answered = threading.Event()

    class Slow(Kept):
        def start(self, parameters: dict[str, Any]) -> None:
            answered.wait()

    assert fit(Slow()).summary["complete"]
    answered.set()


def test_a_run_that_goes_on_is_one_run() -> None:
    kept = Kept()
    started = events.RunStarted(strategy="relay", knobs={}, workers=1, rows=1, validation_rows=0, seed=0)
    for event in (started, dataclasses.replace(started, resumed_from="000002")):
        kept(event)
    kept(events.RunEnded(reason="interrupted", summary={"complete": False}))
    assert kept.starts == 1
    assert kept.ends == [("interrupted", True)]


def test_a_callback_whose_finish_fails_costs_no_model(caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def __call__(self, event: events.Event) -> None:
            return

        def finish(self) -> None:
            return

    with caplog.at_level(logging.WARNING):
        assert fit(Bad()).summary["complete"]
    assert "failed at the end" in caplog.text


def test_a_callback_with_a_finish_gets_the_result() -> None:
    found: list[Any] = []

    class Sink:
        def __call__(self, event: events.Event) -> None:
            return

        def finish(self, result: tw.Result) -> None:
            found.append(result)

    result = fit(Sink(), lambda event: None)
    assert found == [result]


def test_the_history_as_a_frame() -> None:
    pytest.importorskip("pandas")
    result = fit()
    frame = result.frame()
    assert list(frame["val_accuracy"]) == [row["val_accuracy"] for row in result.history]


def test_tensorboards_own_reader_reads_the_files(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard here")
    result = fit(TensorBoard(str(tmp_path / "board")))
    found = reader.EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    scalars = found.Tags()["scalars"]
    assert {"train/loss", "train/busy", "train/rows_per_s", "validation/accuracy", "validation/loss"} <= set(scalars)
    accuracy = found.Scalars("validation/accuracy")
    assert accuracy[-1].value == pytest.approx(result.summary["val_accuracy"], abs=1e-5)
    assert accuracy[-1].step == result.history[-1]["steps"]


LOAD = """
import sys, mlflow, numpy, torch
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(f"runs:/{sys.argv[2]}/model")
model.eval()
with torch.no_grad():
    numpy.save(sys.argv[4], model(torch.from_numpy(numpy.load(sys.argv[3]))).numpy())
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")
def test_mlflow_keeps_a_model_that_a_fresh_process_loads(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no MLflow here: pip install 'thinwire[mlflow]'")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    before = os.getcwd()
    os.chdir(tmp_path)  # where MLflow puts artifacts unless told
    try:
        tracker = MLflow("digits", uri=uri, name="first")
        result = fit(tracker)
        rows = np.random.default_rng(0).random((16, 64), dtype=np.float32)
        np.save(tmp_path / "rows.npy", rows)
        (tmp_path / "load.py").write_text(LOAD)
        argv = ["load.py", uri, str(tracker.run_id), "rows.npy", "out.npy"]
        done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=1700)
        assert done.returncode == 0, done.stderr
    finally:
        os.chdir(before)
    with torch.no_grad():
        wanted = result.model(torch.from_numpy(rows)).numpy()
    assert np.array_equal(np.load(tmp_path / "out.npy"), wanted)
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["strategy"] == "relay"
    assert run.data.metrics["validation/accuracy"] == pytest.approx(result.summary["val_accuracy"])
    assert len(client.get_metric_history(tracker.run_id, "train/loss")) > 3


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[tensorboard\]'"):
        TensorBoard(str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[mlflow\]'"):
        MLflow()
