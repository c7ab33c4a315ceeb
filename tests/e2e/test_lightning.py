"""LightningModules as they are: their own steps, optimizers and schedules, with no trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError, WorkerError

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'thinwire[lightning]'")


class Digits(lightning.LightningModule):
    """As its documentation has them: steps that log, an optimizer with a schedule."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.log_dict({"val_loss": F.cross_entropy(output, y), "val_acc": (output.argmax(1) == y).float().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(model: Any = Digits, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "inputs": ["pixels"], "steps": 12, "batch_size": 32, "cluster": tw.Simulated(workers=2),
        "strategy": tw.SparkNet(period=3), "progress": False,
    }  # fmt: skip
    return tw.fit(model, "digits", **asked | given)


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("model", [Digits, Digits(), lambda: Digits(0.1)], ids=["class", "module", "function"])
def test_a_lightning_module_trains_by_its_own_step_and_optimizer(model: Any) -> None:
    found = fit(model, steps=None, epochs=10, validation=0.2)
    assert isinstance(found.model, Digits)
    assert found.summary["val_acc"] > 0.7
    assert found.summary["val_loss"] < 1.2
    assert {"val_loss", "val_acc"} <= set(found.history[-1])


def test_it_does_what_the_same_network_does_with_the_same_optimizer_and_schedule() -> None:
    def net() -> nn.Module:
        return Digits().net

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    plain = fit(
        net,
        steps=50,
        optimizer=sgd,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 40, gamma=0.5),
        scheduler_every="step",
    )
    torch.testing.assert_close(vector(fit(steps=50).model), vector(plain.model), rtol=1e-4, atol=1e-5)


@pytest.mark.processes
def test_processes_train_it_as_well() -> None:
    assert fit(cluster=tw.Local(workers=2), validation=0.2).summary["complete"]


def test_an_optimizer_that_is_given_takes_the_place_of_the_configured_one() -> None:
    given = fit(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    torch.manual_seed(0)
    assert torch.equal(vector(given.model), vector(Digits()))


def test_a_step_may_take_columns_by_name_and_return_a_dict() -> None:
    class ByName(Digits):
        def training_step(self, batch: Any) -> Any:
            return {"loss": F.cross_entropy(self(batch["pixels"]), batch["label"])}

    torch.testing.assert_close(vector(fit(ByName).model), vector(fit().model))


def test_without_a_validation_step_evaluations_have_the_training_step_s_loss() -> None:
    class Plain(Digits):
        validation_step = lightning.LightningModule.validation_step

    assert np.isfinite(fit(Plain, validation=0.2).summary["val_loss"])


@pytest.mark.parametrize(
    "form",
    [
        lambda o: o,
        lambda o: [o],
        lambda o: ([o], [torch.optim.lr_scheduler.StepLR(o, 100)]),
        lambda o: {"optimizer": o},
        lambda o: {"optimizer": o, "lr_scheduler": torch.optim.lr_scheduler.StepLR(o, 100)},
        lambda o: ([o], [{"scheduler": torch.optim.lr_scheduler.StepLR(o, 100), "interval": "epoch"}]),
        lambda o: [{"optimizer": o}],
    ],
)
def test_all_forms_of_one_optimizer_are_taken(form: Any) -> None:
    class Formed(Digits):
        def configure_optimizers(self) -> Any:
            return form(torch.optim.SGD(self.parameters(), lr=0.1))

    torch.manual_seed(0)
    assert not torch.equal(vector(fit(Formed, steps=2).model), vector(Digits()))


def test_a_run_resumes_with_the_configured_optimizer_and_schedule(tmp_path: Any) -> None:
    whole = fit()
    fit(steps=6, out=str(tmp_path), checkpoint_every=6)
    assert torch.equal(vector(fit(resume=str(tmp_path)).model), vector(whole.model))


@pytest.mark.parametrize(
    ("change", "given", "told"),
    [
        ({"configure_optimizers": lambda self: None}, {}, "must give one torch optimizer"),
        ({"configure_optimizers": lambda self: [sgd_of(self), sgd_of(self)]}, {}, "several parameter groups"),
        (
            {"configure_optimizers": lambda self: {"optimizer": sgd_of(self), "lr_scheduler": {"frequency": 3}}},
            {},
            "frequency=3",
        ),
        ({"automatic_optimization": False}, {}, "automatic_optimization = False"),
        ({"training_step": lambda self, batch, batch_idx: None}, {}, "gives no loss"),
        ({}, {"weight": "label"}, "weight = 'label' has no effect"),
        ({}, {"compile": True}, "compile = True has no effect"),
        ({}, {"placement": tw.Planned(group_size=2)}, "a placement spreads back-propagation"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], given: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, WorkerError), match=told):
        fit(type("Changed", (Digits,), change), **given)


def sgd_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)
