"""Every strategy through one suite: one row a strategy or variant, and nothing else to add for a new one."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch
from tests.reference_loop import Loop, Task
from torch import Tensor

from thinwire.checkpoint import decode, encode
from thinwire.errors import ConfigError
from thinwire.exchange.joint import JointState, slice_state, write_state
from thinwire.parameters import fragments
from thinwire.strategies import (
    EASGD,
    MPCA,
    STRATEGIES,
    Auto,
    DeepSpark,
    DiLoCo,
    Measured,
    ParameterTable,
    Progress,
    Relay,
    Setting,
    Share,
    SparkNet,
    Strategy,
    Synchronous,
    name_of,
    strategy,
)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


TABLE: dict[str, Strategy] = {
    "auto": Auto(),
    "synchronous": Synchronous(),
    "synchronous in int8": Synchronous(codec="int8"),
    "sparknet": SparkNet(period=5),
    "sparknet with a warm-up": SparkNet(period=5, warmup=10),
    "sparknet by time": SparkNet(period_s=0.5),
    "mpca with 1 fragment": MPCA(fragments=1, pull_cycles=3, lookahead_cycles=3, blend_cycles=3),
    "mpca with 2 fragments": MPCA(fragments=2),
    "mpca with 3 fragments": MPCA(),
    "mpca by gradient": MPCA(form="gradient", pull=1.0, pull_peak=1.0),
    "diloco": DiLoCo(period=5, lr=0.7, momentum=0.5),
    "diloco with fragments and overlap": DiLoCo(period=8, fragments=4, overlap=True, momentum=0.5),
    "easgd": EASGD(period=5),
    "easgd with momentum": EASGD(period=5, momentum=0.5, pull=0.2),
    "deepspark": DeepSpark(period=5, budget=0.1),
    "parameter table": ParameterTable(optimizer=momentum),
    "parameter table, strict": ParameterTable(consistency="strict", optimizer=adam),
    "relay": Relay(),
    "relay in 2 bits": Relay(bits=2, fragments=2, momentum=0.3),
    "relay in 8 bits": Relay(bits=8, fragments=1),
}
every = pytest.mark.parametrize("chosen", TABLE.values(), ids=TABLE.keys())

OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("sparknet", {"period": 0}),
    ("sparknet", {"period": 2.5}),
    ("diloco", {"fragments": 1.5}),
    ("easgd", {"tuple_size": 1000.5}),
    ("sparknet", {"period_s": -1.0}),
    ("sparknet", {"warmup": -1}),
    ("mpca", {"fragments": 4}),
    ("mpca", {"fragments": 0}),
    ("mpca", {"form": "both"}),
    ("mpca", {"pull": 1.5}),
    ("mpca", {"pull_peak": -0.1}),
    ("mpca", {"smoothing": 2.0}),
    ("mpca", {"lookahead": -1.0}),
    ("mpca", {"free_cycles": -1}),
    ("mpca", {"pull_cycles": 0}),
    ("mpca", {"lookahead_cycles": 0}),
    ("mpca", {"blend": 0.0}),
    ("mpca", {"blend_cycles": 0}),
    ("diloco", {"period": 0}),
    ("diloco", {"lr": -0.1}),
    ("diloco", {"momentum": 1.5}),
    ("diloco", {"fragments": 0}),
    ("diloco", {"keep": 1.5}),
    ("diloco", {"overlap": "yes"}),
    ("easgd", {"period": 0}),
    ("easgd", {"pull": 1.5}),
    ("easgd", {"momentum": -0.1}),
    ("easgd", {"servers": 0}),
    ("easgd", {"servers": "some"}),
    ("easgd", {"tuple_size": 0}),
    ("easgd", {"log_every": 0}),
    ("deepspark", {"period": 0}),
    ("deepspark", {"budget": -1.0}),
    ("deepspark", {"pool": 0}),
    ("parameter_table", {"consistency": "some"}),
    ("parameter_table", {"groups": 0}),
    ("parameter_table", {"ahead": -1}),
    ("parameter_table", {"staleness": -1}),
    ("parameter_table", {"compensation": -0.1}),
    ("auto", {"guard": "yes"}),
    ("relay", {"bits": 3}),
    ("relay", {"bits": 0}),
    ("relay", {"bits": True}),
    ("relay", {"bits": "many"}),
    ("relay", {"fragments": 0}),
    ("relay", {"lr": -1.0}),
    ("relay", {"momentum": 2.0}),
    ("relay", {"quorum": 1.5}),
    ("relay", {"quorum": -0.5}),
    ("relay", {"grace_s": -1.0}),
    ("synchronous", {"codec": "int3"}),
]
NOT_NUMBERS: list[tuple[str, dict[str, Any]]] = [
    ("sparknet", {"period": "ten"}),
    ("sparknet", {"period": float("nan")}),
    ("mpca", {"pull": "weak"}),
    ("mpca", {"pull": float("nan")}),
    ("diloco", {"period": "ten"}),
    ("diloco", {"lr": float("nan")}),
    ("relay", {"fragments": "some"}),
    ("relay", {"quorum": "half"}),
]


def numbers(count: int, size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def opened(chosen: Strategy, x: Tensor) -> tuple[Any, Any]:
    """The states after a few merges, so that no field is still zero."""
    joint, worker = chosen.open(x)
    for cycle, mean in enumerate(numbers(3, x.numel(), seed=5)):
        reply, joint = chosen.merge(joint, mean, cycle, Setting(momentum=0.3))
        if chosen.subject == "parameters":
            _, worker = chosen.adopt(worker, x, x, reply)
    return joint, worker


# -- the dataclass ----------------------------------------------------------------------------------------------------


def test_every_registered_strategy_has_a_row() -> None:
    assert {type(chosen) for chosen in TABLE.values()} == set(STRATEGIES.values())


@every
def test_it_pickles_prints_and_compares(chosen: Strategy) -> None:
    again = pickle.loads(pickle.dumps(chosen))
    assert again == chosen
    assert hash(again) == hash(chosen)
    assert repr(again) == repr(chosen)
    assert repr(chosen).startswith(type(chosen).__name__ + "(")
    for field in dataclasses.fields(chosen):
        assert f"{field.name}=" in repr(chosen)


@every
def test_its_knobs_are_frozen_and_keyword_only(chosen: Strategy) -> None:
    for field in dataclasses.fields(chosen):
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(chosen, field.name, None)


@every
def test_its_name_and_knobs_give_it_back(chosen: Strategy) -> None:
    assert strategy(name_of(chosen), dataclasses.asdict(chosen)) == chosen


@pytest.mark.parametrize(("name", "knobs"), OUT_OF_RANGE, ids=lambda v: str(v))
def test_a_knob_out_of_range_is_refused_by_name(name: str, knobs: dict[str, Any]) -> None:
    (knob,) = knobs
    with pytest.raises(ConfigError, match=knob):
        strategy(name, knobs)


@pytest.mark.parametrize(("name", "knobs"), NOT_NUMBERS, ids=lambda v: str(v))
def test_a_knob_that_is_no_number_is_refused_by_name(name: str, knobs: dict[str, Any]) -> None:
    (knob,) = knobs
    with pytest.raises(ConfigError, match=knob):
        strategy(name, knobs)


def test_diloco_refuses_more_fragments_than_steps_in_a_period() -> None:
    with pytest.raises(ConfigError, match="period"):
        DiLoCo(period=2, fragments=4)


@pytest.mark.parametrize(("typed", "meant"), [("spraknet", "sparknet"), ("dilco", "diloco"), ("Relay", "relay")])
def test_an_unknown_name_is_refused_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){typed}.*Did you mean '{meant}'"):
        strategy(typed)


@pytest.mark.parametrize(
    ("name", "typed", "meant"),
    [("sparknet", "perod", "period"), ("mpca", "fragment", "fragments"), ("relay", "momentun", "momentum")],
)
def test_an_unknown_knob_is_refused_with_the_nearest(name: str, typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)strategy\.{typed}.*Did you mean '{meant}'"):
        strategy(name, {typed: 1})


# -- state ------------------------------------------------------------------------------------------------------------


@every
def test_its_states_are_named_tuples_of_full_length_tensors_and_numbers(chosen: Strategy) -> None:
    x = numbers(1, 700)[0]
    for joint, worker in (chosen.open(x), opened(chosen, x)):
        for state in (joint, worker):
            assert isinstance(state, tuple)
            assert hasattr(state, "_fields")
            for value in state:
                assert isinstance(value, int | float) or (value.shape == x.shape and value.dtype == torch.float32)
        if chosen.subject == "parameters":
            assert joint._fields[0] == "model"


@every
def test_its_states_share_no_memory_with_the_replica(chosen: Strategy) -> None:
    x = numbers(1, 700)[0]
    for state in chosen.open(x):
        assert all(value.data_ptr() != x.data_ptr() for value in state if isinstance(value, Tensor))


@every
def test_its_states_go_through_a_checkpoint(chosen: Strategy) -> None:
    for state in opened(chosen, numbers(1, 700)[0]):
        back = decode(encode({"state": list(state)}))
        again = type(state)(*back["state"])
        assert type(again) is type(state)
        for mine, theirs in zip(state, again, strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs


@every
def test_a_joint_state_loaded_from_its_tree_goes_on_the_same(chosen: Strategy) -> None:
    x = numbers(1, 1500)[0]
    first = JointState(chosen, x, 4)
    for round in range(5):
        fragment = first.fragment(round)
        first.land(round, fragment, numbers(1, fragment.size, seed=round)[0])
    second = JointState(chosen, torch.zeros(1500), 4)
    second.load(decode(encode(first.tree())))
    for round in range(5, 9):
        fragment = first.fragment(round)
        assert second.fragment(round) == fragment
        mean = numbers(1, fragment.size, seed=round)[0]
        assert torch.equal(first.land(round, fragment, mean), second.land(round, fragment, mean))
    assert first.cycle() == second.cycle()


# -- arithmetic -------------------------------------------------------------------------------------------------------


@every
def test_no_method_but_before_step_writes_its_arguments(chosen: Strategy) -> None:
    x, snapshot, mean = numbers(3, 700)
    joint, worker = opened(chosen, x)
    given = [x, snapshot, mean, *(v for state in (joint, worker) for v in state if isinstance(v, Tensor))]
    before = [v.clone() for v in given]
    contribution = chosen.contribute(joint, snapshot)
    reply, merged = chosen.merge(joint, mean, 4, Setting(momentum=0.3))
    kept = reply.clone()
    chosen.adopt(worker, x, snapshot, reply)
    for cycle in range(5):
        chosen.gradient_term(worker, x, cycle)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert torch.equal(reply, kept)
    assert contribution.shape == mean.shape
    assert type(merged) is type(joint)


@every
def test_before_step_writes_the_replica_and_the_worker_state_and_nothing_else(chosen: Strategy) -> None:
    x = numbers(1, 700)[0]
    joint, worker = opened(chosen, x)
    before = [v.clone() for v in joint]
    for cycle in range(5):
        assert chosen.before_step(worker, x, cycle) is None
    assert all(torch.equal(a, b) for a, b in zip(joint, before, strict=True))
    assert all(torch.isfinite(v).all() for v in (x, *worker))


@every
def test_the_order_of_contributions_does_not_matter(chosen: Strategy) -> None:
    """Numbers that add up exactly in any order, so that only a strategy could tell them apart."""
    x = torch.arange(512.0)
    snapshots = [x + 2.0**k for k in range(4)]
    joint, _ = chosen.open(x)
    contributions = [chosen.contribute(joint, s) for s in snapshots]
    merged = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        mean = sum(contributions[k] for k in order) / 4
        merged.append(chosen.merge(joint, mean, 3, Setting(momentum=0.3)))
    for reply, state in merged[1:]:
        assert torch.equal(reply, merged[0][0])
        assert all(torch.equal(a, b) for a, b in zip(state, merged[0][1], strict=True))


@every
@pytest.mark.parametrize("count", [2, 3, 7])
def test_merging_by_fragments_is_merging_whole(chosen: Strategy, count: int) -> None:
    size = 1500
    x, snapshot, mean = numbers(3, size)
    joint, worker = opened(chosen, x)
    whole_reply, whole_joint = chosen.merge(joint, mean, 2, Setting(momentum=0.3))
    whole_x, whole_worker = chosen.adopt(worker, x, snapshot, whole_reply)
    joint, worker = opened(chosen, x)
    got = x.clone()
    for fragment in fragments(size, count):
        piece = slice_state(joint, fragment, size)
        contribution = chosen.contribute(piece, fragment.of(snapshot))
        assert torch.equal(contribution, fragment.of(chosen.contribute(joint, snapshot)))
        reply, merged = chosen.merge(piece, fragment.of(mean), 2, Setting(momentum=0.3))
        assert torch.equal(reply, fragment.of(whole_reply))
        own = slice_state(worker, fragment, size)
        value, adopted = chosen.adopt(own, fragment.of(got), fragment.of(snapshot), reply)
        fragment.of(got).copy_(value)
        joint = write_state(joint, fragment, size, merged)
        worker = write_state(worker, fragment, size, adopted)
    assert torch.equal(got, whole_x)
    for mine, theirs in zip((*joint, *worker), (*whole_joint, *whole_worker), strict=True):
        assert torch.equal(mine, theirs)


@every
def test_its_first_setting_is_one_that_rounds_can_follow(chosen: Strategy) -> None:
    for size in (10, 700, 10**6):
        setting = chosen.setting(Measured(size, 4, 0, None, None), None)
        assert setting.fragments >= 1
        assert chosen.in_flight >= 1
        assert 0.0 <= chosen.quorum <= 1.0
        assert chosen.grace_s >= 0.0
        joint = JointState(chosen, torch.zeros(size), 4)
        cut = joint.cuts.newest
        assert cut.count <= setting.fragments
        cycle = [joint.fragment(r) for r in range(cut.count)]
        assert all(fragment.size > 0 for fragment in cycle)
        assert sum(fragment.size for fragment in cycle) == size


# -- training ---------------------------------------------------------------------------------------------------------


@every
def test_four_workers_come_to_what_none_could_find_alone(chosen: Strategy) -> None:
    task = Task.make(4)
    loop = Loop(chosen, task)
    for _ in range(800):
        loop.step()
    assert task.loss(loop.model) < 1e-3 * task.loss(torch.zeros(20))


@pytest.mark.parametrize("name", ["synchronous", "sparknet", "relay in 8 bits"])
def test_one_worker_is_plain_training(name: str) -> None:
    """With one worker the mean is its own: for these, exchanging changes nothing (outer momentum 0 for Relay)."""
    chosen = Relay(bits=8, fragments=1, momentum=0.0) if name.startswith("relay") else TABLE[name]
    task = Task.make(1)
    loop, x = Loop(chosen, task), torch.zeros(20)
    for _ in range(60):
        loop.step()
        x.sub_(task.gradient(0, x), alpha=0.05)
    assert torch.allclose(loop.x[0], x, atol=1e-3 if name.startswith("relay") else 1e-5)


def test_synchronous_with_four_workers_is_one_with_all_their_rows() -> None:
    task = Task.make(4)
    whole = Task([torch.cat(task.inputs)], [torch.cat(task.labels)], task.solution)
    loop, x = Loop(Synchronous(), task), torch.zeros(20)
    for _ in range(60):
        loop.step()
        x.sub_(whole.gradient(0, x), alpha=0.05)
    assert all(torch.equal(loop.x[0], other) for other in loop.x[1:])
    assert torch.allclose(loop.x[0], x, atol=1e-4)


def test_easgd_s_pull_is_a_share_of_the_workers_unless_it_is_given() -> None:
    measured = Measured(10, 9, 0, None, None)
    assert EASGD().setting(measured, None).pull == pytest.approx(0.1)
    assert EASGD(pull=0.3).setting(measured, None).pull == 0.3


def test_what_easgd_s_replica_gives_the_joint_model_takes() -> None:
    x, z = numbers(2, 700)
    moved, joint = EASGD().merge(EASGD().open(z)[0], x, 0, Setting(pull=0.25))
    value, _ = EASGD().adopt(None, x, x, moved)
    assert torch.allclose(value + joint.model, x + z, atol=1e-6)
    assert torch.allclose(value, 0.75 * x + 0.25 * z, atol=1e-6)


def test_eamsgd_is_nesterov_s_momentum_on_plain_steps() -> None:
    """One worker that never meets the joint model: x and v as in the paper's Algorithm 2."""
    task, chosen = Task.make(1), EASGD(momentum=0.9, period=10_000)
    loop, x, v = Loop(chosen, task, lr=0.02), torch.zeros(20), torch.zeros(20)
    for _ in range(40):
        loop.step()
        v = 0.9 * v - 0.02 * task.gradient(0, x + 0.9 * v)
        x = x + v
    assert torch.allclose(loop.x[0], x, atol=1e-4)


