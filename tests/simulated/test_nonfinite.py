"""NaN and infinity at any step: a finite model and finite checkpoints, or an error that names the worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.simulated.flawed import (
    STEPS,
    Net,
    Site,
    checkpoints,
    infinite_gradient,
    is_finite,
    nan_gradient,
    nan_loss,
    overflowing_parameters,
    run,
)
from thinwire.errors import CheckpointError, ConfigError, DivergedError
from thinwire.strategies import STRATEGIES, Strategy, strategy

KNOBS: dict[str, dict[str, Any]] = {
    "sparknet": {"period": 3}, "diloco": {"period": 3}, "easgd": {"period": 2}, "deepspark": {"period": 2},
}  # fmt: skip
FLAWS = [nan_gradient, infinite_gradient, nan_loss, overflowing_parameters]
WHEN = {"first": 1, "middle": 6, "last": STEPS}
ALL = (0, 1, 2)


def three(flaw: Any, steps: Any, workers: Any) -> Site:
    return Site(tw.Simulated(workers=3, step_s=0.05), flaw, steps, workers)


def known(name: str) -> Strategy:
    return strategy(name, KNOBS.get(name, {}))


CASES = [
    *((nan_gradient, when, who) for when in WHEN for who in ((1,), ALL)),
    (overflowing_parameters, "middle", (1,)),
    (overflowing_parameters, "last", ALL),
    (infinite_gradient, "first", (1,)),
    (nan_loss, "middle", ALL),
]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("flaw", "when", "who"), CASES, ids=[f"{flaw.__name__}-{when}-{len(who)}" for flaw, when, who in CASES]
)
def test_what_is_not_finite_is_in_no_model_and_in_no_checkpoint(
    tmp_path: Path, flaw: Any, name: str, when: str, who: tuple[int, ...]
) -> None:
    site, given = three(flaw, {WHEN[when]}, who), {"out": str(tmp_path)}
    if flaw is overflowing_parameters and name == "synchronous":  # there is no other model to start again from
        with pytest.raises(DivergedError, match=r"worker \d on machine-\d"):
            run(site, known(name), **given)
        checkpoints(tmp_path)
        return
    result, told = run(site, known(name), **given)
    assert result.summary["complete"]
    assert is_finite(result.model)
    assert checkpoints(tmp_path)[-1].endswith("final")
    if flaw is not overflowing_parameters:
        assert {(event.worker, event.step) for event in told} == {(worker, WHEN[when]) for worker in who}
        assert {event.host for event in told} == {f"machine-{worker}" for worker in who}
        assert result.summary["nonfinite"] == len(who)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_replicas_that_are_one_stay_equal_when_a_gradient_is_left_out(codec: str) -> None:
    site = three(nan_gradient, {1, 5, STEPS}, (1,))
    run(site, tw.Synchronous(codec=codec))
    first, *others = (replica.vector for replica in site.replicas)
    assert all(torch.equal(first, other) for other in others)


def test_nobody_steps_where_no_gradient_is_left() -> None:
    site, taken = three(nan_gradient, {4}, ALL), []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            taken.append(1)
            return super().step(closure)

    result, _ = run(site, tw.Synchronous(), optimizer=lambda p: Counted(p, lr=0.05))
    assert len(taken) == 3 * (STEPS - 1) + 1, "the driver tries a step, of numbers of its own"
    assert [replica.steps for replica in site.replicas] == [STEPS] * 3
    assert result.summary["steps"] == STEPS


def test_a_step_that_is_not_taken_leaves_momentum_and_running_statistics_as_they_were() -> None:
    """One worker that drops its last step is one worker that made a step fewer."""
    cluster = tw.Simulated(workers=1, step_s=0.05)
    shorter, _ = run(Site(cluster, nan_gradient, (), ()), tw.SparkNet(), steps=7, validation=None)
    site = Site(cluster, nan_gradient, {8}, (0,))
    dropped, told = run(site, tw.SparkNet(), steps=8, validation=None)
    assert [(event.what, event.values, event.step) for event in told] == [("gradient", 1, 8)]
    names = [name for name, _ in dropped.model.named_parameters()]
    assert all(torch.equal(dropped.model.state_dict()[n], shorter.model.state_dict()[n]) for n in names)


def test_a_replica_that_is_not_finite_starts_from_the_joint_model_with_a_fresh_optimizer(tmp_path: Path) -> None:
    site = three(overflowing_parameters, {6}, (1,))
    result, told = run(site, tw.Relay(), out=str(tmp_path))
    assert {event.what for event in told} <= {"loss", "buffers", "parameters", "contribution"}
    assert "parameters" in {event.what for event in told}
    replica = site.replicas[1]
    assert replica.is_finite
    moments = [v for kept in replica.optimizer.state.values() for v in kept.values() if isinstance(v, torch.Tensor)]
    assert moments, "it has learnt again since"
    assert all(v.isfinite().all() for v in moments)
    assert result.summary["val_loss"] < 2.2


@pytest.mark.parametrize("name", ["sparknet", "relay", "synchronous", "easgd", "parameter_table"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_in_which_it_goes_on_at_all_workers_ends_and_names_one(tmp_path: Path, name: str, workers: int) -> None:
    site = Site(tw.Simulated(workers=workers, step_s=0.05), nan_gradient, range(9, 1000), range(workers))
    with pytest.raises(DivergedError, match=r"worker \d on machine-\d.*last good checkpoint is 0") as caught:
        run(site, known(name), steps=500, out=str(tmp_path))
    last = checkpoints(tmp_path)[-1]
    assert f"checkpoint is {last}:" in str(caught.value), "nothing is saved after the one that is named"
    assert max(replica.steps for replica in site.replicas) < 100


def test_one_worker_that_never_gets_on_does_not_end_the_run_of_the_others(tmp_path: Path) -> None:
    result, told = run(three(nan_loss, range(1, 100), (2,)), known("sparknet"), steps=60, out=str(tmp_path))
    assert result.summary["complete"]
    assert result.summary["val_loss"] < 1.5
    assert {event.worker for event in told} == {2}
    assert result.summary["nonfinite"] == 60
    assert len(told) < 30, "what happens over and over is told in few words"
    assert sum(event.times for event in told) == 60


def test_a_short_run_half_of_whose_steps_are_lost_is_no_success() -> None:
    with pytest.raises(DivergedError, match=r"the loss became NaN or infinite at step \d"):
        run(three(nan_loss, {2, 3}, ALL), known("sparknet"), steps=3)


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.__name__)
def test_stop_ends_the_run_at_the_first(tmp_path: Path, flaw: Any) -> None:
    with pytest.raises(DivergedError, match=r"worker 1 on machine-1 .*step [67]"):
        run(three(flaw, {6}, (1,)), known("relay"), on_nonfinite="stop", out=str(tmp_path))
    checkpoints(tmp_path)
    with pytest.raises(DivergedError, match=r"worker 1 on machine-1 .*step 12"):
        run(three(flaw, {STEPS}, (1,)), known("relay"), on_nonfinite="stop")


def test_what_is_neither_drop_nor_stop_is_refused() -> None:
    with pytest.raises(tw.errors.ConfigError, match="Allowed: drop, stop"):
        run(three(nan_loss, (), ()), known("relay"), on_nonfinite="ignore")


def test_all_of_a_group_drop_the_same_step(tmp_path: Path) -> None:
    taken: dict[int, list[int]] = {}

    class Counted(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.05)
            self.steps = taken.setdefault(len(taken), [])

        def step(self, closure: Any = None) -> Any:
            self.steps.append(1)
            return super().step(closure)

    site = Site(tw.Simulated(workers=4, step_s=0.05), nan_gradient, {5, STEPS}, (1,))
    result, told = run(
        site, known("sparknet"), placement=tw.TensorParallel(group_size=2), model="mlp", optimizer=Counted,
        out=str(tmp_path),
    )  # fmt: skip
    assert result.summary["complete"]
    assert is_finite(result.model)
    assert checkpoints(tmp_path)
    assert sorted(len(steps) for steps in taken.values() if steps) == [STEPS - 2, STEPS - 2, STEPS, STEPS]
    assert {(event.worker, event.step) for event in told} == {(1, 5), (1, STEPS)}


@pytest.mark.parametrize("name", ["sparknet", "relay", "parameter_table"])
def test_a_group_whose_member_overflows_starts_again_together(tmp_path: Path, name: str) -> None:
    site = Site(tw.Simulated(workers=4, step_s=0.05), overflowing_parameters, {5}, (1,))
    result, _ = run(site, known(name), placement=tw.TensorParallel(group_size=2), model="mlp", out=str(tmp_path))
    assert result.summary["complete"]
    assert is_finite(result.model)
    assert checkpoints(tmp_path)


def test_a_group_that_overflows_and_has_nothing_to_start_from_names_the_worker(tmp_path: Path) -> None:
    site = Site(tw.Simulated(workers=4, step_s=0.05), overflowing_parameters, {5}, (1,))
    with pytest.raises(DivergedError, match=r"worker [01] on machine-[01]"):
        run(site, tw.Synchronous(), placement=tw.TensorParallel(group_size=2), model="mlp", out=str(tmp_path))
    checkpoints(tmp_path)


def test_buffers_that_are_infinite_by_design_stay_so(tmp_path: Path) -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0] * 10 + [float("-inf")]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.mask[:10]

    result, told = run(three(nan_gradient, (), ()), known("sparknet"), model=Masked, out=str(tmp_path))
    assert not told
    assert result.model.mask[-1] == float("-inf")
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_running_statistics_that_overflow_go_back_and_are_in_no_mean(tmp_path: Path) -> None:
    """A variance overflows and the loss does not: nothing of the step says so but the buffers."""

    def overflow(replica: Any, loss: float) -> float:
        norm = next(m for m in replica.module.modules() if isinstance(m, nn.BatchNorm1d))
        norm.running_var[0] = float("inf")
        return loss

    result, told = run(three(overflow, {8}, (1,)), known("sparknet"), out=str(tmp_path))
    assert is_finite(result.model)
    checkpoints(tmp_path)
    assert [(event.worker, event.what, event.values) for event in told] == [(1, "buffers", 1)]


@pytest.mark.parametrize("name", ["synchronous", "sparknet", "relay", "parameter_table"])
def test_running_statistics_that_are_never_finite_are_in_no_checkpoint(tmp_path: Path, name: str) -> None:
    """A checkpoint is of one step, though it is written when further ones have been computed."""

    def spoil(replica: Any, loss: float) -> float:
        norm = next(m for m in replica.module.modules() if isinstance(m, nn.BatchNorm1d))
        norm.running_var[0] = float("nan")
        return loss

    result, told = run(three(spoil, range(1, STEPS + 1), ALL), known(name), out=str(tmp_path))
    assert result.summary["complete"]
    assert is_finite(result.model)
    assert checkpoints(tmp_path)
    assert {event.what for event in told} == {"buffers"}


def test_an_optimizer_whose_moments_overflow_is_saved_without_them(tmp_path: Path) -> None:
    def overflow(replica: Any, loss: float) -> float:
        state = replica.optimizer.state[replica.parameters.tensors[0]]
        state["exp_avg_sq"].view(-1)[0] = float("inf")
        return loss

    site = three(overflow, {3}, (1,))
    result, told = run(site, known("sparknet"), optimizer=lambda p: torch.optim.Adam(p, lr=0.01), out=str(tmp_path))
    checkpoints(tmp_path)
    assert [(event.worker, event.what) for event in told] == [(1, "optimizer state")]
    assert result.summary["complete"]


@pytest.mark.parametrize("name", ["sparknet", "relay"])
def test_a_run_goes_on_from_the_last_good_checkpoint(tmp_path: Path, name: str) -> None:
    site = Site(tw.Simulated(workers=2, step_s=0.05), nan_gradient, range(10, 1000), (0, 1))
    with pytest.raises(DivergedError):
        run(site, known(name), steps=300, out=str(tmp_path))
    again, told = run(tw.Simulated(workers=2, step_s=0.05), known(name), steps=40, resume=str(tmp_path))
    assert not told
    assert again.summary["complete"]
    assert is_finite(again.model)


def test_checkpoints_of_earlier_versions_that_are_not_finite_are_passed_over_and_never_push_a_good_one_out(
    tmp_path: Path,
) -> None:
    from thinwire.checkpoint import CheckpointStore, Manifest

    cluster = tw.Simulated(workers=2, step_s=0.05)
    run(cluster, known("sparknet"), steps=8, out=str(tmp_path))
    store = CheckpointStore(tmp_path / "checkpoints")
    good = store.latest()
    assert good is not None
    for step in (300, 400):
        trees: dict[str, Any] = {part.name: store.read_part(good, part.name) for part in good.parts}
        trees["joint"]["joint"]["state"][0].fill_(float("nan"))
        name = f"0009{step // 100:02d}-step-{step}"
        meta = {key: value for key, value in good.meta.items() if key != "finite"}
        parts = tuple(store.write_part(name, part, tree) for part, tree in trees.items())
        store.commit(Manifest(name, step, parts, meta))
    again, _ = run(cluster, known("sparknet"), steps=24, resume=str(tmp_path))
    assert again.summary["resumed_from"] == good.name
    assert set(again.summary["passed_over"]) == {"000903-step-300", "000904-step-400"}
    assert "not finite" in again.summary["passed_over"]["000904-step-400"]
    assert is_finite(again.model)
    kept = checkpoints(tmp_path)
    assert kept
    assert not set(kept) & set(again.summary["passed_over"])


def changed_checkpoint(out: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Adds a newer checkpoint that says that it is finite, and holds what the last one did with a change."""
    from thinwire.checkpoint import CheckpointStore, Manifest

    store = CheckpointStore(out / "checkpoints")
    good = store.latest()
    assert good is not None
    trees: dict[str, Any] = {part.name: store.read_part(good, part.name) for part in good.parts}
    change(trees)
    parts = tuple(store.write_part("000900-step-300", part, tree) for part, tree in trees.items())
    store.commit(Manifest("000900-step-300", 300, parts, dict(good.meta)))
    return good.name


