"""Slots for the jobs that visit agents: what is done where agents, or other jobs, have taken all of a machine's."""

from __future__ import annotations

import pytest

from thinwire import events
from thinwire.errors import ConfigError
from thinwire.exchange.spark.slots import (
    BLOCKED_S,
    REFUSE_S,
    TELL_S,
    Agent,
    FreeSlots,
    Machine,
    refuse_too_little_room,
)


class Cluster:
    """Machines as Spark would tell of them, and a clock; an attempt that is ended starts again where `goes` says."""

    def __init__(self, *there: Machine, workers: int = 2, may_grow: bool = False) -> None:
        self.there, self.now, self.goes = list(there), 100.0, ""
        self.heard: dict[int, float] = {}
        self.moved: list[int] = []
        self.begun = True
        self._free = FreeSlots(lambda: self.there, self._move, workers, may_grow=may_grow, clock=lambda: self.now)

    def _move(self, _: Machine, attempt: int) -> None:
        self.moved.append(attempt)
        (agent,) = (agent for machine in self.there for agent in machine.agents if agent.attempt == attempt)
        again = Agent(agent.worker, 1 + max(each.attempt for machine in self.there for each in machine.agents))
        for index, machine in enumerate(self.there):
            agents = tuple(each for each in machine.agents if each != agent)
            agents += (again,) if machine.executors == (self.goes,) else ()
            self.there[index] = machine._replace(agents=agents)

    def passes(self, seconds: int, *, heard: tuple[int, ...] = ()) -> list[events.SlotAwaited]:
        """Looks once a second; the attempts named are heard all the time."""
        found = []
        for _ in range(seconds):
            self.now += 1.0
            self.heard |= dict.fromkeys(heard, self.now)
            found += self._free.look(self.heard, begun=self.begun)
        assert all(isinstance(event, events.SlotAwaited) for event in found)
        return found  # type: ignore[return-value]


def machine(name: str, slots: int, *agents: tuple[int, int], others: int = 0) -> Machine:
    return Machine((name,), f"host-{name}", slots, tuple(Agent(*agent) for agent in agents), others)


def test_an_agent_too_many_is_started_again_on_a_machine_with_room() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 2))
    cluster.goes = "b"
    (told,) = cluster.passes(10)
    assert cluster.moved == [6], "the younger one, once"
    assert (told.executors, told.host, told.slots, told.workers, told.moved) == (("a",), "host-a", 2, (0, 1), 1)
    assert "worker 1 is started again" in told.text


def test_an_agent_that_comes_back_on_the_full_machine_is_moved_until_it_finds_another_place() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 2))
    cluster.goes = "a"
    cluster.passes(30)
    assert len(cluster.moved) > 1
    cluster.goes = "b"
    cluster.passes(60)
    count = len(cluster.moved)
    cluster.passes(60)
    assert len(cluster.moved) == count, "it is where it can be visited"


def test_who_was_heard_keeps_its_place() -> None:
    """Spark starts worker 0, whose executor was lost, on the slot in which worker 1 was visited."""
    cluster = Cluster(machine("a", 2, (1, 2)), machine("b", 2))
    cluster.passes(5, heard=(2,))
    cluster.there[0] = machine("a", 2, (1, 2), (0, 7))
    cluster.goes = "b"
    cluster.passes(10)
    assert cluster.moved == [7]


def test_agents_that_are_heard_are_never_moved() -> None:
    """Spark may tell of slots otherwise than they are."""
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 2))
    assert cluster.passes(300, heard=(5, 6)) == []
    assert cluster.moved == []


def test_an_agent_waits_for_a_machine_with_room_and_the_run_says_so() -> None:
    """Its executor was lost, and none has come in its place."""
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 2, (2, 4)), workers=3)
    told = cluster.passes(100, heard=(4,))
    assert not cluster.moved, "the other machine's last slot is for visits to its own worker"
    assert told[0].seconds >= TELL_S
    assert told[0].moved is None
    assert len(told) == 2, "once, and again after a while"
    cluster.there.append(machine("c", 2))
    cluster.goes = "c"
    (moved,) = cluster.passes(10, heard=(4,))
    assert moved.moved == 1


def test_a_machine_that_is_full_with_other_jobs_counts_as_one_without_room() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 2, others=2))
    cluster.passes(50)
    assert not cluster.moved
    cluster.there[1] = machine("b", 2)
    cluster.goes = "b"
    cluster.passes(3)
    assert cluster.moved == [6]


def test_an_agent_is_moved_only_while_a_slot_is_idle_elsewhere() -> None:
    """It would be started where it was: what else looks for machines may have all slots of the others."""
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 2)._replace(visits=2))
    cluster.goes = "b"
    cluster.passes(50)
    assert not cluster.moved
    cluster.there[1] = machine("b", 2)
    cluster.passes(3)
    assert cluster.moved == [6]


def test_tasks_of_other_jobs_that_hold_the_last_slot_are_told_of_with_the_executor() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), others=1), machine("b", 2, (1, 6)))
    (told,) = cluster.passes(int(TELL_S) + 2, heard=(6,))
    assert (told.executors, told.workers, told.others, told.moved) == (("a",), (0,), 1, None)
    assert "executor a on host-a" in told.text
    assert "1 task of another job" in told.text


def test_an_agent_whom_other_jobs_keep_from_being_heard_for_long_is_moved() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), others=1), machine("b", 2, (1, 6)), machine("c", 2))
    cluster.goes = "c"
    cluster.passes(int(BLOCKED_S) - 2, heard=(6,))
    assert not cluster.moved
    cluster.passes(5, heard=(6,))
    assert cluster.moved == [5]


def test_executors_that_share_a_machine_share_its_free_slots() -> None:
    both = Machine(("1", "2"), "host", 2, (Agent(0, 5),))
    cluster = Cluster(both, machine("b", 2))
    assert cluster.passes(100) == []


def test_a_cluster_without_room_is_refused_within_seconds_where_training_has_not_begun() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), machine("b", 1))
    cluster.begun = False
    with pytest.raises(ConfigError) as refused:
        cluster.passes(int(REFUSE_S) + 3)
    for part in ("2 workers", "room for 1", "executor a on host-a: 2 slots", "executor b on host-b: 1 slot)"):
        assert part in str(refused.value)
    for part in ("at most 1 worker,", "spark.executor.cores", "exchange='mesh'"):
        assert part in str(refused.value)


def test_a_run_that_has_begun_waits_for_an_executor_that_was_lost() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)))
    assert cluster.passes(100)
    assert not cluster.moved


def test_a_cluster_that_brings_executors_by_itself_is_given_the_time() -> None:
    cluster = Cluster(machine("a", 2, (0, 5), (1, 6)), may_grow=True)
    cluster.begun = False
    assert cluster.passes(100)
    cluster.there.append(machine("b", 2))
    cluster.goes = "b"
    cluster.passes(5)
    assert cluster.moved == [6]


@pytest.mark.parametrize(
    ("slots", "workers", "fits"),
    [((2, 2), 2, True), ((2, 2), 3, False), ((4, 1, 1), 3, True), ((4, 1, 1), 4, False), ((1, 1, 1), 1, False)],
)
def test_each_machine_has_room_for_all_but_one_of_its_slots(slots: tuple[int, ...], workers: int, fits: bool) -> None:
    there = [machine(str(index), count) for index, count in enumerate(slots)]
    if fits:
        refuse_too_little_room(there, workers)
    else:
        with pytest.raises(ConfigError, match=f"{workers} workers? (are|is) asked for"):
            refuse_too_little_room(there, workers)
