"""The lengths of gradients are told with events, and go to zero on a convex problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.events import EpochEnded, Event, Progressed

X = np.random.default_rng(2).standard_normal((64, 4)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0, 0.5, 2.0], np.float32) > 0).astype(np.int64)


def told(strategy: Any, epochs: int = 60, **changes: Any) -> list[Event]:
    log: list[Event] = []
    settings: dict[str, Any] = {"cluster": tw.Simulated(workers=4, step_s=0.5), "batch_size": 16, "progress": False}
    tw.fit(
        lambda: nn.Linear(4, 2),
        {"x": X, "y": Y},
        inputs=["x"],
        label="y",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.05),
        strategy=strategy,
        epochs=epochs,
        callbacks=[log.append],
        **(settings | changes),
    )
    return log


@pytest.mark.parametrize("strategy", [tw.Synchronous(), tw.ParameterTable(ahead=1), tw.SparkNet(period=5)])
def test_the_lengths_of_gradients_fall_on_a_convex_problem(strategy: Any) -> None:
    """With batches of all rows of a worker they are those of its own loss."""
    log = told(strategy)
    norms = [e.gradient_norm for e in log if isinstance(e, EpochEnded) and e.gradient_norm is not None]
    assert len(norms) == 4 * 60
    assert np.mean(norms[-40:]) < 0.5 * np.mean(norms[:8])
    assert any(e.gradient_norm is not None for e in log if isinstance(e, Progressed))


def test_the_length_that_is_told_is_that_of_the_gradient() -> None:
    log = told(tw.Synchronous(), epochs=1, cluster=tw.Simulated(workers=1, step_s=0.5), batch_size=64)
    (norm,) = [e.gradient_norm for e in log if isinstance(e, EpochEnded)]
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    nn.functional.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y)).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-5)
