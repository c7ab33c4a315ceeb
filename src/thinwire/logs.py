"""Log records that carry the run, worker and generation they belong to.

thinwire logs to `thinwire.*` and adds no handler of its own, unless these environment variables ask for one::

    THINWIRE_LOG=json           one JSON object a line on standard error; "text" for a line to read
    THINWIRE_LOG_LEVEL=DEBUG    INFO by default

The driver passes its setting on to its workers. Programs with handlers of their own add `ContextFilter` to them.
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
"""Fields of a record beside its message; None where a value is not known, such as the worker's number on the driver."""
FORMS = ("json", "text")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_here: ContextVar[dict[str, Any] | None] = ContextVar("thinwire_log", default=None)
_process: dict[str, Any] = {}
"""Context of threads that have not called `enter`, in a process that runs one worker only."""
outside: TextIO | None = None
"""Stream that a worker process logs to; its standard error is kept for the message of a crash."""


class Wanted(NamedTuple):
    """Log settings from the environment."""

    form: str
    level: str


def wanted(environment: Mapping[str, str] = os.environ) -> Wanted | None:
    """Reads the log settings from the environment; None where no log is asked for.

    Raises:
        ConfigError: A variable has a value that is not known.
    """
    form, level = environment.get("THINWIRE_LOG", ""), environment.get("THINWIRE_LOG_LEVEL", "INFO").upper()
    for name, value, known in (("THINWIRE_LOG", form, ("", *FORMS)), ("THINWIRE_LOG_LEVEL", level, LEVELS)):
        if value not in known:
            hint = nearest(value, filter(None, known))
            raise ConfigError(f"{name} = {value!r} is not known. {hint} Set one of these.")
    return Wanted(form, level) if form else None


def start(asked: Wanted | None, stream: TextIO | None = None) -> None:
    """Writes thinwire's records to a stream, by default standard error; a second call replaces the first handler.

    With None, thinwire's handler is removed.
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
    logger.propagate = False  # a root handler would repeat each record


@contextlib.contextmanager
def of_a_run() -> Iterator[str]:
    """A run on the driver: logs as the environment asks, with a random name for the run. Gives back that name."""
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
    """Sets the run and worker that records of this thread, and of threads with its context, belong to."""
    about = {"run": run, "worker": worker, "attempt": attempt, "generation": None}
    _here.set(about)
    if threading.current_thread() is threading.main_thread():
        _process.clear()
        _process.update(about)
        _here.set(_process)


def leave() -> None:
    """Ends the run that this thread entered."""
    if _here.get() is _process:
        _process.clear()
    _here.set(None)


def note(**fields: Any) -> None:
    """Adds fields to the context, such as the generation; does nothing outside a run."""
    about = _here.get()
    if about:
        about.update(fields)


class ContextFilter(logging.Filter):
    """Adds run, worker, attempt and generation to every record."""

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
    """A record as a line of text."""

    def format(self, record: logging.LogRecord) -> str:
        known = [f"{name}={getattr(record, name)}" for name in FIELDS if getattr(record, name, None) is not None]
        line = f"{self.formatTime(record)} {record.levelname} {record.name} [{' '.join(known)}] {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A class of its own tells thinwire's handler from handlers that others have added."""