def test_a_checkpoint_that_says_it_is_finite_and_is_not_is_passed_over(tmp_path: Path) -> None:
    cluster = tw.Simulated(workers=2, step_s=0.05)
    run(cluster, known("sparknet"), steps=8, out=str(tmp_path))

    def change(trees: dict[str, Any]) -> None:
        trees["joint"]["joint"]["state"][0].view(-1)[0] = float("nan")

    good = changed_checkpoint(tmp_path, change)
    again, _ = run(cluster, known("sparknet"), steps=24, resume=str(tmp_path))
    assert again.summary["resumed_from"] == good
    assert set(again.summary["passed_over"]) == {"000900-step-300"}
    assert is_finite(again.model)


@pytest.mark.parametrize("what", ["buffers", "vector"])
@pytest.mark.parametrize("workers", ["one", "all"])
def test_a_worker_takes_up_no_part_of_a_checkpoint_that_is_not_finite(tmp_path: Path, what: str, workers: str) -> None:
    """Buffers above all: nothing that is computed later would put them right, nor say so."""
    cluster = tw.Simulated(workers=2, step_s=0.05)
    run(cluster, known("sparknet"), steps=8, out=str(tmp_path))

    def change(trees: dict[str, Any]) -> None:
        for part in ("worker-0", "worker-1")[workers == "one" :]:
            trees[part]["replica"][what].view(-1)[0] = float("nan")

    changed_checkpoint(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"worker \d on machine-\d.*not finite: .*Remove its folder"):
        run(cluster, known("sparknet"), steps=24, resume=str(tmp_path))


