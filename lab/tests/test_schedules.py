"""The whole protocol under seeded schedules of what goes wrong; and mistakes planted to prove that they are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire.cli.main import main
from thinwire.coordinator import attendance as absent
from thinwire.coordinator import checkpoints as saves
from thinwire.coordinator import ending, membership
from thinwire.exchange import joint, mesh
from thinwire.exchange import round as exchange_round
from thinwire.exchange.table import server
from thinwire.replicas import TorchReplica
from thinwire.rules.compression import Codec
from thinwire.strategies import STRATEGIES, name_of
from thinwire.transport import reliable as sure
from thinwire.worker import conclusion, nonfinite, worker
from thinwire_lab.schedules import Schedule, play
from thinwire_lab.schedules.draw import JOINT_FROM, MENU, NAN_FROM
from thinwire_lab.schedules.many import play_all

SLICES = 8
SLICE = 20
FEW = 2
"""Slices for `make test`."""
STARTS = [pytest.param(part * SLICE, marks=[] if part < FEW else pytest.mark.long) for part in range(SLICES)]


@pytest.mark.parametrize("start", STARTS)
def test_whatever_goes_wrong_what_must_hold_holds(start: int) -> None:
    tally = play_all(range(start, start + SLICE), jobs=1)
    assert tally.played == SLICE
    assert not tally.failed, [(verdict.replay, verdict.what[:300]) for verdict in tally.failed]


def test_what_is_not_finite_is_in_no_model_that_landed_and_in_no_checkpoint() -> None:
    drawn = [Schedule.draw(seed) for seed in range(NAN_FROM, NAN_FROM + 2 * SLICE)]
    failed = [
        (v.replay, v.what[:300]) for v in (play(schedule) for schedule in drawn if schedule.group_size == 1) if not v.ok
    ]
    assert not failed


def test_one_joint_optimizer_is_the_same_bits_on_all_that_hold_it() -> None:
    tally = play_all(range(JOINT_FROM, JOINT_FROM + SLICE // 2), jobs=1)
    assert not tally.failed, [(verdict.replay, verdict.what[:300]) for verdict in tally.failed]


@pytest.mark.long
def test_two_processes_play_what_one_plays() -> None:
    one, two = (play_all(range(SLICE + 2), jobs=jobs).to_json() for jobs in (1, 2))
    assert one | {"seconds": 0} == two | {"seconds": 0}


BROKE = [538, 1980, 2788, 4175, 5409, 6086, 6321, 7036, 14490, 19572, 36345, 39199, 39729, 68256, 86060]
BROKE_IN_GROUPS = [
    200075, 200122, 200136, 200137, 200298, 200366, 200797, 201070, 201125, 201666, 202091, 202484, 210094,
    214321,
]  # fmt: skip
BROKE_WITH_ONE_OPTIMIZER = [410086, 410936]


@pytest.mark.parametrize("seed", BROKE_IN_GROUPS)
def test_schedules_of_groups_that_once_broke_something_pass(seed: int) -> None:
    """What was wrong.

    200075, 200122, 200366: a step broke off before its gradient was whole; servers and later steps of that worker
        waited for the rest of it.
    200136: a member took over a joint state with a publication in it; its group dropped that publication without a
        word, and the other groups waited for its part in the verdict. The member then waited for the joint state
        again, since it began the generation only after the state had come.
    200137, 200298: a member that lacked the joint state passed over a round to which the others of its group
        contributed; from then on its lane counted one round more.
    200797: a group that was alone waited for a verdict, which needed a group that waited for its joint state.
    201070, 201125: a worker lost while the final model was saved was replaced; its group made its last steps again, and
        ended on another model than the others.
    201666: a worker gave its joint model away before it had begun the generation in which it was alone: its replica
        replaced that model afterwards.
    202091: a worker began three generations at once, and had been alone in one of them: the check looked too early.
    202484: nobody held a part of the model any more, and the run went on from its checkpoint: the check did not know.
    210094: a group had lost a member, and a generation formed without it. Back in the next one, the member that had
        stayed contributed to a round, in its part of the model alone, what it had held since; and the check did not
        know that a group may be a round ahead of the group at which a round is torn.
    214321: a worker came back in the middle of a step and launched a round in its part of the model alone. Groups that
        were done took rounds of different numbers together from then on; one part of them never heard of a
        publication, whose buffers the others waited for.
    """
    verdict = play(Schedule.draw(seed))
    assert verdict.ok, verdict.what


@pytest.mark.parametrize("seed", BROKE)
def test_schedules_that_once_broke_something_pass(seed: int) -> None:
    """What was wrong.

    538: a quorum made the final mean without one that had yet to come to it, who then made another.
    2788: a publication that was announced again counted twice at the worker that had all of it the first time.
    5409: the first worker, back after a cut, waited for what it had announced and others had published without it.
    6321: a newcomer went on stepping while a round that it had nothing to give to was held up, and gave the next one a
        model from before it.
    14490: a worker that had its state from a peer handed on that it had seen no publication, and the next one counted
        an old one again.
    19572: one that had yet to get its state kept a publication that the others had given up.
    36345: a worker came back with a contribution that was in the model, to servers that could not know that.
    39199: so did one that was never away, to servers that its reference had put in what it had.
    39729: rounds took longer than before when none of the newest cut had landed yet: the link was fitted to nothing.
    68256: two generations formed before one that had been alone put its replica in: the check looked too early.
    86060: a checkpoint was saved under the number that its announcer had counted to beside the others, which was that
        of the last one: when it was committed, what was written of the last one was cleared away.
    """
    verdict = play(Schedule.draw(seed))
    assert verdict.ok, verdict.what


@pytest.mark.parametrize("seed", BROKE_WITH_ONE_OPTIMIZER)
def test_schedules_with_one_joint_optimizer_that_once_broke_something_pass(seed: int) -> None:
    """What was wrong.

    410086, 410936: a worker's own slice was summed without it, and its note was heard only by owners whose sums counted
        it: workers merged a round by different notes.
    """
    verdict = play(Schedule.draw(seed))
    assert verdict.ok, verdict.what


BACK: dict[str, tuple[int, str, float, float, list[tuple[Any, int, float, float]]]] = {
    "the end began while one was being taken in": (5124, "relay", 0.3, 8.0, [("pause", 0, 2.859, 8.227)]),
    "it had seen a publication that the others never made": (
        71, "mpca", 0.3, 1.0, [("pause", 0, 2.316, 4.579), ("pause", 0, 2.606, 6.05)]
    ),
    "it handed a model back after the others had": (84, "table, strict", 0.3, 8.0, [("pause", 2, 2.552, 21.098)]),
    "one was alone at the end, and then no longer": (5015, "mpca", 0.0, 8.0, [("pause", 1, 2.595, 10.635)]),
}  # fmt: skip


@pytest.mark.parametrize("what", BACK)
def test_one_who_was_given_up_and_comes_back_at_the_end_changes_nothing(what: str) -> None:
    seed, name, spread, store_s, away = BACK[what]
    faults = tuple(tw.Fault(kind=kind, worker=worker, at_s=at_s, seconds=s) for kind, worker, at_s, s in away)
    verdict = play(Schedule(seed, name, 3, True, False, spread, faults, store_s))
    assert verdict.ok, verdict.what


@pytest.mark.parametrize(
    ("seed", "name", "away", "at_s", "seconds", "dies", "killed_s", "gone_s"),
    [
        (254, "table, bounded", 0, 1.913, 6.55, 2, 2.754, 0.0),
        (353, "table, eventual", 2, 1.351, 7.727, 1, 1.483, 0.0),
        (396, "table, eventual", 2, 1.46, 6.339, 1, 4.621, 1.5),
    ],
)
def test_a_contribution_that_servers_began_anew_with_is_not_merged_again(
    seed: int, name: str, away: int, at_s: float, seconds: float, dies: int, killed_s: float, gone_s: float
) -> None:
    """One is away whose last reply was lost; the others lose the table meanwhile, and put in what one of them has.

    Nobody knows any more whether that contribution is in it, not even generations later, when the table lives on.
    """
    faults = (
        tw.Fault(kind="cut", worker=away, at_s=at_s, seconds=seconds),
        tw.Fault(kind="kill", worker=dies, at_s=killed_s, seconds=gone_s),
        tw.Fault(kind="lose", worker=away, at_s=round(at_s - 0.3, 3), seconds=0.4, share=0.3),
    )
    verdict = play(Schedule(seed, name, 3, True, True, 0.3, faults, 0.0))
    assert verdict.ok, verdict.what


def test_every_strategy_is_on_the_menu() -> None:
    assert {name_of(make()) for make in MENU.values()} == set(STRATEGIES)


def test_a_seed_plays_the_same_way_each_time() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        play(Schedule.draw(seed), [lambda event: lines.append(event.to_json())])
        own = (
            '"pid"',
            '"run"',
            "thinwire-schedule-",
        )  # a process, a run and a folder have names of their own each time
        return [line for line in lines if not any(name in line for name in own)]

    assert told(18) == told(18)
    assert told(18) != told(19)


# -- planted mistakes ------------------------------------------------------------------------------------------------


def no_memory_of_what_was_merged(patch: Any) -> None:
    """A server that counts an update again when it is sent again."""
    patch.setattr(server.Server, "_known", lambda self, key, book, update: None)


def nobody_is_ever_behind(patch: Any) -> None:
    """A worker that was away goes on with what it has."""
    patch.setattr(mesh.Mesh, "holds", lambda self, commit: True)


def words_are_said_once(patch: Any) -> None:
    """What a broken connection takes with it is gone."""
    patch.setattr(sure.Channel, "_lost", lambda self, seen, heard: [])


def a_successor_skips_rows(patch: Any) -> None:
    """A replacement begins one batch after the position of the last heartbeat."""
    commit = membership.Membership._commit

    def skipping(self: Any, lane: Any) -> Any:
        found = commit(self, lane)
        for send in found:
            for entry in send.body.members.values():
                if entry.get("position"):
                    entry["position"] = [entry["position"][0], entry["position"][1] + 1]
        return found

    patch.setattr(membership.Membership, "_commit", skipping)


def a_successor_speaks_too_soon(patch: Any) -> None:
    """A replacement that waits to be taken in tells of its own rows, none, and begins there."""

    def hasty(self: Any) -> dict[str, Any]:
        note = {"rows": self.meter.rows_done}
        return self.meter.report() | {"note": note, "first_loss": self.trigger.first_loss}

    patch.setattr(worker.Worker, "_progress", hasty)


def the_end_is_not_waited_for(patch: Any) -> None:
    """A worker ends on what it has when it hears that all are done, though rounds are still on their way to it."""
    patch.setattr(worker, "concludes", lambda life, *others, **settings: life.num_rounds is not None)


def who_comes_too_late_is_taken_in(patch: Any) -> None:
    """A successor that comes when the others have the final model, and are on their way out, is waited for."""
    patch.setattr(ending.Ending, "closed", False)
    patch.setattr(ending.Ending, "not_awaited", lambda self: set())


def checkpoints_are_committed_early(patch: Any) -> None:
    """A checkpoint counts as whole when anybody has written a part of it."""
    whole = saves.CheckpointCommits.whole
    patch.setattr(saves.CheckpointCommits, "whole", lambda self, needed, newest: whole(_careless(self), set(), newest))


def _careless(books: Any) -> Any:
    books._group_size = 0
    return books


def one_who_died_at_the_end_is_missed(patch: Any) -> None:
    """A worker lost after all rows were done makes the run incomplete."""
    patch.setattr(absent.Attendance, "done", property(lambda self: set(), lambda self, value: None), raising=False)


def numbers_are_not_looked_at(patch: Any) -> None:
    """A worker takes every step, and an exchange merges every mean."""
    patch.setattr(nonfinite.NonFinite, "takes", lambda self, loss: True)
    patch.setattr(TorchReplica, "is_finite", True)
    patch.setattr(Codec, "is_finite", lambda self, packed, count: True)
    for module in (nonfinite, joint, exchange_round, conclusion):
        patch.setattr(module, "is_finite", lambda values: True)


PLANTED: dict[Callable[[Any], None], tuple[str | None, tuple[int, ...], range]] = {
    no_memory_of_what_was_merged: ("table, eventual", (3,), range(60)),
    nobody_is_ever_behind: ("sparknet", (1,), range(60)),
    words_are_said_once: (None, (1,), range(100)),
    a_successor_skips_rows: (None, (0,), range(60)),
    a_successor_speaks_too_soon: (None, (2,), range(60)),
    the_end_is_not_waited_for: ("relay", (7,), range(330)),
    who_comes_too_late_is_taken_in: (None, (1980,), range(1975, 1985)),
    checkpoints_are_committed_early: (None, (0,), range(60)),
    one_who_died_at_the_end_is_missed: (None, (20,), range(100)),
    numbers_are_not_looked_at: ("sparknet", (NAN_FROM,), range(NAN_FROM, NAN_FROM + 40)),
}
"""The strategy, seeds that are known to find it, and those to search when these do not any more."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    only, known, _ = PLANTED[plant]
    plant(monkeypatch)
    assert any(not play(Schedule.draw(seed, only)).ok for seed in known), (
        f"not found by seeds {known}: search for others, by `pytest -k searched_for` among the long tests"
    )


