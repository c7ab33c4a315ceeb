"""The coordinator's own loop, with messages and ends of processes in an order that a busy machine brings about."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from thinwire import __version__, events
from thinwire.coordinator.attendance import FAREWELL_S
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.ports import Exit
from thinwire.errors import LostWorkersError, ProtocolError
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.handshake import PROTOCOL, hello
from thinwire.protocol.messages import Message

PART = {"name": "joint", "size_bytes": 1, "digest": "0" * 64}
PROGRESS = {"rows": 8, "steps": 1, "busy": 1.0, "gap_s": 0.0, "position": [1, 0]}


class Script:
    """Hub, workforce and clock in one: worker 0 answers as it should, and its process is seen to end before its bye."""

    revives = False
    refused = 0

    def __init__(self, farewell_s: float | None) -> None:
        self.moment, self.farewell_s = 0.0, farewell_s
        self.ended_at: float | None = None
        self.inbox = [self._said("join", address="memory:0.0", rows=8, digest="d", **hello())]
        self.replaced: list[int] = []
        self.seen = False
        self.saves: list[str] = []
        self.later: list[Message] = []

    def _said(self, kind: str, **fields: Any) -> Message:
        return Message(0, {"t": kind, "a": 0, **fields}, None)

    def now(self) -> float:
        return self.moment

    def receive(self, timeout_s: float) -> list[Message]:
        self.moment += 0.1
        assert self.moment < 60.0, "the run does not end"
        if self.ended_at is not None and self.farewell_s is not None and self.moment >= self.ended_at + self.farewell_s:
            self.inbox.append(self._said("bye"))
        elif self.ended_at is None:
            self.inbox.append(
                self._said("beat", landed=0, bytes=0, received=0, waiting={}, refused=0, progress=PROGRESS)
            )
        found, self.inbox = self.inbox[:1], self.inbox[1:] + self.later  # one at a time
        self.later = []
        return found

    def send(self, worker: int, attempt: int, header: dict[str, Any], payload: memoryview | None = None) -> None:
        kind = header["t"]
        if kind == "prepare":
            state = {"landed": 0, "digest": "d", "fresh": True, "since": 0}
            self.inbox.append(self._said("prepared", g=header["g"], **state))
        elif kind == "commit":
            self.inbox += [self._said("saved", name=name, steps=8, parts=[PART], fails=False) for name in self.saves]
            self.later = [self._said("finished")]
        elif kind == "conclude":
            self.ended_at = self.moment

    def broken(self) -> list[tuple[int, int]]:
        return []

    def notices(self) -> list[events.Event]:
        return []

    def exits(self) -> list[Exit]:
        if self.ended_at is None or self.seen:
            return []
        self.seen = True
        return [Exit(0, 0, "its process ended with exit code 0")]

    def replace(self, worker: int, attempt: int) -> bool:
        self.replaced.append(worker)
        return False


def run(script: Any, log: list[events.Event], **more: Any) -> Any:
    policy = Policy(1, deadlines=Deadlines(settle_s=0.0), min_workers=0)
    coordinator = Coordinator(script, script, policy, emit=log.append, time=script, **more)
    return coordinator.run()


def test_a_worker_whose_end_is_seen_before_its_farewell_is_heard_was_not_lost() -> None:
    script = Script(farewell_s=FAREWELL_S / 2)
    log: list[events.Event] = []
    outcome = run(script, log)
    assert outcome.workers_lost == 0
    assert not script.replaced
    assert not any(isinstance(event, events.WorkerLost) for event in log)


def test_a_worker_that_ends_without_a_farewell_was() -> None:
    script = Script(farewell_s=None)
    log: list[events.Event] = []
    with pytest.raises(LostWorkersError):
        run(script, log)
    assert not script.replaced  # the model went with it
    (lost,) = [event for event in log if isinstance(event, events.WorkerLost)]
    assert "exit code 0" in lost.reason
    assert script.ended_at is not None
    assert FAREWELL_S < script.moment - script.ended_at < FAREWELL_S + 1.0


def test_the_last_checkpoint_is_committed_behind_a_slow_one() -> None:
    """It becomes whole while an earlier one is still under way, and the run ends then."""
    script = Script(farewell_s=0.0)
    script.saves = ["000001-step-4"]
    under_way: dict[str, Future[int]] = {}

    def commit(name: str, step: int, parts: list[Any], meta: Any) -> Future[int]:
        under_way[name] = Future()
        if name.endswith("final"):
            under_way[name].set_result(1)
        else:
            script.inbox.append(script._said("saved", name="000002-final", steps=8, parts=[PART], fails=False))
            threading.Timer(1.0, under_way[name].set_result, [1]).start()
        return under_way[name]

    outcome = run(script, [], commit=commit)
    assert [*under_way] == ["000001-step-4", "000002-final"]
    assert outcome.checkpoint == "000002-final"


def test_a_checkpoint_whose_reports_come_after_a_newer_one_was_committed_is_given_up() -> None:
    """Pruning has cleared away its parts by then."""
    script = Script(farewell_s=0.0)
    script.saves = ["000001-step-4", "000003-step-96", "000003-step-104", "000002-step-8"]
    committed: list[str] = []

    def commit(name: str, step: int, parts: list[Any], meta: Any) -> Future[int]:
        committed.append(name)
        done: Future[int] = Future()
        done.set_result(1)
        return done

    outcome = run(script, [], commit=commit)
    assert committed == ["000001-step-4", "000003-step-96", "000003-step-104"]
    assert outcome.checkpoint == "000003-step-104"


@pytest.mark.parametrize("theirs", [PROTOCOL + 1, PROTOCOL - 1, None, str(PROTOCOL)])
def test_a_worker_of_another_protocol_is_refused_by_name_before_it_has_a_seat(theirs: Any) -> None:
    script = Script(farewell_s=0.0)
    told = {"host": "elsewhere", "thinwire": "0.0.7", "protocol": theirs}
    script.inbox[0].header.update({key: value for key, value in told.items() if value is not None})
    if theirs is None:
        del script.inbox[0].header["protocol"]
    log: list[events.Event] = []
    with pytest.raises(ProtocolError) as refused:
        run(script, log)
    said = str(refused.value)
    for part in ("worker 0", "elsewhere", "0.0.7", f"the driver runs thinwire {__version__}", "Install thinwire"):
        assert part in said
    assert not any(isinstance(event, events.WorkerJoined) for event in log)


def test_a_worker_of_another_version_with_the_same_protocol_is_taken_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script(farewell_s=0.0)
    script.inbox[0].header["thinwire"] = "0.1.7"
    with caplog.at_level(logging.WARNING, "thinwire"):
        outcome = run(script, [])
    assert outcome.workers_lost == 0
    assert "runs thinwire 0.1.7 and the driver" in caplog.text


def test_a_trained_model_that_comes_before_all_rows_are_done_is_refused() -> None:
    class Hasty(Script):
        def send(self, worker: int, attempt: int, header: dict[str, Any], payload: memoryview | None = None) -> None:
            super().send(worker, attempt, header, payload)
            if header["t"] == "commit":
                piece = {"part": 0, "chunk": 0, "chunks": 1, "i": 0, "n": 1}
                self.inbox.append(Message(0, {"t": "result", "a": 0, **piece}, memoryview(b"half a model")))

    outcome = run(Hasty(farewell_s=0.0), [])
    assert outcome.refused == 1
    assert outcome.results == {}
