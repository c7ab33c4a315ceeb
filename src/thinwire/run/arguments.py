"""The arguments of `fit`: what each may be. `fit`, `TorchEstimator` and recipes all look here, before anything starts.

`ARGUMENTS` has a check for every argument: of its type, of its range, and of names. Where a recipe has a form of an
object, `{name = "sgd", lr = 0.1}` or a name alone, the check makes the object.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.coordinator.stopping import EarlyStopping, Target
from thinwire.data.tables import TableEncoder
from thinwire.data.tokens import Collate, is_collator, transform_of
from thinwire.errors import ConfigError, nearest
from thinwire.models import ZooModel, imported, model_by_name
from thinwire.placement import Pipeline, Placement, Planned, TensorParallel, Whole
from thinwire.protocol.deadlines import Deadlines
from thinwire.replicas import ALGORITHMS, Algorithm
from thinwire.replicas.keras import is_keras
from thinwire.replicas.objectives import LOSSES, OWN, NamedOptimizer, NamedScheduler, metrics_of
from thinwire.rules.compression import codec as codec_by_name
from thinwire.strategies import Strategy
from thinwire.strategies import strategy as strategy_by_name
from thinwire.values import (
    Check,
    choice,
    function,
    instance,
    known_only,
    named,
    number,
    optional,
    place,
    refused,
    text,
    truth,
    whole,
)

P = ParamSpec("P")
R = TypeVar("R")
PLACEMENTS: dict[str, type[Placement]] = {kind.name: kind for kind in (Whole, TensorParallel, Planned, Pipeline)}
RATE = 0.01
"""Learning rate of an optimizer that is given by its name alone."""
MOST_SEED = 2**63 - 1


def _model(key: str, given: Any) -> Any:
    if isinstance(given, Mapping):
        return ZooModel(*named(key, given, '{ name = "deepfm", width = 8 }'))
    if isinstance(given, str):
        model_by_name(given)
    elif not (isinstance(given, nn.Module) or is_keras(given) or callable(given)):
        raise refused(key, given, "an nn.Module, a function that makes one, or a built-in name such as 'cnn8'")
    elif isinstance(given, torch.jit.ScriptModule):
        raise ConfigError(
            f"{key} is a module of torch.jit, whose parameters cannot be put into one vector; give the module that it "
            "was made of, and script the trained one"
        )
    elif not (isinstance(given, nn.Module) or is_keras(given)):
        _refuse_arguments(key, given)
    return given


def _refuse_arguments(key: str, factory: Any) -> None:
    """Refuses a factory that cannot be called with nothing."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of what is not Python
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise ConfigError(
            f"{key} = {name}{signature} is called without arguments, and is {error}; give a function that needs none: "
            f"lambda: {name}(…), or functools.partial({name}, …)"
        ) from error


