"""The composition root: objects wired, `fit` out."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from thinwire import __version__, events
from thinwire.checkpoint import CheckpointStore, Manifest, Part, decode, write_file
from thinwire.cluster import Local
from thinwire.data import ShardFiles, open_source, split
from thinwire.display import Display
from thinwire.engine.coordinator import Coordinator, Outcome, Policy
from thinwire.engine.membership import Deadlines
from thinwire.engine.plan import WorkerPlan
from thinwire.engine.stopping import EarlyStopping, Target
from thinwire.errors import CheckpointError, ConfigError, Interrupted, ThinwireError
from thinwire.exchange.wire import Keys, ZmqHub
from thinwire.job import Columns, Job, Transform, work
from thinwire.models import model_by_name
from thinwire.replicas import TrainSpec
from thinwire.replicas.objectives import (
    Loss,
    Metric,
    NamedOptimizer,
    Objective,
    OptimizerFactory,
    SchedulerFactory,
    metrics_of,
)
from thinwire.replicas.torch import build_module
from thinwire.rules.compression import codec as codec_by_name
from thinwire.runlog import RunLog
from thinwire.strategies import Relay, Strategy, name_of
from thinwire.strategies import strategy as strategy_by_name

KEEP_CHECKPOINTS = 2


@dataclass(frozen=True)
class Result:
    """What `fit` gives back.

    Attributes:
        model: the trained module, on the CPU, in evaluation mode.
        history: one row an evaluation.
        summary: the run in numbers; also `summary.json`.
    """

    model: nn.Module
    history: list[dict[str, Any]]
    summary: dict[str, Any]


def fit(
    model: nn.Module | Callable[[], nn.Module] | str,
    data: Any,
    *,
    inputs: Sequence[str] | None = None,
    label: str | None = "label",
    loss: str | Loss = "cross_entropy",
    optimizer: str | OptimizerFactory = "sgd",
    scheduler: SchedulerFactory | None = None,
    scheduler_every: Literal["step", "epoch"] = "epoch",
    strategy: Strategy | str | None = None,
    cluster: Local | None = None,
    codec: str = "float32",
    epochs: int | None = None,
    steps: int | None = None,
    until: str | None = None,
    batch_size: int = 64,
    validation: Any = None,
    weight: str | None = None,
    transform: Transform | None = None,
    metrics: Sequence[str] | Mapping[str, Metric] | None = None,
    stop: EarlyStopping | None = None,
    restore_best: bool | None = None,
    callbacks: Sequence[Callable[[events.Event], Any]] = (),
    clip_norm: float | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    device: str = "auto",
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    out: str | None = None,
    resume: str | None = None,
    seed: int = 0,
    deadlines: Deadlines | None = None,
    progress: bool | None = None,
) -> Result:
    """Trains a model on data with several workers; returns it with its history.

    Args:
        model: a module, a factory of one, or a built-in name. A factory is called under the seed on every worker.
        data: arrays, an Arrow table, a Parquet path or glob, or a built-in set such as "digits".
        inputs: columns given to the model, in its order; None takes all but label and weight.
        label: the column the loss compares with; None calls the loss with the output alone.
        loss: a name, or a callable of (output, label).
        optimizer: a name, or a callable that makes the optimizer from the parameters.
        scheduler: makes a learning-rate scheduler from the optimizer.
        scheduler_every: whether it moves after each step or each epoch.
        strategy: what replicas tell each other; `Relay` unless said.
        cluster: where workers run; two local processes unless said.
        codec: how contributions are packed, for strategies that leave it open.
        epochs: passes over the rows.
        steps: optimizer steps of each worker at most.
        until: a target that ends the run, such as "val_accuracy >= 0.97".
        batch_size: rows of one step of one worker.
        validation: a share of the rows, or data of its own.
        weight: a column of row weights.
        transform: a function from a batch's columns to a batch's columns, run on the workers.
        metrics: names, or callables by name, measured on the validation rows.
        stop: early stopping.
        restore_best: give back the best evaluation's model; with `stop` unless said.
        callbacks: called with every event; one that returns True ends the run.
        clip_norm: largest norm of a gradient.
        precision: "bfloat16" computes under autocast.
        device: "cpu", "cuda", or "auto".
        evaluate_every: steps between evaluations; once an epoch unless said.
        checkpoint_every: steps between checkpoints; at epochs, not too often, unless said.
        out: a folder or URL for events, summary and checkpoints.
        resume: the folder of an earlier run to go on from.
        seed: of everything random.
        deadlines: how long to wait for workers.
        progress: show a live display; only on a terminal unless said.
    """
    chosen = _strategy(strategy)
    where = cluster or Local()
    factory = model_by_name(model) if isinstance(model, str) else model
    spec = TrainSpec(
        loss=loss,
        optimizer=NamedOptimizer(optimizer, lr=0.01) if isinstance(optimizer, str) else optimizer,
        scheduler=scheduler,
        scheduler_every=scheduler_every,
        metrics=_metrics(metrics, loss),
        clip_norm=clip_norm,
        precision=precision,
        device=device,
        seed=seed,
    )
    _check(spec, chosen, codec, epochs=epochs, steps=steps, batch_size=batch_size)
    if epochs is None and steps is None and until is None:
        epochs = 1
    if resume is not None and out is None:
        out = resume
    policy_stop = Target.parse(until) if until else None
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        source = open_source(data)
        held = validation if validation is None or isinstance(validation, float | int) else open_source(validation)
        names = _columns(source.schema.names, inputs, label, weight)
        columns = None if transform is not None else [*names, *(n for n in (label, weight) if n)]
        shards = split(
            source,
            workers=where.workers,
            directory=folder,
            validation=float(held) if isinstance(held, int) else held,
            seed=seed,
            columns=columns,
        )
        log = RunLog(out, callbacks)
        store = CheckpointStore(f"{out.rstrip('/')}/checkpoints") if out is not None else None
        earlier = _earlier(resume, chosen) if resume is not None else None
        total_rows = sum(s.num_rows for s in shards)
        plan = WorkerPlan(
            worker=0,
            attempt=0,
            total_rows=total_rows,
            epochs=epochs,
            steps=steps,
            evaluates=any(s.num_validation_rows for s in shards),
            evaluate_every=evaluate_every,
            checkpoint_every=None if store is None else checkpoint_every or "auto",
            keeps_best=stop is not None if restore_best is None else restore_best,
            codec=codec,
        )
        keys = Keys.make()
        hub = ZmqHub(keys=keys, host=where.host)
        job = Job(
            model=factory,
            spec=spec,
            strategy=chosen,
            plan=plan,
            workers=where.workers,
            shards=tuple(shards),
            columns=Columns(inputs=names, label=label, weight=weight, transform=_both(source.transform, transform)),
            batch_size=batch_size,
            keys=keys,
            coordinator=hub.address,
            host=where.host,
            checkpoints=None if store is None else store.url,
            resume=None if earlier is None else (earlier[0].url, earlier[1].name),
        )
        run = _Run(job, where, shards, log, store, earlier, seed)
        policy = Policy(
            workers=where.workers,
            total_rows=total_rows,
            stop=stop,
            until=policy_stop,
            deadlines=deadlines or Deadlines(),
        )
        try:
            outcome, seconds = run.execute(hub, policy, progress)
        finally:
            hub.close()
        summary = run.summary(outcome, seconds)
        log.close(events.RunEnded(reason=outcome.reason, summary=summary))
        if out is not None:
            write_file(f"{out.rstrip('/')}/summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        if outcome.interrupted:
            raise Interrupted(run.how_to_resume(out, outcome))
        return Result(run.trained(outcome), outcome.history, summary)


class _Run:
    """One run on the driver: launches the workers, serves them, and sums up."""

    def __init__(
        self,
        job: Job,
        cluster: Local,
        shards: list[ShardFiles],
        log: RunLog,
        store: CheckpointStore | None,
        earlier: tuple[CheckpointStore, Manifest] | None,
        seed: int,
    ) -> None:
        self._job, self._cluster, self._shards, self._log = job, cluster, shards, log
        self._store, self._earlier, self._seed = store, earlier, seed
        self._coordinator: Coordinator | None = None

    def execute(self, hub: ZmqHub, policy: Policy, progress: bool | None) -> tuple[Outcome, float]:
        began = time.monotonic()
        self._log.emit(self._started(policy))
        workforce = self._cluster.launch(functools.partial(work, self._job))
        try:
            coordinator = self._coordinator = Coordinator(
                hub,
                workforce,
                policy,
                emit=self._log.emit,
                commit=self._commit if self._store is not None else None,
                meta=self._meta,
                resumed=None if self._earlier is None else dict(self._earlier[1].meta),
            )
            with Display(coordinator, self._job, progress) as display:
                self._log.listen(display.see)
                interrupted = False
                while True:
                    try:
                        outcome = coordinator.run(display.turn)
                        break
                    except KeyboardInterrupt:
                        if interrupted:
                            raise
                        interrupted = True
                        display.say("stopping at the next round and leaving a checkpoint; Ctrl-C again to stop at once")
                        coordinator.interrupt()
            return outcome, time.monotonic() - began
        except BaseException as error:
            reason = str(error) if isinstance(error, ThinwireError) else repr(error)
            self._log.close(events.RunEnded(reason=reason, summary={}))
            raise
        finally:
            workforce.stop()

    def _started(self, policy: Policy) -> events.RunStarted:
        strategy = self._job.strategy
        return events.RunStarted(
            strategy=name_of(strategy),
            knobs=dataclasses.asdict(strategy),
            workers=policy.workers,
            rows=policy.total_rows,
            validation_rows=sum(s.num_validation_rows for s in self._shards),
            parameters=0,
            seed=self._seed,
            resumed_from=None if self._earlier is None else self._earlier[1].name,
            version=__version__,
        )

    def _meta(self) -> dict[str, Any]:
        assert self._coordinator is not None
        reports = self._coordinator.progress().values()
        return {
            "strategy": name_of(self._job.strategy),
            "workers": self._job.workers,
            "seed": self._seed,
            "total_rows": self._job.plan.total_rows,
            "rows_done": sum(int((r.get("progress") or {}).get("rows", 0)) for r in reports),
            "thinwire": __version__,
        }

    def _commit(self, name: str, step: int, parts: list[dict[str, Any]], meta: dict[str, Any]) -> int:
        assert self._store is not None
        written = tuple(Part(p["name"], int(p["size_bytes"]), p["digest"]) for p in parts)
        self._store.commit(Manifest(name=name, step=step, parts=written, meta=meta))
        self._store.prune(KEEP_CHECKPOINTS)
        return sum(p.size_bytes for p in written)

    def trained(self, outcome: Outcome) -> nn.Module:
        """The module with the run's parameters."""
        given = self._job.model
        module = copy.deepcopy(given) if isinstance(given, nn.Module) else build_module(given, self._job.spec.seed)
        assert outcome.result is not None
        state = decode(outcome.result)
        module.cpu().load_state_dict(state)  # type: ignore[arg-type]
        return module.eval()

    def summary(self, outcome: Outcome, seconds: float) -> dict[str, Any]:
        metrics = outcome.metrics
        found = {
            "strategy": name_of(self._job.strategy),
            "workers": self._job.workers,
            "steps": outcome.steps,
            "rows": outcome.rows,
            "epochs": round(outcome.epochs, 4),
            "seconds": round(seconds, 3),
            "train_seconds": round(outcome.train_s, 3),
            "train_loss": outcome.train_loss,
            "val_loss": metrics.get("val_loss"),
            "val_accuracy": metrics.get("val_accuracy"),
            "busy": round(outcome.busy, 4),
            "bytes_sent": outcome.bytes_sent,
            "rounds": outcome.rounds,
            "generations": outcome.generations,
            "workers_lost": outcome.workers_lost,
            "refused": outcome.refused,
            "reason": outcome.reason,
            "checkpoint": outcome.checkpoint,
            "seed": self._seed,
        }
        found |= {k: v for k, v in metrics.items() if k not in found}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}

    def how_to_resume(self, out: str | None, outcome: Outcome) -> str:
        if out is None or outcome.checkpoint is None:
            return "interrupted; nothing was kept, because the run has no out folder: give one to be able to go on"
        return f"interrupted after {outcome.steps} steps; go on with resume={out!r} (or --resume {out})"


