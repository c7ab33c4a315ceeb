"""A mesh of peers turned by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.exchange.signals import Asked, Averaged, Caught, Landed
from thinwire.parameters import Fragment
from thinwire.protocol.messages import Join, Message
from thinwire.strategies import MPCA, Relay, SparkNet

from .stage import SIZE, Stage


def test_a_generation_forms_and_a_round_lands_everywhere() -> None:
    stage = Stage(3, SparkNet())
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
    stage.settle()
    assert stage.landed() == [1, 1, 1]
    stage.assert_same()
    assert torch.equal(stage.joints[0].model, torch.full((SIZE,), 2.0))


def test_a_round_completed_in_the_same_turn_as_a_prepare_is_landed_by_all_or_by_none() -> None:
    """What the peer must not do.

    1. worker 0's inbox holds the last sum of round 0 and then prepare(2), and it takes both in one turn
    2. round 0 is complete there but not merged: it answers that it has landed nothing, as does worker 1
    3. commit(2), without worker 2: worker 1 launches round 0 again; worker 0 merges the old mean, and never launches
    """
    stage = Stage(3, SparkNet())
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
        stage.turn(worker)
    for sender in range(3):
        for receiver in range(3):
            stage.deliver(sender, receiver, "part")
    for worker in range(3):
        stage.turn(worker)
    stage.deliver(0, 1, "sum")
    stage.deliver(1, 0, "sum")
    stage.deliver(2, 0, "sum")
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert len(set(stage.landed())) == 1, f"rounds landed: {stage.landed()}"
    assert stage.landed() == [1, 1]
    stage.assert_same()
    assert all(stage.heard_of(worker) == {0} for worker in range(2))
    for worker in range(2):
        stage.launch(worker, 5.0)
    stage.settle()
    assert stage.landed() == [2, 2]
    stage.assert_same()


def test_a_round_completed_before_the_joint_state_came_is_still_told_to_the_main_thread() -> None:
    """What leaves the main thread waiting for ever.

    1. worker 0 has landed round 0 when worker 2 dies, worker 1 has not; round 1 is in flight
    2. commit: worker 1 asks for the joint state, and launches round 1 again, as worker 0 does
    3. round 1 completes; worker 0 lands it, and only then sends its joint state, which holds round 1
    4. worker 1 takes the state over and drops its own completed round 1: no reply, and no word that it counted
    """
    stage = Stage(3, MPCA(fragments=3))
    for worker in range(3):
        stage.launch(worker, 1.0)
        stage.turn(worker)
    for sender in range(3):
        for receiver in range(3):
            stage.deliver(sender, receiver, "part")
    for worker in range(3):
        stage.turn(worker)
    stage.deliver(1, 0, "sum")
    stage.deliver(2, 0, "sum")
    stage.turn(0)
    assert stage.landed() == [1, 0, 0]
    for worker in range(2):
        stage.launch(worker, 2.0)
        stage.turn(worker)
    stage.kill(2)
    stage.coordinate()
    stage.hold_donations = True
    stage.settle()
    assert stage.landed() == [2, 0]
    stage.hold_donations = False
    stage.settle()
    assert stage.landed() == [2, 2]
    stage.assert_same()
    assert [stage.heard_of(worker) for worker in range(2)] == [{0, 1}, {0, 1}]
    assert not any(stage.peers[worker].member.rounds.ledger.records() for worker in range(2))


def test_a_round_completed_with_a_prepare_and_landed_elsewhere_is_told_to_the_main_thread() -> None:
    """As above, but worker 1 has landed round 0: worker 0 drops its completed round for worker 1's joint state."""
    stage = Stage(3, SparkNet())
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
        stage.turn(worker)
    for sender in range(3):
        for receiver in range(3):
            stage.deliver(sender, receiver, "part")
    for worker in range(3):
        stage.turn(worker)
    for owner, receiver in ((0, 1), (2, 1)):
        stage.deliver(owner, receiver, "sum")
    stage.turn(1)
    for owner in (1, 2):
        stage.deliver(owner, 0, "sum")
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert stage.landed() == [1, 1]
    assert [stage.heard_of(worker) for worker in range(2)] == [{0}, {0}]


