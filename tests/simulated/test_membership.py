"""Membership in virtual time: seats, generations, deadlines, and random lives of workers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from thinwire.coordinator.membership import Decision, JointModelLost, Lost, Membership, Send, Stalled
from thinwire.coordinator.slots import Slots
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.messages import Beat, Join, Leave, Prepared, Rejoin

QUICK = Deadlines(start_s=60.0, silence_s=10.0, prepare_s=5.0, rejoin_s=30.0, settle_s=0.5)


def hello(attempt: int = 0, **more: Any) -> Join:
    return Join(attempt=attempt, address=f"memory:0.{attempt}", host="h", pid=1, **more)


def answer(attempt: int, generation: int, *, landed: int = 0, fresh: bool = True, digest: str = "d") -> Prepared:
    said: dict[str, Any] = {"landed": landed, "fresh": fresh, "since": int(not fresh), "digest": digest}
    return Prepared(attempt=attempt, generation=generation, **said)


def beat(attempt: int, **more: Any) -> Beat:
    quiet: dict[str, Any] = {"landed": 0, "progress": {}, "waiting": {}}
    return Beat(attempt=attempt, sent_bytes=0, received_bytes=0, refused=0, **quiet | more)


def sent(decisions: list[Decision], kind: str) -> list[Send]:
    return [d for d in decisions if isinstance(d, Send) and d.body.tag == kind]


def lost(decisions: list[Decision]) -> list[tuple[int, int]]:
    return [(d.worker, d.attempt) for d in decisions if isinstance(d, Lost)]


def formed(workers: int, now: float = 1.0, deadlines: Deadlines = QUICK) -> Membership:
    """A run whose first generation is committed at `now`."""
    members = Membership(workers, deadlines)
    for worker in range(workers):
        members.join(hello(), worker, now - 1)
    assert len(sent(members.tick(now), "prepare")) == workers
    for worker in range(workers):
        committed = members.prepared(answer(0, 1), worker, now)
    assert len(sent(committed, "commit")) == workers
    return members


def beat_all(members: Membership, now: float) -> None:
    for seat in members.seats.values():
        assert members.beat(beat(seat.attempt, landed=seat.landed), seat.worker, now)


# -- the start --------------------------------------------------------------------------------------------------------


def test_the_start_waits_for_every_worker() -> None:
    members = Membership(3, QUICK)
    members.join(hello(), 0, 0.0)
    members.join(hello(), 2, 1.0)
    for now in (2.0, 5.0, 9.0):
        beat_all(members, now)
        assert members.tick(now) == []
    members.join(hello(), 1, 9.0)
    assert set(members.seats) == {0, 1, 2}
    assert len(sent(members.tick(9.6), "prepare")) == 3


def test_an_attempt_that_lost_its_seat_may_come_back_where_the_cluster_revives_until_a_newer_one_is_there() -> None:
    members = formed(2)
    members.lose(1, 0, "no heartbeat", 5.0)
    assert isinstance(members.answer(1, 0, revives=True), Rejoin)
    assert isinstance(members.answer(1, 0, revives=False), Leave)
    members.join(hello(1), 1, 6.0)
    assert isinstance(members.answer(1, 0, revives=True), Leave)


def test_who_is_lost_before_its_first_heartbeat_has_its_host_told() -> None:
    members = Membership(2, QUICK)
    members.join(hello(), 0, 0.0)
    (gone,) = members.lose(0, 0, "killed", 0.1)
    assert isinstance(gone, Lost)
    assert gone.host == "h"


def test_the_start_goes_on_without_those_who_do_not_come() -> None:
    members = Membership(3, QUICK)
    members.join(hello(), 0, 0.0)
    members.join(hello(), 2, 1.0)
    for now in range(1, 60):
        beat_all(members, float(now))
        assert members.tick(float(now)) == []
    beat_all(members, 60.0)
    assert [s.worker for s in sent(members.tick(60.0), "prepare")] == [0, 2]


def test_joins_close_together_make_one_generation() -> None:
    members = formed(2)
    members.roster.workers = 5
    for worker, now in ((2, 5.0), (3, 5.2), (4, 5.4)):
        members.join(hello(), worker, now)
        assert sent(members.tick(now), "prepare") == []
    prepares = sent(members.tick(6.0), "prepare")
    assert sorted(s.worker for s in prepares) == [0, 1, 2, 3, 4]
    assert {s.body.generation for s in prepares} == {2}
    assert members.tick(6.1) == []


def test_a_loss_and_a_join_close_together_make_one_generation() -> None:
    members = formed(3)
    assert lost(members.lose(1, 0, "killed", 5.0)) == [(1, 0)]
    members.join(hello(1), 1, 5.3)
    assert sent(members.tick(5.6), "prepare") == []
    prepares = sent(members.tick(5.9), "prepare")
    assert sorted((s.worker, s.attempt) for s in prepares) == [(0, 0), (1, 1), (2, 0)]


# -- commits ----------------------------------------------------------------------------------------------------------


def test_the_last_answer_commits_and_no_earlier_one() -> None:
    members = Membership(3, QUICK)
    for worker in range(3):
        members.join(hello(), worker, 0.0)
    members.tick(1.0)
    assert members.prepared(answer(0, 1), 0, 1.0) == []
    assert members.prepared(answer(0, 1), 0, 1.0) == []
    assert members.prepared(answer(0, 1), 2, 1.0) == []
    commits = sent(members.prepared(answer(0, 1), 1, 1.0), "commit")
    assert sorted(s.worker for s in commits) == [0, 1, 2]
    assert members.agreement.members == (0, 1, 2)
    assert sorted(commits[0].body.members) == [0, 1, 2]


def test_answers_to_an_older_call_or_of_another_attempt_do_not_count() -> None:
    members = formed(2)
    members.join(hello(1), 1, 2.0)
    members.tick(3.0)
    assert members.agreement.generation == 2
    assert members.prepared(answer(0, 1), 0, 3.0) == []
    assert members.prepared(answer(0, 2), 1, 3.0) == []
    assert members.prepared(answer(1, 2), 1, 3.0) == []
    assert len(sent(members.prepared(answer(0, 2, fresh=False), 0, 3.0), "commit")) == 2


def test_a_join_while_answers_come_in_starts_the_call_again() -> None:
    members = formed(3)
    members.lose(2, 0, "killed", 2.0)
    members.tick(3.0)
    members.prepared(answer(0, 2, fresh=False), 0, 3.0)
    members.join(hello(1), 2, 3.1)
    assert members.prepared(answer(0, 2, fresh=False), 1, 3.2) == []
    assert {s.body.generation for s in sent(members.tick(4.0), "prepare")} == {3}


def test_the_reference_has_landed_most_among_those_that_are_not_fresh() -> None:
    members = Membership(4, QUICK)
    for worker in range(4):
        members.join(hello(), worker, 0.0)
    members.tick(1.0)
    members.prepared(answer(0, 1, landed=99, fresh=True), 0, 1.0)
    members.prepared(answer(0, 1, landed=6, fresh=False), 1, 1.0)
    members.prepared(answer(0, 1, landed=7, fresh=False, digest="two"), 2, 1.0)
    commits = sent(members.prepared(answer(0, 1, landed=7, fresh=False, digest="three"), 3, 1.0), "commit")
    commit = commits[0].body
    assert (commit.reference, commit.landed, commit.digest) == (2, 7, "two")


def test_a_successor_is_told_where_its_predecessor_was() -> None:
    members = formed(2)
    members.beat(beat(0, progress={"position": [2, 5], "steps": 40, "rows": 640}), 1, 2.0)
    members.lose(1, 0, "killed", 3.0)
    members.join(hello(1), 1, 3.1)
    members.tick(4.0)
    members.prepared(answer(0, 2, fresh=False, landed=4), 0, 4.0)
    commit = sent(members.prepared(answer(1, 2), 1, 4.0), "commit")[0].body
    assert commit.members[1]["position"] == [2, 5]
    assert commit.members[1]["steps"] == 40
    assert "position" not in commit.members[0]
    assert commit.totals == {1: 640}


# -- the fence --------------------------------------------------------------------------------------------------------


def test_a_newer_attempt_takes_the_seat_and_the_older_is_told_to_leave() -> None:
    members = formed(2)
    decisions = members.join(hello(1), 1, 2.0)
    assert lost(decisions) == [(1, 0)]
    assert [(s.worker, s.attempt) for s in sent(decisions, "leave")] == [(1, 0)]
    assert members.seats[1].attempt == 1


def test_an_older_attempt_never_gets_the_seat_back_even_when_it_is_empty() -> None:
    members = formed(2)
    members.join(hello(2), 1, 2.0)
    members.lose(1, 2, "killed", 3.0)
    for attempt in (0, 1):
        decisions = members.join(hello(attempt), 1, 4.0)
        assert [(s.worker, s.attempt) for s in sent(decisions, "leave")] == [(1, attempt)]
        assert 1 not in members.seats
        assert not members.beat(beat(attempt), 1, 4.0)


def test_a_newer_attempt_waits_while_the_older_alone_holds_the_joint_model() -> None:
    members = formed(1)
    assert [(s.worker, s.attempt) for s in sent(members.join(hello(1), 0, 2.0), "wait")] == [(0, 1)]
    assert members.seats[0].attempt == 0
    assert members.roster.standing == {0: 1}
    assert lost(members.lose(0, 0, "killed", 3.0)) == [(0, 0)]
    assert not sent(members.join(hello(1), 0, 4.0), "wait")
    assert members.seats[0].attempt == 1
    assert members.roster.standing == {}


def test_when_all_are_to_be_replaced_at_once_each_waits_until_another_has_the_joint_model() -> None:
    members = formed(2)
    assert lost(members.join(hello(1), 0, 2.0)) == [(0, 0)]
    assert sent(members.join(hello(1), 1, 2.0), "wait"), "worker 0's new attempt holds nothing yet"
    members.tick(3.0)
    members.prepared(answer(1, 2), 0, 3.0)
    members.prepared(answer(0, 2, landed=4, fresh=False), 1, 3.0)
    assert members.reference == 1
    assert sent(members.join(hello(1), 1, 4.0), "wait"), "it has been told of the joint model, and does not have it"
    members.caught(0)
    assert lost(members.join(hello(1), 1, 5.0)) == [(1, 0)]


# -- more workers than slots ------------------------------------------------------------------------------------------


def with_two_of_four() -> Membership:
    """A run of four workers, two of which got slots."""
    members = Membership(4, dataclasses.replace(QUICK, gather_s=5.0))
    for worker in range(2):
        members.join(hello(), worker, 0.0)
    members.tick(5.0)
    for worker in range(2):
        members.prepared(answer(0, 1), worker, 5.0)
    assert members.agreement.formed
    return members


def test_a_worker_that_is_done_makes_room_for_one_that_never_came() -> None:
    members = with_two_of_four()
    slots = Slots(members)
    assert slots.make_room(set(), set(), 20.0) == []
    assert slots.make_room({0, 1}, set(), 4.9) == [], "somebody may be on the way"
    assert slots.make_room({0, 1}, set(), 20.0) == [], "neither is heard: the other may be about to be given up"
    beat_all(members, 20.0)
    decisions = slots.make_room({0, 1}, set(), 20.0)
    assert [(s.worker, s.body.done) for s in sent(decisions, "leave")] == [(1, True)]
    assert lost(decisions) == [], "it is not lost: its rows are done"
    assert slots.room_for({0}, set(), 21.0), "the slot is free: worker 2 is awaited"
    assert not slots.room_for({0}, set(), 51.0), "but not forever"
    members.join(hello(), 2, 22.0)
    beat_all(members, 22.0)
    members.tick(23.0)
    members.prepared(answer(0, 2, landed=3, fresh=False), 0, 23.0)
    members.prepared(answer(0, 2), 2, 23.0)
    members.caught(2)
    beat_all(members, 60.0)
    assert [s.worker for s in sent(slots.make_room({0}, set(), 60.0), "leave")] == [0], (
        "worker 2 trains on, 3 gets a slot"
    )


def test_a_worker_that_is_done_makes_room_for_one_that_was_lost() -> None:
    members = formed(3, deadlines=dataclasses.replace(QUICK, gather_s=2.0))
    slots = Slots(members)
    members.lose(2, 0, "killed", 2.0)
    members.tick(3.0)
    for worker in range(2):
        members.prepared(answer(0, 2, landed=3, fresh=False), worker, 3.0)
    assert slots.make_room({0, 1}, {2}, 5.0) == [], "its successor may be on the way"
    beat_all(members, 9.0)
    assert [s.worker for s in sent(slots.make_room({0, 1}, {2}, 9.0), "leave")] == [1]
    assert slots.room_for({0}, {2}, 10.0)


def test_one_that_left_to_make_room_stays_away() -> None:
    members = with_two_of_four()
    slots = Slots(members)
    beat_all(members, 20.0)
    slots.make_room({0, 1}, set(), 20.0)
    (told,) = sent(members.join(hello(), 1, 20.1), "leave")
    assert told.body.done
    assert 1 not in members.seats


def test_who_was_left_out_of_the_newest_generation_is_never_the_reference() -> None:
    """Both have landed three rounds, not the same three: worker 0 was cut off, and 1 went on alone."""
    members = formed(2)
    members.lose(0, 0, "silent", 2.0)
    members.tick(3.0)
    members.prepared(answer(0, 2, landed=3, fresh=False), 1, 3.0)
    members.join(hello(), 0, 4.0)
    members.tick(5.0)
    members.prepared(dataclasses.replace(answer(0, 3, landed=3, fresh=False), since=2), 1, 5.0)
    committed = members.prepared(answer(0, 3, landed=3, fresh=False), 0, 5.0)
    assert members.reference == 1
    assert [s.body.since for s in sent(committed, "commit")] == [2, 2]
    assert members.seats[0].blank
    assert not members.seats[1].blank


def test_the_last_who_holds_the_joint_model_makes_no_room() -> None:
    members = with_two_of_four()
    slots = Slots(members)
    members.lose(1, 0, "killed", 6.0)
    members.tick(7.0)
    members.prepared(answer(0, 2, landed=3, fresh=False), 0, 7.0)
    assert slots.make_room({0}, set(), 100.0) == []
    assert not slots.room_for({0}, set(), 100.0)


@pytest.mark.parametrize("worker", [-1, 2, 1000])
def test_a_worker_that_the_run_does_not_have_is_told_to_leave(worker: int) -> None:
    members = formed(2)
    assert len(sent(members.join(hello(), worker, 2.0), "leave")) == 1
    assert sorted(members.seats) == [0, 1]


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_silence_loses_a_seat() -> None:
    members = formed(2, now=1.0)
    members.beat(beat(0), 0, 10.0)
    assert members.tick(11.0) == []
    decisions = members.tick(11.1)
    assert lost(decisions) == [(1, 0)]
    assert [s.worker for s in sent(members.tick(12.0), "prepare")] == [0]


def test_who_does_not_answer_a_call_is_lost_and_the_others_are_called_again() -> None:
    members = formed(3)
    members.lose(2, 0, "killed", 2.0)
    members.tick(3.0)
    members.prepared(answer(0, 2, fresh=False), 0, 3.0)
    beat_all(members, 8.0)
    assert members.tick(8.0) == []
    assert lost(members.tick(8.1)) == [(1, 0)]
    assert [s.worker for s in sent(members.tick(9.0), "prepare")] == [0]
    assert len(sent(members.prepared(answer(0, 3, fresh=False), 0, 9.0), "commit")) == 1


def test_who_was_never_called_is_not_lost_for_not_answering_during_the_start() -> None:
    """1. all join and are called. 2. one dies before the commit. 3. its replacement comes after prepare_s."""
    members = Membership(2, QUICK)
    members.join(hello(), 0, 0.0)
    members.join(hello(), 1, 0.0)
    members.tick(1.0)
    members.prepared(answer(0, 1), 0, 1.0)
    members.lose(1, 0, "killed", 1.5)
    for now in (2.0, 5.0, 8.0):
        beat_all(members, now)
        assert members.tick(now) == []
    members.join(hello(1), 1, 9.0)
    assert lost(members.tick(9.1)) == []
    beat_all(members, 9.6)
    assert sorted((s.worker, s.attempt) for s in sent(members.tick(9.6), "prepare")) == [(0, 0), (1, 1)]


def test_who_was_never_called_is_not_lost_for_another_who_did_not_answer() -> None:
    members = formed(3)
    members.lose(2, 0, "killed", 2.0)
    members.tick(3.0)
    members.prepared(answer(0, 2, fresh=False), 0, 3.0)
    beat_all(members, 7.9)
    members.join(hello(1), 2, 7.9)  # settles at 8.4; worker 1 is late from 8.0 on
    assert lost(members.tick(8.1)) in ([], [(1, 0)])


def test_the_start_goes_on_once_nobody_else_has_come_for_a_while() -> None:
    """Fewer task slots than workers: those who have one begin."""
    members = Membership(4, dataclasses.replace(QUICK, gather_s=5.0))
    members.join(hello(), 2, 0.0)
    members.join(hello(), 0, 3.0)
    for now in (4.0, 7.9):
        beat_all(members, now)
        assert members.tick(now) == []
    assert [s.worker for s in sent(members.tick(8.5), "prepare")] == [2, 0]
    assert members.roster.total_rows == 0


def test_a_broken_connection_loses_a_seat_unless_it_is_heard_again() -> None:
    members = formed(3)
    members.suspect(1, 0, 2.0)
    members.suspect(2, 0, 2.0)
    members.suspect(0, 7, 2.0)  # of an attempt that is long gone
    assert members.beat(beat(0), 2, 2.5)
    assert lost(members.tick(2.9)) == []
    assert lost(members.tick(3.1)) == [(1, 0)]
    assert lost(members.tick(4.0)) == []


def test_rows_of_all_who_ever_joined_make_an_epoch() -> None:
    members = Membership(2, QUICK)
    members.join(hello(rows=10), 0, 0.0)
    members.join(hello(rows=12), 1, 0.0)
    members.lose(1, 0, "killed", 1.0)
    assert members.roster.total_rows == 22
    members.join(hello(1, rows=12), 1, 2.0)
    assert members.roster.total_rows == 22


def beat_waiting(members: Membership, now: float, landed: int, *, waiting: bool = True) -> None:
    for seat in members.seats.values():
        waits = {"train:7": [2]} if waiting else {}
        assert members.beat(beat(seat.attempt, landed=landed, waiting=waits), seat.worker, now)


def test_rounds_that_do_not_land_make_the_same_members_form_a_generation_anew() -> None:
    members = formed(3)
    for now in range(2, 22):
        beat_waiting(members, now, landed=0)
        assert members.tick(now) == [], f"after {now} s"
    beat_waiting(members, 22.0, landed=0)
    assert members.tick(22.0) == [Stalled(0, 20.0, {"train:7": [2]})]
    assert len(sent(members.tick(22.5), "prepare")) == 3
    for worker in range(3):
        committed = members.prepared(answer(0, 2, fresh=False), worker, 22.6)
    assert len(sent(committed, "commit")) == 3


def test_each_new_start_in_vain_doubles_the_wait_for_the_next_until_a_round_lands() -> None:
    members = formed(2)
    stalls = []
    for tenth in range(20, 2200):
        now = tenth / 10
        landed = 0 if now < 150 else 1
        beat_waiting(members, now, landed=landed)
        stalls += [now for d in members.tick(now) if isinstance(d, Stalled)]
        for seat in list(members.seats.values()):
            if not members.roster.answered(seat.worker):
                again = answer(0, members.agreement.generation, landed=landed, fresh=False)
                members.prepared(again, seat.worker, now)
    gaps = [round(b - a) for a, b in zip([2.0, *stalls], stalls, strict=False)]
    assert gaps[:2] == [20, 40]
    assert gaps[2] == 80
    assert stalls[3] == pytest.approx(170, abs=1)


def test_a_round_that_lands_or_nothing_to_wait_for_is_no_stall() -> None:
    members = formed(2)
    for now in range(2, 100):
        beat_waiting(members, now, landed=now // 15)
        assert members.tick(now) == []
    for now in range(100, 200):
        beat_waiting(members, now, landed=0, waiting=now % 15 != 0)
        assert members.tick(now) == []


def test_all_may_leave_and_come_back() -> None:
    members = formed(2)
    for worker in range(2):
        members.lose(worker, 0, "killed", 2.0)
    assert members.tick(3.0) == []
    members.join(hello(1), 0, 20.0)
    assert [s.worker for s in sent(members.tick(21.0), "prepare")] == [0]
    assert members.prepared(answer(1, 2, fresh=True), 0, 21.5) == [JointModelLost((0,))], (
        "the joint model went with them"
    )


# -- random lives -----------------------------------------------------------------------------------------------------


class World:
    """Workers that join, beat, answer, fall silent and come back, as the seed has it, beside a `Membership`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.workers = self.rng.randint(1, 5)
        self.members = Membership(self.workers, QUICK)
        self.now = 0.0
        self.attempts = dict.fromkeys(range(self.workers), -1)
        self.called: dict[tuple[int, int], int] = {}
        self.answered: dict[tuple[int, int], Prepared] = {}
        self.left: set[tuple[int, int]] = set()

    def take(self, decisions: list[Decision]) -> None:
        commits = sent(decisions, "commit")
        for send in sent(decisions, "prepare"):
            self.called[send.worker, send.attempt] = send.body.generation
        for send in sent(decisions, "leave"):
            assert send.attempt < self.attempts[send.worker] or send.attempt < self.members.roster.attempts[send.worker]
            self.left.add((send.worker, send.attempt))
        for gone in (d for d in decisions if isinstance(d, Lost)):
            seat = self.members.seats.get(gone.worker)
            assert seat is None or seat.attempt > gone.attempt
        if commits:
            self.check_commit(commits)
        self.check_seats()

    def check_commit(self, commits: list[Send]) -> None:
        generation = self.members.agreement.generation
        seats = {(s.worker, s.attempt) for s in self.members.seats.values()}
        assert {(s.worker, s.attempt) for s in commits} == seats
        assert all(self.answered[seat].generation == generation for seat in seats)
        commit = commits[0].body
        assert all(send.body == commit for send in commits)
        answers = {worker: self.answered[worker, attempt] for worker, attempt in seats}
        kept = [a for a in answers.values() if not a.fresh] or list(answers.values())
        reference = answers[commit.reference]
        assert reference in kept
        assert reference.landed == commit.landed == max(a.landed for a in kept)

    def check_seats(self) -> None:
        for worker, seat in self.members.seats.items():
            assert seat.worker == worker
            assert seat.attempt == self.members.roster.attempts[worker]
            assert (worker, seat.attempt) not in self.left

    def step(self) -> None:
        self.now += self.rng.choice((0.0, 0.1, 0.4, 1.0, 3.0))
        worker = self.rng.randrange(self.workers)
        seat = self.members.seats.get(worker)
        attempt = self.attempts[worker]
        match self.rng.randrange(7):
            case 0:
                self.attempts[worker] += 1
                self.take(self.members.join(hello(attempt + 1), worker, self.now))
            case 1 if self.members.roster.attempts.get(worker, 0) > 0:
                old = self.rng.randrange(self.members.roster.attempts[worker])
                before = dict(self.members.seats)
                self.take(self.members.join(hello(old), worker, self.now))
                assert self.members.seats == before
            case 2 if seat is not None:
                self.take(self.members.lose(worker, seat.attempt, "killed", self.now))
            case 3 if seat is not None:
                assert self.members.beat(beat(seat.attempt, landed=seat.landed), worker, self.now)
            case _:
                due = [s for s in self.members.seats.values() if (s.worker, s.attempt) in self.called]
                for seat in self.rng.sample(due, self.rng.randint(0, len(due))):
                    key = (seat.worker, seat.attempt)
                    told = answer(
                        seat.attempt, self.called[key], landed=self.rng.randint(0, 5), fresh=self.rng.random() < 0.4
                    )
                    self.answered[key] = told
                    self.take(self.members.prepared(told, seat.worker, self.now))
        self.take(self.members.tick(self.now))


