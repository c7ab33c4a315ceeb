"""Runs on a cluster that is not there: the real engine, strategies and gradients in virtual time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.cli.main import main
from thinwire.errors import ConfigError, DivergedError, WorkerError
from thinwire.strategies import SparkNet, strategy

ROOT = Path(__file__).parents[2]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(cluster: Any, name: str = "sparknet", knobs: dict[str, Any] | None = None, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "model": "mlp", "data": "digits", "inputs": ["pixels"], "epochs": 4, "batch_size": 32, "validation": 0.1,
        "optimizer": sgd, "progress": False,
    }  # fmt: skip
    return tw.fit(cluster=cluster, **(asked | {"strategy": strategy(name, knobs or {})} | given))


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


@pytest.mark.parametrize(
    ("model", "name", "knobs"),
    [
        ("mlp", "sparknet", {"period": 5}),
        (Normed, "synchronous", {}),
        pytest.param("mlp", "synchronous", {}, marks=pytest.mark.long),
        pytest.param(Normed, "sparknet", {"period": 5}, marks=pytest.mark.long),
    ],
)
def test_a_run_comes_to_what_real_processes_come_to(name: str, knobs: dict[str, Any], model: Any) -> None:
    """The strategies that stop at every exchange give the same numbers each time, wherever they run."""
    real = fit(tw.Local(workers=3), name, knobs, model=model)
    simulated = fit(tw.Simulated(workers=3, step_s=0.01), name, knobs, model=model)
    torch.testing.assert_close(values(simulated), values(real), rtol=1e-3, atol=1e-4)
    assert simulated.summary["rounds"] == real.summary["rounds"]
    assert simulated.summary["bytes_sent"] == pytest.approx(real.summary["bytes_sent"], rel=1e-3)
    assert [row["steps"] for row in simulated.history] == [row["steps"] for row in real.history]


@pytest.mark.parametrize(
    "name",
    [
        "relay",
        "easgd",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("mpca", "deepspark", "diloco", "parameter_table")),
    ],
)
def test_the_same_run_twice_gives_the_same_bits_at_the_same_moments(name: str) -> None:
    cluster = tw.Simulated(workers=4, step_s=0.02, link="20mbit", spread=0.3, slow={2: 1.5})
    gentle = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05)}  # late gradients and momentum do not go together
    first, second = fit(cluster, name, **gentle), fit(cluster, name, **gentle)
    assert torch.equal(values(first), values(second))
    assert [row["seconds"] for row in first.history] == [row["seconds"] for row in second.history]
    assert first.summary["train_loss"] < 2.29


@pytest.mark.parametrize("name", ["relay", "sparknet", "easgd"])
def test_a_worker_that_comes_back_goes_on_at_the_learning_rate_of_the_others(name: str) -> None:
    """One that began its schedule anew would undo at a high rate what the others have settled."""
    rates: list[list[float]] = []

    class Watched(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.seen: list[float] = []
            rates.append(self.seen)

        def step(self, closure: Any = None) -> Any:
            self.seen.append(float(self.param_groups[0]["lr"]))
            return super().step(closure)

    run = fit(
        tw.Simulated(workers=3, step_s=0.1, faults=(tw.Fault(worker=1, at_s=8.0, seconds=1.0),)),
        name,
        optimizer=Watched,
        scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.01, total_iters=160),
        scheduler_every="step",
        epochs=None,
        steps=160,
        batch_size=8,
    )
    assert run.summary["workers_lost"] == 1
    back = [seen for seen in rates if 0 < len(seen) < 160 and seen[0] < 0.1]
    assert len(back) == 1, "the one that came back begins below the first rate"
    assert back[0][0] < 0.06
    assert back[0][-1] == pytest.approx(0.001, abs=0.01), "and ends where the others do"


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


@pytest.mark.parametrize("ratio", [8.0, *(pytest.param(ratio, marks=pytest.mark.long) for ratio in (64.0, 110.0))])
def test_relay_cuts_so_that_a_fragment_s_exchange_fits_a_step(ratio: float) -> None:
    def wide() -> nn.Module:
        width = 1500 if ratio < 10 else 6000  # fragments are cut in whole blocks: many of them need many values
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    cluster = tw.Simulated(workers=8, link="1gbit", latency_s=0.0, ratio=ratio)
    run = fit(cluster, "relay", model=wide, validation=None, batch_size=8, epochs=None, steps=200)
    assert run.summary["rounds"] > 0.85 * run.summary["steps"]


def test_replicas_computed_together_give_what_each_would_give_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.cluster.simulated import gradient_batching as lab

    computed = []
    monkeypatch.setattr(lab.GradientBatcher, "_together", _counted(lab.GradientBatcher._together, computed))
    together = fit(tw.Simulated(workers=4, step_s=0.02, spread=0.2), "sparknet", {"period": 3}, model=Normed)
    assert sum(computed) > 0
    monkeypatch.setattr(lab, "can_vmap", lambda replica: False)
    alone = fit(tw.Simulated(workers=4, step_s=0.02, spread=0.2), "sparknet", {"period": 3}, model=Normed)
    torch.testing.assert_close(values(together), values(alone), rtol=1e-3, atol=1e-4)


def _counted(inner: Any, counts: list[int]) -> Any:
    def outer(self: Any, group: list[Any]) -> bool:
        done: bool = inner(self, group)
        counts.append(len(group) * done)
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


@pytest.mark.parametrize(
    "name", ["relay", *(pytest.param(name, marks=pytest.mark.long) for name in ("synchronous", "easgd"))]
)
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


def test_a_pause_and_a_cut_cost_a_barrier_their_time_and_a_faster_link_gives_some_back() -> None:
    def seconds(*faults: tw.Fault) -> float:
        cluster = tw.Simulated(workers=2, step_s=0.5, link="1mbit", latency_s=0.0, faults=faults)
        run = fit(cluster, "synchronous", validation=None, epochs=1)
        return float(run.summary["train_seconds"])

    plain = seconds()
    assert seconds(tw.Fault(at_s=3, kind="pause", worker=1, seconds=3)) == pytest.approx(plain + 3, abs=0.5)
    assert plain + 2 < seconds(tw.Fault(at_s=3, kind="cut", worker=1, seconds=3)) < plain + 3.1
    assert seconds(tw.Fault(at_s=3, kind="link", link="100mbit")) < 0.9 * plain


def test_a_worker_that_is_killed_and_not_replaced_takes_no_more_steps() -> None:
    seen: list[tuple[int, float]] = []

    def note(event: Any) -> None:
        if type(event).__name__ == "Progressed":
            seen.append((event.worker, event.time))

    faults = [tw.Fault(at_s=4.05, worker=1)]
    fit(tw.Simulated(workers=3, step_s=0.1, faults=faults, max_restarts=0), "relay", epochs=20, callbacks=[note])
    assert max(at for worker, at in seen if worker == 0) > 8
    assert max(at for worker, at in seen if worker == 1) < 5


def test_a_gradient_does_not_leave_before_its_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network that is computed with the others' when the fastest is done, and streamed to servers."""
    from thinwire.exchange.table.updates import Updates

    fed: list[tuple[int, float]] = []
    inner = Updates.feed

    def feed(self: Any, round: int, keys: list[int], absent: frozenset[int]) -> None:
        fed.append((self._station.worker, self._station.time.now()))
        inner(self, round, keys, absent)

    monkeypatch.setattr(Updates, "feed", feed)
    cluster = tw.Simulated(workers=2, step_s=1.0, slow={1: 5.0})
    fit(cluster, "parameter_table", model="cnn8", epochs=None, steps=3, validation=None)
    assert min(at for worker, at in fed if worker == 1) >= 5.0
    assert min(at for worker, at in fed if worker == 0) < 2.0


