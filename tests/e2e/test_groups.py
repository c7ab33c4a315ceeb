"""Replicas that span several workers, under every kind of strategy, with workers killed on the way.

In virtual time, where it can be said what was learnt; and on real processes, which meet through gloo.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import CheckpointError, ConfigError, LostWorkersError, WorkerError
from thinwire.models import cnn8, mlp

EPOCHS, BATCH, ROWS = 5, 16, 1438
LONGER = 8
"""Epochs of runs with real processes, which are to be there when the first of them are killed."""


class Killer:
    """Kills workers once the first of them has made so many steps."""

    def __init__(self, *victims: int, after: int = 30) -> None:
        self._victims, self._after = victims, after
        self._pids: dict[int, int] = {}
        self.log: list[events.Event] = []

    def __call__(self, event: events.Event) -> None:
        self.log.append(event)
        if isinstance(event, events.WorkerJoined):
            self._pids[event.worker] = event.pid
        if isinstance(event, events.Progressed) and event.steps >= self._after and self._victims:
            for victim in self._victims:
                os.kill(self._pids[victim], signal.SIGKILL)
            self._victims = ()

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.log if isinstance(e, kind)]


def fit(strategy: tw.Strategy, placement: Any, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "strategy": strategy,
        "placement": placement,
        "cluster": tw.Local(workers=4),
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "validation": 0.2,
        "deadlines": tw.Deadlines(rejoin_s=40.0, round_s=120.0, join_s=120.0, conclude_s=120.0),
        "progress": False,
    }
    model = changes.pop("model", mlp)
    return tw.fit(model, "digits", **(settings | changes))


def gentle(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def best(result: tw.Result) -> float:
    return float(max(row["val_accuracy"] for row in result.history))


def virtual(*victims: int, workers: int = 4, **given: Any) -> tw.Simulated:
    """A cluster whose workers die after 30 steps."""
    faults = [tw.Fault(worker=worker, at_s=3.0, seconds=1.0) for worker in victims]
    return tw.Simulated(workers=workers, step_s=0.1, link="100mbit", faults=faults, **given)


@pytest.mark.parametrize(
    ("strategy", "placement", "cluster"),
    [
        (tw.DiLoCo(period=5), tw.Pipeline(group_size=2, microbatches=2), tw.Local(workers=4)),
        (tw.ParameterTable(), tw.TensorParallel(group_size=2), virtual()),
        pytest.param(tw.ParameterTable(), tw.TensorParallel(group_size=2), tw.Local(workers=4), marks=pytest.mark.long),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_strategy_works_across_replicas_of_two(strategy: tw.Strategy, placement: Any, cluster: Any) -> None:
    """Those without a victim below."""
    result = fit(strategy, placement, cluster=cluster, model=cnn8, optimizer=gentle)
    assert result.summary["complete"]
    assert result.summary["rows"] == EPOCHS * ROWS
    assert result.summary["placement"] == placement.name
    if isinstance(cluster, tw.Simulated):
        assert best(result) >= 0.9


DEATHS: list[tuple[tw.Strategy, tuple[int, ...]]] = [
    (tw.Synchronous(), (1,)),
    (tw.SparkNet(period=5), (2,)),
    (tw.Relay(), (0,)),
    (tw.EASGD(period=5), (3,)),
    (tw.MPCA(), (1, 2)),
]


def named(each: Any) -> str:
    return type(each).__name__ if isinstance(each, tw.Strategy) else str(each)


def check_together_again(result: tw.Result, log: Killer, victims: tuple[int, ...], epochs: int = EPOCHS) -> None:
    assert result.summary["complete"]
    assert result.summary["workers_lost"] == len(victims)
    assert result.summary["rows"] >= epochs * ROWS  # a batch that was under way may count twice
    formed = [e.members for e in log.of(events.GenerationFormed)]
    assert formed[0] == formed[-1] == (0, 1, 2, 3)
    if len(victims) == 1:  # the other group went on alone
        assert tuple(w for w in range(4) if w // 2 != victims[0] // 2) in formed
    given = {(e.peer, e.digest) for e in log.of(events.HandedOver)}
    taken = {(e.worker, e.digest) for e in log.of(events.Rejoined)}
    assert {worker for worker, _ in taken} >= set(victims)
    assert taken <= given  # what was taken over is what was given, part by part


@pytest.mark.parametrize(("strategy", "victims"), DEATHS, ids=named)
def test_a_group_that_loses_a_worker_comes_together_again(strategy: tw.Strategy, victims: tuple[int, ...]) -> None:
    """Also where every group has lost somebody, as long as each part is still somewhere."""
    log = Killer()
    result = fit(strategy, tw.Planned(group_size=2), cluster=virtual(*victims), callbacks=[log])
    check_together_again(result, log, victims)
    assert best(result) >= 0.9


@pytest.mark.timeout(600)  # gloo may take a minute to see that a member is gone
@pytest.mark.parametrize(
    ("strategy", "victims"),
    [pytest.param(*case, marks=[] if case[0] == tw.Relay() else pytest.mark.long) for case in DEATHS],
    ids=named,
)
def test_a_group_whose_process_is_killed_comes_together_again(strategy: tw.Strategy, victims: tuple[int, ...]) -> None:
    killer = Killer(*victims)
    result = fit(strategy, tw.Planned(group_size=2), callbacks=[killer], epochs=LONGER)
    check_together_again(result, killer, victims, LONGER)


@pytest.mark.parametrize("cluster", [pytest.param("virtual"), pytest.param("processes", marks=pytest.mark.long)])
def test_the_only_group_goes_on_from_its_last_checkpoint(tmp_path: Path, cluster: str) -> None:
    def where(*victims: int) -> Any:
        return virtual(*victims, workers=2) if cluster == "virtual" else tw.Local(workers=2)

    killer = Killer(*([1] if cluster == "processes" else []), after=60)
    out = str(tmp_path / "run")
    result = fit(
        tw.Synchronous(),
        tw.TensorParallel(group_size=2),
        cluster=where(1),
        callbacks=[killer],
        out=out,
        checkpoint_every=20,
    )
    assert result.summary["complete"]
    assert result.summary["workers_lost"] == 1
    starts = killer.of(events.RunStarted)
    assert [start.resumed_from is None for start in starts] == [True, False]
    assert len(killer.of(events.RunEnded)) == 1
    if cluster == "virtual":
        assert best(result) >= 0.9

    again = fit(tw.Synchronous(), tw.TensorParallel(group_size=2), cluster=where(), resume=out, epochs=EPOCHS + 1)
    assert again.summary["rows"] == pytest.approx((EPOCHS + 1) * ROWS, abs=2 * BATCH)
    with pytest.raises(CheckpointError, match="same placement"):
        fit(tw.Synchronous(), None, cluster=where(), resume=out)


def test_without_a_checkpoint_the_loss_of_the_only_group_says_what_to_do() -> None:
    with pytest.raises(LostWorkersError, match="checkpoint"):
        fit(tw.Synchronous(), tw.Planned(group_size=2), cluster=virtual(1, workers=2))


LIMIT = 510 << 20
"""Bytes beyond what a worker has before it makes its network: less than the 538 MB that its parameters are."""


def limited(driver: int) -> nn.Module:
    """A network of 134 million parameters, in a process that may not have much more memory than it has."""
    import resource

    if os.getpid() != driver:
        import torch._dynamo  # noqa: F401 - what planning loads counts as there before

        with open("/proc/self/status", encoding="ascii") as lines:
            data = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT, data + LIMIT))
    layers = [layer for _ in range(32) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), *layers, nn.Linear(2048, 10))


@pytest.mark.long
def test_a_network_that_one_worker_has_no_memory_for_trains_on_four() -> None:
    driver = os.getpid()
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.01),
        "strategy": tw.Synchronous(),
        "steps": 4,
        "batch_size": 4,
        "progress": False,
    }
    with pytest.raises(WorkerError, match=r"in limited[\s\S]*Cannot allocate memory"):  # it cannot even be made
        tw.fit(lambda: limited(driver), "digits", cluster=tw.Local(workers=1), **settings)
    result = tw.fit(
        lambda: limited(driver),
        "digits",
        cluster=tw.Local(workers=4),
        placement=tw.TensorParallel(group_size=4),
        **settings,
    )
    assert result.summary["steps"] == 4
    assert sum(p.numel() for p in result.model.parameters()) > 134_000_000


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        (tw.Planned(group_size=3), {}, "does not divide 4 workers"),
        (tw.Planned(group_size=2), {"cluster": tw.Local(workers=2, processes=False)}, "a process for each worker"),
        (tw.Planned(group_size=2), {"strategy": tw.EASGD(period=5, servers="driver")}, "servers='spread'"),
        ("planned", {}, "tw.Planned"),
        (tw.Pipeline(group_size=4), {"epochs": 1}, "cannot be cut into 4 stages"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_remedy(placement: Any, changes: Any, message: str) -> None:
    settings = {"strategy": tw.Synchronous()} | changes
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    if isinstance(placement, tw.Pipeline):
        with pytest.raises(ConfigError, match=message):
            tw.fit(model, "digits", inputs=["pixels"], placement=placement, cluster=tw.Local(workers=4), progress=False)
        return
    with pytest.raises(ConfigError, match=message):
        fit(settings.pop("strategy"), placement, **settings)


class Looks(nn.Module):
    """An optional argument, a constant, a buffer that is not saved, and one more layer, which may branch on values."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.inner, self.last, self.out = nn.Linear(64, 32), last, nn.Linear(32, 10)
        self.register_buffer("shift", torch.full((32,), 0.1), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = torch.relu(self.inner(x.flatten(1)) + self.shift) * torch.ones(32)
        found = self.last(found if mask is None else found * mask)
        return self.out(found)  # type: ignore[no-any-return]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.mean() > 0 else -x


def test_a_network_with_optional_arguments_trains_in_groups_as_it_does_alone() -> None:
    settings: dict[str, Any] = {"inputs": ["pixels"], "steps": 20, "batch_size": 8, "strategy": tw.Synchronous()}
    settings |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "progress": False}
    placement = tw.TensorParallel(group_size=2)
    placed = tw.fit(lambda: Looks(nn.Tanh()), "digits", placement=placement, cluster=virtual(workers=2), **settings)
    alone = tw.fit(lambda: Looks(nn.Tanh()), "digits", cluster=virtual(workers=2), **settings)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(placed.model.state_dict()[name], value, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("placement", [tw.Planned(group_size=2), tw.TensorParallel(group_size=2), tw.Pipeline()])
def test_a_network_that_cannot_be_read_is_refused_before_a_worker_starts(placement: Any) -> None:
    log: list[events.Event] = []
    with pytest.raises(ConfigError, match=r"last \(Branches\) at .*`return x if x.mean\(\) > 0 else -x`.*as_one_layer"):
        fit(tw.Synchronous(), placement, model=lambda: Looks(Branches()), callbacks=[log.append])
    assert log == []
