"""Runs that go on from a checkpoint, and lose workers before anything was heard of them; in virtual time."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.models import mlp

ROWS, EPOCHS = 256, 8
STRATEGIES = [tw.SparkNet(period=4), tw.Relay(), tw.Relay(sends="gradients"), tw.EASGD(period=4)]


def fit(workers: int, *, faults: tuple[tw.Fault, ...] = (), callbacks: Any = (), **more: Any) -> tw.Result:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 16, (ROWS, 64), generator=generator).float()
    given: dict[str, Any] = {"strategy": tw.SparkNet(period=4), "epochs": EPOCHS, "validation": None}
    return tw.fit(
        mlp,
        {"x": x.numpy(), "y": (x.sum(1) > 480).long().numpy()},
        inputs=["x"],
        label="y",
        cluster=tw.Simulated(workers=workers, step_s=0.1, faults=faults),
        batch_size=8,
        callbacks=callbacks,
        progress=False,
        **(given | more),
    )


def begun(out: Path, strategy: tw.Strategy) -> Path:
    """A run of two workers that stopped in the middle."""

    def stop(event: events.Event) -> bool:
        return isinstance(event, events.EpochEnded) and event.epoch == EPOCHS // 2 - 1

    result = fit(2, out=str(out), callbacks=[stop], strategy=strategy)
    assert ROWS * EPOCHS // 4 <= result.summary["rows"] < ROWS * EPOCHS
    return out


def done_by(out: Path) -> dict[int, int]:
    """The rows of each worker in the newest checkpoint."""
    store = CheckpointStore(f"{out}/checkpoints")
    newest = store.latest()
    assert newest is not None
    parts: dict[int, Any] = {worker: store.read_part(newest, f"worker-{worker}") for worker in range(2)}
    return {worker: int(part["meter"]["rows"]) for worker, part in parts.items()}


@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_those_lost_before_they_were_heard_of_are_gone_on_with_too(
    victims: tuple[int, ...], strategy: tw.Strategy, tmp_path: Path
) -> None:
    half = begun(tmp_path, strategy)
    before = done_by(half)
    told: list[events.Event] = []
    faults = tuple(tw.Fault(kind="kill", worker=worker, at_s=0.02, seconds=0.3) for worker in victims)
    result = fit(2, resume=str(half), faults=faults, callbacks=[told.append], strategy=strategy)
    assert result.summary["workers_lost"] == len(victims)
    assert result.summary["complete"]
    assert result.summary["rows"] == ROWS * EPOCHS
    for event in told:
        if isinstance(event, events.Progressed):
            assert event.rows >= before[event.worker], f"worker {event.worker} began behind the checkpoint"


def test_the_checkpoint_gone_on_from_stays_for_those_who_come_later(tmp_path: Path) -> None:
    half = begun(tmp_path, tw.SparkNet(period=4))
    newest = CheckpointStore(f"{half}/checkpoints").latest()
    assert newest is not None
    there: list[bool] = []

    def look(event: events.Event) -> None:
        if isinstance(event, events.CheckpointSaved) and not event.name.endswith("final"):
            there.append((half / "checkpoints" / newest.name).is_dir())

    fit(2, resume=str(half), checkpoint_every=8, callbacks=[look])
    assert len(there) > 3
    assert all(there)
    assert len(CheckpointStore(f"{half}/checkpoints").manifests()) == 2, "when the run is over it has done its service"


def test_the_learning_rate_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    """Nobody has a part of its own then."""
    rates: list[float] = []

    class Told(torch.optim.lr_scheduler.ExponentialLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            rates.append(self.get_last_lr()[0])

    how: dict[str, Any] = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    how |= {"scheduler": lambda optimizer: Told(optimizer, gamma=0.5), "out": str(tmp_path)}
    fit(2, epochs=3, **how)
    rates.clear()
    how.pop("out")
    fit(3, epochs=5, resume=str(tmp_path), **how)
    assert rates[-1] == pytest.approx(0.1 * 0.5**5)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_first_worker_that_is_behind_saves_as_often_as_the_one_before(strategy: tw.Strategy, tmp_path: Path) -> None:
    """The last checkpoint is of the other worker alone, which had made many more steps."""
    every: dict[str, Any] = {"checkpoint_every": 8, "strategy": strategy}

    def end(event: events.Event) -> None:
        if isinstance(event, events.CheckpointSaved) and event.steps >= 64:
            raise RuntimeError("the driver's end")

    lost = tw.Fault(kind="kill", worker=0, at_s=1.2, seconds=60.0)
    with pytest.raises(RuntimeError, match="the driver's end"):
        fit(2, out=str(tmp_path), faults=(lost,), callbacks=[end], **every)
    steps: list[int] = []
    saved: list[int] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.CheckpointSaved):
            saved.append(len(steps))
        if isinstance(event, events.Progressed) and event.worker == 0:
            steps.append(event.steps)

    fit(2, resume=str(tmp_path), callbacks=[note], **every)
    assert steps[0] < 24
    assert steps[saved[0]] < 40  # as the first was saved
