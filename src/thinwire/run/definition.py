"""What a run is: what `fit` was asked for, settled in steps before the first worker starts."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from thinwire import logs
from thinwire.cluster.base import Cluster, Dealt, Opened, Site
from thinwire.cluster.frames import decode_images, is_frame
from thinwire.cluster.local import Local
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.stopping import Target
from thinwire.data.columns import Nullable
from thinwire.data.tables import TableEncoder
from thinwire.data.tokens import Tokenize
from thinwire.models import model_by_name
from thinwire.placement import Placement, refuse_unreadable
from thinwire.protocol.deadlines import Deadlines
from thinwire.records import is_rdd
from thinwire.replicas import TrainingStep, TrainSpec
from thinwire.replicas.keras import KerasModule, is_keras
from thinwire.replicas.labels import labels_of
from thinwire.replicas.metrics import computed
from thinwire.replicas.objectives import NamedScheduler, metrics_of
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
    refuse_not_finite,
    refuse_unvalidated,
    stepping_for,
    target_for,
    wanted_for,
    warn_without_effect,
    why_dense,
)
from thinwire.run.job import Columns, Job, Transform
from thinwire.run.networks import copied, refuse_instance, refuse_one_for_all, steps_of
from thinwire.run.optimizers import refuse_optimizer
from thinwire.run.searches import Setup, refuse_searches
from thinwire.run.sizing import FirstRow, sized
from thinwire.run.tables import of_table
from thinwire.run.trial import Trial
from thinwire.strategies import Relay, Strategy
from thinwire.strategies.base import by_time
from thinwire.transport.ports import Wire
from thinwire.worker.plan import WorkerPlan

_log = logging.getLogger(__name__)

ALIKE = {
    "network": "is of a network whose trained parameters or buffers have other names or shapes; resume with the same "
    "model and the same frozen parameters",
    "optimizer": "was made with the optimizer {0}, not {1}, whose state it would be; resume with the same optimizer "
    "(its learning rate and the like may differ), or begin a new run from the trained model",
}
"""What a run that goes on from a checkpoint must have as the earlier run had it, with the error if it differs."""
Asked = SimpleNamespace
"""The arguments of `fit` by name, each checked and in its one form."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a run is, before its data are opened."""

    site: Site
    factory: Any
    """Makes the network."""
    inputs: tuple[str, ...] | None
    transform: Transform | None
    spec: TrainSpec
    epochs: int | None
    strategy: Strategy
    carrier: str
    placement: Placement
    """As it was asked for: the group size may be left to the first row."""
    deadlines: Deadlines
    target: Target | None
    out: str | None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A run's data, dealt out to its workers, and what the first row tells."""

    dealt: Dealt
    columns: Columns
    placement: Placement
    base: str | None
    """The digest of a base that is not trained, if there is one."""
    alike: Mapping[str, str]
    """What a run that goes on from a checkpoint must have as the earlier run had it; see `ALIKE`."""


