"""The composition root: objects wired, `fit` out."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import secrets
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn

from thinwire import events, logs
from thinwire.checkpoint import CheckpointStore, Manifest, write_file
from thinwire.checkpoint.finite import why_not_finite
from thinwire.cluster.base import Cluster, Site
from thinwire.cluster.frames import decode_images, is_frame
from thinwire.cluster.local import Local
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.stopping import EarlyStopping
from thinwire.data.columns import Nullable
from thinwire.data.tables import TableEncoder
from thinwire.data.tokens import Tokenize
from thinwire.errors import CheckpointError, ConfigError, Interrupted, LostWorkersError, ThinwireError
from thinwire.models import model_by_name
from thinwire.placement import Placement, Whole, refuse_unreadable
from thinwire.protocol.deadlines import Deadlines
from thinwire.records import is_rdd
from thinwire.replicas import Algorithm, TrainingStep, TrainSpec
from thinwire.replicas.keras import KerasModule, is_keras
from thinwire.replicas.labels import labels_of
from thinwire.replicas.metrics import computed
from thinwire.replicas.objectives import (
    Loss,
    Metric,
    NamedScheduler,
    OptimizerFactory,
    SchedulerFactory,
    metrics_of,
)
from thinwire.run.arguments import checks_arguments
from thinwire.run.checks import (
    Stepping,
    carrier_for,
    columns_for,
    may_take_names,
    metrics_for,
    objective_for,
    placement_for,
    refuse_few_rows,
    refuse_impossible,
    refuse_unvalidated,
    stepping_for,
    target_for,
    wanted_for,
    warn_without_effect,
    why_dense,
)
from thinwire.run.driver import Earlier, Run
from thinwire.run.job import Columns, Job, Transform
from thinwire.run.left_out import evaluate_left_out
from thinwire.run.networks import copied, refuse_instance, refuse_one_for_all, steps_of
from thinwire.run.optimizers import refuse_optimizer
from thinwire.run.run_log import RunLog
from thinwire.run.searches import Setup, refuse_searches
from thinwire.run.sizing import FirstRow, sized
from thinwire.run.tables import of_table
from thinwire.run.trial import Trial
from thinwire.strategies import Relay, Strategy, name_of
from thinwire.strategies.base import by_time
from thinwire.transport.ports import Hub, Wire
from thinwire.transport.reliable import ReliableHub, ReliableWire
from thinwire.worker.plan import WorkerPlan

_log = logging.getLogger(__name__)
ALIKE = {
    "network": "is of a network whose trained parameters or buffers have other names or shapes; resume with the same "
    "model and the same frozen parameters",
    "optimizer": "was made with the optimizer {0}, not {1}, whose state it would be; resume with the same optimizer "
    "(its learning rate and the like may differ), or begin a new run from the trained model",
}
"""What a run that goes on must have as the earlier one had it, and what is told where it has not."""


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
    out, resume = cast("str | None", out), cast("str | None", resume)  # by now arguments have one form
    placement = cast("Placement | None", placement)
    besides = {"label": label, "weight": weight, "validation": validation if isinstance(validation, str) else None}
    model, transform, inputs = of_table(model, transform, data, inputs=inputs, besides=besides, validation=validation)
    own = None if isinstance(transform, TableEncoder) else transform
    warn_without_effect(
        validated=validation is not None or any(hasattr(each, "on_model") for each in callbacks),
        saved=out is not None or resume is not None,
        watching={"metrics": metrics, "evaluate_every": evaluate_every, "restore_best": restore_best},
        saving={"checkpoint_every": checkpoint_every},
    )
    stop = cast("EarlyStopping | None", stop)
    chosen: Any = strategy or Relay()
    where = (cluster or _default_cluster(data)).site(data)
    patience = where.deadlines(deadlines)
    factory: Any = model_by_name(model) if isinstance(model, str) else model
    if is_keras(factory):
        factory = KerasModule(factory)
    network = factory
    refuse_instance(network)
    if where.in_process:
        refuse_one_for_all(network, seed, where.workers)
    if where.in_process and isinstance(factory, nn.Module):
        factory = functools.partial(copied, factory)  # threads must not train one module together
    method: Any
    moves: Any
    method, optimizer, moves, scheduler_every = stepping_for(
        network,
        Stepping(cast("Algorithm | None", algorithm), optimizer, scheduler, scheduler_every),
        seed=seed,
        weight=weight,
        compiled=compile,
    )
    unlabelled = label is None or (label in (inputs or ()) and may_take_names(network))
    loss, metrics = objective_for(method, loss, metrics, own=unlabelled or isinstance(method, TrainingStep))
    if epochs is None and steps is None and until is None and seconds is None:
        epochs = 1
    if isinstance(moves, NamedScheduler):
        scheduler_every = moves.every or scheduler_every  # type: ignore[assignment]
        span = epochs if scheduler_every == "epoch" else steps
        moves = moves.moving(scheduler_every).over(span)
        if late := moves.unsettled(span):
            _log.warning("%s", late)
    spec = TrainSpec(
        loss=loss,
        algorithm=method,
        optimizer=optimizer,  # type: ignore[arg-type]  # by now it is a function
        scheduler=moves,
        scheduler_every=scheduler_every,
        metrics=metrics_for(metrics, loss),
        clip_norm=clip_norm,
        precision=precision,
        accumulate=accumulate,
        compile=compile,
        device=device,
        seed=seed,
    )
    carrier = carrier_for(exchange, chosen, where)
    spread = placement_for(placement, chosen, carrier, where)
    if carrier == "spark" and deadlines is None:  # jobs are slow, and letters are not lost
        patience = dataclasses.replace(patience, stall_s=300.0, silence_s=60.0, prepare_s=60.0)
    spec = dataclasses.replace(spec, dense=why_dense(chosen, spread))
    refuse_impossible(spec, chosen, codec, spread, validated=validation is not None)
    refuse_optimizer(network, spec, chosen, spread)
    refuse_searches(factory, Setup(spec=spec, strategy=chosen, placement=spread, exchange=carrier, codec=codec))
    if resume is not None and out is None:
        out = resume
    target = target_for(until, stop, spec.metrics, validated=validation is not None)
    with logs.of_a_run() as name, tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        opened = where.open(data, validation)
        where.look(out, ports=carrier != "spark")
        names = columns_for([n for n in opened.names if n != opened.indicator], inputs, label, weight)
        reads, opaque = None, own is not None
        if isinstance(transform, Tokenize):
            names, reads, opaque = transform.given(names), transform.reads(names), False
        refuse_unreadable(spread, factory, seed, len(names))
        columns = Columns(
            inputs=names,
            reads=reads,
            label=label,
            labels=labels_of(loss),
            weight=weight,
            transform=in_turn(opened.transform, transform),
        )
        trial = Trial(
            factory,
            spec,
            columns,
            batch_size,
            transforms=opaque,
            validated=validation is not None,
            nullable=nullable_of(transform),
            steps=steps_of(chosen, spread, spec, where.workers),
        )
        first = FirstRow(trial, kept=spread.group_size == "auto")
        wanted = wanted_for(trial, validation=validation, indicator=opened.indicator)
        dealt = opened.deal(wanted._replace(measure=first), folder)
        spread = sized(spread, trial, first, where=where, strategy=chosen)
        refuse_few_rows(dealt.rows, where.workers, spread)
        if dealt.validation_rows == 0 and validation is not None:
            refuse_unvalidated(validation, target, stop)
        store = CheckpointStore(f"{out.rstrip('/')}/checkpoints") if out is not None else None
        alike = {name: trial.found[name] for name in ALIKE if name in trial.found}
        earlier = _earlier(resume, chosen, spread, alike) if resume is not None else None
        log = RunLog(out, callbacks, clock=where.time.wall)
        goes_on = by_time(chosen) and spread.size == 1 and where.workers > 1 and epochs is not None
        beyond = where.workers if goes_on else None
        plan = WorkerPlan(
            worker=0,
            attempt=0,
            epochs=epochs,
            steps=steps,
            evaluates=log.shows or (validation is not None and dealt.validation_rows != 0),
            shows=log.shows,
            evaluate_every=evaluate_every,
            checkpoint_every=None if store is None else checkpoint_every or "auto",
            keeps_best=stop is not None if restore_best is None else restore_best,
            codec=codec,
            deadlines=patience,
            group_size=spread.size,
            seconds=seconds,
            beyond=beyond,
            on_nonfinite=on_nonfinite,
        )
        hub, wire = _wire(where, carrier)
        job = Job(
            model=factory,
            spec=spec,
            strategy=chosen,
            plan=plan,
            workers=where.workers,
            feed=dealt.feed,
            exchange=carrier,
            silence_s=120.0 if carrier == "spark" else 30.0,
            columns=dataclasses.replace(columns, labels=dealt.labels),
            batch_size=batch_size,
            wire=wire,
            checkpoints=None if store is None else store.url,
            resume=None if earlier is None else earlier.place,
            base=trial.found.get("base"),
            placement=spread,
            time=where.time,
            prefetch=where.prefetch if transform is not None else None,
            replica=where.replica,
            crew=where.crew,
            part=where.part,
            observe=where.observe,
            alike=alike,
            run=name,
            log=logs.wanted(),
        )
        policy = Policy(
            workers=where.workers,
            helpers=chosen.helpers,
            stop=stop,
            until=target,
            seconds=seconds,
            epochs=None if beyond is None else epochs,
            compute=functools.partial(computed, {f"val_{k}": v for k, v in metrics_of(spec.metrics).items()}),
            deadlines=patience,
            group_size=spread.size,
        )
        run = Run(job, where, dealt, log, store, earlier, seed)
        try:
            while True:
                try:
                    outcome, seconds = run.execute(hub, policy, progress)
                    break
                except LostWorkersError as lost:
                    earlier = _from_checkpoint(lost, spread, store, run.saved, earlier)
                finally:
                    hub.close()
                hub, wire = _wire(where, carrier)
                run.go_on_from(earlier, wire)
            trained = None if outcome.interrupted else run.trained(outcome)
            if trained is not None:
                evaluate_left_out(outcome, trained, job, dealt, policy)
        except BaseException as error:
            reason = str(error) if isinstance(error, ThinwireError) else repr(error)
            log.close(events.RunEnded(reason=reason, summary={}))
            raise
        summary = run.summary(outcome, seconds)
        log.close(events.RunEnded(reason=outcome.reason, summary=summary))
        if out is not None:
            _write_summary(f"{out.rstrip('/')}/summary.json", summary)
        if trained is None:
            raise Interrupted(run.how_to_resume(out, outcome))
        result = Result(trained, outcome.history, summary, transform)
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


def _default_cluster(data: Any) -> Cluster:
    """Two processes here, or the Spark cluster that the data is on."""
    if not (is_frame(data) or is_rdd(data)):
        return Local()
    from thinwire.cluster.spark import Spark

    return Spark()


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


def in_turn(first: Transform | None, second: Transform | None) -> Transform | None:
    """Two transforms as one."""
    if first is None or second is None:
        return first or second
    return functools.partial(composed, first, second)


def nullable_of(transform: Transform | None) -> Nullable:
    """Which columns may have nulls, since this transform fills them."""
    if isinstance(transform, TableEncoder):
        return transform.columns
    if isinstance(transform, functools.partial) and transform.func is composed:
        return nullable_of(transform.args[1])
    return transform is not None and not (isinstance(transform, functools.partial) and transform.func is decode_images)


def composed(first: Transform, second: Transform, columns: dict[str, Any]) -> dict[str, Any]:
    """The second of the first."""
    return second(first(columns))


def _why_not(store: CheckpointStore, manifest: Manifest) -> str:
    """Why a whole checkpoint is nothing to go on from; empty where it is. Those that say so were checked as they were
    written; earlier versions wrote any.
    """
    if manifest.meta.get("finite") is True:
        return ""
    trees = (store.read_part(manifest, part.name) for part in manifest.parts)
    try:
        return next(filter(None, (why_not_finite(tree) for tree in trees if isinstance(tree, dict))), "")
    except (CheckpointError, LookupError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"


def _earlier(resume: str, strategy: Strategy, placement: Placement, alike: Mapping[str, str]) -> Earlier:
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
    if placed != repr(placement):
        raise CheckpointError(
            f"checkpoint {manifest.name} in {resume!r} was made with placement {placed}, not {placement!r}; "
            "resume with the same placement"
        )
    for name, now in alike.items():
        before = manifest.meta.get(name, now)  # earlier versions wrote none
        if before != now:
            raise CheckpointError(f"checkpoint {manifest.name} in {resume!r} {ALIKE[name].format(before, now)}")
    return Earlier(store, manifest, passed)
