"""The end of a run in groups, one of whose members is lost when the others have the final model."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire import events
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.ending import Ending
from thinwire.coordinator.membership import Membership
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.ports import Exit
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.forms import Body
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import Message

PROGRESS = {"rows": 8, "steps": 1, "busy": 1.0, "gap_s": 0.0, "position": [1, 0]}
VICTIM, FELLOW = 1, 0


class Script:
    """Hub, workforce and clock in one: four workers in two groups, of which one dies a second after the conclusion.

    The other group hands the model back and leaves; the fellow of the lost one stands by until it is told to leave.
    """

    revives = False
    refused = 0

    def __init__(self, successor_s: float | None) -> None:
        self.moment, self.successor_s = 0.0, successor_s
        self.concluded: float | None = None
        self.done: float | None = None
        self.attempt = dict.fromkeys(range(4), 0)
        self.gone: set[int] = set()
        self.held: dict[tuple[int, int], int] = {}
        self.ends: list[Exit] = []
        self.dismissed: set[tuple[int, int]] = set()
        self.inbox = [
            self._said(w, "join", address=f"memory:{w}.0", rows=8, meets=None if w % 2 else "x:1", **hello())
            for w in range(4)
        ]

    def _said(self, worker: int, kind: str, payload: memoryview | None = None, **fields: Any) -> Message:
        return Message(worker, {"t": kind, "a": self.attempt[worker], **fields}, payload)

    def now(self) -> float:
        return self.moment

    def receive(self, timeout_s: float) -> list[Message]:
        self.moment += 0.1
        assert self.moment < 60.0, "the run does not end"
        here = [w for w in range(4) if w not in self.gone]
        self.inbox += [self._said(w, "beat", landed=3, bytes=0, progress=PROGRESS) for w in here]
        if VICTIM in here and self.attempt[VICTIM] == 0 and self.concluded and self.moment > self.concluded + 1:
            self.gone.add(VICTIM)
            self.ends = [Exit(VICTIM, 0, "killed")]
        comes = self.done is not None and self.successor_s is not None and self.moment > self.done + self.successor_s
        if comes and self.attempt[VICTIM] == 0:
            self.attempt[VICTIM] = 1
            self.gone.discard(VICTIM)
            self.inbox.append(self._said(VICTIM, "join", address="memory:1.1", rows=8, **hello()))
        found, self.inbox = self.inbox, []
        return found

    def send(self, worker: int, attempt: int, header: dict[str, Any], payload: memoryview | None = None) -> None:
        kind, me = header["t"], (worker, attempt)
        if kind == "leave":
            self.dismissed.add(me)
            self.gone |= {worker} if attempt == self.attempt[worker] else set()
        if worker in self.gone or attempt != self.attempt[worker]:
            return
        if kind == "prepare":
            since = self.held.get(me, 0)
            state = {"landed": 3, "digest": "d", "fresh": not since, "since": since}
            self.inbox.append(self._said(worker, "prepared", g=header["g"], **state))
        elif kind == "commit":
            self.held[me] = int(header["g"])
            if self.concluded is None:
                self.inbox.append(self._said(worker, "finished"))
            elif worker == min(map(int, header["members"])):  # the first of its lane
                piece = {"part": worker % 2, "chunk": 0, "chunks": 1, "i": 0, "n": 1}
                self.inbox.append(self._said(worker, "result", memoryview(b"model"), **piece))
        elif kind == "conclude" and self.concluded is None:
            self.concluded = self.moment
        elif kind == "done":
            self.done = self.done or self.moment
            if worker != FELLOW:
                self.gone.add(worker)
                self.inbox.append(self._said(worker, "bye"))

    def broken(self) -> list[tuple[int, int]]:
        return []

    def notices(self) -> list[events.Event]:
        return []

    def exits(self) -> list[Exit]:
        found, self.ends = self.ends, []
        return found

    def replace(self, worker: int, attempt: int) -> bool:
        return self.successor_s is not None


@pytest.mark.parametrize("successor_s", [None, 0.05, 2.0])
def test_what_another_group_has_handed_back_is_the_end_of_the_run(successor_s: float | None) -> None:
    script = Script(successor_s)
    policy = Policy(4, group_size=2, deadlines=Deadlines(settle_s=0.05))
    outcome = Coordinator(script, script, policy, emit=lambda event: None, time=script).run()
    assert outcome.results == {0: {0: b"model"}, 1: {0: b"model"}}
    assert outcome.workers_lost == 1
    assert script.done is not None
    assert (FELLOW, 0) in script.dismissed
    assert script.moment < script.done + 10


def unheard(worker: int, attempt: int, body: Body) -> None:
    raise AssertionError("nobody is told anything")


def test_a_word_of_agreement_before_all_rows_are_done_changes_nothing() -> None:
    ending = Ending(Membership(1), 1, unheard)
    ending.formed(0.0)
    ending.agreed(0)
    assert not ending.closed
    ending.begin(1.0)
    assert ending.closed


def test_nobody_is_let_in_once_all_of_one_group_hold_the_final_model() -> None:
    ending = Ending(Membership(4, group_size=2), 2, unheard)
    ending.formed(0.0)
    ending.agreed(0)
    ending.agreed(1)
    assert not ending.closed, "it has not begun"
    ending.begin(1.0)
    assert ending.closed
    ending.lost(1)
    ending.agreed(3)
    assert not ending.closed, "no group is whole"
    ending.agreed(2)
    assert ending.closed
