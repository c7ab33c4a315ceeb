"""An agent's box: a Unix socket in a private folder, which short tasks on the same machine find by the run's name.

One visit is one connection: the visitor says what it brings and wants, the box answers, once or several times. Headers
are JSON; short frames follow as bytes, long ones as descriptors of memory that both ends map. A folder of mode 0700
keeps other users out, and a token other runs.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from thinwire.errors import ProtocolError
from thinwire.exchange.spark.shared_memory import SharedMemory

_log = logging.getLogger("thinwire.spark")
_LENGTH = struct.Struct("<Q")
MOST_HEADER, MOST_FRAME = 64 << 20, 8 << 30
AT_ONCE = 1 << 20
VISIT_S = 5.0
"""How long either side waits for the other to send or take something."""
LONGEST = 100
"""Bytes of a socket's path: the system takes 107."""
Frame = bytes | SharedMemory
Answer = tuple[dict[str, Any], list[Frame]]
Serve = Callable[[dict[str, Any], list[memoryview]], Iterator[Answer]]


def path_of(run: str) -> str:
    """The folder of this machine's boxes of a run, which need not be there."""
    name = f"thinwire-{os.getuid()}-{run}"
    found = os.path.join(tempfile.gettempdir(), name)
    return found if len(found) + 32 <= LONGEST else os.path.join("/tmp", name)


def folder(run: str) -> str:
    """The same, made where it was not."""
    path = path_of(run)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not _private(path):
        raise ProtocolError(f"{path} is not a private folder of this user; remove it")
    return path


def _private(path: str) -> bool:
    """Whether a folder is this user's, and nobody else can look into it."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class GoneError(Exception):
    """The agent of a box has ended."""


class Box:
    """An agent's end; `serve` is called for every visit, on a thread of its own."""

    def __init__(self, run: str, token: str, name: str, serve: Serve) -> None:
        self._token, self._serve = token, serve
        self._path = os.path.join(folder(run), f"{name}.box")
        fresh = self._path.removesuffix(".box") + ".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(fresh)
        self._socket.listen(64)
        self._socket.settimeout(1.0)
        os.rename(fresh, self._path)  # whoever finds it finds somebody at home
        self._open = True
        self._thread = threading.Thread(target=self._run, name="box", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as waker:
            waker.connect(self._path)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self._path))

    def _run(self) -> None:
        while self._open:
            try:
                guest, _ = self._socket.accept()
            except TimeoutError:
                continue
            except (OSError, ValueError):  # it was closed, before or while it listened
                return
            threading.Thread(target=self._receive, args=(guest,), name="visit", daemon=True).start()

    def _receive(self, guest: socket.socket) -> None:
        with guest:
            guest.settimeout(VISIT_S)
            try:
                header, frames = receive(guest)
                if hmac.compare_digest(str(header.get("token", "")), self._token):
                    for answer in self._serve(header, frames):
                        send(guest, *answer)
            except (BrokenPipeError, ConnectionResetError):  # the visitor had enough, and comes back
                pass
            except Exception as error:  # whoever came with what does not fit: the next visitor may do better
                _log.warning("a visit failed: %s: %s", type(error).__name__, error)


def boxes(run: str) -> Iterator[str]:
    """The names of this machine's boxes of a run."""
    path = path_of(run)
    if _private(path):
        for name in sorted(os.listdir(path)):
            if name.endswith(".box"):
                yield name.removesuffix(".box")


def sweep(run: str) -> None:
    """Takes the folder away, where nobody has a box in it any more."""
    with contextlib.suppress(OSError):
        os.rmdir(path_of(run))


def machine(run: str) -> str | None:
    """What tells this machine's boxes of a run from those of others; None where there are none."""
    path = path_of(run)
    if not _private(path):
        return None
    found = os.stat(path)
    return f"{socket.gethostname()}:{found.st_dev}:{found.st_ino}"


def knock(run: str, token: str, name: str, header: dict[str, Any], frames: list[Frame]) -> socket.socket:
    """A connection to a box that has been told what its visitor brings and wants.

    The box of an agent that is gone is taken away, which GoneError says; OSError is that of one that does not answer.
    """
    path = os.path.join(path_of(run), f"{name}.box")
    door = socket.socket(socket.AF_UNIX)
    try:
        door.settimeout(VISIT_S)
        try:
            door.connect(path)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise GoneError(name) from error
        send(door, header | {"token": token}, frames)
        return door
    except BaseException:
        door.close()
        raise


def send(door: socket.socket, header: dict[str, Any], frames: list[Frame]) -> None:
    """A header and frames: bytes, or memory."""
    sizes = [[frame.size, 1] if isinstance(frame, SharedMemory) else [len(frame), 0] for frame in frames]
    text = json.dumps(header | {"sizes": sizes}).encode()
    door.sendall(_LENGTH.pack(len(text)) + text)
    for frame in frames:
        if isinstance(frame, SharedMemory):
            socket.send_fds(door, [b"s"], [frame.descriptor])
        else:
            door.sendall(frame)


def receive(door: socket.socket) -> tuple[dict[str, Any], list[memoryview]]:
    """A header and frames; lengths are checked before memory is taken."""
    (length,) = _LENGTH.unpack(_exactly(door, _LENGTH.size))
    if length > MOST_HEADER:
        raise ProtocolError(f"a header of {length} bytes is over the limit")
    try:
        header = json.loads(_exactly(door, length))
        sizes = [(int(size), bool(sheet)) for size, sheet in header.pop("sizes")]
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ProtocolError(f"a header is a table of JSON with the sizes of its frames ({error})") from error
    if any(size < 0 for size, _ in sizes) or sum(size for size, _ in sizes) > MOST_FRAME:
        raise ProtocolError("frames over the limit")
    return header, [_sheet(door, size) if sheet else memoryview(_exactly(door, size)) for size, sheet in sizes]


def _sheet(door: socket.socket, size: int) -> memoryview:
    _, descriptors, _, _ = socket.recv_fds(door, 1, 1)
    if len(descriptors) != 1:
        raise ProtocolError("memory was announced and did not come")
    try:
        sheet = SharedMemory.received(descriptors[0], size)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    try:
        return sheet.read()
    finally:
        sheet.close()


def _exactly(door: socket.socket, size: int) -> bytearray:
    """So many bytes; memory is taken as they come, whatever was announced."""
    found, got = bytearray(), 0
    while got < size:
        found += bytes(min(AT_ONCE, size - got))
        with memoryview(found) as view:
            while got < len(found):
                count = door.recv_into(view[got:], len(found) - got)
                if not count:
                    raise ProtocolError("the other end has gone")
                got += count
    return found
