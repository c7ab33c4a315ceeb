"""The run's log: every event to `events.jsonl` and to whoever listens."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from io import FileIO
from typing import Any

import fsspec

from thinwire import logs
from thinwire.checkpoint import write_file
from thinwire.errors import CheckpointError, ConfigError
from thinwire.events import Event, GenerationFormed, Progressed, RoundLanded
from thinwire.protocol.clock import Clock

Listener = Callable[[Event], Any]
FREQUENT = Progressed, RoundLanded
"""Logged at DEBUG, the others at INFO."""
MOST_WAITING_BYTES = 16 << 20
_log = logging.getLogger("thinwire.run")


class RunLog:
    """Appends events as they happen; for a store that cannot append, to a file here that it gets whole at the end."""

    def __init__(self, out: str | None, callbacks: Sequence[Listener] = (), *, clock: Clock = time.time) -> None:
        self._clock = clock
        for callback in callbacks:
            if not callable(callback):
                raise ConfigError(f"callback {callback!r} cannot be called; give functions of one event")
        self._listeners = list(callbacks)
        self._url = None if out is None else f"{out.rstrip('/')}/events.jsonl"
        self._file: _Lines | None = None
        if self._url is not None:
            filesystem, path = fsspec.url_to_fs(self._url)
            if "file" in filesystem.protocol:
                try:
                    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                    self._file = _Lines(_own_file(path), path)
                except OSError as error:
                    raise ConfigError(
                        f"out = {out!r} cannot be written to ({error.strerror}: {error.filename!r}); it must be "
                        "a folder, or a place where one can be made. Name another, or change its owner or mode."
                    ) from error
                self._url = None
            else:
                file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
                self._file = _Lines(file, "the file that events wait in")

    def listen(self, listener: Listener) -> None:
        """Adds someone who is told of every event."""
        self._listeners.append(listener)

    def leave(self, listener: Listener) -> None:
        """Takes someone out again."""
        self._listeners.remove(listener)

    def emit(self, event: Event) -> bool:
        """Writes an event and tells everyone; True when a listener wants the run to stop."""
        event = dataclasses.replace(event, time=self._clock())
        _say(event)
        line = event.to_json()
        if self._file is not None:
            self._file.write(line, frequent=isinstance(event, FREQUENT))
        answers = [listener(event) for listener in self._listeners]  # everyone hears of it
        return True in answers

    @property
    def shows(self) -> bool:
        """Whether someone is to be given the joint model of each evaluation."""
        return any(callable(getattr(listener, "on_model", None)) for listener in self._listeners)

    def show(self, model: Any, event: Event) -> bool:
        """Gives everyone who asks for it the joint model of an evaluation; True when one wants the run to stop."""
        asking = [getattr(listener, "on_model", None) for listener in self._listeners]
        answers = [on_model(model, event) for on_model in asking if callable(on_model)]
        return True in answers

    def close(self, last: Event) -> None:
        """Writes the last event and lets go of the file."""
        self.emit(last)
        if self._file is None:
            return
        try:
            if self._url is not None:
                write_file(self._url, self._file.whole())
        except CheckpointError as error:  # no reason to lose the model, which is about to be handed back
            _log.warning("the events could not be written: %s", error)
        finally:
            self._file.close()
            self._file = None


class _Lines:
    """A file of lines that a full disk holds up and does not end: they are kept until there is room."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path
        self._waiting = b""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._waiting = b"" if self._file.read(1) == b"\n" else b"\n"  # half a line, from before the disk was full
        self._told = False

    def write(self, line: str, *, frequent: bool = False) -> None:
        """Appends a line, after those that are waiting; frequent ones are left out where too many wait."""
        if frequent and len(self._waiting) > MOST_WAITING_BYTES:
            return
        self._waiting += line.encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning("%s cannot be written to (%s); what happens is kept until it can", self._path, error)

    def whole(self) -> bytes:
        """All lines, those that are waiting too."""
        self._file.seek(0)
        return bytes(self._file.read()) + self._waiting

    def close(self) -> None:
        self._file.close()


def _own_file(path: str) -> FileIO:
    """A file to append to. A link in a folder that somebody else has made could lead to any file of the user's."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return FileIO(descriptor, "a+b")


def _say(event: Event) -> None:
    """An event as a log record, for those who collect records rather than files."""
    if isinstance(event, GenerationFormed):
        logs.note(generation=event.generation)
    level = logging.DEBUG if isinstance(event, FREQUENT) else logging.INFO
    _log.log(level, "%s", event.kind, extra={"event": event, "worker": getattr(event, "worker", None)})
