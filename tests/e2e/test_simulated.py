"""Runs on a cluster that is not there: the real engine, strategies and gradients in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.cli.main import main
from thinwire.errors import ConfigError, DivergedError
from thinwire.strategies import strategy

ROOT = Path(__file__).parents[2]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(cluster: Any, name: str = "sparknet", knobs: dict[str, Any] | None = None, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "model": "mlp", "data": "digits", "inputs": ["pixels"], "epochs": 4, "batch_size": 32, "validation": 0.1,
        "optimizer": sgd, "progress": False,
    }  # fmt: skip
    return tw.fit(strategy=strategy(name, knobs or {}), cluster=cluster, **(asked | given))


def values(result: tw.Result) -> torch.Tensor:
    return torch.cat([v.flatten().float() for v in result.model.state_dict().values()])


class Normed(nn.Module):
    """With everything that several replicas at once may get wrong: buffers, in-place updates, chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.float())
        return found


@pytest.mark.parametrize(("name", "knobs"), [("synchronous", {}), ("sparknet", {"period": 5})])
@pytest.mark.parametrize("model", ["mlp", Normed])
def test_a_run_comes_to_what_real_processes_come_to(name: str, knobs: dict[str, Any], model: Any) -> None:
    """The strategies that stop at every exchange give the same numbers each time, wherever they run."""
    real = fit(tw.Local(workers=3), name, knobs, model=model)
    simulated = fit(tw.Simulated(workers=3, step_s=0.01), name, knobs, model=model)
    torch.testing.assert_close(values(simulated), values(real), rtol=1e-3, atol=1e-4)
    assert simulated.summary["rounds"] == real.summary["rounds"]
    assert simulated.summary["bytes_sent"] == real.summary["bytes_sent"]
    assert [row["steps"] for row in simulated.history] == [row["steps"] for row in real.history]


@pytest.mark.parametrize("name", ["relay", "mpca", "easgd", "deepspark", "diloco", "parameter_table"])
def test_the_same_run_twice_gives_the_same_bits_at_the_same_moments(name: str) -> None:
    cluster = tw.Simulated(workers=4, step_s=0.02, link="20mbit", spread=0.3, slow={2: 1.5})
    first, second = fit(cluster, name), fit(cluster, name)
    assert torch.equal(values(first), values(second))
    assert [row["seconds"] for row in first.history] == [row["seconds"] for row in second.history]
    assert first.summary["val_accuracy"] > 0.3


def test_a_barrier_costs_the_time_that_its_bytes_take() -> None:
    """Each worker sends and hears (K - 1) / K of the vector twice: parts out, sums back."""
    workers, step_s, rate = 4, 0.02, 125_000_000 / 100
    cluster = tw.Simulated(workers=workers, step_s=step_s, link="10mbit", latency_s=0.0)
    run = fit(cluster, "synchronous", validation=None)
    size = 4 * sum(p.numel() for p in run.model.parameters())
    expected = run.summary["steps"] * (step_s + 2 * (workers - 1) / workers * size / rate)
    assert run.summary["train_seconds"] == pytest.approx(expected, rel=0.1)  # slices are whole grains
    assert run.summary["busy"] == pytest.approx(run.summary["steps"] * step_s / expected, rel=0.1)


def test_a_strategy_that_overlaps_costs_nothing_where_the_link_keeps_up() -> None:
    run = fit(tw.Simulated(workers=4, step_s=0.02, link="1gbit"), "relay", validation=None)
    assert run.summary["train_seconds"] == pytest.approx(run.summary["steps"] * 0.02, rel=0.02)
    assert run.summary["busy"] > 0.99


@pytest.mark.parametrize("ratio", [8.0, 64.0, 110.0])
def test_relay_cuts_so_that_a_fragment_s_exchange_fits_a_step(ratio: float) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 10))

    cluster = tw.Simulated(workers=8, link="1gbit", latency_s=0.0, ratio=ratio)
    run = fit(cluster, "relay", model=wide, validation=None, batch_size=8, epochs=None, steps=150)
    assert run.summary["rounds"] > 0.85 * run.summary["steps"]


def test_replicas_computed_together_give_what_each_would_give_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.cluster.simulated import lab

    computed = []
    monkeypatch.setattr(lab.Lab, "_together", _counted(lab.Lab._together, computed))
    together = fit(tw.Simulated(workers=4, step_s=0.02, spread=0.2), "sparknet", {"period": 3}, model=Normed)
    assert sum(computed) > 0
    monkeypatch.setattr(lab, "stackable", lambda replica: False)
    alone = fit(tw.Simulated(workers=4, step_s=0.02, spread=0.2), "sparknet", {"period": 3}, model=Normed)
    torch.testing.assert_close(values(together), values(alone), rtol=1e-3, atol=1e-4)


def _counted(inner: Any, counts: list[int]) -> Any:
    def outer(self: Any, group: list[Any]) -> bool:
        counts.append(len(group))
        done: bool = inner(self, group)
        return done

    return outer


def test_what_cannot_be_computed_together_is_computed_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.flatten(1).float()
            if rows.mean().item() > 1e9:  # which vmap refuses to look at
                rows = rows * 0
            found: torch.Tensor = self.linear(rows)
            return found

    assert fit(tw.Simulated(workers=2, step_s=0.01), model=Counting).summary["val_accuracy"] > 0.5