def test_an_optimizer_s_state_that_is_not_finite_is_forgotten_as_a_run_goes_on(tmp_path: Path) -> None:
    cluster = tw.Simulated(workers=2, step_s=0.05)
    run(cluster, known("sparknet"), steps=8, out=str(tmp_path))

    def change(trees: dict[str, Any]) -> None:
        learnt = trees["worker-1"]["replica"]["learning"]["optimizer"]["state"]
        next(iter(learnt.values()))["momentum_buffer"].view(-1)[0] = float("inf")

    changed_checkpoint(tmp_path, change)
    again, told = run(cluster, known("sparknet"), steps=24, resume=str(tmp_path))
    assert [(event.worker, event.what, event.values, event.step) for event in told] == [(1, "optimizer state", 1, 8)]
    assert again.summary["complete"]
    assert is_finite(again.model)


def test_buffers_that_go_back_are_told_with_the_step_that_left_them(tmp_path: Path) -> None:
    pixels = torch.rand(600, 64)
    pixels[10, 3] = float("nan")
    data = {"pixels": pixels.numpy(), "label": torch.randint(0, 10, (600,)).numpy()}
    _, told = run(tw.Simulated(workers=3, step_s=0.05), known("sparknet"), data=data, validation=None)
    assert {event.what for event in told} == {"loss", "buffers"}
    steps = [{event.step for event in told if event.what == what} for what in ("loss", "buffers")]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", ["layers.1.running_mean", "layers.0.weight"])
