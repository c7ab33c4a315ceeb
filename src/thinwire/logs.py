"""Log records that say which run, worker and generation they belong to.

thinwire logs to `thinwire.*` and adds no handler of its own, unless the environment asks for one::

    THINWIRE_LOG=json           one JSON object a line on standard error; "text" for a line to read
    THINWIRE_LOG_LEVEL=DEBUG    INFO unless said

The driver's setting travels to its workers. Who has handlers already adds `ContextFilter` to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TextIO

from thinwire.errors import ConfigError, nearest

FIELDS = ("run", "worker", "attempt", "generation")
"""What a record carries beside its message; None where it is not known, as a worker's number on the driver is."""
FORMS = ("json", "text")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_here: ContextVar[dict[str, Any] | None] = ContextVar("thinwire_log", default=None)
_process: dict[str, Any] = {}
"""For threads that nobody told, in a process that is one worker's own."""
outside: TextIO | None = None
"""Where a worker process writes instead of its standard error, which is kept for its last words."""


class Wanted(NamedTuple):
    """What the environment asks for."""

    form: str
    level: str


def wanted(environment: Mapping[str, str] = os.environ) -> Wanted | None:
    """The log that the environment asks for; None where it asks for none.

    Raises:
        ConfigError: One of the variables has a value that is not known.
    """
    form, level = environment.get("THINWIRE_LOG", ""), environment.get("THINWIRE_LOG_LEVEL", "INFO").upper()
    for name, value, known in (("THINWIRE_LOG", form, ("", *FORMS)), ("THINWIRE_LOG_LEVEL", level, LEVELS)):
        if value not in known:
            hint = nearest(value, filter(None, known))
            raise ConfigError(f"{name} = {value!r} is not known. {hint} Set one of these.")
    return Wanted(form, level) if form else None


def start(asked: Wanted | None, stream: TextIO | None = None) -> None:
    """Writes thinwire's records to a stream, standard error unless said; a second call replaces the first.

    With None it stops that.
    """
    logger = logging.getLogger("thinwire")
    for handler in [h for h in logger.handlers if isinstance(h, _OwnHandler)]:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    if asked is None:
        return
    handler = _OwnHandler(stream or outside or sys.stderr)
    handler.addFilter(ContextFilter())
    handler.setFormatter(JsonFormatter() if asked.form == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(asked.level)
    logger.propagate = False  # or a root handler would say everything twice


@contextlib.contextmanager
def of_a_run() -> Iterator[str]:
    """A run on the driver: logs as the environment asks, under a name of its own."""
    asked = wanted()
    if asked is not None:
        start(asked)
    run = secrets.token_hex(4)
    enter(run=run)
    try:
        yield run
    finally:
        leave()


def enter(*, run: str, worker: int | None = None, attempt: int | None = None) -> None:
    """From here on, what this thread and those in its context log is of this run and worker."""
    about = {"run": run, "worker": worker, "attempt": attempt, "generation": None}
    _here.set(about)
    if threading.current_thread() is threading.main_thread():
        _process.clear()
        _process.update(about)
        _here.set(_process)


def leave() -> None:
    """The run is over."""
    if _here.get() is _process:
        _process.clear()
    _here.set(None)


def note(**fields: Any) -> None:
    """Adds to what is known here, such as the generation; nothing where nobody has entered a run."""
    about = _here.get()
    if about:
        about.update(fields)


class ContextFilter(logging.Filter):
    """Puts run, worker, attempt and generation on every record that passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        about = _here.get() or _process
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, about.get(name))
        return True


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        told = {"time": record.created, "level": record.levelname, "logger": record.name}
        told |= {name: getattr(record, name, None) for name in FIELDS}
        told |= {"pid": record.process, "message": record.getMessage()}
        if hasattr(record, "event"):
            told["event"] = dataclasses.asdict(record.event)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class TextFormatter(logging.Formatter):
    """A record as a line to read."""

    def format(self, record: logging.LogRecord) -> str:
        known = [f"{name}={getattr(record, name)}" for name in FIELDS if getattr(record, name, None) is not None]
        line = f"{self.formatTime(record)} {record.levelname} {record.name} [{' '.join(known)}] {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Known from handlers that others have added."""
