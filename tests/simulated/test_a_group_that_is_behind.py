"""Groups in virtual time, one of which lost a worker and is behind when the other has trained all its epochs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events

ROWS, EPOCHS = 192, 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("seed", "killed_s", "gone_s"),
    [(712, 1.73, 1.5), (4, 2.0, 1.5)],
)
def test_the_group_that_is_ahead_waits_for_no_part_of_the_one_that_is_behind(
    seed: int, killed_s: float, gone_s: float
) -> None:
    """How a run came to hang, as with the first of these:

    1. group (2, 3) makes its last step in the round in which group (0, 1), some steps behind, announces an evaluation
    2. group (2, 3) takes it up when its epochs are done, and waits for its verdict before it follows further rounds
    3. group (0, 1), which took it up only after its next step, launches that step's round, and waits there for (2, 3)
    """
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    log: list[events.Event] = []
    result = tw.fit(
        network,
        {"x": x, "y": y},
        inputs=["x"],
        label="y",
        strategy=tw.Synchronous(),
        placement=tw.TensorParallel(group_size=2),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        epochs=EPOCHS,
        batch_size=4,
        validation={"x": x[:4], "y": y[:4]},
        cluster=tw.Simulated(
            workers=4,
            step_s=0.1,
            spread=0.1,
            seed=seed,
            faults=[tw.Fault(kind="kill", worker=1, at_s=killed_s, seconds=gone_s)],
        ),
        deadlines=tw.Deadlines(round_s=30.0, conclude_s=120.0),
        callbacks=[log.append],
        progress=False,
    )
    assert result.summary["complete"]
    assert result.summary["workers_lost"] == 1
    assert result.summary["rows"] >= EPOCHS * ROWS
    assert not [event for event in log if isinstance(event, events.RoundStalled)]
    formed = [event.members for event in log if isinstance(event, events.GenerationFormed)]
    assert formed[0] == formed[-1] == (0, 1, 2, 3)