def test_a_network_that_is_given_with_nan_in_it_is_refused_before_anything_starts(name: str) -> None:
    """Of one that is made later the end of the run says so."""

    def made() -> nn.Module:
        net = Net()
        net.state_dict()[name].view(-1)[0] = float("nan")
        return net

    cluster = tw.Simulated(workers=2, step_s=0.05)
    with pytest.raises(ConfigError, match=rf"model holds NaN: 1 of \d+ values of '{name}'"):
        run(cluster, known("sparknet"), model=made())
    with pytest.raises(DivergedError, match="finite"):
        run(cluster, known("sparknet"), model=made)


@pytest.mark.parametrize("name", ["layers.1.running_var", "layers.0.weight"])
@pytest.mark.parametrize("frozen", [True, False])
def test_whatever_a_worker_hands_back_is_looked_at_before_a_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, frozen: bool
) -> None:
    """Buffers and frozen parameters too: one worker's word is the whole model's."""
    from thinwire.run import driver

    true = driver.load_over_base

    def spoiled(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
        true(module, state | {name: torch.full_like(module.state_dict()[name], float("nan"))})

    def made() -> nn.Module:
        net = Net()
        net.layers[0].requires_grad_(not frozen)
        return net

    monkeypatch.setattr(driver, "load_over_base", spoiled)
    with pytest.raises(DivergedError, match=rf"'{name}' of the trained model is not finite.*last good checkpoint"):
        run(tw.Simulated(workers=2, step_s=0.05), known("sparknet"), model=made, validation=None, out=str(tmp_path))


def test_bfloat16_is_no_different() -> None:
    result, told = run(three(nan_gradient, {6}, (1,)), known("relay"), precision="bfloat16")
    assert [(event.worker, event.what, event.step) for event in told] == [(1, "gradient", 6)]
    assert is_finite(result.model)