def test_rounds_that_completed_out_of_order_are_not_lost_with_the_generation() -> None:
    """What must not be taken for landed.

    1. rounds 0 (of three grains) and 1 (of two) are in flight; worker 2 owns a slice of round 0 and none of round 1
    2. worker 2's sum of round 0 is still on its way: at worker 0 round 1 completes ahead of round 0
    3. worker 2 dies: both rounds start again, and the mean that worker 0 holds of round 1 counts for nothing
    """
    stage = Stage(3, MPCA(fragments=3))
    assert [stage.joints[0].fragment(round).size for round in range(2)] == [768, 512]
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
        stage.launch(worker, worker + 1.0)
        stage.turn(worker)
    for sender in range(3):
        for receiver in range(3):
            stage.deliver(sender, receiver, "part")
    for worker in range(3):
        stage.turn(worker)
    stage.deliver(0, 1)
    stage.deliver(1, 0)
    stage.turn(0)
    stage.turn(1)
    assert all([d.key for d in stage.peers[worker].member.rounds.summed()] == ["train:1"] for worker in range(2))
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert stage.landed() == [2, 2]
    stage.assert_same()
    assert all(stage.heard_of(worker) == {0, 1} for worker in range(2))
    merged = [s for s in stage.signals[0] if isinstance(s, Landed)]
    for landed in merged:  # 1.5 is the mean of those who are left, 2.0 would be the dead worker's too
        assert torch.equal(landed.reply, torch.full((landed.fragment.size,), 1.5))


def test_a_claim_by_a_worker_that_fell_behind_follows_the_newest_setting() -> None:
    """What must not end the worker.

    1. round 0 goes on without worker 2 (quorum); its note puts four fragments in force from round 1 on
    2. worker 2 hears of round 1 before it has all of round 0: it follows round 0, and its next claim is round 1
    3. if its main thread claimed round 1 now, when round 0 has not landed there, it would by the old setting, the
       whole model: so it must wait until it has adopted round 0
    """
    strategy = Relay(bits=8, fragments=1, quorum=0.5, grace_s=0.0)
    stage = Stage(3, strategy)
    new = {"fragments": 4, "codec": "int8", "momentum": 0.0}
    stage.launch(0, 1.0, {"setting": new, "since": 1})
    stage.launch(1, 2.0)
    for _ in range(4):  # all but what worker 1 sends worker 2 in the end
        for sender, receiver in list(stage.wires):
            if receiver in stage.peers and (sender, receiver) != (1, 2):
                stage.deliver(sender, receiver)
        stage.deliver(1, 2, "part")
        for worker in range(3):
            stage.turn(worker)
    assert stage.landed()[:2] == [1, 1]
    stage.launch(0, 1.0)
    stage.launch(1, 2.0)
    stage.turn(0)
    stage.turn(1)
    stage.deliver(0, 2)
    stage.turn(2)
    assert stage.peers[2].next_round == 1
    assert stage.landed()[2] == 0
    assert not stage.may_claim(2)
    stage.settle()
    assert stage.launch(2, 3.0) == 1
    assert stage.joints[2].fragment(1).size == SIZE // 4
    stage.settle()
    assert stage.landed() == [2, 2, 2]
    stage.assert_same()


