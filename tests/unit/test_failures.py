"""What a worker's failure becomes: by its kind, an error that says what to do."""

from __future__ import annotations

import pytest

from thinwire.coordinator.failures import failure
from thinwire.coordinator.membership import Seat
from thinwire.coordinator.model_chunks import ModelChunks
from thinwire.coordinator.outcome import Outcome
from thinwire.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    LostWorkersError,
    ThinwireError,
    TimedOutError,
    WorkerError,
)
from thinwire.protocol.messages import Failed, Result


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("DivergedError", DivergedError),
        ("LostWorkersError", LostWorkersError),
        ("TimedOutError", TimedOutError),
        ("ValueError", WorkerError),
        ("ConfigError", ConfigError),
        ("DataError", DataError),
        ("CheckpointError", CheckpointError),
    ],
)
def test_a_failure_ends_the_run_with_the_error_of_its_kind(kind: str, error: type[ThinwireError]) -> None:
    seat = Seat(worker=2, attempt=1, host="node-7", pid=42, address="somewhere", meets=None, last_seen=0.0)
    failed = Failed(attempt=1, kind=kind, error="it went wrong", traceback="line 1")
    event, found = failure(seat, failed, Outcome())
    assert type(found) is error
    assert "worker 2 on node-7 (pid 42, attempt 1)" in str(found)
    assert "it went wrong" in str(found)
    assert (event.worker, event.host, event.traceback) == (2, "node-7", "line 1")


def test_a_model_that_has_come_in_is_not_replaced_by_another() -> None:
    harvest = ModelChunks(1)
    result = Result(attempt=0, part=0, chunk=0, chunks=1, index=0, count=1)
    for word in (b"first", b"other"):
        assert harvest.take(result, memoryview(word))
    assert harvest.results == {0: {0: b"first"}}
