"""Log records say which run, worker and generation they belong to."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from thinwire import logs
from thinwire.errors import ConfigError
from thinwire.events import WorkerLost


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    yield io.StringIO()
    logs.leave()
    logs.start(None)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_nothing_is_asked_for_unless_the_environment_says_so() -> None:
    assert logs.wanted({}) is None
    assert logs.wanted({"THINWIRE_LOG_LEVEL": "debug"}) is None
    assert logs.wanted({"THINWIRE_LOG": "json"}) == ("json", "INFO")
    assert logs.wanted({"THINWIRE_LOG": "text", "THINWIRE_LOG_LEVEL": "debug"}) == ("text", "DEBUG")


@pytest.mark.parametrize(
    ("environment", "hint"),
    [({"THINWIRE_LOG": "jason"}, "mean 'json'"), ({"THINWIRE_LOG_LEVEL": "WARN"}, "mean 'WARNING'")],
)
def test_a_value_that_is_not_known_is_refused(environment: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        logs.wanted(environment)


def test_a_record_carries_what_was_entered_and_noted(stream: io.StringIO) -> None:
    logs.start(logs.Wanted("json", "INFO"), stream)
    log = logging.getLogger("thinwire.anything")
    log.info("before")
    logs.enter(run="r1", worker=2, attempt=1)
    log.debug("too little to tell")
    logs.note(generation=7)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it %s", "failed")
    before, failed = lines(stream)
    assert {name: before[name] for name in logs.FIELDS} == dict.fromkeys(logs.FIELDS)
    assert {name: failed[name] for name in logs.FIELDS} == {"run": "r1", "worker": 2, "attempt": 1, "generation": 7}
    assert failed["message"] == "it failed"
    assert failed["level"] == "ERROR"
    assert "ValueError: broken" in str(failed["exception"])


def test_threads_of_different_workers_stay_apart_and_others_are_the_process_s(stream: io.StringIO) -> None:
    logs.start(logs.Wanted("json", "INFO"), stream)
    logs.enter(run="r1")
    barrier = threading.Barrier(2)

    def work(worker: int) -> None:
        logs.enter(run="r1", worker=worker)
        barrier.wait(10)
        logs.note(generation=worker * 10)
        logging.getLogger("thinwire.x").info("mine %s", worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (0, 1)]
    threads.append(threading.Thread(target=logging.getLogger("thinwire.x").info, args=("nobody's",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    found = {str(line["message"]): line for line in lines(stream)}
    for worker in (0, 1):
        assert found[f"mine {worker}"]["worker"] == worker
        assert found[f"mine {worker}"]["generation"] == worker * 10
    assert found["nobody's"]["run"] == "r1"
    assert found["nobody's"]["worker"] is None


def test_an_event_is_a_record_with_its_fields_about_its_worker(stream: io.StringIO) -> None:
    from thinwire.run.run_log import RunLog

    logs.start(logs.Wanted("json", "INFO"), stream)
    logs.enter(run="r1")
    RunLog(None).emit(WorkerLost(worker=3, attempt=0, host="h", reason="killed", steps=5))
    (line,) = lines(stream)
    assert line["message"] == "worker_lost"
    assert line["worker"] == 3
    assert line["event"]["reason"] == "killed"


def test_text_is_a_line_to_read(stream: io.StringIO) -> None:
    logs.start(logs.Wanted("text", "WARNING"), stream)
    logs.enter(run="r1", worker=0)
    logging.getLogger("thinwire.x").info("not this")
    logging.getLogger("thinwire.x").warning("but %s", "this")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING thinwire.x [run=r1 worker=0] but this")


def test_starting_again_replaces_and_stopping_leaves_the_library_without_a_handler(stream: io.StringIO) -> None:
    logger = logging.getLogger("thinwire")
    before = list(logger.handlers)
    for _ in range(3):
        logs.start(logs.Wanted("json", "INFO"), stream)
    logging.getLogger("thinwire.x").info("once")
    assert len(lines(stream)) == 1
    logs.start(None)
    assert logger.handlers == before
    assert logger.propagate
    assert logger.level == logging.NOTSET


def test_a_handler_of_the_user_s_gets_the_fields_by_a_filter(stream: io.StringIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.addFilter(logs.ContextFilter())
    handler.setFormatter(logging.Formatter("%(run)s/%(worker)s/%(generation)s %(message)s"))
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    try:
        logs.enter(run="r1", worker=4)
        logging.getLogger("thinwire.x").warning("hello")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "r1/4/None hello\n"