def _columns(key: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise refused(key, given, 'a list of names of columns, such as ["features"]')
    return tuple(names)


def _loss(key: str, given: Any) -> Any:
    if isinstance(given, str):
        if ":" in given:
            return imported(key, given)
        if given not in (*LOSSES, OWN):
            raise ConfigError(f"{key} = {given!r} is not known. {nearest(given, (*LOSSES, OWN))}")
        return given
    return function("a name such as 'cross_entropy', or a function of (output, label), such as nn.MSELoss()")(
        key, given
    )


def _optimizer(key: str, given: Any) -> Any:
    if isinstance(given, str):
        return NamedOptimizer(given, lr=RATE)
    if isinstance(given, Mapping):
        name, settings = named(key, given, '{ name = "sgd", lr = 0.1 }')
        return NamedOptimizer(name, **settings)
    if isinstance(given, torch.optim.Optimizer):
        kind = type(given).__name__
        raise ConfigError(
            f"{key} is a {kind} of this process's parameters, and each worker has parameters of its own; give a "
            f"function that makes one: optimizer=lambda parameters: torch.optim.{kind}(parameters, lr=0.1)"
        )
    if not callable(given):
        allowed = 'a name such as "sgd", { name = "sgd", lr = 0.1 }, or a function from parameters to an optimizer'
        raise refused(key, given, allowed)
    return given


def _scheduler(key: str, given: Any) -> Any:
    if isinstance(given, str):
        return NamedScheduler(given)
    if isinstance(given, Mapping):
        name, settings = named(key, given, '{ name = "cosine", T_max = 10 }')
        return NamedScheduler(name, **settings)
    if isinstance(given, (LRScheduler, ReduceLROnPlateau)):
        kind = type(given).__name__
        raise ConfigError(
            f"{key} is a {kind} of this process's optimizer, and each worker has an optimizer of its own; give a "
            f"function that makes one: scheduler=lambda optimizer: torch.optim.lr_scheduler.{kind}(optimizer, …)"
        )
    if not callable(given):
        allowed = 'a name such as "plateau", { name = "cosine", T_max = 10 }, or a function from optimizer to scheduler'
        raise refused(key, given, allowed)
    return given


def _algorithm(key: str, given: Any) -> Algorithm:
    if isinstance(given, str | Mapping):
        example = '{ name = "contrastive_divergence", k = 1 }'
        name, settings = (given, {}) if isinstance(given, str) else named(key, given, example)
        if name not in ALGORITHMS:
            raise ConfigError(f"{key}.name = {name!r} is not known. {nearest(name, ALGORITHMS)}")
        kind = ALGORITHMS[name]
        known_only(key, settings, tuple(field.name for field in dataclasses.fields(kind)), name)
        made: Algorithm = kind(**settings)
        return made
    if not isinstance(given, Algorithm):
        raise refused(key, given, "an algorithm such as tw.ContrastiveDivergence(k=1), or its name")
    return given


def _strategy(key: str, given: Any) -> Strategy:
    if isinstance(given, str):
        return strategy_by_name(given)
    if isinstance(given, Mapping):
        name, knobs = named(key, {"name": "relay", **given}, '{ name = "sparknet", period = 20 }')
        return strategy_by_name(name, knobs)
    if not isinstance(given, Strategy):
        raise refused(key, given, "a strategy such as tw.Relay(), or its name")
    if not hasattr(given, "timing"):
        raise ConfigError(
            f"strategy {type(given).__name__} does not say its timing; write timing = 'barrier', 'overlap' or 'async' "
            "in its class"
        )
    return given


def _placement(key: str, given: Any) -> Placement:
    if isinstance(given, Mapping):
        name, settings = named(key, given, '{ kind = "planned", group_size = 4 }', "kind")
        choice(*PLACEMENTS)(f"{key}.kind", name)
        kind = PLACEMENTS[name]
        known_only(key, settings, tuple(field.name for field in dataclasses.fields(kind)), name)
        return kind(**settings)
    if not isinstance(given, Placement):
        raise refused(key, given, "a placement such as tw.Planned(group_size=4)")
    return given


def _cluster(key: str, given: Any) -> Any:
    if isinstance(given, type) or not callable(getattr(given, "site", None)):
        raise refused(key, given, "a cluster such as tw.Local(workers=2), tw.Spark(workers=8) or tw.Simulated()")
    return given


def _codec(key: str, given: Any) -> str:
    return codec_by_name(text("'float32'")(key, given)).name


def _until(key: str, given: Any) -> str:
    Target.parse(text('"val_accuracy >= 0.97"')(key, given))
    return str(given)


def _validation(key: str, given: Any) -> Any:
    if isinstance(given, bool):
        raise refused(key, given, "a share of the rows such as 0.1, or rows of their own")
    if isinstance(given, numbers.Real):
        share = number(least=0)(key, given)
        if share >= 1:
            raise refused(key, share, "a share of the rows below 1, such as 0.1, or rows of their own")
        return float(share) or None
    return given


def _transform(key: str, given: Any) -> Any:
    if isinstance(given, str):
        return imported(key, given)
    if isinstance(given, Mapping):
        if "name" in given:
            return transform_of(key, given)
        known_only(key, given, tuple(field.name for field in dataclasses.fields(TableEncoder)), "TableEncoder")
        return TableEncoder(**given)
    if is_collator(given):
        return Collate(given)
    if not callable(given) or isinstance(given, type):
        what = "a function from a batch's columns to a batch's columns, tw.Tokenize(tokenizer, 'text') or"
        raise refused(key, given, f"{what} tw.TableEncoder(…)")
    return given


def _metrics(key: str, given: Any) -> Any:
    if isinstance(given, str):
        given = (given,)
    if isinstance(given, Mapping):
        metrics_of(given)
        return dict(given)
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise refused(key, given, 'a list of names such as ["accuracy"], or functions by name: {"f1": f1}')
    metrics_of(given)
    return tuple(given)


def _stop(key: str, given: Any) -> EarlyStopping:
    if isinstance(given, Mapping):
        known_only(key, given, tuple(field.name for field in dataclasses.fields(EarlyStopping)), "early stopping")
        return EarlyStopping(**given)
    if not isinstance(given, EarlyStopping):
        raise refused(key, given, "tw.EarlyStopping(patience=3)")
    return given


def _callbacks(key: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(map(callable, given)):
        raise refused(key, given, "a list of functions of an event, such as [print]")
    for each in given:
        if isinstance(each, type):
            raise refused(key, each, f"an instance, such as {each.__name__}(…)")
    return tuple(given)


def _device(key: str, given: Any) -> str:
    name = str(given) if isinstance(given, torch.device) else text("'auto', 'cpu' or 'cuda'")(key, given)
    if name != "auto":
        try:
            kind = torch.device(name).type
        except RuntimeError as error:
            raise refused(key, given, "'auto', 'cpu' or 'cuda'") from error
        if kind not in ("cpu", "cuda"):
            raise refused(key, given, "'auto', 'cpu' or 'cuda'")
    return name


ARGUMENTS: dict[str, Check] = {
    "model": _model,
    "data": lambda key, value: value,  # its own kinds are told of where it is opened
    "inputs": optional(_columns),
    "label": optional(text("'label'")),
    "loss": optional(_loss),
    "optimizer": _optimizer,
    "scheduler": optional(_scheduler),
    "scheduler_every": choice("step", "epoch"),
    "algorithm": optional(_algorithm),
    "strategy": optional(_strategy),
    "placement": optional(_placement),
    "cluster": optional(_cluster),
    "exchange": choice("auto", "mesh", "table", "spark"),
    "codec": _codec,
    "epochs": optional(whole(1)),
    "steps": optional(whole(1)),
    "seconds": optional(number(above=0)),
    "until": optional(_until),
    "batch_size": whole(1),
    "validation": _validation,
    "weight": optional(text("'weight'")),
    "transform": optional(_transform),
    "metrics": optional(_metrics),
    "stop": optional(_stop),
    "restore_best": optional(truth),
    "callbacks": _callbacks,
    "clip_norm": optional(number(above=0)),
    "on_nonfinite": choice("drop", "stop"),
    "precision": choice("float32", "bfloat16", "float16"),
    "accumulate": whole(1),
    "compile": truth,
    "device": _device,
    "evaluate_every": optional(whole(1)),
    "checkpoint_every": optional(whole(1)),
    "out": optional(place),
    "resume": optional(place),
    "seed": whole(0, MOST_SEED),
    "deadlines": optional(instance(Deadlines, "tw.Deadlines(silence_s=30.0)")),
    "progress": optional(truth),
}
"""By argument of `fit`, what it may be."""


def checked(given: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Arguments in the form that a run goes on with.

    Args:
        given: some arguments of `fit`, by name.
        keys: what messages call them, where that is another name: a recipe's key, say.

    Raises:
        ConfigError: one is of another type, out of its range, or names what is not known.
    """
    return {name: ARGUMENTS[name]((keys or {}).get(name, name), value) for name, value in given.items()}


def checks_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """`fit` with its arguments checked, and the defaults with them."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in signature.parameters:
                raise TypeError(f"{call.__name__} has no argument {name!r}. {nearest(name, signature.parameters)}")
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments.update(checked(bound.arguments))
        return call(*bound.args, **bound.kwargs)

    return checking
