"""State machines: what their tables allow, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.coordinator import checkpoints, ending, generation, member
from thinwire.coordinator.ending import Ending
from thinwire.coordinator.member import MemberEvent, MemberState, Roster
from thinwire.coordinator.membership import Membership
from thinwire.exchange import ledger
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.messages import Join, Prepared
from thinwire.protocol.transitions import InvalidTransitionError, Row, Transitions
from thinwire.worker import life, publication
from thinwire.worker.life import Life, LifeEvent
from thinwire.worker.publication import Publication, PublicationEvent

MACHINES = {
    "member": (member.TRANSITIONS, MemberEvent),
    "generation": (generation.TRANSITIONS, generation.GenerationEvent),
    "run": (ending.TRANSITIONS, ending.RunEvent),
    "round": (ledger.TRANSITIONS, ledger.RoundEvent),
    "checkpoint": (checkpoints.TRANSITIONS, checkpoints.CheckpointEvent),
    "life": (life.TRANSITIONS, LifeEvent),
    "publication": (publication.TRANSITIONS, PublicationEvent),
}


def hello(attempt: int = 0) -> Join:
    return Join(attempt=attempt, address=f"memory:0.{attempt}", host="h", pid=1)


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_can_be_reached_and_every_event_is_in_the_table(name: str) -> None:
    table, causes = MACHINES[name]
    reached, ahead = {table.initial}, [table.initial]
    while ahead:
        state = ahead.pop()
        for row in table.rows:
            if state in row.before and row.after not in reached:
                reached.add(row.after)
                ahead.append(row.after)
    assert reached == set(type(table.initial))
    assert {row.cause for row in table.rows} == set(causes)


@pytest.mark.parametrize("name", MACHINES)
def test_an_event_that_a_state_does_not_allow_is_refused_with_the_events_that_it_allows(name: str) -> None:
    table, causes = MACHINES[name]
    refused = 0
    for state in type(table.initial):
        for cause in causes:
            if not table.allows(state, cause):
                refused += 1
                with pytest.raises(InvalidTransitionError, match=f"{state.name} does not allow {cause.name}; it"):
                    table.after(state, cause)
    assert refused


def test_a_table_in_which_an_event_has_two_outcomes_is_refused() -> None:
    rows: list[Row[Any, Any]] = [
        Row((MemberState.ABSENT,), MemberEvent.JOIN, MemberState.JOINED),
        Row((MemberState.ABSENT,), MemberEvent.JOIN, MemberState.CALLED),
    ]
    with pytest.raises(InvalidTransitionError, match="two rows"):
        Transitions(MemberState.ABSENT, rows)


def test_a_worker_passes_from_absent_to_committed_and_is_awaited_once_it_is_lost() -> None:
    members, seen = Membership(1, Deadlines(settle_s=0.0)), []
    roster = members.roster
    seen.append(roster.state(0))
    members.join(hello(), 0, 0.0)
    seen.append(roster.state(0))
    members.tick(0.0)
    seen.append(roster.state(0))
    answer = Prepared(attempt=0, generation=1, landed=0, fresh=True, since=0, digest="d")
    members.prepared(answer, 0, 0.0)
    seen.append(roster.state(0))
    members.lose(0, 0, "killed", 1.0)
    seen.append(roster.state(0))
    roster.expect(0, 1.0, replaced=True)
    seen.append(roster.state(0))
    assert roster.awaited(0.0) == {0}
    assert roster.awaited(1.0) == set(), "not forever"
    assert members.join(hello(1), 0, 2.0) == []
    assert members.seats[0].again
    seen.append(roster.state(0))
    names = ["ABSENT", "JOINED", "CALLED", "COMMITTED", "LOST", "AWAITED", "JOINED"]
    assert [state.name for state in seen] == names


def test_a_second_answer_of_the_last_worker_does_not_commit_the_generation_twice() -> None:
    members = Membership(1, Deadlines(settle_s=0.0))
    members.join(hello(), 0, 0.0)
    members.tick(0.0)
    answer = Prepared(attempt=0, generation=1, landed=0, fresh=True, since=0, digest="d")
    assert len(members.prepared(answer, 0, 0.0)) == 1
    assert members.prepared(answer, 0, 0.1) == []


def test_a_worker_that_has_no_seat_cannot_be_retired_or_committed() -> None:
    roster = Roster(2)
    with pytest.raises(InvalidTransitionError, match="ABSENT does not allow COMMIT"):
        roster.commit([0])
    roster.join(hello(), 0, 0.0)
    with pytest.raises(InvalidTransitionError, match="JOINED does not allow COMMIT"):
        roster.commit([0])


def test_a_lost_worker_that_no_replacement_comes_for_is_missing_and_not_awaited() -> None:
    roster = Roster(2)
    roster.join(hello(), 0, 0.0)
    roster.lose(0)
    roster.expect(0, 1.0, replaced=False)
    assert roster.missing == roster.unreplaced == {0}
    assert roster.awaited(0.0) == set()


def test_a_newer_attempt_that_is_there_already_is_not_taken_for_the_lost_one() -> None:
    """The older attempt is given up as the newer one joins, and the decision about its replacement comes after that."""
    roster = Roster(1)
    roster.join(hello(), 0, 0.0)
    roster.lose(0)
    roster.join(hello(1), 0, 1.0)
    roster.expect(0, 1.0, replaced=False)
    assert roster.state(0) is MemberState.JOINED
    assert roster.missing == set()


def test_rows_cannot_be_done_before_a_generation_has_formed() -> None:
    run = Ending(Membership(1), 1, lambda worker, attempt, body: None)
    with pytest.raises(InvalidTransitionError, match="GATHERING does not allow ROWS_DONE"):
        run.begin(0.0)


def test_a_worker_is_finished_from_its_last_round_until_it_leaves_and_not_where_its_group_breaks_meanwhile() -> None:
    worker, seen = Life(), []
    for _ in range(2):  # a second generation changes nothing
        worker.form()
    for cause in (LifeEvent.SYNC, LifeEvent.DRAIN, LifeEvent.FINISH, LifeEvent.BREAK):
        worker.move(cause)
        seen.append(worker.finished)
    assert seen == [False, False, True, False]
    for cause in (LifeEvent.SYNC, LifeEvent.DRAIN, LifeEvent.FINISH, LifeEvent.CONCLUDE, LifeEvent.LEAVE):
        worker.move(cause)
        seen.append(worker.finished)
    assert seen[4:] == [False, False, True, True, False]


def test_a_worker_cannot_conclude_before_it_has_finished() -> None:
    worker = Life()
    worker.form()
    worker.move(LifeEvent.SYNC)
    with pytest.raises(InvalidTransitionError, match="TRAINING does not allow CONCLUDE; it allows BREAK, DRAIN"):
        worker.move(LifeEvent.CONCLUDE)


def test_a_publication_is_neither_evaluated_nor_saved_before_its_buffers_are_here() -> None:
    made = Publication(1, torch.zeros(1), evaluate=True)
    for cause in (PublicationEvent.EVALUATE, PublicationEvent.SAVE):
        with pytest.raises(InvalidTransitionError, match="CAPTURED does not allow"):
            made.move(cause)
    made.give({})
    made.move(PublicationEvent.EVALUATE)
    made.move(PublicationEvent.SAVE)
    with pytest.raises(InvalidTransitionError, match="SAVED does not allow DROP; it allows SAVE"):
        made.move(PublicationEvent.DROP)
