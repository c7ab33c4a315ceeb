"""The asynchronous strategies through `fit`: consistency, checkpoints, what they send; in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError
from thinwire.models import mlp


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.002)


def fit(strategy: tw.Strategy, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": sgd,
        "strategy": strategy,
        "cluster": tw.Simulated(workers=3, step_s=0.01, link="100mbit", spread=0.2),
        "epochs": 3,
        "batch_size": 16,
        "validation": 0.2,
        "progress": False,
    }
    return tw.fit(changes.pop("model", mlp), "digits", **(settings | changes))


def differ(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("optimizer", "servers"),
    [
        (sgd, 1),
        (adam, "spread"),
        (adam, "driver"),
        pytest.param(adam, 1, marks=pytest.mark.long),
        pytest.param(sgd, "spread", marks=pytest.mark.long),
        pytest.param(sgd, "driver", marks=pytest.mark.long),
    ],
)
def test_strict_consistency_is_synchronous_training(optimizer: Any, servers: Any) -> None:
    """The mean of all gradients at every step, and one optimizer: to float tolerance the same parameters."""
    table = fit(tw.ParameterTable(consistency="strict", servers=servers, tuple_size=700), optimizer=optimizer)
    plain = fit(tw.Synchronous(), optimizer=optimizer)
    assert table.summary["steps"] == plain.summary["steps"]
    assert differ(table.model, plain.model) < 1e-4


@pytest.mark.parametrize(
    ("optimizer", "servers"),
    [
        pytest.param(optimizer, servers, marks=[] if (optimizer, servers) == (adam, "spread") else pytest.mark.long)
        for optimizer in (sgd, adam)
        for servers in (1, "spread", "driver")
    ],
)
def test_real_servers_come_to_what_servers_in_virtual_time_come_to(optimizer: Any, servers: Any) -> None:
    strategy = tw.ParameterTable(consistency="strict", servers=servers, tuple_size=700)
    real = fit(strategy, optimizer=optimizer, cluster=tw.Local(workers=3))
    assert differ(real.model, fit(strategy, optimizer=optimizer).model) < 1e-4


def test_groups_that_hold_all_workers_are_strict() -> None:
    assert differ(fit(tw.ParameterTable(groups=1)).model, fit(tw.ParameterTable(consistency="strict")).model) < 1e-5


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(tw.ParameterTable(), id="table"),
        pytest.param(tw.EASGD(period=4), id="easgd", marks=pytest.mark.long),
    ],
)
def test_eventual_consistency_comes_close_to_synchronous(strategy: tw.Strategy) -> None:
    """Within half a point and one of 359 validation rows, each with the learning rate that suits it."""
    optimizer = larger_sgd if isinstance(strategy, tw.ParameterTable) else momentum
    plain = _best(fit(tw.Synchronous(), epochs=15, optimizer=momentum))
    late = _best(fit(strategy, epochs=15, optimizer=optimizer))
    assert late >= plain - 0.005 - 1 / 359


def _best(result: tw.Result) -> float:
    return max(float(row["val_accuracy"]) for row in result.history)


def larger_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(tw.EASGD(period=3), id="easgd"),
        pytest.param(tw.EASGD(period=3, momentum=0.5), id="eamsgd", marks=pytest.mark.long),
        pytest.param(tw.DeepSpark(period=3), id="deepspark", marks=pytest.mark.long),
        pytest.param(tw.ParameterTable(), id="table"),
    ],
)
def test_a_run_resumes(strategy: tw.Strategy, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    first = fit(strategy, out=out, epochs=4, checkpoint_every=20, optimizer=adam)
    again = fit(strategy, out=out, resume=out, epochs=8, optimizer=adam)
    assert again.summary["rows"] == 8 * 1438
    assert again.history[: len(first.history)] == first.history
    assert again.history[-1]["val_loss"] < first.history[0]["val_loss"]  # not from the beginning again


def test_a_server_s_optimizer_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """Strict runs are repeatable: a resumed one, Adam's moments at the servers, comes close to an unbroken one."""
    strategy, out = tw.ParameterTable(consistency="strict"), str(tmp_path / "run")
    fit(strategy, out=out, epochs=3, optimizer=adam)
    resumed = fit(strategy, out=out, resume=out, epochs=6, optimizer=adam)
    whole = fit(strategy, epochs=6, optimizer=adam)
    assert differ(resumed.model, whole.model) < 0.02
    assert resumed.history[-1]["val_loss"] == pytest.approx(whole.history[-1]["val_loss"], rel=0.02)


def test_the_learning_rate_of_the_moment_goes_with_a_gradient() -> None:
    """A scheduler that takes the rate to zero after an epoch: nothing moves from there on."""

    def halt(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch == 0 else 0.0)

    one = fit(tw.ParameterTable(consistency="strict"), epochs=1, scheduler=halt)
    three = fit(tw.ParameterTable(consistency="strict"), epochs=3, scheduler=halt)
    assert differ(one.model, three.model) < 1e-6


def test_clipping_tied_and_unused_parameters_work_with_a_table() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
            self.tied = self.first.weight
            self.unused = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.last(torch.relu(self.first(x)) @ self.tied)

    table = fit(tw.ParameterTable(consistency="strict"), model=Odd)
    assert differ(table.model, fit(tw.ParameterTable(consistency="strict", servers=1), model=Odd).model) < 1e-4
    assert fit(tw.ParameterTable(), model=Odd, clip_norm=1.0).summary["complete"]


def test_deepspark_sends_less_than_easgd_of_the_same_first_period() -> None:
    """As the loss falls its period grows: fewer bytes, a loss as low."""
    where = tw.Simulated(workers=3, step_s=0.01)
    logs: dict[str, list[events.RoundLanded]] = {"deepspark": [], "easgd": []}

    def keep(name: str) -> Any:
        return lambda event: logs[name].append(event) if isinstance(event, events.RoundLanded) else None

    fixed = fit(tw.EASGD(period=4), epochs=20, optimizer=momentum, callbacks=[keep("easgd")], cluster=where)
    adaptive = fit(tw.DeepSpark(period=4), epochs=20, optimizer=momentum, callbacks=[keep("deepspark")], cluster=where)
    assert adaptive.summary["bytes_sent"] < 0.7 * fixed.summary["bytes_sent"]
    assert adaptive.summary["train_loss"] < fixed.summary["train_loss"] + 0.05
    apart = {name: max(e.steps for e in log) / max(e.round for e in log) for name, log in logs.items()}
    assert apart["deepspark"] > 1.4 * apart["easgd"], "steps between exchanges"


def test_a_lossy_codec_is_refused_with_a_table() -> None:
    with pytest.raises(ConfigError, match="float32"):
        fit(tw.EASGD(), codec="int8")


def test_more_servers_than_workers_are_as_many_as_workers() -> None:
    assert fit(tw.EASGD(servers=9, period=2), epochs=1).summary["complete"]


def test_an_asynchronous_strategy_that_is_not_served_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Late(tw.SparkNet):
        timing: ClassVar[Any] = "async"

    with pytest.raises(ConfigError, match="derive it from"):
        fit(Late())
