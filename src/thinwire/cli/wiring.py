"""Turns a recipe's plain values into a call of `fit`."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from thinwire.checkpoint import write_file
from thinwire.cli.first_rows import DIGITS
from thinwire.cluster.base import Cluster
from thinwire.cluster.local import Local
from thinwire.data.tables import TableEncoder
from thinwire.errors import ConfigError, nearest
from thinwire.events import Event
from thinwire.placement import Placement
from thinwire.recipe import Recipe
from thinwire.run.arguments import checked
from thinwire.run.session import Result, fit
from thinwire.run.tables import OfTable, of_table

BATCH_SIZE = 64
KEYS = {
    "inputs": "data.inputs",
    "label": "data.label",
    "weight": "data.weight",
    "validation": "data.validation",
    "transform": "data.transform",
    "exchange": "exchange.kind",
    "codec": "exchange.codec",
    "checkpoint_every": "run.checkpoint_every",
    "out": "run.out",
    "resume": "--resume",
    "strategy": "strategy",
} | {
    name: f"train.{name}"
    for name in (
        "accumulate",
        "algorithm",
        "batch_size",
        "clip_norm",
        "compile",
        "device",
        "epochs",
        "evaluate_every",
        "loss",
        "metrics",
        "on_nonfinite",
        "optimizer",
        "precision",
        "restore_best",
        "scheduler",
        "seconds",
        "seed",
        "steps",
        "stop",
        "until",
    )
}
"""The recipe's key for each argument of `fit`, for messages."""


def run(
    recipe: Recipe,
    *,
    out: str | None,
    resume: str | None,
    progress: bool | None,
    callbacks: Sequence[Callable[[Event], Any]] = (),
) -> Result:
    """Runs a recipe; `callbacks` are called in addition to the recipe's trackers."""
    import_modules(recipe)
    by_caffe = recipe.model.caffe is not None or recipe.train.solver is not None
    folder = out or recipe.run.out
    asked: dict[str, Any] = {"model": None if by_caffe else model_of(recipe)}
    asked |= {name: attrgetter(key)(recipe) for name, key in KEYS.items() if name != "resume"}
    asked |= {
        "data": recipe.data.source or DIGITS,
        "batch_size": recipe.train.batch_size or BATCH_SIZE,
        "cluster": _cluster(recipe),
        "transform": transform_of(recipe),
        "out": folder,
        "resume": resume,
    }
    if by_caffe:
        from thinwire.cli.caffe import arguments, keep

        asked |= arguments(recipe)
    result = fit(
        **checked(asked, KEYS),
        placement=placement_of(recipe),
        callbacks=(*callbacks, *_trackers(recipe)),
        progress=progress,
    )
    if by_caffe and folder is not None:
        keep(result.model, folder)
    if isinstance(result.transform, TableEncoder) and folder is not None:
        write_file(f"{folder.rstrip('/')}/encoder.json", (json.dumps(result.transform.state()) + "\n").encode())
    return result


def _trackers(recipe: Recipe) -> list[Callable[[Event], Any]]:
    from thinwire.trackers import MLflow, TensorBoard

    found: list[Callable[[Event], Any]] = []
    if recipe.run.tensorboard is not None:
        found.append(TensorBoard(recipe.run.tensorboard))
    if recipe.run.mlflow is not None:
        found.append(MLflow(recipe.run.mlflow))
    return found


def import_modules(recipe: Recipe) -> None:
    """Imports the modules of `model.modules`, such as Caffe layers that register themselves."""
    for name in recipe.model.modules or ():
        try:
            importlib.import_module(name)
        except (ImportError, ValueError) as error:  # ValueError for a text that is not a module's name
            raise ConfigError(f"model.modules = {name!r}: {error}; put the module's folder on PYTHONPATH") from error


def model_of(recipe: Recipe) -> str | dict[str, Any]:
    """The network that a recipe names, with its settings."""
    name, settings = model_name(recipe), recipe.model.settings
    if settings and recipe.model.zoo is None:
        raise ConfigError(
            "model.settings are of a network of model.zoo; a factory of your own takes none: leave them out"
        )
    return {**settings, "name": name} if settings else name


def transform_of(recipe: Recipe) -> Any:
    """The transform of a recipe."""
    if recipe.data.table is not None and recipe.data.transform is not None:
        raise ConfigError(
            "data.table and data.transform exclude each other; make the columns in SQL or in the data, or have a "
            "transform of your own call a TableEncoder"
        )
    if recipe.data.table is None:
        return recipe.data.transform
    return checked({"transform": recipe.data.table}, {"transform": "data.table"})["transform"]


def table_of(recipe: Recipe) -> OfTable:
    """A recipe's network, inputs and transform; a `TableEncoder` is fitted."""
    data = recipe.data
    besides = {"data.label": data.label, "data.weight": data.weight}
    source, model, transform = data.source or DIGITS, model_of(recipe), transform_of(recipe)
    return of_table(model, transform, source, inputs=data.inputs, besides=besides, validation=data.validation)


def model_name(recipe: Recipe) -> str:
    """The name of a recipe's network."""
    model = recipe.model
    if (model.zoo is None) == (model.factory is None):
        raise ConfigError(
            '[model] needs one of zoo, factory and caffe; write zoo = "cnn8", factory = "package.module:fn" or '
            'caffe = "train_val.prototxt"'
        )
    return model.zoo or model.factory or ""


def placement_of(recipe: Recipe) -> Placement:
    """The placement of a recipe."""
    given = {k: v for k, v in dataclasses.asdict(recipe.placement).items() if v is not None}
    found: Placement = checked({"placement": given})["placement"]
    return found


def _cluster(recipe: Recipe) -> Cluster:
    cluster = recipe.cluster
    _only("cluster.kind", cluster.kind, ("local", "spark", "simulated"))
    if cluster.kind == "simulated":
        return _simulated(recipe)
    if cluster.kind == "local":
        return Local(workers=cluster.workers, threads=cluster.threads, max_restarts=cluster.max_restarts)
    from thinwire.cluster.spark import Spark

    return Spark(
        workers=cluster.workers,
        master=cluster.master,
        threads=cluster.threads,
        repartition=cluster.repartition,
    )


def _simulated(recipe: Recipe) -> Cluster:
    from thinwire.cluster.simulated import Fault, Simulated

    cluster, allowed = recipe.cluster, tuple(f.name for f in dataclasses.fields(Fault))
    for fault in cluster.faults or ():
        for key in fault:
            if key not in allowed:
                raise ConfigError(f"cluster.faults.{key} is not a field of a fault. {nearest(key, allowed)}")
        if "at_s" not in fault:
            raise ConfigError("cluster.faults needs at_s; write faults = [{ at_s = 20, worker = 1 }]")
    try:
        slow = {int(worker): float(factor) for worker, factor in (cluster.slow or {}).items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cluster.slow = {cluster.slow} is not understood; write slow = {{ 3 = 2.0 }}") from error
    return Simulated(
        workers=cluster.workers,
        link=cluster.link,
        latency_s=cluster.latency_ms / 1e3,
        step_s=cluster.step_s,
        ratio=cluster.ratio,
        spread=cluster.spread,
        slow=slow,
        contention=cluster.contention,
        handling=cluster.handling,
        store_s=cluster.store_s,
        faults=[Fault(**fault) for fault in cluster.faults or ()],
        seed=recipe.train.seed,
    )


def _only(path: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{path} = {value!r} is not known. {nearest(value, allowed)}")