def test_what_compression_left_of_a_round_that_only_others_landed_is_still_owed() -> None:
    """Worker 1's contribution is in the joint model it then asks for; the part that two bits left behind is not."""
    stage = Stage(3, SparkNet(), codec_name="sign2")
    gradient = torch.linspace(-1.0, 1.0, SIZE)
    for worker in range(3):
        round, fragment = stage.peers[worker].claim()
        stage.claimed[worker].add(round)
        stage.peers[worker].launch(round, fragment, gradient * (worker + 1), 1.0, {})
        stage.turn(worker)
    for sender in range(3):
        for receiver in range(3):
            stage.deliver(sender, receiver, "part")
    for worker in range(3):
        stage.turn(worker)
    stage.deliver(1, 0, "sum")
    stage.deliver(2, 0, "sum")
    stage.turn(0)
    assert stage.landed() == [1, 0, 0]
    behind = stage.peers[1]
    owed = behind.member.residuals.own + 3 * behind.member.residuals.owed
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert stage.landed() == [1, 1]
    stage.assert_same()
    assert torch.allclose(behind.member.residuals.own + 2 * behind.member.residuals.owed, owed, atol=1e-5)


@pytest.mark.parametrize("falls_behind", [False, True], ids=["by the reference", "by one that fell behind"])
def test_a_joint_state_copied_before_the_generation_is_not_taken_for_the_newest(falls_behind: bool) -> None:
    """What leaves the newcomer, and with it everyone, waiting for ever.

    1. worker 3 joins and asks worker 0, whose main thread copies the joint state (1 round) and is long in encoding it
    2. round 1 lands, on worker 1 at least; worker 2 dies
    3. commit(3) at 2 rounds: worker 3 asks again, the reference this time, and drops the mean of round 1 that it kept
    4. worker 0's main thread is done and hands the old state on, in generation 3: after it, round 1 never comes
    """
    stage = Stage(3, SparkNet())
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
    stage.settle()
    stage.hold_donations = True
    stage.membership.roster.workers = 4
    stage.join(3, attempt=0)
    stage.settle()
    asked = Asked(3, stage.membership.agreement.generation)
    assert stage.asked == [(0, asked)]
    stage.asked.clear()
    old = {"joint": stage.joints[0].tree()}
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
    for _ in range(4):
        for sender, receiver in list(stage.wires):
            if receiver in stage.peers:
                stage.deliver(sender, receiver, "part" if receiver == 0 and falls_behind else None)
        for worker in range(4):
            stage.turn(worker)
    assert stage.landed() == [1 if falls_behind else 2, 2, 2, 0]
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert stage.membership.reference == (1 if falls_behind else 0)
    for generation in (asked.generation, stage.membership.agreement.generation):
        stage.peers[0].donate(3, old, generation)
        stage.settle()
        assert stage.peers[3].member.standing.needs_state
    stage.hold_donations = False
    stage.settle()
    assert stage.landed() == [2, 2, 2]
    for worker in (0, 1, 3):
        stage.launch(worker, 4.0)
    stage.settle()
    assert stage.landed() == [3, 3, 3]
    stage.assert_same()


def test_a_joint_state_asked_for_in_an_earlier_generation_is_not_taken() -> None:
    """It may lack a publication that its giver took up as this generation began, with no round between."""
    stage = Stage(3, SparkNet())
    stage.settle()
    stage.hold_donations = True
    stage.membership.roster.workers = 4
    stage.join(3, attempt=0)
    stage.settle()
    (_, asked), *_ = stage.asked
    tree = {"joint": stage.joints[0].tree()}
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert stage.membership.agreement.generation > asked.generation
    for generation, needs in ((asked.generation, True), (stage.membership.agreement.generation, False)):
        stage.peers[0].donate(3, tree, generation)
        stage.settle()
        assert stage.peers[3].member.standing.needs_state is needs