def defined(asked: Asked) -> Definition:
    """What a run is; refuses what cannot be."""
    besides = {
        "label": asked.label,
        "weight": asked.weight,
        "validation": asked.validation if isinstance(asked.validation, str) else None,
    }
    model, transform, inputs = of_table(
        asked.model, asked.transform, asked.data, inputs=asked.inputs, besides=besides, validation=asked.validation
    )
    warn_without_effect(
        validated=asked.validation is not None or any(hasattr(each, "on_model") for each in asked.callbacks),
        saved=asked.out is not None or asked.resume is not None,
        watching={name: getattr(asked, name) for name in ("metrics", "evaluate_every", "restore_best")},
        saving={"checkpoint_every": asked.checkpoint_every},
    )
    strategy: Strategy = asked.strategy or Relay()
    site = (asked.cluster or _default_cluster(asked.data)).site(asked.data)
    deadlines = site.deadlines(asked.deadlines)
    network: Any = model_by_name(model) if isinstance(model, str) else model
    if is_keras(network):
        network = KerasModule(network)
    refuse_instance(network)
    if site.in_process:
        refuse_one_for_all(network, asked.seed, site.workers)
    factory = network
    if site.in_process and isinstance(network, nn.Module):
        factory = functools.partial(copied, network)  # threads must not train one module together
    bounds = asked.epochs, asked.steps, asked.until, asked.seconds
    epochs = 1 if all(bound is None for bound in bounds) else asked.epochs
    spec = _spec(asked, network, inputs, epochs)
    carrier = carrier_for(asked.exchange, strategy, site)
    placement = placement_for(asked.placement, strategy, carrier, site)
    if carrier == "spark" and asked.deadlines is None:  # jobs are slow, and letters are not lost
        deadlines = dataclasses.replace(deadlines, stall_s=300.0, silence_s=60.0, prepare_s=60.0)
    spec = dataclasses.replace(spec, dense=why_dense(strategy, placement))
    validated = asked.validation is not None
    refuse_impossible(spec, strategy, asked.codec, placement, validated=validated)
    refuse_not_finite(network)
    refuse_optimizer(network, spec, strategy, placement)
    setup = Setup(spec=spec, strategy=strategy, placement=placement, exchange=carrier, codec=asked.codec)
    refuse_searches(factory, setup)
    return Definition(
        site=site,
        factory=factory,
        inputs=inputs,
        transform=transform,
        spec=spec,
        epochs=epochs,
        strategy=strategy,
        carrier=carrier,
        placement=placement,
        deadlines=deadlines,
        target=target_for(asked.until, asked.stop, spec.metrics, validated=validated),
        out=asked.resume if asked.out is None else asked.out,
    )


def _spec(asked: Asked, network: Any, inputs: tuple[str, ...] | None, epochs: int | None) -> TrainSpec:
    """How a worker takes a step."""
    method: Any
    moves: Any
    stepping = Stepping(asked.algorithm, asked.optimizer, asked.scheduler, asked.scheduler_every)
    method, optimizer, moves, every = stepping_for(
        network, stepping, seed=asked.seed, weight=asked.weight, compiled=asked.compile
    )
    unlabelled = asked.label is None or (asked.label in (inputs or ()) and may_take_names(network))
    own = unlabelled or isinstance(method, TrainingStep)
    loss, metrics = objective_for(method, asked.loss, asked.metrics, own=own)
    if isinstance(moves, NamedScheduler):
        every = moves.every or every
        span = epochs if every == "epoch" else asked.steps
        moves = moves.moving(every).over(span)
        if late := moves.unsettled(span):
            _log.warning("%s", late)
    return TrainSpec(
        loss=loss,
        algorithm=method,
        optimizer=optimizer,
        scheduler=moves,
        scheduler_every=every,
        metrics=metrics_for(metrics, loss),
        clip_norm=asked.clip_norm,
        precision=asked.precision,
        accumulate=asked.accumulate,
        compile=asked.compile,
        device=asked.device,
        seed=asked.seed,
    )


def deal(asked: Asked, what: Definition, folder: str) -> Rows:
    """Opens the data, tries the first row, and deals the rows out to the workers."""
    opened = what.site.open(asked.data, asked.validation)
    what.site.look(what.out, ports=what.carrier != "spark")
    columns, opaque = _columns(asked, what, opened)
    refuse_unreadable(what.placement, what.factory, asked.seed, len(columns.inputs))
    validated = asked.validation is not None
    trial = Trial(
        what.factory,
        what.spec,
        columns,
        asked.batch_size,
        transforms=opaque,
        validated=validated,
        nullable=nullable_of(what.transform),
        steps=steps_of(what.strategy, what.placement, what.spec, what.site.workers),
    )
    first = FirstRow(trial, kept=what.placement.group_size == "auto")
    wanted = wanted_for(trial, validation=asked.validation, indicator=opened.indicator)
    dealt = opened.deal(wanted._replace(measure=first), folder)
    placement = sized(what.placement, trial, first, where=what.site, strategy=what.strategy)
    refuse_few_rows(dealt.rows, what.site.workers, placement)
    if dealt.validation_rows == 0 and validated:
        refuse_unvalidated(asked.validation, what.target, asked.stop)
    columns = dataclasses.replace(columns, labels=dealt.labels)
    alike = {name: trial.found[name] for name in ALIKE if name in trial.found}
    return Rows(dealt=dealt, columns=columns, placement=placement, base=trial.found.get("base"), alike=alike)