def _strategy(given: Strategy | str | None) -> Strategy:
    if given is None:
        return Relay()
    if isinstance(given, str):
        return strategy_by_name(given)
    if not isinstance(given, Strategy):
        raise ConfigError(f"strategy is {type(given).__name__}; give a strategy such as tw.Relay(), or its name")
    return given


def _metrics(given: Sequence[str] | Mapping[str, Metric] | None, loss: object) -> Any:
    if given is None:
        return ("accuracy",) if loss in ("cross_entropy", "nll", "bce_with_logits") else ()
    return dict(given) if isinstance(given, Mapping) else tuple(given)


def _check(spec: TrainSpec, strategy: Strategy, codec: str, **numbers: int | None) -> None:
    """Refuses what cannot work before any process starts."""
    Objective(spec.loss)
    metrics_of(spec.metrics)
    codec_by_name(codec)
    if strategy.timing == "async":
        raise ConfigError(f"strategy {name_of(strategy)!r} is asynchronous and needs the table exchange")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value} is too small; use 1 or more")
    if spec.precision not in ("float32", "bfloat16"):
        raise ConfigError(f"precision = {spec.precision!r} is not known; use 'float32' or 'bfloat16'")


def _columns(
    present: Sequence[str], inputs: Sequence[str] | None, label: str | None, weight: str | None
) -> tuple[str, ...]:
    if inputs is not None:
        return tuple([inputs] if isinstance(inputs, str) else inputs)
    found = tuple(n for n in present if n not in (label, weight))
    if not found:
        raise ConfigError(f"no input columns are left in {list(present)}; name them with inputs=[…]")
    return found


def _both(first: Transform | None, second: Transform | None) -> Transform | None:
    if first is None or second is None:
        return first or second
    return functools.partial(_in_turn, first, second)


def _in_turn(first: Transform, second: Transform, columns: dict[str, Any]) -> dict[str, Any]:
    return second(first(columns))


def _earlier(resume: str, strategy: Strategy) -> tuple[CheckpointStore, Manifest]:
    store = CheckpointStore(f"{resume.rstrip('/')}/checkpoints")
    manifest = store.latest()
    if manifest is None:
        raise CheckpointError(
            f"resume = {resume!r} holds no complete checkpoint; name the out folder of an earlier run"
        )
    made_by = manifest.meta.get("strategy")
    if made_by != name_of(strategy):
        raise CheckpointError(
            f"checkpoint {manifest.name} in {resume!r} was made by strategy {made_by!r}, not {name_of(strategy)!r}; "
            "resume with the same strategy"
        )
    return store, manifest