@pytest.mark.parametrize("behind", [1, 2], ids=["one waits", "all wait"])
def test_a_reference_that_dies_before_it_hands_the_joint_state_on_stops_nobody(behind: int) -> None:
    """What leaves main threads waiting for ever for a round that they contributed to.

    1. worker 2 has landed round 0, workers 0 and 1 (or only worker 0, beside a newcomer) have not; worker 3 dies
    2. commit(2): worker 2 is the reference, with 1 round. Who is behind drops its part in round 0, which has arrived
    3. worker 2 dies before its joint state is on the way: round 0 is gone from the joint model of all who are left
    4. commit(3) at 0 rounds: round 0 is claimed already, and no peer holds what its main thread gave for it
    """
    stage = Stage(4, SparkNet())
    for worker in range(4):
        stage.launch(worker, worker + 1.0)
        stage.turn(worker)
    for sender in range(4):
        for receiver in range(4):
            stage.deliver(sender, receiver, "part")
    for worker in range(4):
        stage.turn(worker)
    for owner in (0, 1, 3):
        stage.deliver(owner, 2, "sum")
    stage.turn(2)
    assert stage.landed() == [0, 0, 1, 0]
    stage.hold_donations = True
    stage.kill(3)
    if behind == 1:
        stage.kill(1)
    stage.coordinate()
    stage.settle()
    assert stage.membership.landed == 1
    stage.asked.clear()
    stage.kill(2)
    if behind == 1:
        stage.join(1, attempt=1)
    stage.coordinate()
    stage.hold_donations = False
    stage.settle()
    assert stage.landed() == [1, 1]
    stage.assert_same()
    assert stage.heard_of(0) == {0}
    for worker in stage.peers:
        stage.launch(worker, 5.0)
    stage.settle()
    assert stage.landed() == [2, 2]
    stage.assert_same()


def test_what_an_owner_was_owed_for_a_sum_that_is_given_up_is_not_owed_any_more() -> None:
    """What must not be counted twice.

    1. all owners have summed their slices of round 0 in two bits, and keep what that left; nobody has all sums
    2. worker 2 dies: round 0 is given up and launched again, so what the old sums left is void
    """
    stage = Stage(3, SparkNet(), codec_name="sign2")
    gradient = torch.linspace(-1.0, 1.0, SIZE)
    for worker in range(3):
        round, fragment = stage.peers[worker].claim()
        stage.claimed[worker].add(round)
        stage.peers[worker].launch(round, fragment, gradient * (worker + 1), 1.0, {})
        stage.turn(worker)
    for sender in range(3):
        for receiver in range(3):
            stage.deliver(sender, receiver, "part")
    for worker in range(3):
        stage.turn(worker)
    assert all(bool(stage.peers[worker].member.residuals.owed.any()) for worker in range(3))
    stage.kill(2)
    stage.coordinate()
    stage.settle()
    assert stage.landed() == [1, 1]
    stage.assert_same()
    owed = sum(
        stage.peers[worker].member.residuals.own + 2 * stage.peers[worker].member.residuals.owed for worker in range(2)
    )
    contributed = -3 * gradient  # displacements x̃ − s of workers 0 and 1, from x̃ = 0
    assert torch.allclose(owed - 2 * stage.joints[0].model, contributed, atol=1e-5)


def test_a_worker_that_joins_late_holds_what_all_hold() -> None:
    stage = Stage(2, MPCA(fragments=2))
    for _ in range(3):
        for worker in range(2):
            stage.launch(worker, worker + 1.0)
        stage.settle()
    stage.membership.roster.workers = 3
    stage.join(2, attempt=0)
    for worker in range(2):
        stage.launch(worker, 7.0)  # while the generation forms
    stage.settle()
    assert stage.landed() == [4, 4, 4]
    for worker in range(3):
        stage.launch(worker, worker + 2.0)
    stage.settle()
    assert stage.landed() == [5, 5, 5]
    for field in range(2):
        states = [stage.joints[worker].state[field] for worker in range(3)]
        assert torch.equal(states[0], states[1])
        assert torch.equal(states[0], states[2])