def _columns(asked: Asked, what: Definition, opened: Opened) -> tuple[Columns, bool]:
    """What is read of the data, and whether a transform of the caller's own makes something else of it."""
    transform = what.transform
    names = columns_for([n for n in opened.names if n != opened.indicator], what.inputs, asked.label, asked.weight)
    reads, opaque = None, transform is not None and not isinstance(transform, TableEncoder)
    if isinstance(transform, Tokenize):
        names, reads, opaque = transform.given(names), transform.reads(names), False
    columns = Columns(
        inputs=names,
        reads=reads,
        label=asked.label,
        labels=labels_of(what.spec.loss),
        weight=asked.weight,
        transform=in_turn(opened.transform, transform),
    )
    return columns, opaque


def plan_of(asked: Asked, what: Definition, rows: Rows, *, shows: bool) -> WorkerPlan:
    """What each worker does; `shows` whether callbacks are given joint models."""
    size = rows.placement.size
    goes_on = by_time(what.strategy) and size == 1 and what.site.workers > 1 and what.epochs is not None
    return WorkerPlan(
        worker=0,
        attempt=0,
        epochs=what.epochs,
        steps=asked.steps,
        evaluates=shows or (asked.validation is not None and rows.dealt.validation_rows != 0),
        shows=shows,
        evaluate_every=asked.evaluate_every,
        checkpoint_every=None if what.out is None else asked.checkpoint_every or "auto",
        keeps_best=asked.stop is not None if asked.restore_best is None else asked.restore_best,
        codec=asked.codec,
        deadlines=what.deadlines,
        group_size=size,
        seconds=asked.seconds,
        beyond=what.site.workers if goes_on else None,
        on_nonfinite=asked.on_nonfinite,
    )


def job_of(
    asked: Asked,
    what: Definition,
    rows: Rows,
    plan: WorkerPlan,
    *,
    wire: Wire,
    checkpoints: str | None,
    resume: tuple[str, str] | None,
    run: str,
) -> Job:
    """What a worker is sent."""
    site = what.site
    return Job(
        model=what.factory,
        spec=what.spec,
        strategy=what.strategy,
        plan=plan,
        workers=site.workers,
        feed=rows.dealt.feed,
        exchange=what.carrier,
        silence_s=120.0 if what.carrier == "spark" else 30.0,
        columns=rows.columns,
        batch_size=asked.batch_size,
        wire=wire,
        checkpoints=checkpoints,
        resume=resume,
        base=rows.base,
        placement=rows.placement,
        time=site.time,
        prefetch=site.prefetch if what.transform is not None else None,
        replica=site.replica,
        crew=site.crew,
        part=site.part,
        observe=site.observe,
        alike=rows.alike,
        run=run,
        log=logs.wanted(),
    )


def policy_of(asked: Asked, what: Definition, plan: WorkerPlan) -> Policy:
    """What the coordinator decides by."""
    return Policy(
        workers=what.site.workers,
        helpers=what.strategy.helpers,
        stop=asked.stop,
        until=what.target,
        seconds=asked.seconds,
        epochs=None if plan.beyond is None else what.epochs,
        compute=functools.partial(computed, {f"val_{k}": v for k, v in metrics_of(what.spec.metrics).items()}),
        deadlines=what.deadlines,
        group_size=plan.group_size,
    )


def _default_cluster(data: Any) -> Cluster:
    """Two processes here, or the Spark cluster that the data is on."""
    if not (is_frame(data) or is_rdd(data)):
        return Local()
    from thinwire.cluster.spark import Spark

    return Spark()


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