@pytest.mark.long
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_that_is_searched_for_is_found(
    plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only, _, seeds = PLANTED[plant]
    plant(monkeypatch)
    found = next((seed for seed in seeds if not play(Schedule.draw(seed, only)).ok), None)
    assert found is not None, f"not found in {len(seeds)} schedules"


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_counts_and_tells_how_to_play_one_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["testbed", "schedules", "--seeds", "0:3", "--jobs", "1"]) == 0
    assert "3 schedules" in capsys.readouterr().out
    a_successor_skips_rows(monkeypatch)
    assert main(["testbed", "schedules", "--seeds", "0:3", "--jobs", "1"]) != 0
    shown = capsys.readouterr()
    assert "thinwire testbed schedules --seeds " in shown.out + shown.err


def test_one_seed_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "schedules", "--seeds", "18"]) == 0
    shown = capsys.readouterr().out
    assert "seed 18" in shown
    assert "worker_lost" in shown
    assert "passed: complete" in shown


@pytest.mark.parametrize("seeds", ["x", "5:2", "1:x", ""])
def test_seeds_that_make_no_sense_are_refused(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "schedules", "--seeds", seeds]) == 2
    assert "0:1000" in capsys.readouterr().err


def test_slices_are_added_up_in_a_file_and_no_seed_counts_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedules.json"
    for seeds in ("0:3", "5:7", "3:5"):
        assert main(["testbed", "schedules", "--seeds", seeds, "--jobs", "1", "--record", str(path)]) == 0
    kept = json.loads(path.read_text())
    assert kept["seeds"] == [[0, 7]]
    assert kept["played"] == sum(kept["outcomes"].values()) == sum(kept["strategies"].values()) == 7
    assert main(["testbed", "schedules", "--seeds", "6:8", "--jobs", "1", "--record", str(path)]) == 2
    assert "has seeds 0:7 already" in capsys.readouterr().err
    assert json.loads(path.read_text()) == kept


def test_another_tree_is_compared_by_the_digests_of_its_events(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "digests.json"
    words = ["testbed", "schedules", "--seeds", "5:7", "--jobs", "1", "--digests", str(path)]
    assert main(words) == 0
    before = json.loads(path.read_text())
    assert sorted(before) == ["5", "6"]
    assert main(words) == 0
    assert json.loads(path.read_text()) == before
    path.write_text(json.dumps(before | {"6": "0" * 16}))
    assert main(words) == 4
    assert "1 of 2 schedules have other events" in capsys.readouterr().err