def test_a_mean_of_a_publication_that_came_with_the_joint_state_does_not_wait_for_the_newcomer() -> None:
    """What leaves those who published waiting for ever.

    1. worker 2 has asked for the joint state; worker 0 publishes, asks for the mean of the buffers, hands the state on
    2. worker 2 takes in both in one turn: it needs no state by the time it looks for rounds to follow
    3. its main thread has no part in that publication, so it never asks for the mean: the others' is never complete
    """
    stage = Stage(2, SparkNet())
    for worker in range(2):
        stage.launch(worker, worker + 1.0)
    stage.settle()
    stage.hold_donations = True
    stage.membership.roster.workers = 3
    stage.join(2, attempt=0)
    stage.settle()
    assert stage.asked == [(0, Asked(2, stage.membership.agreement.generation))]
    stage.published = 1
    stage.peers[0].average("buffers:1", torch.ones(5), 1.0, {})
    stage.donate()
    stage.turn(0)
    stage.deliver(0, 2)
    stage.turn(2)
    assert stage.landed() == [1, 1, 1]
    stage.peers[1].average("buffers:1", torch.full((5,), 3.0), 1.0, {})
    stage.settle()
    for worker in range(2):
        assert [s.mean.tolist() for s in stage.signals[worker] if isinstance(s, Averaged)] == [[2.0] * 5]


def test_a_mean_asked_for_again_in_a_new_generation_does_not_wait_for_the_newcomer() -> None:
    """As above, but the word of it comes after the joint state.

    1. worker 0 has the mean of publication 1, worker 1 has not; worker 2 joins
    2. worker 1 asks for the mean again; before anyone hears of that, worker 2 has the joint state from worker 0
    """
    stage = Stage(2, SparkNet())
    for worker in range(2):
        stage.launch(worker, worker + 1.0)
    stage.settle()
    stage.published = 1
    for worker in range(2):
        stage.peers[worker].average("buffers:1", torch.ones(5), 1.0, {})
        stage.turn(worker)
    stage.deliver(1, 0)
    stage.turn(0)
    assert len([s for s in stage.signals[0] if isinstance(s, Averaged)]) == 1
    stage.membership.roster.workers = 3
    stage.join(2, attempt=0)
    stage.coordinate()
    for _ in range(6):
        for sender, receiver in list(stage.wires):
            if receiver in stage.peers and sender != 1:
                stage.deliver(sender, receiver)
        for worker in range(3):
            stage.turn(worker)
        stage.coordinate()
    assert stage.landed() == [1, 1, 1]
    assert stage.wires[1, 2]
    stage.settle()
    assert len([s for s in stage.signals[1] if isinstance(s, Averaged)]) == 1


@pytest.mark.parametrize("header", [{"t": "want"}, {"t": "want", "g": "x"}, {"t": "state"}, {"t": "state", "g": 1}, {}])
def test_a_malformed_message_from_a_peer_does_not_end_the_exchange(header: dict[str, Any]) -> None:
    stage = Stage(2, SparkNet())
    stage.peers[0].member._link.ready.append(Message(1, header))
    for worker in range(2):
        stage.launch(worker, 1.0)
    stage.settle()
    assert stage.landed() == [1, 1]


def test_a_snapshot_comes_with_a_reply_only_where_this_worker_did_not_contribute() -> None:
    stage = Stage(2, SparkNet())
    stage.launch(0, 4.0)
    round, fragment = stage.peers[1].claim()
    stage.peers[1].launch(round, fragment, None, 0.0, {})
    stage.settle()
    found = [next(s for s in stage.signals[w] if isinstance(s, Landed)) for w in range(2)]
    assert found[0].snapshot is None
    assert torch.equal(found[1].snapshot, torch.zeros(SIZE))
    assert all(torch.equal(s.reply, torch.full((SIZE,), 4.0)) for s in found)


