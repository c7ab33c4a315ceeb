"""Groups and lanes in virtual time: who is in a generation, who stands by, and whom each takes the joint state from."""

from __future__ import annotations

from typing import Any

from thinwire.coordinator.groups import Groups
from thinwire.coordinator.membership import Decision, JointModelLost, Membership, Send
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.messages import Commit, Join, Prepared

QUICK = Deadlines(start_s=60.0, silence_s=10.0, prepare_s=5.0, rejoin_s=30.0, settle_s=0.5)


def hello(worker: int, attempt: int = 0) -> Join:
    at = f"meeting:{worker}.{attempt}"
    return Join(attempt=attempt, address=f"memory:{worker}.{attempt}", host="h", pid=1, meets=at)


def answer(generation: int, attempt: int = 0, *, landed: int = 0, since: int = 0) -> Prepared:
    said: dict[str, Any] = {"landed": landed, "fresh": not since, "since": since, "digest": "d"}
    return Prepared(attempt=attempt, generation=generation, **said)


def commits(decisions: list[Decision]) -> dict[int, Commit]:
    return {d.worker: d.body for d in decisions if isinstance(d, Send) and isinstance(d.body, Commit)}


def stands(decisions: list[Decision]) -> list[int]:
    return [d.worker for d in decisions if isinstance(d, Send) and d.body.tag == "stand"]


def formed() -> Membership:
    """Four workers, two replicas of two, in their first generation at 1 s."""
    members = Membership(4, QUICK, group_size=2)
    for worker in range(4):
        members.join(hello(worker), worker, 0.0)
    members.tick(1.0)
    found: list[Decision] = []
    for worker in range(4):
        found = members.prepared(answer(1), worker, 1.0)
    told = commits(found)
    assert {w: sorted(h.members) for w, h in told.items()} == {
        0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3],
    }  # fmt: skip
    assert [told[w].group for w in range(4)] == [
        {"n": 1, "at": "meeting:0.0"}, {"n": 1, "at": "meeting:0.0"},
        {"n": 1, "at": "meeting:2.0"}, {"n": 1, "at": "meeting:2.0"},
    ]  # fmt: skip
    return members


def again(members: Membership, now: float, landed: dict[int, int], attempts: dict[int, int]) -> dict[int, Any]:
    """All who are here answer the next call; those with rounds have been in the first generation."""
    members.tick(now)
    found: list[Decision] = []
    for worker in list(members.seats):
        since = 1 if worker in landed else 0
        told = answer(members.agreement.generation, attempts.get(worker, 0), landed=landed.get(worker, 0), since=since)
        found = members.prepared(told, worker, now)
    return commits(found)


def test_a_lane_is_told_of_itself_only() -> None:
    formed()


def test_the_rest_of_a_broken_group_stands_by_and_the_others_go_on() -> None:
    members = formed()
    assert stands(members.lose(1, 0, "killed", 2.0)) == [0]
    assert members.working == {2, 3}
    told = again(members, 3.0, {0: 7, 2: 7, 3: 7}, {})
    assert set(told) == {2, 3}
    assert members.agreement.members == (2, 3)
    assert told[2].group["n"] == 1  # they have not parted


def test_a_group_that_is_whole_again_takes_each_part_from_its_own_lane() -> None:
    members = formed()
    members.lose(1, 0, "killed", 2.0)
    again(members, 3.0, {0: 7, 2: 9, 3: 8}, {})
    members.join(hello(1, 1), 1, 4.0)
    told = again(members, 5.0, {0: 7, 2: 9, 3: 8}, {1: 1})
    assert (told[0].reference, told[0].landed) == (2, 9)
    assert (told[1].reference, told[1].landed) == (3, 8)
    assert [told[w].group["n"] for w in range(4)] == [2, 2, 1, 1]


def test_where_both_groups_lost_somebody_the_survivors_hold_both_parts() -> None:
    members = formed()
    members.lose(1, 0, "killed", 2.0)
    members.lose(2, 0, "killed", 2.0)
    assert members.working == set()
    members.join(hello(1, 1), 1, 3.0)
    members.join(hello(2, 1), 2, 3.0)
    told = again(members, 4.0, {0: 7, 3: 7}, {1: 1, 2: 1})
    assert [told[w].reference for w in range(4)] == [0, 3, 0, 3]
    assert [told[w].group["n"] for w in range(4)] == [2, 2, 2, 2]


def test_a_group_waits_where_the_only_holder_of_a_part_stands_by() -> None:
    members = formed()
    members.lose(1, 0, "killed", 2.0)
    members.lose(2, 0, "killed", 2.0)
    members.join(hello(1, 1), 1, 3.0)  # its group is whole, and its part is held by worker 3 alone
    assert again(members, 4.0, {0: 7, 3: 7}, {1: 1}) == {}
    assert members.agreement.waits
    members.join(hello(2, 1), 2, 5.0)
    assert (
        not members.agreement.waits
    )  # already before the generation forms: the coordinator would else give the run up
    told = again(members, 6.0, {0: 7, 3: 7}, {1: 1, 2: 1})
    assert [told[w].reference for w in range(4)] == [0, 3, 0, 3]
    assert not members.agreement.waits


def test_a_part_that_nobody_holds_ends_the_run() -> None:
    members = formed()
    members.lose(1, 0, "killed", 2.0)
    members.lose(3, 0, "killed", 2.0)
    members.join(hello(1, 1), 1, 3.0)
    members.join(hello(3, 1), 3, 3.0)
    members.tick(4.0)
    found: list[Decision] = []
    for worker, attempt, since in ((0, 0, 1), (2, 0, 1), (1, 1, 0), (3, 1, 0)):
        found = members.prepared(answer(members.agreement.generation, attempt, since=since), worker, 4.0)
    assert any(isinstance(d, JointModelLost) for d in found)


def test_a_group_that_fell_apart_unnoticed_meets_once_more() -> None:
    members = formed()
    members.come_together(2, 1, 2.0)
    members.come_together(3, 1, 2.0)  # the same parting, told by the other
    told = again(members, 3.0, dict.fromkeys(range(4), 5), {})
    assert [told[w].group["n"] for w in range(4)] == [1, 1, 2, 2]
    members.come_together(3, 1, 4.0)  # of a meeting that is over
    assert not members.agreement.changing


def test_whole_groups_only() -> None:
    groups = Groups(6, 3)
    assert groups.whole([0, 1, 2, 4, 5]) == {0, 1, 2}
    assert groups.others_in_group(4) == [3, 5]
    assert Groups(3, 1).whole([0, 2]) == {0, 2}
    assert Groups(3, 1).others_in_group(0) == []


def test_the_agreement_is_not_settled_while_a_worker_of_a_broken_group_is_still_called() -> None:
    """The whole group has answered; its commit comes with the last answer, and the end of the run not before that."""
    members = formed()
    members.lose(3, 0, "killed", 2.0)
    members.tick(3.0)
    for worker in (0, 1):
        assert members.prepared(answer(members.agreement.generation, since=1), worker, 3.0) == []
    assert not members.agreement.settled
    assert members.prepared(answer(members.agreement.generation, since=1), 2, 3.0)
    assert members.agreement.settled