def test_no_life_of_workers_breaks_the_rules() -> None:
    for seed in range(150):
        world = World(seed)
        for _ in range(80):
            world.step()


def test_a_run_whose_workers_stay_and_answer_comes_to_a_generation_of_all() -> None:
    for seed in range(60):
        world = World(seed)
        for _ in range(40):
            world.step()
        for _ in range(50):
            world.now += 0.2
            for worker in set(range(world.workers)) - set(world.members.seats):
                world.attempts[worker] += 1
                world.take(world.members.join(hello(world.attempts[worker]), worker, world.now))
            beat_all(world.members, world.now)
            world.take(world.members.tick(world.now))
            for seat in list(world.members.seats.values()):
                called = world.called.get((seat.worker, seat.attempt), 0)
                told = answer(seat.attempt, called, fresh=not world.members.agreement.formed)
                world.answered[seat.worker, seat.attempt] = told
                world.take(world.members.prepared(told, seat.worker, world.now))
        assert world.members.agreement.members == tuple(range(world.workers)), f"with seed {seed}"


def test_a_helper_alone_makes_no_generation() -> None:
    """It has no rows: a run of it alone would be over at once, and its model is nobody's."""
    members = Membership(2, QUICK, helpers=1)
    members.join(hello(), 2, 0.0)
    for now in range(1, 100):
        beat_all(members, float(now))
        assert members.tick(float(now)) == []
    assert members.roster.unseen == (0, 1)
    members.join(hello(), 0, 101.0)
    members.join(hello(), 1, 101.0)
    assert sorted(s.worker for s in sent(members.tick(102.0), "prepare")) == [0, 1, 2]


def test_a_helper_that_is_left_alone_keeps_what_it_holds_until_a_worker_comes() -> None:
    members = formed(3)
    members.roster.workers, members.roster.helpers = 2, 1
    members.lose(0, 0, "killed", 5.0)
    members.lose(1, 0, "killed", 5.0)
    for now in range(6, 40):
        beat_all(members, float(now))
        assert members.tick(float(now)) == []
    assert members.roster.present == set()
    members.join(hello(1), 1, 41.0)
    assert sorted(s.worker for s in sent(members.tick(42.0), "prepare")) == [1, 2]
