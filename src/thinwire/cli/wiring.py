"""From a recipe's plain values to a call of `fit`."""

from __future__ import annotations

import importlib
from typing import Any

from thinwire.cluster.base import Cluster
from thinwire.cluster.local import Local
from thinwire.engine.stopping import EarlyStopping
from thinwire.errors import ConfigError, nearest
from thinwire.recipe import Recipe
from thinwire.replicas.objectives import NamedOptimizer, NamedScheduler
from thinwire.session import Result, fit
from thinwire.strategies import strategy


def run(recipe: Recipe, *, out: str | None, resume: str | None, progress: bool | None) -> Result:
    """Runs a recipe."""
    train, data = recipe.train, recipe.data
    scheduler, every = _scheduler(train.scheduler)
    return fit(
        model_name(recipe),
        data.source,
        inputs=data.inputs,
        label=data.label,
        loss=train.loss,
        optimizer=_optimizer(train.optimizer),
        scheduler=scheduler,
        scheduler_every=every,
        strategy=_strategy(recipe.strategy),
        cluster=_cluster(recipe),
        exchange=recipe.exchange.kind,
        codec=recipe.exchange.codec,
        epochs=train.epochs,
        steps=train.steps,
        until=train.until,
        batch_size=train.batch_size,
        validation=data.validation,
        weight=data.weight,
        transform=None if data.transform is None else imported("data.transform", data.transform),
        metrics=train.metrics,
        stop=_stop(train.stop),
        restore_best=train.restore_best,
        clip_norm=train.clip_norm,
        precision=train.precision,  # type: ignore[arg-type]
        device=train.device,
        evaluate_every=train.evaluate_every,
        checkpoint_every=recipe.run.checkpoint_every,
        out=out or recipe.run.out,
        resume=resume,
        seed=train.seed,
        progress=progress,
    )


def model_name(recipe: Recipe) -> str:
    """The network that a recipe names."""
    model = recipe.model
    if (model.zoo is None) == (model.factory is None):
        raise ConfigError('[model] needs one of zoo and factory; write zoo = "cnn8" or factory = "package.module:fn"')
    return model.zoo or model.factory or ""


def _strategy(values: dict[str, Any]) -> Any:
    knobs = dict(values)
    return strategy(str(knobs.pop("name", "relay")), knobs)


def _optimizer(given: str | dict[str, Any]) -> NamedOptimizer:
    if isinstance(given, str):
        return NamedOptimizer(given, lr=0.01)
    settings = dict(given)
    if "name" not in settings:
        raise ConfigError('train.optimizer needs a name; write optimizer = { name = "sgd", lr = 0.1 }')
    return NamedOptimizer(str(settings.pop("name")), **settings)


def _scheduler(given: dict[str, Any] | None) -> tuple[NamedScheduler | None, Any]:
    if given is None:
        return None, "epoch"
    settings = dict(given)
    if "name" not in settings:
        raise ConfigError('train.scheduler needs a name; write scheduler = { name = "cosine", T_max = 10 }')
    every = settings.pop("every", "epoch")
    if every not in ("step", "epoch"):
        raise ConfigError(f"train.scheduler.every = {every!r} is not known; use 'step' or 'epoch'")
    return NamedScheduler(str(settings.pop("name")), **settings), every


def _stop(given: dict[str, Any] | None) -> EarlyStopping | None:
    if given is None:
        return None
    allowed = ("patience", "metric", "mode", "min_delta")
    for key in given:
        if key not in allowed:
            raise ConfigError(f"train.stop.{key} is not known. {nearest(key, allowed)}")
    return EarlyStopping(**given)


def _cluster(recipe: Recipe) -> Cluster:
    cluster = recipe.cluster
    _only("cluster.kind", cluster.kind, ("local", "spark"))
    _only("placement.kind", recipe.placement.kind, ("whole",))
    if cluster.kind == "local":
        return Local(workers=cluster.workers, threads=cluster.threads, max_restarts=cluster.max_restarts)
    from thinwire.cluster.spark import Spark

    return Spark(
        workers=cluster.workers,
        master=cluster.master,
        threads=cluster.threads,
        repartition=cluster.repartition,
    )


def _only(path: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{path} = {value!r} is not known. {nearest(value, allowed)}")


def imported(path: str, name: str) -> Any:
    """What a recipe names as "package.module:function"."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path} = {name!r}: {error}; write it as 'package.module:function'") from error