def test_parameters_that_are_not_used_stay_as_they_are_also_together() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.used(x.flatten(1).float())
            return found

    torch.manual_seed(0)
    given = Spare()
    decayed: Any = fit(
        tw.Simulated(workers=2, step_s=0.01), model=given, epochs=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    ).model  # fmt: skip
    assert torch.equal(decayed.spare.weight, given.spare.weight)
    assert not torch.equal(decayed.used.weight, given.used.weight)


def test_a_transform_that_draws_at_random_draws_the_same_each_time() -> None:
    def shaken(columns: dict[str, Any]) -> dict[str, Any]:
        pixels = np.asarray(columns["pixels"], dtype="float32")
        return columns | {"pixels": pixels + 0.1 * np.random.randn(*pixels.shape).astype("float32")}

    runs = [fit(tw.Simulated(workers=2, step_s=0.01), "relay", transform=shaken, epochs=2) for _ in range(2)]
    assert torch.equal(values(runs[0]), values(runs[1]))


def test_a_result_that_takes_longer_than_silence_may_last_still_comes_back() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, 10))

    run = fit(tw.Simulated(workers=1, step_s=0.1, link="200kbit"), model=wide, epochs=1, validation=None)
    assert run.summary["seconds"] > 30
    assert run.summary["complete"]


