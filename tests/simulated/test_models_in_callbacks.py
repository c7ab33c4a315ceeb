"""Callbacks that have `on_model` are given the joint model of every evaluation, under any strategy and placement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.events import Evaluated, Event
from thinwire.models.sequences import masked_cross_entropy, sample

MADE = np.random.default_rng(1)
X, Y = MADE.standard_normal((96, 6)).astype(np.float32), MADE.integers(0, 3, 96)
HELD_X, HELD_Y = MADE.standard_normal((30, 6)).astype(np.float32), MADE.integers(0, 3, 30)


class Seen:
    """Keeps what it is given; ends the run after so many."""

    def __init__(self, most: int = 99) -> None:
        self.models: list[tuple[Evaluated, nn.Module]] = []
        self.events: list[Event] = []
        self._most = most

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def on_model(self, model: nn.Module, event: Evaluated) -> bool:
        assert self.events[-1] is not None
        assert event.number in [each.number for each in self.events if isinstance(each, Evaluated)]
        self.models.append((event, model))
        return len(self.models) >= self._most


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def fit(seen: Seen, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "inputs": ["x"],
        "label": "y",
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "cluster": tw.Simulated(workers=4, step_s=0.1),
        "epochs": 4,
        "batch_size": 8,
        "validation": {"x": HELD_X, "y": HELD_Y},
        "callbacks": [seen],
        "progress": False,
    }
    return tw.fit(network, {"x": X, "y": Y}, **(settings | changes))


@pytest.mark.parametrize(
    ("strategy", "placement"),
    [
        (tw.Synchronous(), None),
        (tw.Relay(), None),
        (tw.ParameterTable(), None),
        (tw.SparkNet(period=2), tw.TensorParallel(group_size=2)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_model_of_every_evaluation_has_the_loss_of_its_event(strategy: Any, placement: Any) -> None:
    seen = Seen()
    result = fit(seen, strategy=strategy, placement=placement)
    assert [event.number for event, _ in seen.models] == [row["number"] for row in result.history]
    assert len(seen.models) >= 3
    for event, model in seen.models:
        assert not model.training
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(torch.from_numpy(HELD_X)), torch.from_numpy(HELD_Y))
        assert float(loss) == pytest.approx(event.metrics["val_loss"], rel=1e-4)
    last = dict(seen.models[-1][1].named_parameters())
    assert all(torch.equal(value, last[name]) for name, value in result.model.named_parameters())


def test_without_validation_rows_there_is_a_model_an_epoch() -> None:
    seen = Seen()
    result = fit(seen, strategy=tw.Synchronous(), validation=None)
    assert [event.number for event, _ in seen.models] == [1, 2, 3, 4]
    assert seen.models[-1][0].epoch == 4
    assert all(event.metrics == {} for event, _ in seen.models)
    assert result.summary["complete"]


def test_a_callback_ends_the_run_from_what_it_sees_of_the_model() -> None:
    seen = Seen(most=2)
    result = fit(seen, strategy=tw.Synchronous(), epochs=50)
    assert result.summary["reason"] == "a callback asked for it"
    assert result.summary["epochs"] < 10


def test_a_run_without_such_callbacks_sends_no_models() -> None:
    plain: list[Event] = []
    quiet = fit(Seen(), strategy=tw.Synchronous(), callbacks=[plain.append])
    seen = fit(Seen(), strategy=tw.Synchronous())
    assert all(torch.equal(a, b) for a, b in zip(quiet.model.parameters(), seen.model.parameters(), strict=True))


def test_text_is_sampled_every_epoch_of_a_character_lstm() -> None:
    text = (
        np.frombuffer(b"to be or not to be, that is the question. " * 4, np.uint8)[:160]
        .reshape(10, 16)
        .astype(np.int64)
    )
    written: list[str] = []

    class Writer:
        def __call__(self, event: Event) -> None: ...

        def on_model(self, model: nn.Module, event: Evaluated) -> None:
            written.append(sample(model, "to", 12))

    tw.fit(
        "char_lstm",
        {"characters": text[:, :-1], "next": text[:, 1:]},
        inputs=["characters"],
        label="next",
        loss=masked_cross_entropy,
        cluster=tw.Simulated(workers=2, step_s=0.1),
        strategy=tw.Synchronous(),
        epochs=3,
        batch_size=1,
        callbacks=[Writer()],
        progress=False,
    )
    assert len(written) == 3
    assert all(each.startswith("to") and len(each) >= 3 for each in written)
