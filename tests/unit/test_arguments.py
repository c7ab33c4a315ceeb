"""Arguments of `fit`, `TorchEstimator` and recipes are looked at on the driver, before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import recipe
from thinwire.cli.wiring import run
from thinwire.errors import ConfigError
from thinwire.run.arguments import ARGUMENTS, checked

RANDOM = np.random.default_rng(0)
ROWS = {"x": RANDOM.normal(size=(64, 4)).astype(np.float32), "label": RANDOM.integers(0, 3, 64)}
SOME = torch.nn.Linear(2, 2)
STEPPER = torch.optim.SGD(SOME.parameters(), lr=0.1)

WRONG: list[tuple[str, Any, str]] = [
    ("epochs", 1.5, r"epochs = 1\.5 is not possible; use a whole number of 1 or more"),
    ("epochs", 0, "epochs = 0 is too small"),
    ("epochs", True, "epochs = True is not possible"),
    ("epochs", "3", "epochs = '3' is not possible"),
    ("steps", -4, "steps = -4 is too small"),
    ("batch_size", 0.5, r"batch_size = 0\.5 is not possible"),
    ("evaluate_every", "epoch", "evaluate_every = 'epoch' is not possible"),
    ("checkpoint_every", 0, "checkpoint_every = 0 is too small"),
    ("seed", -1, "seed = -1 is too small"),
    ("seed", 2**70, "seed = .* is too large"),
    ("seed", None, "seed = None is not possible"),
    ("clip_norm", -1.0, r"clip_norm = -1\.0 is not possible; use a number above 0"),
    ("clip_norm", 0, "clip_norm = 0 is not possible"),
    ("clip_norm", float("nan"), "clip_norm = nan is not possible"),
    ("clip_norm", "1", "clip_norm = '1' is not possible"),
    ("cluster", 2, r"cluster = 2 is not possible; use a cluster such as tw\.Local\(workers=2\)"),
    ("cluster", "local", "cluster = 'local' is not possible"),
    ("cluster", tw.Local, "cluster = the class Local is not possible"),
    ("strategy", 3, r"strategy = 3 is not possible; use a strategy such as tw\.Relay\(\)"),
    ("strategy", tw.SparkNet, "strategy = the class SparkNet is not possible"),
    ("strategy", "relai", "Did you mean 'relay'"),
    ("strategy", {"name": "sparknet", "perod": 3}, "Did you mean 'period'"),
    ("placement", 4, "placement = 4 is not possible"),
    ("placement", "planned", r"use a placement such as tw\.Planned"),
    ("placement", {"kind": "planed"}, "Did you mean 'planned'"),
    ("placement", {"kind": "planned", "group": 2}, "Did you mean 'group_size'"),
    ("loss", 3, "loss = 3 is not possible"),
    ("loss", nn.CrossEntropyLoss, "loss = the class CrossEntropyLoss is not possible"),
    ("loss", "cross_entrpy", "Did you mean 'cross_entropy'"),
    ("loss", "no_such_module:loss", "write it as 'package.module:function'"),
    ("optimizer", STEPPER, r"optimizer is a SGD of this process's parameters.*lambda parameters: torch\.optim\.SGD"),
    ("optimizer", 0.1, r"optimizer = 0\.1 is not possible"),
    ("optimizer", None, "optimizer = None is not possible"),
    ("optimizer", "sdg", "Did you mean 'sgd'"),
    ("optimizer", {"lr": 0.1}, "optimizer = .* has no name"),
    ("optimizer", {"name": "adm"}, "Did you mean 'adam'"),
    ("optimizer", {"name": "sgd", "lr": -1.0}, "does not take"),
    ("optimizer", {"name": "sgd", "momentun": 0.9}, "does not take"),
    ("scheduler", "cosin", "Did you mean 'cosine'"),
    ("scheduler", "step", "does not take .*step_size"),
    ("scheduler", {"T_max": 3}, "scheduler = .* has no name"),
    ("scheduler", {"name": "cosine", "T_max": 3, "every": "batch"}, "every = 'batch' is not known"),
    ("scheduler", torch.optim.lr_scheduler.StepLR(STEPPER, 3), "scheduler is a StepLR of this process's optimizer"),
    ("scheduler", torch.optim.lr_scheduler.ReduceLROnPlateau(STEPPER), "is a ReduceLROnPlateau of this process's"),
    ("scheduler", 3, "scheduler = 3 is not possible"),
    ("scheduler_every", "batch", "scheduler_every = 'batch' is not known"),
    ("algorithm", "back_propagaton", "Did you mean 'back_propagation'"),
    ("algorithm", {"name": "contrastive_divergence", "kk": 2}, "Did you mean 'k'"),
    ("exchange", "mesch", "Did you mean 'mesh'"),
    ("codec", "int3", "int4"),
    ("codec", 8, "codec = 8 is not possible"),
    ("until", 0.9, r"until = 0\.9 is not possible"),
    ("until", "val_accuracy 0.9", "is not understood"),
    ("inputs", 3, "inputs = 3 is not possible"),
    ("inputs", [], "inputs = .* is not possible"),
    ("inputs", ["x", 3], "inputs = .* is not possible"),
    ("label", 3, "label = 3 is not possible"),
    ("weight", 1.0, r"weight = 1\.0 is not possible"),
    ("validation", 1.5, r"validation = 1\.5 is not possible; use a share of the rows below 1"),
    ("validation", -0.1, r"validation = -0\.1 is not possible"),
    ("validation", True, "validation = True is not possible"),
    ("transform", 3, "transform = 3 is not possible"),
    ("metrics", 3, "metrics = 3 is not possible"),
    ("metrics", [len], "metrics = .* use a list of names .* or functions by name"),
    ("metrics", ["acuracy"], "Did you mean 'accuracy'"),
    ("metrics", {"f1": 3}, "metrics.f1 = 3 is not possible"),
    ("stop", 3, "stop = 3 is not possible"),
    ("stop", {"patiense": 3}, "Did you mean 'patience'"),
    ("stop", {"patience": 0}, "patience = 0 is too small"),
    ("restore_best", "yes", "restore_best = 'yes' is not possible; use True or False"),
    ("callbacks", print, "callbacks = .* is not possible; use a list"),
    ("callbacks", [3], "callbacks = .* is not possible"),
    ("on_nonfinite", "skip", "on_nonfinite = 'skip' is not known"),
    ("precision", "bfloat61", "Did you mean 'bfloat16'"),
    ("device", "gpu", "device = 'gpu' is not possible"),
    ("out", 3, "out = 3 is not possible"),
    ("out", "", "out = '' is not possible"),
    ("resume", 3, "resume = 3 is not possible"),
    ("deadlines", 30, "deadlines = 30 is not possible"),
    ("progress", "no", "progress = 'no' is not possible"),
]


def refuses_to_be_made() -> nn.Module:
    raise AssertionError("a model was made")


@pytest.mark.parametrize(("name", "value", "told"), WRONG, ids=[f"{n}={v!r:.30}" for n, v, _ in WRONG])
def test_an_argument_that_is_not_possible_is_refused_before_a_model_is_made(name: str, value: Any, told: str) -> None:
    arguments: dict[str, Any] = {"cluster": tw.Local(processes=False), "validation": 0.2, name: value}
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        tw.fit(refuses_to_be_made, ROWS, **arguments)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model = \[.*\] .*is not possible; use an nn\.Module"):
        tw.fit([nn.Linear(4, 3)], ROWS, cluster=tw.Local(processes=False))  # type: ignore[arg-type]


def test_a_factory_that_needs_arguments_is_refused() -> None:
    for factory in (nn.Linear, lambda outputs: nn.Linear(4, outputs)):
        with pytest.raises(ConfigError, match=r"model = .* is called without arguments, and is missing a required"):
            tw.fit(factory, ROWS, cluster=tw.Local(processes=False))  # type: ignore[arg-type]


def test_the_table_has_every_argument_of_fit_and_no_other() -> None:
    assert set(ARGUMENTS) == set(inspect.signature(tw.fit).parameters)


def test_a_name_that_is_no_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"fit has no argument 'epoch'\. Did you mean 'epochs'"):
        tw.fit(refuses_to_be_made, ROWS, epoch=3)  # type: ignore[call-arg]


def test_what_is_checked_once_may_be_checked_again() -> None:
    given = {
        "optimizer": "adam",
        "scheduler": {"name": "step", "step_size": 2},
        "strategy": "sparknet",
        "metrics": "mae",
    }
    once = checked(given)
    assert checked(once) == once


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (tw.Local, "workers", 2.5),
        (tw.Local, "workers", "2"),
        (tw.Local, "max_restarts", 1.5),
        (tw.Local, "processes", "no"),
        (tw.Simulated, "workers", True),
        (tw.Simulated, "latency_s", "fast"),
        (tw.Simulated, "step_s", 0),
        (tw.Planned, "group_size", 2.5),
        (tw.Planned, "link_gbit", "1gbit"),
        (tw.Pipeline, "microbatches", 0),
        (tw.EarlyStopping, "patience", True),
        (tw.EarlyStopping, "min_delta", float("nan")),
        (tw.EarlyStopping, "metric", None),
        (tw.Deadlines, "silence_s", -1.0),
        (tw.Deadlines, "silence_s", "15"),
        (tw.ContrastiveDivergence, "k", 1.5),
    ],
)
def test_a_field_that_is_not_possible_is_refused_by_its_name(kind: Callable[..., Any], field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\.{field} = "):
        kind(**{field: value})


def trained(**arguments: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (1 + index))
    options: dict[str, Any] = {"cluster": tw.Simulated(workers=2, step_s=0.01), "epochs": 4, "batch_size": 8}
    result = tw.fit(model, ROWS, strategy=tw.Synchronous(), **(options | arguments))
    return result.model.state_dict()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_recipes_form_of_an_optimizer_trains_as_the_optimizer_itself() -> None:
    plain = trained(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert equal(trained(optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}), plain)


def test_a_recipes_form_of_a_scheduler_trains_as_the_scheduler_itself() -> None:
    plain = trained(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5), scheduler_every="step")
    form = {"name": "step", "step_size": 3, "gamma": 0.5, "every": "step"}
    assert equal(trained(scheduler=form), plain)
    assert not equal(trained(), plain)


def test_a_cosine_that_is_only_named_ends_with_the_run() -> None:
    plain = trained(scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4))
    assert equal(trained(scheduler="cosine"), plain)


def test_names_and_recipes_forms_of_all_else_are_understood() -> None:
    plain = trained()
    forms = {
        "strategy": {"name": "synchronous"},
        "algorithm": "back_propagation",
        "placement": {"kind": "whole"},
        "loss": "torch.nn.functional:cross_entropy",
        "metrics": "accuracy",
        "stop": {"patience": 5},
        "validation": ROWS,
    }
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (1 + index))
    cluster = tw.Simulated(workers=2, step_s=0.01)
    result = tw.fit(model, ROWS, cluster=cluster, epochs=4, batch_size=8, restore_best=False, **forms)
    assert equal(result.model.state_dict(), plain)


def test_numbers_of_numpy_and_paths_are_as_good_as_plain_ones(tmp_path: Path) -> None:
    result = tw.fit(
        nn.Linear(4, 3),
        ROWS,
        cluster=tw.Simulated(workers=1, step_s=0.01),
        epochs=np.int64(1),  # type: ignore[arg-type]
        clip_norm=np.float32(1.0),  # type: ignore[arg-type]
        validation=np.float64(0.25),
        out=tmp_path / "run",
    )
    assert result.summary["epochs"] == 1.0
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.epochs=0", "train.epochs = 0 is too small"),
        ("train.clip_norm=-1.0", r"train.clip_norm = -1.0 is not possible"),
        ("train.scheduler=cosin", "Did you mean 'cosine'"),
        ("data.validation=1.5", r"data.validation = 1.5 is not possible"),
        ("train.seed=-1", "train.seed = -1 is too small"),
        ("exchange.kind=mesch", "exchange.kind = 'mesch' is not known. Did you mean 'mesh'"),
        ("train.stop={patience=0}", "patience = 0 is too small"),
        ("placement.kind=planed", "placement.kind = 'planed' is not known. Did you mean 'planned'"),
    ],
)
def test_a_recipes_values_are_refused_by_the_recipes_keys(change: str, told: str) -> None:
    chosen = recipe.load("digits", [change])
    with pytest.raises(ConfigError, match=told):
        run(chosen, out=None, resume=None, progress=False)


def estimator(**given: Any) -> Any:
    pytest.importorskip("pyspark")
    from thinwire.spark import TorchEstimator

    return TorchEstimator(refuses_to_be_made, input_cols=["x"], **given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"epoch": 3}, "TorchEstimator has no parameter 'epoch'. Did you mean 'epochs'.*clip_norm.*scheduler"),
        ({"schedular": "cosine"}, "Did you mean 'scheduler'"),
        ({"epochs": 1.5}, "epochs = 1.5 .*is not possible"),
        ({"epochs": 0}, "epochs = 0 is too small"),
        ({"batch_size": "many"}, "batch_size = 'many' .*is not possible"),
        ({"num_workers": 0}, "num_workers = 0 is too small"),
        ({"clip_norm": -1.0}, "clip_norm = -1.0 is not possible"),
        ({"cluster": 2}, "cluster = 2 is not possible"),
        ({"optimizer": STEPPER}, "optimizer is a SGD of this process's parameters"),
        ({"optimizer": {"name": "adm"}}, "Did you mean 'adam'"),
        ({"scheduler": {"name": "cosin"}}, "Did you mean 'cosine'"),
        ({"strategy": 3}, "strategy = 3 is not possible"),
        ({"loss": nn.MSELoss}, "loss = the class MSELoss is not possible"),
        ({"stop": 3}, "stop = 3 is not possible"),
        ({"input_cols": "x"}, "input_cols.*is not possible"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast' .*is not possible"),
    ],
)
def test_an_estimator_refuses_what_fit_would_when_it_is_made(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        estimator(**({"epochs": 1} | given)) if "input_cols" not in given else estimator().setParams(**given)


def test_an_estimator_keeps_recipes_forms_as_they_were_given() -> None:
    scheduler = {"name": "cosine", "T_max": 4}
    made = estimator(optimizer={"name": "sgd", "momentum": 0.9}, learning_rate=0.5, scheduler=scheduler)
    assert made._optimizer() == {"name": "sgd", "momentum": 0.9, "lr": 0.5}
    assert made.getOrDefault(made.fitOptions)["scheduler"] == scheduler
    with pytest.raises(ConfigError, match=r"learning_rate = 0.5 and optimizer = .* differ"):
        estimator(optimizer={"name": "sgd", "lr": 0.1}, learning_rate=0.5)._optimizer()


def test_a_learning_rate_beside_a_function_is_warned_of() -> None:
    made = estimator(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), learning_rate=0.5)
    with pytest.warns(UserWarning, match="learning_rate has no effect"):
        made._optimizer()