FAULTS = [
    tw.Fault(at_s=5, worker=1, seconds=4),
    tw.Fault(at_s=14, kind="pause", worker=2, seconds=3),
    tw.Fault(at_s=20, kind="cut", worker=3, seconds=4),
    tw.Fault(at_s=25, kind="link", link="100mbit"),
]


@pytest.mark.parametrize("name", ["relay", "synchronous", "easgd"])
def test_faults_happen_when_told_and_are_survived_the_same_way_each_time(name: str) -> None:
    cluster = tw.Simulated(workers=4, step_s=0.1, link="10mbit", faults=FAULTS)
    seen: list[list[tuple[str, int, float]]] = []
    runs = []
    for _ in range(2):
        told: list[tuple[str, int, float]] = []

        def note(event: Any, told: list[tuple[str, int, float]] = told) -> None:
            if type(event).__name__ in ("WorkerLost", "WorkerJoined"):
                told.append((type(event).__name__, event.worker, event.time))

        runs.append(fit(cluster, name, epochs=25, callbacks=[note]))
        seen.append(told)
    assert seen[0] == seen[1]
    assert torch.equal(values(runs[0]), values(runs[1]))
    lost = [event for event in seen[0] if event[0] == "WorkerLost"]
    assert [event[:2] for event in lost] == [("WorkerLost", 1)]
    assert 5.0 <= lost[0][2] < 6.0
    back = [event for event in seen[0] if event[:2] == ("WorkerJoined", 1)][-1]
    assert 9.0 <= back[2] < 10.5
    assert runs[0].summary["val_accuracy"] > 0.9
    assert runs[0].summary["complete"]


def test_a_run_that_loses_everybody_can_be_gone_on_with(tmp_path: Path) -> None:
    from thinwire.errors import LostWorkersError

    faults = [tw.Fault(at_s=6, worker=w, seconds=1) for w in range(2)]
    cluster = tw.Simulated(workers=2, step_s=0.1, faults=faults, max_restarts=0)
    with pytest.raises(LostWorkersError):
        fit(cluster, "relay", epochs=20, out=str(tmp_path), checkpoint_every=20)
    again = fit(tw.Simulated(workers=2, step_s=0.1), "relay", epochs=20, resume=str(tmp_path))
    assert again.summary["complete"]
    seconds = [row["seconds"] for row in again.history]
    assert seconds == sorted(seconds)


def test_many_workers() -> None:
    run = fit(tw.Simulated(workers=200, step_s=0.05), "sparknet", {"period": 2}, batch_size=4, epochs=2)
    assert run.summary["workers"] == 200
    assert run.summary["rounds"] >= 2


def test_what_goes_wrong_in_a_worker_is_told_as_ever() -> None:
    with pytest.raises(DivergedError, match="the loss became"):
        fit(tw.Simulated(workers=2, step_s=0.01), optimizer=lambda p: torch.optim.SGD(p, lr=1e9))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "cluster.workers = 0"),
        ({"step_s": 0.1, "ratio": 2.0}, "give one of them"),
        ({"step_s": -1.0}, "cluster.step_s = -1.0"),
        ({"link": "fast"}, "'fast' is not understood"),
        ({"link": 0.0}, "bytes a second above 0"),
        ({"faults": [tw.Fault(at_s=1, worker=9)]}, "a fault names worker 9"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tw.Simulated(**given)


def test_the_command_compares_strategies_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    asked = ["--workers", "1,2,4", "--link", "10mbit", "--step", "0.02", "--strategies", "sparknet:period=5,relay"]
    changes = ["--set", "model.zoo=mlp", "--set", "train.epochs=25", "--set", "train.until=val_accuracy >= 0.9"]
    recipe = str(ROOT / "recipes" / "digits.toml")
    assert main(["simulate", recipe, *asked, *changes, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "simulated.json").read_text())
    ran = [(t["strategy"], t["workers"]) for t in found["trials"]]
    assert ran == [("one worker", 1), *((name, k) for k in (2, 4) for name in ("sparknet:period=5", "relay"))]
    alone, *others = found["trials"]
    assert all(t["speedup"] == pytest.approx(alone["seconds"] / t["seconds"]) for t in others)
    assert all(any(row["val_accuracy"] >= 0.9 for row in t["curve"]) for t in found["trials"])
    busy = {(t["strategy"], t["workers"]): t["busy"] for t in others}
    assert busy["relay", 4] > 0.95 > busy["sparknet:period=5", 4]
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "simulated.svg").read_bytes()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--workers", "two"], "--workers 'two' is not understood"),
        (["--workers", "0,2"], "a count below 1"),
        (["--strategies", "sparknt"], "Did you mean 'sparknet'?"),
        (["--strategies", "relay:perod=3"], "strategy.perod"),
        (["--link", "1 furlong"], "is not understood"),
    ],
)
def test_a_simulation_that_is_not_understood_is_refused(
    asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(ROOT / "recipes" / "digits.toml"), *asked]) == 2
    assert message in capsys.readouterr().err