def test_a_simulation_leaves_the_recipe_s_own_folder_alone(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = (ROOT / "recipes" / "digits.toml").read_text().replace('zoo = "cnn8"', 'zoo = "mlp"')
    recipe.write_text(text + f'\n[run]\nout = "{tmp_path / "run"}"\n')
    asked = ["--workers", "1,2", "--strategies", "sparknet", "--set", "train.epochs=1", "--json"]
    assert main(["simulate", str(recipe), *asked]) == 0
    assert not (tmp_path / "run").exists()


def test_one_step_time_is_measured_and_holds_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--workers", "1,2", "--strategies", "relay,mpca", "--set", "train.epochs=1", "--json"]
    assert main(["simulate", str(ROOT / "recipes" / "digits.toml"), *asked, "--set", "model.zoo=mlp"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [t["step_s"] for t in found["trials"]] == pytest.approx([found["trials"][0]["step_s"]] * 3, rel=1e-6)


def test_a_trial_that_fails_is_told_of_beside_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--workers", "1,2", "--strategies", "sparknet", "--step", "0.01", "--set", "train.epochs=1"]
    wild = ["--set", "train.optimizer={ name = 'sgd', lr = 1e12 }", "--set", "model.zoo=mlp", "--out", str(tmp_path)]
    assert main(["simulate", str(ROOT / "recipes" / "digits.toml"), *asked, *wild]) == 0
    assert "diverged" in capsys.readouterr().out
    assert "DivergedError" in json.loads((tmp_path / "simulated.json").read_text())["trials"][0]["failed"]


def test_ctrl_c_leaves_a_checkpoint_in_virtual_time_too(tmp_path: Path) -> None:
    import os
    import signal

    from thinwire.errors import Interrupted

    sent: list[int] = []

    def note(event: Any) -> None:
        if type(event).__name__ == "Progressed" and event.steps > 30 and not sent:
            sent.append(event.steps)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        fit(tw.Simulated(workers=3, step_s=0.1), "relay", epochs=500, out=str(tmp_path), callbacks=[note])
    again = fit(tw.Simulated(workers=3, step_s=0.1), "relay", epochs=10, resume=str(tmp_path))
    assert again.summary["complete"]


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
    run = fit(tw.Simulated(workers=64, step_s=0.05), "sparknet", {"period": 2}, batch_size=8, epochs=2)
    assert run.summary["workers"] == 64
    assert run.summary["rounds"] >= 2


def test_what_goes_wrong_in_a_worker_is_told_as_ever() -> None:
    with pytest.raises(DivergedError, match="the loss became"):
        fit(tw.Simulated(workers=2, step_s=0.01), optimizer=lambda p: torch.optim.SGD(p, lr=1e9))


@dataclass(frozen=True, kw_only=True)
class Faulty(SparkNet):
    """One of whose methods has a mistake in it."""

    where: str = "merge"

    def _mistake(self, where: str) -> None:
        if where == self.where:
            raise KeyError(f"modle in {where}")

    def due(self, progress: Any) -> bool:
        self._mistake("due")
        return super().due(progress)

    def contribute(self, joint: Any, snapshot: torch.Tensor) -> torch.Tensor:
        self._mistake("contribute")
        return super().contribute(joint, snapshot)

    def merge(self, joint: Any, mean: torch.Tensor, cycle: int, setting: Any) -> tuple[torch.Tensor, Any]:
        self._mistake("merge")
        return super().merge(joint, mean, cycle, setting)

    def adopt(self, worker: Any, x: torch.Tensor, snapshot: torch.Tensor, reply: torch.Tensor) -> tuple[Any, Any]:
        self._mistake("adopt")
        return super().adopt(worker, x, snapshot, reply)

    def weight(self, share: Any) -> float:
        self._mistake("weight")
        return super().weight(share)


@pytest.mark.parametrize("where", ["due", "contribute", "merge", "adopt", "weight"])
def test_a_mistake_in_a_strategy_is_shown_with_its_traceback(where: str) -> None:
    """Also in methods that the exchange thread calls."""
    with pytest.raises(WorkerError, match=f"modle in {where}") as caught:
        fit(tw.Simulated(workers=2, step_s=0.01), strategy=Faulty(period=5, where=where))
    assert "_mistake" in str(caught.value)


def test_a_strategy_without_timing_is_refused() -> None:
    class Timeless(tw.Strategy):
        def due(self, progress: Any) -> bool:
            return False

        def merge(self, joint: Any, mean: torch.Tensor, cycle: int, setting: Any) -> tuple[torch.Tensor, Any]:
            return mean, joint

        def adopt(self, worker: Any, x: torch.Tensor, snapshot: Any, reply: torch.Tensor) -> tuple[Any, Any]:
            return x, worker

    with pytest.raises(ConfigError, match="Timeless does not say its timing"):
        fit(tw.Simulated(workers=2, step_s=0.01), strategy=Timeless())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "cluster.workers = 0"),
        ({"step_s": 0.1, "ratio": 2.0}, "give one of them"),
        ({"step_s": -1.0}, "cluster.step_s = -1.0"),
        ({"link": "fast"}, "'fast' is not understood"),
        ({"link": 0.0}, "bytes a second above 0"),
        ({"faults": [tw.Fault(at_s=1, worker=9)]}, "a fault names worker 9"),
        ({"faults": [tw.Fault(at_s=1, kind="stop")]}, "kind = 'stop' is not known"),  # type: ignore[arg-type]
        ({"faults": [tw.Fault(at_s=float("nan"))]}, "numbers of 0 or more"),
        ({"faults": [tw.Fault(at_s=1, kind="link", link="slow")]}, "'slow' is not understood"),
        ({"slow": {0: 0.0}}, "factors above 0"),
        ({"slow": {9: 2.0}}, "factors above 0"),
        ({"spread": float("nan")}, "cluster.spread = nan"),
        ({"step_s": float("inf")}, "cluster.step_s = inf"),
        ({"workers": 2.5}, "cluster.workers = 2.5"),
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


def test_the_command_takes_a_target_on_the_training_loss(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--workers", "2", "--step", "0.02", "--strategies", "sparknet:period=5", "--json"]
    changes = ["model.zoo=mlp", "data.validation=0", "train.epochs=25", "train.until=train_loss <= 0.5"]
    options = [word for change in changes for word in ("--set", change)]
    assert main(["simulate", str(ROOT / "recipes" / "digits.toml"), *asked, *options]) == 0
    trials = json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]
    assert all(trial["seconds"] > 0 and trial["reached_steps"] == trial["steps"] for trial in trials)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--workers", "two"], "--workers 'two' is not understood"),
        (["--workers", "0,2"], "a count below 1"),
        (["--strategies", "sparknt"], "Did you mean 'sparknet'?"),
        (["--strategies", "relay:perod=3"], "strategy.perod"),
        (["--link", "1 furlong"], "is not understood"),
        (["--strategies", "sparknet:5"], "write knobs as sparknet:period=50"),
        (["--strategies", "sparknet:period=5,momentum=1"], "with colons"),
    ],
)
def test_a_simulation_that_is_not_understood_is_refused(
    asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(ROOT / "recipes" / "digits.toml"), *asked]) == 2
    assert message in capsys.readouterr().err