def test_a_round_whose_message_a_broken_connection_lost_is_launched_again() -> None:
    stage = Stage(3, SparkNet())
    for worker in range(3):
        stage.launch(worker, worker + 1.0)
        stage.turn(worker)
    stage.wires.pop((1, 0))  # worker 0 will never hear of these
    stage.settle()
    assert stage.landed() == [0, 0, 0]
    stage.beat()
    stage.now += stage.membership.deadlines.stall_s
    stage.beat()
    stage.settle()
    assert stage.membership.agreement.generation == 2
    assert stage.landed() == [1, 1, 1]
    stage.assert_same()
    assert all(stage.heard_of(worker) == {0} for worker in range(3))


def test_a_worker_that_never_heard_of_the_commit_is_called_again() -> None:
    stage = Stage(3, SparkNet())
    stage.kill(2)
    for worker in range(2):
        stage.launch(worker, worker + 1.0)
    stage.coordinate()
    for worker in range(2):
        stage.turn(worker)
    stage.coordinate()  # commits
    stage.peers[1].member._link.ready.clear()
    stage.settle()
    assert stage.landed() == [0, 0]
    stage.beat()
    stage.now += stage.membership.deadlines.stall_s
    stage.beat()
    stage.settle()
    assert stage.landed() == [1, 1]
    stage.assert_same()


def test_signals_come_one_by_one() -> None:
    """What left a run waiting for ever.

    1. one look brings a round that is to be published, and behind it a peer's request for the joint state
    2. taking the round up, a worker under a barrier waits for the verdict, which waits for that peer
    3. the request lay in the list of the first look: nobody answered it
    """
    peer = Stage(2, SparkNet()).peers[0]
    first, second = Asked(1, 1), Asked(2, 1)
    peer.member.signals.put(first)
    peer.member.signals.put(second)
    looking = iter(peer.signals())
    assert next(looking) is first
    assert list(peer.signals()) == [second]
    assert list(looking) == []


def test_the_joint_state_that_a_newcomer_starts_from_does_not_move_on_under_it() -> None:
    """Rounds landed after it was handed over come as signals of their own: moved on already, they would count twice."""
    stage = Stage(2, SparkNet())
    tree = stage.joints[0].tree()
    kept = tree["state"][0].clone()
    stage.joints[1].load(tree)
    stage.joints[1].land(0, Fragment(0, SIZE), torch.ones(SIZE))
    assert torch.equal(tree["state"][0], kept)


def test_who_joins_one_that_trained_alone_starts_from_its_model() -> None:
    """No round has landed, and both began with the same digest; one of them has moved since."""
    stage = Stage(2, SparkNet())
    stage.kill(1)
    stage.coordinate()
    stage.settle()
    stage.joints[0].set_model(torch.full((SIZE,), 5.0))  # as its main thread does with a replica that is alone
    stage.join(1, 1)
    stage.peers[1].member.standing.digest = "same"
    stage.settle()
    assert any(isinstance(signal, Caught) for signal in stage.signals[1])
    stage.assert_same()
    for worker in range(2):
        stage.launch(worker, 7.0)
    stage.settle()
    assert stage.landed() == [1, 1]
    stage.assert_same()


def test_who_was_cut_off_takes_the_state_over_though_it_has_landed_as_many_rounds() -> None:
    stage = Stage(2, SparkNet())
    for worker in range(2):
        stage.launch(worker, worker + 1.0)
    stage.settle()
    away = stage.peers.pop(0)  # lives on, and hears nothing
    stage._decide(stage.membership.lose(0, 0, "no heartbeat", stage.now))
    stage.coordinate()
    stage.settle()
    stage.joints[1].set_model(torch.full((SIZE,), 5.0))
    stage.peers[0] = away
    stage._decide(stage.membership.join(Join(attempt=0, address="memory:0.0"), 0, stage.now))
    stage.settle()
    assert stage.landed() == [1, 1]
    assert any(isinstance(signal, Caught) for signal in stage.signals[0])
    stage.assert_same()
    assert torch.equal(stage.joints[0].model, torch.full((SIZE,), 5.0))
