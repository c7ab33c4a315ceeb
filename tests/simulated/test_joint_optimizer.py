"""Workers that send gradients, by which one joint optimizer steps; in virtual time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError
from thinwire.exchange.joint import JointState
from thinwire.exchange.notes import taken_of
from thinwire.parameters import Fragment
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.worker.ahead import Ahead

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def fit(
    strategy: tw.Strategy, *, workers: int = 8, ratio: float = 16.0, optimizer: Any = adamw, **more: Any
) -> tw.Result:
    given: dict[str, Any] = {"batch_size": 4, "steps": 80, "validation": 0.2, "seed": 0, "progress": False}
    cluster = more.pop("cluster", None) or tw.Simulated(workers=workers, ratio=ratio, faults=more.pop("faults", ()))
    return tw.fit(network, "digits", cluster=cluster, strategy=strategy, optimizer=optimizer, **(given | more))


def test_with_adam_and_many_workers_gradients_come_near_free_communication() -> None:
    free = fit(tw.Synchronous(), ratio=0.01).summary["val_loss"]
    gradients = fit(tw.Relay()).summary["val_loss"]
    displacements = fit(tw.Relay(sends="displacements")).summary["val_loss"]
    assert gradients - free < (displacements - free) / 2


def test_where_a_round_takes_many_steps_replicas_wait_and_learn_all_the_same() -> None:
    cluster = tw.Simulated(workers=3, step_s=0.001, latency_s=0.03)
    slow = fit(tw.Relay(sends="gradients"), cluster=cluster, batch_size=16).summary
    free = fit(tw.Synchronous(), workers=3, ratio=0.01, batch_size=16).summary
    assert slow["rounds"] > slow["steps"] / 10
    assert slow["val_loss"] < 2 * free["val_loss"]


def test_momentum_sgd_sends_displacements_unless_asked_for() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    by_default, displacements = (
        fit(strategy, optimizer=sgd, steps=20).summary["val_loss"]
        for strategy in (tw.Relay(), tw.Relay(sends="displacements"))
    )
    assert by_default == displacements
    assert fit(tw.Relay(sends="gradients"), optimizer=sgd, steps=20).summary["val_loss"] != displacements


def test_a_worker_lost_on_the_way_is_replaced_and_the_run_is_complete() -> None:
    told: list[events.Event] = []
    faults = [tw.Fault(kind="kill", worker=1, at_s=0.004, seconds=0.001)]
    result = fit(tw.Relay(), workers=3, faults=faults, callbacks=[told.append], steps=None, epochs=3)
    assert result.summary["workers_lost"] == 1
    assert result.summary["complete"]
    assert result.summary["lacking"] == []


@pytest.mark.parametrize("kind", ["NAdam", "Adafactor"])
def test_an_optimizer_that_cannot_step_in_pieces_is_refused_before_anything_runs(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"Relay\(sends='gradients'\) is not possible: .*such as SGD"):
        fit(tw.Relay(sends="gradients"), optimizer=getattr(torch.optim, kind))


@pytest.mark.parametrize("kind", ["NAdam", "Adafactor"])
def test_where_nobody_asks_for_gradients_such_an_optimizer_sends_displacements(kind: str) -> None:
    assert fit(tw.Relay(), optimizer=getattr(torch.optim, kind), steps=10).summary["complete"]


def test_rates_that_a_schedule_moves_are_the_joint_optimizers_too() -> None:
    def frozen(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    plain = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.0)
    result = fit(tw.Relay(), optimizer=plain, scheduler=frozen, steps=12)
    torch.manual_seed(0)
    start = network()
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), start.parameters(), strict=True))


# -- by hand ----------------------------------------------------------------------------------------------------------


class Hand:
    """Workers whose rounds are summed by hand, without a codec."""

    def __init__(self, count: int, strategy: tw.Relay, optimizer: Any) -> None:
        spec = TrainSpec(loss="cross_entropy", optimizer=optimizer, device="cpu")
        self.replicas = [TorchReplica(network, spec, worker) for worker in range(count)]
        self.strategies = [
            strategy.with_optimizer(optimizer).laid_out(r.parameters, r.optimizer_by) for r in self.replicas
        ]
        self.joints = [
            JointState(s, r.vector.detach(), count) for s, r in zip(self.strategies, self.replicas, strict=True)
        ]
        self.ahead = [
            Ahead(r, j, s.joint_optimizer.rule)  # type: ignore[attr-defined]
            for r, j, s in zip(self.replicas, self.joints, self.strategies, strict=True)
        ]
        self.made = [0] * count
        self.held = torch.zeros(self.joints[0].size)
        """One where a parameter lies, zero between them."""
        for view in self.replicas[0].parameters.views(self.held):
            view.fill_(1.0)

    def step(self, worker: int, gradient: torch.Tensor, rows: float) -> None:
        replica = self.replicas[worker]
        replica.parameters.scatter_gradients(gradient)
        self.ahead[worker].add(rows)
        replica.take_step()
        self.made[worker] += 1

    def round(self, number: int) -> None:
        whole = Fragment(0, self.joints[0].size)
        sums = [ahead.sum.clone() for ahead in self.ahead]
        notes = {w: ahead.note(whole, made) for w, (ahead, made) in enumerate(zip(self.ahead, self.made, strict=True))}
        given = [total for total, note in zip(sums, notes.values(), strict=True) if note]
        for ahead, note in zip(self.ahead, notes.values(), strict=True):
            if note:
                ahead.sent(whole)
        mean = torch.stack(given).mean(0)
        for worker, joint in enumerate(self.joints):
            reply = joint.land_steps(number, whole, mean.clone(), taken_of(notes, whole))
            self.ahead[worker].land(whole, reply, self.made[worker])


def random_gradients(hand: Hand, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(hand.joints[0].size, generator=generator) * hand.held for _ in range(count)]


def test_a_round_of_one_step_is_the_step_of_the_mean_gradient_by_rows() -> None:
    hand = Hand(2, tw.Relay(sends="gradients"), adamw)
    plain = TorchReplica(network, TrainSpec(loss="cross_entropy", optimizer=adamw, device="cpu"))
    assert torch.equal(plain.vector, hand.joints[0].model)
    for number, (a, b) in enumerate(zip(random_gradients(hand, 3), random_gradients(hand, 6)[3:], strict=True)):
        hand.step(0, a, 3.0)
        hand.step(1, b, 1.0)
        hand.round(number)
        plain.parameters.scatter_gradients((3 * a + b) / 4)
        plain.take_step()
        assert torch.allclose(hand.joints[0].model, plain.vector, atol=1e-6)
        for replica, joint in zip(hand.replicas, hand.joints, strict=True):
            assert torch.equal(replica.vector, joint.model)
            kept = replica.optimizer.state[replica.parameters.tensors[0]]["exp_avg"].flatten()
            assert torch.equal(kept, joint.state.exp_avg[: kept.numel()])


def test_steps_made_while_a_round_was_under_way_are_taken_again_on_what_lands() -> None:
    hand = Hand(1, tw.Relay(sends="gradients"), functools.partial(torch.optim.SGD, lr=0.1))
    first, second = random_gradients(hand, 2)
    whole, joint, ahead = Fragment(0, hand.joints[0].size), hand.joints[0], hand.ahead[0]
    hand.step(0, first, 2.0)
    note, total = ahead.note(whole, 1), ahead.sum.clone()
    ahead.sent(whole)
    hand.step(0, second, 2.0)
    reply = joint.land_steps(0, whole, total, taken_of({0: note}, whole))
    ahead.land(whole, reply, 2)
    assert torch.allclose(hand.replicas[0].vector, joint.model - 0.1 * second, atol=1e-6)
    assert torch.equal(ahead.sum, 2 * second), "which is yet to be sent"


def test_a_model_that_is_cut_anew_has_the_same_mean_gradient_in_all_its_parts() -> None:
    hand = Hand(1, tw.Relay(sends="gradients"), functools.partial(torch.optim.SGD, lr=0.1))
    ahead, size = hand.ahead[0], hand.joints[0].size
    halves, whole = (Fragment(0, size // 2), Fragment(size // 2, size)), Fragment(0, size)
    for half in halves:
        hand.step(0, hand.held, 2.0)
        assert ahead.note(half, 1)
        ahead.sent(half)
    for _ in range(2):
        hand.step(0, hand.held, 2.0)
    weight, steps, _ = ahead.note(whole, 4)["taken"]
    assert steps == 2, "the first half has waited for three steps, the second for two"
    assert torch.allclose(ahead.sum / weight, hand.held)


def test_whoever_made_more_steps_counts_by_its_rows() -> None:
    hand = Hand(2, tw.Relay(sends="gradients"), functools.partial(torch.optim.SGD, lr=0.1))
    start = hand.joints[0].model.clone()
    a, b, c = random_gradients(hand, 3)
    hand.step(0, a, 4.0)
    hand.step(0, b, 4.0)
    hand.step(1, c, 4.0)
    hand.round(0)
    steps = round((8 * 2 + 4 * 1) / 12)
    assert torch.allclose(hand.joints[0].model, start - 0.1 * steps * (a + b + c) / 3, atol=1e-5)


def test_a_newcomer_takes_the_joint_optimizers_state_over() -> None:
    hand = Hand(2, tw.Relay(sends="gradients"), adamw)
    for number, gradient in enumerate(random_gradients(hand, 3)):
        hand.step(0, gradient, 1.0)
        hand.step(1, gradient, 1.0)
        hand.round(number)
    late = Hand(1, tw.Relay(sends="gradients"), adamw)
    late.joints[0].load(hand.joints[0].tree())
    with torch.no_grad():
        late.replicas[0].vector.copy_(late.joints[0].model)
    late.ahead[0].open()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert [state[name].tolist() for state in late.replicas[0].optimizer.state.values()] == [
            state[name].tolist() for state in hand.replicas[0].optimizer.state.values()
        ]


def test_what_is_yet_to_be_sent_is_kept_in_a_checkpoint() -> None:
    hand = Hand(1, tw.Relay(sends="gradients"), adamw)
    hand.step(0, *random_gradients(hand, 1), 2.0)
    again = Hand(1, tw.Relay(sends="gradients"), adamw)
    again.ahead[0].load(hand.ahead[0].tree())
    whole = Fragment(0, hand.joints[0].size)
    assert torch.equal(again.ahead[0].sum, hand.ahead[0].sum)
    assert again.ahead[0].note(whole, 1) == hand.ahead[0].note(whole, 1)