def test_a_strict_table_with_four_workers_is_one_optimizer_with_all_their_rows() -> None:
    """At every version, for an optimizer with state: what SINGA calls synchronous SGD."""
    task = Task.make(4)
    whole = Task([torch.cat(task.inputs)], [torch.cat(task.labels)], task.solution)
    loop = Loop(ParameterTable(consistency="strict", optimizer=adam), task)
    plain = torch.nn.Parameter(torch.zeros(20))
    optimizer = adam([plain])
    for _ in range(60):
        loop.step()
        plain.grad = whole.gradient(0, plain.detach())
        optimizer.step()
        assert torch.allclose(loop.model, plain, atol=1e-5)


def test_an_optimizer_whose_state_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"NAdam keeps 'mu_product'(?s:.)*Adam"):
        ParameterTable(optimizer=lambda p: torch.optim.NAdam(p)).open(torch.zeros(4))


@pytest.mark.parametrize("optimizer", ["sgd", 3, {"name": "sgd"}])
def test_an_optimizer_that_cannot_be_called_is_refused_by_name(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"ParameterTable\.optimizer = .*cannot be called.*train\.optimizer"):
        ParameterTable(optimizer=optimizer)


def test_deepspark_s_period_grows_as_the_loss_falls() -> None:
    chosen, task = DeepSpark(period=5), Task.make(4)
    loop, launched = Loop(chosen, task), []
    for step in range(200):
        before = loop.joint.landed
        loop.step()
        if loop.joint.landed > before:
            launched.append(step)
    periods = [b - a for a, b in itertools.pairwise(launched)]
    assert periods[0] < periods[-1]
    assert periods[-1] > 10


def test_sparknet_s_warm_up_counts_the_first_worker_alone() -> None:
    chosen = SparkNet(period=5, warmup=10)
    lead = Progress(round=0, steps=9, steps_since=9, seconds_since=0.0, loss_since=0.0, lead=True)
    other = dataclasses.replace(lead, steps=0, steps_since=0, lead=False)
    assert not chosen.due(lead)
    assert chosen.due(dataclasses.replace(lead, steps=10))
    assert chosen.due(other)
    assert [chosen.weight(Share(0, 1, 1, lead)) for lead in (True, False)] == [1.0, 0.0]
    assert [chosen.weight(Share(1, 1, 1, lead)) for lead in (True, False)] == [1.0, 1.0]
