"""Trackers that send a run's numbers to MLflow and TensorBoard.

A tracker is a callback of `fit`: `fit` calls it with every event, and its method `finish` with the result. Each tracker
needs a package of its own: the extras `mlflow` and `tensorboard`.
"""

from __future__ import annotations

import abc
import functools
import importlib
import inspect
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.dashboard.event_reducer import EventReducer
from thinwire.dashboard.server import as_dict
from thinwire.errors import ConfigError
from thinwire.events import Evaluated, Event, Progressed, RunEnded, RunStarted, WorkerLost
from thinwire.replicas.calls import scores

if TYPE_CHECKING:
    from thinwire.run.session import Result

_log = logging.getLogger(__name__)
MOST_WAITING = 1000
"""Queued events above which a tracker drops reports of progress."""
END_S, KEEP_S = 30.0, 600.0
"""Timeouts at the end of a run: for the queued events, and for storing the model."""
MOST_TEXT = 500
EVERY_S = ("loss", "rows_per_s", "busy", "sent_bytes", "workers")


class Tracker(abc.ABC):
    """Reduces events to numbers, at most once a second, and passes the numbers on by name and step.

    It works on a thread of its own, so that a slow or missing server cannot delay training. A tracker that fails logs
    one warning and does nothing more.
    """

    def __init__(self) -> None:
        self._reducer = EventReducer()
        self._ticked: float | None = None
        self._failed = False
        self._started = False
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event in. Reports of progress are dropped where the thread does not keep up."""
        if self._failed or (isinstance(event, Progressed) and self._work.qsize() > MOST_WAITING):
            return
        self._do(functools.partial(self._see, event))
        if isinstance(event, RunEnded):
            self._wait(END_S)

    def finish(self, result: Result) -> None:
        """Takes the result in, after the last event."""
        if not self._failed:
            self._do(functools.partial(self.keep, result))
            self._wait(KEEP_S)

    def _do(self, act: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
            self._thread.start()
        self._work.put(act)

    def _wait(self, seconds: float) -> None:
        done = threading.Event()
        self._do(done.set)
        if not done.wait(seconds) and not self._failed:
            self._fail(TimeoutError(f"the tracker did not answer within {seconds:g} s"))

    def _run(self) -> None:
        while True:
            act = self._work.get()
            try:
                act()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            _log.warning("%s keeps nothing more of this run, which goes on: %s", type(self).__name__, error)
        self._failed = True

    def _see(self, event: Event) -> None:
        if self._failed:
            return
        self._reducer.feed(as_dict(event))
        if isinstance(event, RunStarted) and not self._started:
            self._started = True
            told = {"strategy": event.strategy, "workers": event.workers, "seed": event.seed}
            told |= {f"strategy.{name}": value for name, value in event.knobs.items()}
            self.start(told | {"thinwire": event.version, "resumed_from": event.resumed_from or ""})
        newest = self._reducer.newest
        if newest and newest["time"] != self._ticked:
            self._ticked = newest["time"]
            values = {f"train/{name}": newest[name] for name in EVERY_S}
            self._numbers(values, int(newest["steps"] or 0))
        if isinstance(event, Evaluated):
            self._numbers({f"validation/{k.removeprefix('val_')}": v for k, v in event.metrics.items()}, event.steps)
        elif isinstance(event, WorkerLost):
            reason = event.reason.splitlines() or [""]
            self.say(f"worker {event.worker} on {event.host} lost: {reason[0]}", event.steps)
        elif isinstance(event, RunEnded):
            self.end(event.reason, event.summary)

    def keep(self, result: Result) -> None:
        """Stores the model of a finished run; does nothing unless a subclass overrides it."""
        return

    def _numbers(self, values: Mapping[str, float | None], step: int) -> None:
        there = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        if there:
            self.numbers(there, step)

    @abc.abstractmethod
    def start(self, parameters: dict[str, Any]) -> None:
        """A run begins with these settings."""

    @abc.abstractmethod
    def numbers(self, values: dict[str, float], step: int) -> None:
        """Records numbers at a step."""

    @abc.abstractmethod
    def say(self, text: str, step: int) -> None:
        """Records a line of text."""

    @abc.abstractmethod
    def end(self, reason: str, summary: dict[str, Any]) -> None:
        """The run is over; the summary is empty where an error ended it."""


class TensorBoard(Tracker):
    """Writes event files that TensorBoard reads.

    Args:
        folder: where to write; read it with `tensorboard --logdir`.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        _needs("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=folder)

    def start(self, parameters: dict[str, Any]) -> None:
        lines = "\n".join(f"| {name} | {value} |" for name, value in parameters.items())
        self._writer.add_text("run", f"| setting | value |\n|---|---|\n{lines}")

    def numbers(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def say(self, text: str, step: int) -> None:
        self._writer.add_text("events", text, step)

    def end(self, reason: str, summary: dict[str, Any]) -> None:
        self._writer.add_text("run", f"ended: {reason}")
        self._writer.close()


class MLflow(Tracker):
    """Logs settings, numbers and the model to MLflow.

    Args:
        experiment: name of the experiment; MLflow's default experiment if not given.
        uri: of the tracking server, or a folder; MLflow's current setting if not given.
        name: of the run in MLflow.
        model: whether to store the trained module with the run, in the PyTorch flavour.
        example: an array of a few rows, as the module takes them. It is stored with the model and its signature, which
            `mlflow.pyfunc.spark_udf` and model servers use.
        registered: the name to register the model under, as a new version.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        uri: str | None = None,
        name: str | None = None,
        model: bool = True,
        example: Any = None,
        registered: str | None = None,
    ) -> None:
        super().__init__()
        _needs("mlflow", "mlflow")
        if not model and (example is not None or registered is not None):
            raise ConfigError("MLflow(model=False) keeps no model; leave out example and registered, or keep the model")
        self._example, self._registered = None if example is None else _as_rows(example), registered
        self._uri, self._name, self._keeps, self._experiment = uri, name, model, experiment
        self._client: Any = None
        self.run_id: str | None = None
        """ID of the run in MLflow, once the run has begun."""

    def start(self, parameters: dict[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        number = "0"
        if self._experiment is not None:
            known = self._client.get_experiment_by_name(self._experiment)
            number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self.run_id = self._client.create_run(number, run_name=self._name).info.run_id
        told = [mlflow.entities.Param(name, str(value)[:MOST_TEXT]) for name, value in parameters.items()]
        self._client.log_batch(self.run_id, params=told)

    def numbers(self, values: dict[str, float], step: int) -> None:
        import mlflow

        now = int(time.time() * 1e3)
        told = [mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=told)

    def say(self, text: str, step: int) -> None:
        self._client.set_tag(self.run_id, f"thinwire.step_{step}", text[:MOST_TEXT])

    def end(self, reason: str, summary: dict[str, Any]) -> None:
        self._client.set_tag(self.run_id, "thinwire.ended", reason[:MOST_TEXT])
        numbers = {f"summary/{k}": float(v) for k, v in summary.items() if isinstance(v, int | float)}
        there = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if there:
            self.numbers(there, int(summary.get("steps", 0)))
        self._client.set_terminated(
            self.run_id, "FINISHED" if summary.get("complete") else "KILLED" if summary else "FAILED"
        )

    def _described(self, module: Any) -> dict[str, Any]:
        """What is stored beside the module: example rows, the signature that they give, and the registered name."""
        told: dict[str, Any] = {} if self._registered is None else {"registered_model_name": self._registered}
        if self._example is None:
            return told
        import torch
        from mlflow.models import infer_signature

        with torch.no_grad():
            output = scores(module(torch.from_numpy(self._example)))
        return told | {"signature": infer_signature(self._example, output.numpy()), "input_example": self._example}

    def keep(self, result: Result) -> None:
        """Stores the module; `mlflow.pytorch.load_model(f"runs:/{run_id}/model")` loads it."""
        if not self._keeps or self.run_id is None:
            return
        import mlflow

        before = mlflow.get_tracking_uri()
        try:
            if self._uri is not None:
                mlflow.set_tracking_uri(self._uri)
            with mlflow.start_run(run_id=self.run_id, nested=True):
                told = _as_code(mlflow.pytorch.log_model) | self._described(result.model)
                mlflow.pytorch.log_model(result.model, name="model", **told)
        finally:
            mlflow.set_tracking_uri(before)


def _as_rows(example: Any) -> Any:
    """Rows as an array of at least one row."""
    rows = example.numpy() if hasattr(example, "numpy") else np.asarray(example)
    if rows.dtype == object or rows.ndim < 1 or not len(rows):
        raise ConfigError(
            f"MLflow.example is a {type(example).__name__} of {rows.dtype} in the shape {rows.shape}; give an array "
            "of a few rows, as the module takes them"
        )
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows


def _as_code(log_model: Any) -> dict[str, str]:
    """Stores modules by pickle: newer versions of MLflow would trace them by default, which needs an example input."""
    known = inspect.signature(log_model).parameters
    return {"serialization_format": "pickle"} if "serialization_format" in known else {}


def _needs(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the package {module} is not installed ({error}); run: pip install 'thinwire[{extra}]'"
        ) from None
