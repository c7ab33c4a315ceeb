"""A store that takes its time, while workers come and go; in virtual time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.errors import LostWorkersError
from thinwire.models import mlp
from thinwire.strategies import name_of

ROWS, EPOCHS, STEP_S = 96, 4, 0.1
STRATEGIES = [tw.SparkNet(period=2), tw.Relay(), tw.EASGD(period=2), tw.Synchronous(), tw.MPCA(), tw.DiLoCo(period=2)]


def fit(out: Path, told: list[events.Event], *, workers: int = 3, **more: Any) -> tw.Result:
    given: dict[str, Any] = {"strategy": tw.SparkNet(period=2), "checkpoint_every": 5, "epochs": EPOCHS}
    cluster = {name: more.pop(name) for name in ("store_s", "faults", "revives", "max_restarts") if name in more}
    x = np.random.default_rng(0).random((ROWS, 64), np.float32)
    return tw.fit(
        mlp,
        {"x": x, "y": (x.sum(1) > 32).astype(np.int64)},
        inputs=["x"],
        label="y",
        cluster=tw.Simulated(workers=workers, step_s=STEP_S, **cluster),
        batch_size=8,
        validation=0.2,
        callbacks=[told.append],
        progress=False,
        out=str(out),
        **(given | more),
    )


def numbers(told: list[events.Event]) -> list[int]:
    return [event.number for event in told if isinstance(event, events.Evaluated)]


def last_verdict_s(told: list[events.Event]) -> float:
    return max(event.time for event in told if isinstance(event, events.Evaluated))


BACK_S = (0.2, 5.68, 10.0)
"""When a replacement of a worker that is lost while the last checkpoint is written may come: then, as the others leave,
never."""
LAST = list(itertools.product(range(len(STRATEGIES)), (0, 1), range(len(BACK_S)), (False, True)))
FEW = {
    (n, victim, (n + victim) % len(BACK_S), bool((n + victim) % 2)) for n in range(len(STRATEGIES)) for victim in (0, 1)
}
"""Cases for `make test`: every strategy with either victim, and all combinations of the other two."""


def described(case: tuple[int, int, int, bool]) -> str:
    number, victim, back, revives = case
    return f"{name_of(STRATEGIES[number])}-{victim}-{BACK_S[back]}-{'as Spark' if revives else 'local'}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FEW else pytest.mark.long, id=described(case)) for case in LAST],
)
def test_a_worker_lost_while_the_last_checkpoint_is_written_is_not_missed(
    case: tuple[int, int, int, bool], tmp_path: Path
) -> None:
    """The others have the final model: they save it and hand it back, and who comes to stand in may go."""
    strategy, victim, seconds, revives = STRATEGIES[case[0]], case[1], BACK_S[case[2]], case[3]
    told: list[events.Event] = []
    calm = fit(tmp_path / "calm", told, strategy=strategy, store_s=3.0)
    fault = tw.Fault(kind="kill", worker=victim, at_s=last_verdict_s(told) + 1.0, seconds=seconds)
    told = []
    result = fit(tmp_path / "run", told, strategy=strategy, store_s=3.0, faults=(fault,), revives=revives)
    assert result.summary["workers_lost"] == 1
    assert result.summary["complete"]
    assert result.summary["seconds"] < calm.summary["seconds"] + 3 * 3.0, "it waited for something that nobody does"
    assert len(numbers(told)) == len(set(numbers(told)))
    store = CheckpointStore(str(tmp_path / "run" / "checkpoints"))
    newest = store.latest()
    assert newest is not None
    assert newest.name == result.summary["checkpoint"] == f"{max(numbers(told)):06d}-final"
    saved = store.read_part(newest, "joint")["model"]
    for name, values in calm.model.state_dict().items():
        assert torch.equal(values, result.model.state_dict()[name]), "not what was evaluated"
        assert torch.equal(values, saved[name])


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=str)
def test_those_who_are_left_save_the_last_checkpoint_where_nobody_is_replaced(
    victims: tuple[int, ...], tmp_path: Path
) -> None:
    told: list[events.Event] = []
    calm = fit(tmp_path / "calm", told, store_s=0.3)
    faults = tuple(tw.Fault(kind="kill", worker=w, at_s=last_verdict_s(told) + 0.2) for w in victims)
    result = fit(tmp_path / "run", [], store_s=0.3, faults=faults, max_restarts=0)
    assert result.summary["complete"]
    assert result.summary["checkpoint"] == calm.summary["checkpoint"]
    assert result.summary["unsaved"] is None


def test_where_all_are_lost_before_the_model_is_handed_back_the_run_says_so_at_once(tmp_path: Path) -> None:
    told: list[events.Event] = []
    fit(tmp_path / "calm", told, store_s=3.0)
    at_s = last_verdict_s(told) + 1.0
    faults = tuple(tw.Fault(kind="kill", worker=w, at_s=at_s) for w in range(3))
    more: list[events.Event] = []
    with pytest.raises(LostWorkersError, match="resume"):
        fit(tmp_path / "run", more, store_s=3.0, faults=faults)
    assert max(event.time for event in more) < at_s + 15


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", [tw.Relay(), tw.EASGD(period=2), tw.MPCA()], ids=name_of)
def test_who_comes_after_the_verdict_that_ended_the_run_does_not_train_on(
    strategy: tw.Strategy, victim: int, tmp_path: Path
) -> None:
    told: list[events.Event] = []
    early: dict[str, Any] = {"strategy": strategy, "epochs": 30, "until": "val_loss <= 100"}
    calm = fit(tmp_path / "calm", told, **early)
    first = min(event.time for event in told if isinstance(event, events.Evaluated))
    fault = tw.Fault(kind="kill", worker=victim, at_s=first + 0.02, seconds=0.2)
    result = fit(tmp_path / "run", [], faults=(fault,), **early)
    assert result.summary["workers_lost"] == 1
    assert result.summary["reason"] == calm.summary["reason"]
    assert result.summary["steps"] <= calm.summary["steps"] + 8


@pytest.mark.parametrize("store_s", [0.05, 0.7, 2.0])
def test_training_goes_on_beside_a_slow_store(store_s: float, tmp_path: Path) -> None:
    told: list[events.Event] = []
    quick = fit(tmp_path / "quick", [])
    slow = fit(tmp_path / "slow", told, store_s=store_s)
    assert slow.summary["complete"]
    assert slow.summary["train_seconds"] == pytest.approx(quick.summary["train_seconds"], rel=0.02)
    assert slow.summary["checkpoint"].endswith("final")
    assert slow.summary["seconds"] > quick.summary["seconds"] + 1.9 * store_s, "written, then committed"
    saved = [event.name for event in told if isinstance(event, events.CheckpointSaved)]
    assert saved == sorted(saved)


@pytest.mark.parametrize("missing", [None, 0, 2])
@pytest.mark.parametrize("strategy", [tw.SparkNet(period=2), tw.Relay(), tw.EASGD(period=2)], ids=name_of)
def test_who_goes_on_from_the_last_checkpoint_counts_on(
    strategy: tw.Strategy, missing: int | None, tmp_path: Path
) -> None:
    """All the same, whether or not a worker has a part of its own in it."""
    told: list[events.Event] = []
    faults = () if missing is None else (tw.Fault(kind="kill", worker=missing, at_s=0.9),)
    first = fit(tmp_path, told, strategy=strategy, faults=faults, max_restarts=0)
    more: list[events.Event] = []
    second = fit(tmp_path, more, strategy=strategy, epochs=EPOCHS + 2, resume=str(tmp_path))
    assert second.summary["resumed_from"] == first.summary["checkpoint"] == f"{max(numbers(told)):06d}-final"
    assert min(numbers(more)) > max(numbers(told))
    assert second.summary["checkpoint"] == f"{max(numbers(more)):06d}-final"
    assert second.summary["seconds"] < 60
