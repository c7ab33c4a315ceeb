"""The composition root: `fit` settles what a run is, deals out its rows, and serves its workers to the end."""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from thinwire import events, logs
from thinwire.checkpoint import CheckpointStore, Manifest, write_file
from thinwire.checkpoint.finite import why_not_finite
from thinwire.cluster.base import Cluster, Site
from thinwire.coordinator.stopping import EarlyStopping
from thinwire.errors import CheckpointError, ConfigError, Interrupted, LostWorkersError, ThinwireError
from thinwire.placement import Placement, Whole
from thinwire.protocol.deadlines import Deadlines
from thinwire.replicas import Algorithm
from thinwire.replicas.objectives import (
    Loss,
    Metric,
    OptimizerFactory,
    SchedulerFactory,
)
from thinwire.run.arguments import checks_arguments
from thinwire.run.definition import ALIKE, Rows, deal, defined, job_of, plan_of, policy_of
from thinwire.run.driver import Earlier, Run
from thinwire.run.job import Transform
from thinwire.run.left_out import evaluate_left_out
from thinwire.run.run_log import RunLog
from thinwire.strategies import Strategy, name_of
from thinwire.transport.ports import Hub, Wire
from thinwire.transport.reliable import ReliableHub, ReliableWire

_log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Result:
    """What `fit` gives back.

    Attributes:
        model: the trained module, on the CPU, in evaluation mode.
        history: one row an evaluation.
        summary: the run in numbers; also `summary.json`.
        transform: what rows went through before the model, a `TableEncoder` fitted; None where `fit` was given none.
    """

    model: nn.Module
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    transform: Transform | None = None

    def __repr__(self) -> str:
        """One line: the network, how the run ended, and its last numbers."""
        told = [f"{type(self.model).__name__} of {sum(p.numel() for p in self.model.parameters()):,} parameters"]
        for name in ("epochs", "steps", "train_loss", "val_loss", "val_accuracy"):
            value = self.summary.get(name)
            if value is not None:
                told.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
        if not self.summary.get("complete", True):
            told.append("not complete")
        return f"Result({', '.join(told)})"

    def frame(self, spark: Any = None) -> Any:
        """The history as a pandas DataFrame, or as one of the Spark session that is given."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("frame needs pandas: pip install 'thinwire[spark]'") from None
        if spark is None:
            return pandas.DataFrame(self.history)
        if not self.history:
            raise ConfigError("there is no history: give validation rows, and every evaluation has a row in it")
        names = list(dict.fromkeys(name for row in self.history for name in row))
        whole = {name: all(isinstance(row.get(name), int) for row in self.history) for name in names}
        schema = ", ".join(f"`{name}` {'bigint' if whole[name] else 'double'}" for name in names)
        rows = [
            tuple(row.get(n) if whole[n] or row.get(n) is None else float(row[n]) for n in names)
            for row in self.history
        ]
        return spark.createDataFrame(rows, schema)


@checks_arguments
def fit(
    model: nn.Module | Callable[[], nn.Module] | str | Mapping[str, Any],
    data: Any,
    *,
    inputs: Sequence[str] | None = None,
    label: str | None = "label",
    loss: str | Loss | None = None,
    optimizer: str | Mapping[str, Any] | OptimizerFactory = "sgd",
    scheduler: str | Mapping[str, Any] | SchedulerFactory | None = None,
    scheduler_every: Literal["step", "epoch"] = "epoch",
    algorithm: Algorithm | str | Mapping[str, Any] | None = None,
    strategy: Strategy | str | Mapping[str, Any] | None = None,
    placement: Placement | Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    exchange: str = "auto",
    codec: str = "float32",
    epochs: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    until: str | None = None,
    batch_size: int = 64,
    validation: Any = None,
    weight: str | None = None,
    transform: Transform | str | Mapping[str, Any] | None = None,
    metrics: str | Sequence[str] | Mapping[str, Metric] | None = None,
    stop: EarlyStopping | Mapping[str, Any] | None = None,
    restore_best: bool | None = None,
    callbacks: Sequence[Callable[[events.Event], Any]] = (),
    clip_norm: float | None = None,
    on_nonfinite: Literal["drop", "stop"] = "drop",
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    accumulate: int = 1,
    compile: bool = False,
    device: str = "auto",
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    seed: int = 0,
    deadlines: Deadlines | None = None,
    progress: bool | None = None,
) -> Result:
    """Trains a model on data with several workers; returns it with its history.

    Every argument is checked before a worker starts. Where a recipe has a form of an object, it may be given here too:
    `optimizer={"name": "sgd", "lr": 0.1}`, `scheduler={"name": "step", "step_size": 5}`, `stop={"patience": 3}`.

    Args:
        model: a module, a factory of one, a built-in name, or that with settings, {"name": "deepfm", "width": 8}. A
            factory is called under the seed on every worker.
        data: arrays, an Arrow table, a DataFrame, an RDD of (array, label), a Parquet path or glob, or a built-in set
            such as "digits".
        inputs: columns given to the model, in its order (models of transformers: by name); None takes all but label and
            weight.
        label: the column the loss compares with; None calls the loss with the output alone.
        loss: a name, or a callable of (output, label); unless said "cross_entropy", the algorithm's own, or "own", the
            network's, where the label is None or among the inputs.
        optimizer: a name, a recipe's form, or a callable that makes the optimizer from the parameters.
        scheduler: a name, a recipe's form, or a callable that makes a learning-rate scheduler from the optimizer.
        scheduler_every: whether it moves after each step or each epoch.
        algorithm: how a gradient is found: `BackPropagation` unless said, or `ContrastiveDivergence`.
        strategy: what replicas tell each other; `Relay` unless said.
        placement: how one replica spans several workers: `Planned`, `TensorParallel` or `Pipeline`; whole unless said.
        cluster: where workers run; two local processes unless said.
        exchange: how bytes move: "mesh", "table", "spark", or "auto", which takes what the strategy needs.
        codec: how contributions are packed, for strategies that leave it open.
        epochs: passes over the rows.
        steps: optimizer steps of each worker at most.
        seconds: of training, after which the run ends with the model as it is; those before a resume count.
        until: a target that ends the run, such as "val_accuracy >= 0.97" or "train_loss <= 0.1".
        batch_size: rows of one step of one worker.
        validation: a share of the rows, or data of its own.
        weight: a column of row weights.
        transform: a function from a batch's columns to a batch's columns, run on the workers; it sees nulls, and fills
            them. Or a `TableEncoder`, which is fitted on the training rows, and its columns are the inputs; `Tokenize`
            for text; or a data collator of transformers.
        metrics: names, or by name callables that give one number a row, `MetricOfSums`, or metrics of torchmetrics;
            measured on the validation rows.
        stop: early stopping.
        restore_best: give back the best evaluation's model; with `stop` unless said.
        callbacks: called with every event; one that returns True ends the run. One that has a method `finish` is given
            the result with it at the end: `thinwire.trackers` has such ones. One that has a method `on_model` is given
            the joint model, as a module, and the `evaluated` event of each evaluation: once an epoch unless said.
        clip_norm: largest norm of a gradient.
        on_nonfinite: whether a step with a loss or a gradient that is not finite, and a contribution that is not, is
            left out and told of, or ends the run. A run whose workers all keep skipping steps ends in any case.
        precision: "bfloat16" computes under autocast, "float16" with a scaled loss as well.
        accumulate: pieces that the rows of a step are computed in, one after the other, so that a larger batch_size
            fits into memory.
        compile: compute training's forward passes by torch.compile.
        device: "cpu", "cuda", or "auto".
        evaluate_every: steps between evaluations; once an epoch unless said.
        checkpoint_every: steps between checkpoints; at epochs, not too often, unless said.
        out: a folder or URL for events, summary and checkpoints.
        resume: the folder of an earlier run to go on from.
        seed: of everything random.
        deadlines: how long to wait for workers.
        progress: show a live display; only on a terminal or in a notebook unless said. True writes lines into a log.
    """
    asked = SimpleNamespace(**locals())
    what = defined(asked)
    with logs.of_a_run() as name, tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        rows = deal(asked, what, folder)
        url = None if what.out is None else f"{what.out.rstrip('/')}/checkpoints"
        store = None if url is None else CheckpointStore(url)
        kept = None if store is None else store.url  # absolute: executors have other working folders
        earlier = None if asked.resume is None else _earlier(asked.resume, what.strategy, rows)
        log = RunLog(what.out, callbacks, clock=what.site.time.wall)
        plan = plan_of(asked, what, rows, shows=log.shows)
        hub, wire = _wire(what.site, what.carrier)
        place = None if earlier is None else earlier.place
        job = job_of(asked, what, rows, plan, wire=wire, checkpoints=kept, resume=place, run=name)
        policy = policy_of(asked, what, plan)
        run = Run(job, what.site, rows.dealt, log, store, earlier, seed)
        try:
            while True:
                try:
                    outcome, took_s = run.execute(hub, policy, progress)
                    break
                except LostWorkersError as lost:
                    earlier = _from_checkpoint(lost, rows.placement, store, run.saved, earlier)
                finally:
                    hub.close()
                hub, wire = _wire(what.site, what.carrier)
                run.go_on_from(earlier, wire)
            trained = None if outcome.interrupted else run.trained(outcome)
            if trained is not None:
                evaluate_left_out(outcome, trained, job, rows.dealt, policy)
        except BaseException as error:
            reason = str(error) if isinstance(error, ThinwireError) else repr(error)
            log.close(events.RunEnded(reason=reason, summary={}))
            raise
        summary = run.summary(outcome, took_s)
        log.close(events.RunEnded(reason=outcome.reason, summary=summary))
        if what.out is not None:
            _write_summary(f"{what.out.rstrip('/')}/summary.json", summary)
        if trained is None:
            raise Interrupted(run.how_to_resume(what.out, outcome))
        result = Result(trained, outcome.history, summary, what.transform)
        for callback in callbacks:
            _finish(callback, result)
        return result


def _write_summary(url: str, summary: dict[str, Any]) -> None:
    try:
        write_file(url, (json.dumps(summary, indent=2) + "\n").encode())
    except CheckpointError as error:  # no reason to lose the model, which the caller is about to get
        _log.warning("the summary could not be written: %s", error)
        summary["unsaved"] = summary["unsaved"] or str(error)


def _finish(callback: Any, result: Result) -> None:
    """Gives a sink the result; what goes wrong there is no reason to lose the model."""
    finish = getattr(callback, "finish", None)
    if not callable(finish):
        return
    try:
        finish(result)
    except Exception as error:
        _log.warning("callback %r failed at the end: %s: %s", callback, type(error).__name__, error)


def _from_checkpoint(
    lost: LostWorkersError,
    placement: Placement,
    store: CheckpointStore | None,
    saved: str | None,
    earlier: Earlier | None,
) -> Earlier:
    """Where groups go on from when no replica is whole; raises where there is nothing new since the last time."""
    if store is None or saved is None or placement.size == 1 or (earlier and earlier.manifest.name == saved):
        raise lost
    return Earlier(store, store.load(saved), earlier.passed_over if earlier else {})


def _wire(cluster: Site, carrier: str) -> tuple[Hub, Wire]:
    """The coordinator's end of a run's wire, and what workers make theirs from."""
    if carrier == "spark":
        from thinwire.exchange.spark.link import SparkWire
        from thinwire.exchange.spark.post import SparkHub

        post = SparkWire(uuid.uuid4().hex[:12], secrets.token_hex(16))
        return SparkHub(cluster.needs_jobs(), post, cluster.workers), post  # letters are not lost
    hub, wire = cluster.wire()
    return ReliableHub(hub), ReliableWire(wire, cluster.time)


def _why_not(store: CheckpointStore, manifest: Manifest) -> str:
    """Why a whole checkpoint is nothing to go on from; empty where it is.

    Checkpoints of earlier versions may hold anything, so all their parts are read. Of later ones the joint part is
    read: the mark that says that they were checked as they were written may be forged. A worker checks its own part
    when it takes it up.
    """
    marked = manifest.meta.get("finite") is True
    names = [part.name for part in manifest.parts if not marked or part.name == "joint"]
    trees = (store.read_part(manifest, name) for name in names)
    try:
        return next(filter(None, (why_not_finite(tree) for tree in trees if isinstance(tree, dict))), "")
    except (CheckpointError, LookupError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"


def _earlier(resume: str, strategy: Strategy, rows: Rows) -> Earlier:
    store = CheckpointStore(f"{resume.rstrip('/')}/checkpoints")
    manifest, passed = store.newest_whole(functools.partial(_why_not, store))
    told = "; ".join(f"{name}: {why}" for name, why in passed.items())
    if manifest is None:
        damaged = f"; damaged are {told}" if passed else ""
        raise CheckpointError(
            f"resume = {resume!r} holds no complete checkpoint{damaged}; name the out folder of an earlier run"
        )
    if passed:
        _log.warning("going on from checkpoint %s; newer ones in %s cannot be used: %s", manifest.name, resume, told)
    made_by = manifest.meta.get("strategy")
    if made_by != name_of(strategy):
        raise CheckpointError(
            f"checkpoint {manifest.name} in {resume!r} was made by strategy {made_by!r}, not {name_of(strategy)!r}; "
            "resume with the same strategy"
        )
    placed = manifest.meta.get("placement", repr(Whole()))
    if placed != repr(rows.placement):
        raise CheckpointError(
            f"checkpoint {manifest.name} in {resume!r} was made with placement {placed}, not {rows.placement!r}; "
            "resume with the same placement"
        )
    for name, now in rows.alike.items():
        before = manifest.meta.get(name, now)  # earlier versions wrote none
        if before != now:
            raise CheckpointError(f"checkpoint {manifest.name} in {resume!r} {ALIKE[name].format(before, now)}")
    return Earlier(store, manifest, passed)
