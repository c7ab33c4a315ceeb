"""Auto: what it chooses for which link, that it says why, and its guard; in virtual time under the real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.rules.compression import CODECS
from thinwire.worker import comparison
from thinwire.worker.comparison import Compared


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def fit(strategy: tw.Strategy, cluster: tw.Simulated, **given: Any) -> tuple[tw.Result, list[events.Event]]:
    log: list[events.Event] = []
    asked: dict[str, Any] = {"inputs": ["pixels"], "steps": 60, "batch_size": 16, "validation": 0.2, "progress": False}
    asked |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "callbacks": [log.append], "seed": 1}
    return tw.fit(network, "digits", strategy=strategy, cluster=cluster, **(asked | given)), log


def tried(log: list[events.Event]) -> list[events.Tried]:
    return [e for e in log if isinstance(e, events.Tried)]


@pytest.mark.parametrize(
    ("ratio", "codec", "fragments", "waits"),
    [
        (0.01, "float32", 1, True),
        pytest.param(0.4, "float32", 1, False, marks=pytest.mark.long),
        (0.8, "bfloat16", 1, False),
        pytest.param(1.5, "int8", 1, False, marks=pytest.mark.long),
        (12.0, "int4", (2, 3), False),
        (45.0, "sign2", tuple(range(3, 9)), False),
        pytest.param(150.0, "sign2", tuple(range(5, 21)), False, marks=pytest.mark.long),
    ],
)
def test_it_takes_what_fits_the_link(ratio: float, codec: str, fragments: Any, waits: bool) -> None:
    result, log = fit(tw.Auto(), tw.Simulated(workers=4, ratio=ratio, latency_s=0.0))
    last = [e for e in log if isinstance(e, events.SettingChanged)][-1]
    assert last.setting["codec"] == codec
    assert last.setting["fragments"] in (fragments if isinstance(fragments, tuple) else (fragments,))
    assert last.setting["wait"] == waits
    assert f"in {CODECS[codec].bits} bits a value" in result.summary["choice"], "it says what it chose"
    assert result.summary["choice"] == last.why
    assert result.summary["busy"] >= (0.95 if waits else 0.99)


def test_waiting_for_the_mean_of_every_step_is_synchronous_sgd() -> None:
    """Also under momentum: the mean of the replicas' buffers is the buffer of the mean gradient."""
    cluster = tw.Simulated(workers=4, ratio=0.001, latency_s=0.0)
    together, _ = fit(tw.Synchronous(), cluster, validation=None)
    chosen, log = fit(tw.Auto(quorum=1.0), cluster, validation=None)
    assert any(e.setting["wait"] for e in log if isinstance(e, events.SettingChanged))
    mine, theirs = (torch.cat([v.flatten() for v in r.model.state_dict().values()]) for r in (chosen, together))
    assert float((mine - theirs).norm() / theirs.norm()) < 0.05, (
        "apart by the first few rounds, which measured, and by nothing that grows"
    )


def test_a_link_that_slows_down_is_noticed_and_answered() -> None:
    """Ratio 0.5 at first, then a hundredth of the speed."""
    cluster = tw.Simulated(
        workers=4, step_s=0.01, latency_s=0.0, faults=(tw.Fault(at_s=1.5, kind="link", link="10mbit"),)
    )
    result, log = fit(tw.Auto(), cluster, steps=600)
    chosen = [e.setting["codec"] for e in log if isinstance(e, events.SettingChanged)]
    assert "float32" in chosen
    assert chosen[-1] == "sign2"
    assert "in 2 bits a value" in result.summary["choice"]
    assert result.summary["busy"] >= 0.99


def test_a_healthy_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "TRIALS", (40, 160, 640))
    result, log = fit(tw.Auto(), tw.Simulated(workers=4, ratio=10.0, latency_s=0.0), steps=500)
    assert [e.steps for e in tried(log)] == [40, 160]
    assert all(not e.hurts for e in tried(log))
    assert result.summary["warnings"] == []
    first, second = tried(log)
    assert first.alone is not None
    assert first.joint_beside is not None
    assert first.joint_beside < first.alone, "together they have learnt more in as many steps"
    assert second.alone is None, "and the one alone is with them since"
    assert result.summary["val_accuracy"] >= 0.95


def test_where_exchanging_hurts_it_says_so_and_tightens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outer step far too large: the joint model overshoots what the replicas learn."""
    monkeypatch.setattr(comparison, "TRIALS", (20, 80))
    wild: dict[str, Any] = {"lr": 2.2, "momentum": 0.3}
    cluster = tw.Simulated(workers=4, ratio=30.0, latency_s=0.0)
    guarded, log = fit(tw.Auto(**wild), cluster, steps=300)
    unguarded, silent = fit(tw.Auto(**wild, guard=False), cluster, steps=300)
    assert any(e.hurts for e in tried(log))
    assert not tried(silent)
    (warning, *_) = guarded.summary["warnings"]
    assert "after 80 steps the joint model has a validation loss of" in warning
    tightened = [e for e in log if isinstance(e, events.SettingChanged) and e.setting["caution"]]
    assert tightened[0].setting["wait"]
    assert "tightened" in tightened[0].why
    assert guarded.summary["val_loss"] < 0.2 * unguarded.summary["val_loss"]


def test_a_short_run_or_one_without_validation_rows_has_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "TRIALS", (10, 40))
    _, long = fit(tw.Auto(), tw.Simulated(workers=3, ratio=3.0), steps=100)
    _, short = fit(tw.Auto(), tw.Simulated(workers=3, ratio=3.0), steps=99)
    _, blind = fit(tw.Auto(), tw.Simulated(workers=3, ratio=3.0), steps=100, validation=None)
    assert tried(long)
    assert not tried(short)
    assert not tried(blind)


@pytest.mark.long
def test_a_worker_lost_during_the_trials_does_not_silence_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "TRIALS", (20, 60))
    cluster = tw.Simulated(workers=4, step_s=0.1, faults=(tw.Fault(worker=3, at_s=1.0),))
    result, log = fit(tw.Auto(), cluster, steps=300)
    assert result.summary["workers_lost"] == 1
    assert [e.steps for e in tried(log)][-1] == 60


@pytest.mark.parametrize("count", [2, 4, 8])
def test_chance_alone_is_seldom_taken_for_harm(count: int) -> None:
    """A joint model as good as the replica, on noisy batches: a false alarm in less than one of two hundred."""
    made = torch.Generator().manual_seed(count)
    alarms = 0
    for _ in range(1000):
        losses = 0.5 + 0.1 * torch.randn(count, 2, generator=made)
        alarms += Compared.of(losses.tolist()).worse
    assert alarms <= (5 if count != 4 else 20)
