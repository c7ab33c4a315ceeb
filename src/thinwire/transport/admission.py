"""The listening socket of a run's mesh, and who comes to it without the run's keys.

libzmq takes every connection in, and gives a visitor memory and a descriptor before it knows whether that one has the
keys. What a visitor can take is bounded three times: by the length of a frame (`thinwire.transport.zmq`), by the time
for a handshake, and here by the number of connections whose handshake has not ended. Beyond that number the kernel
drops requests for new connections at the listening socket; an honest peer's kernel repeats its request after a second.
Connections that are there already do not notice.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import resource
import socket as net
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_S = 5.0
SLACK_S = 2.0
"""How much later libzmq may end a handshake that takes longer."""
MOST_STRANGERS = 64
"""Connections at once whose handshake has not ended."""
REMEMBERED_S = 1.0
"""As long as a connection that failed counts as one: it bounds how many can be tried a second."""
BACKLOG = 100
MOST_HOSTS = 1024
"""Counted one by one."""
MOST_DESCRIPTORS = 1 << 16
"""A higher limit makes programs slow that close all descriptors one by one."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | _FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_RETURN = 0x06
_log = logging.getLogger("thinwire.wire")


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as its hard limit allows, up to `MOST_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_strangers() -> int:
    """`MOST_STRANGERS`, or fewer where a process has few descriptors: three quarters are for the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_STRANGERS if soft == resource.RLIM_INFINITY else max(4, min(MOST_STRANGERS, soft // 4))


class Admission:
    """Watches one listening zmq socket from a thread of its own, and holds new connections back while too many wait.

    `gone` is called there with the descriptor of each connection that has ended after its handshake.
    """

    def __init__(self, monitor: Any, listening: net.socket, gone: Callable[[int], None] = lambda fd: None) -> None:
        self._monitor, self._listening, self._gone = monitor, listening, gone
        self._most = most_strangers()
        self._waiting: dict[int, tuple[str, float]] = {}
        """By descriptor, connections that are not known to have the keys: from where, and until when that can be so."""
        self._known: set[int] = set()
        self._unclear = 0
        """How many of those that wait have the keys: libzmq tells of a handshake, and not whose it was."""
        self._failed: collections.deque[float] = collections.deque()
        """Until when each connection that failed counts as a stranger's."""
        self._by_host: collections.Counter[str] = collections.Counter()
        self._failing = self._held = False
        self._can_hold = sys.platform == "linux"
        self.refused = 0
        """Connections that ended without a handshake."""
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends with the monitor, which the owner of the watched socket has disabled."""
        self._thread.join()
        self._monitor.close(linger=0)
        self._listening.close()

    def _watch(self) -> None:
        while True:
            if self._monitor.poll(500 if self._held else None):
                told = recv_monitor_message(self._monitor)
                if told["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._note(told["event"], int(told["value"]), time.monotonic())
            self._hold(time.monotonic())

    def _note(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._waiting[value] = _host(value), now + HANDSHAKE_S + SLACK_S
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._admit()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # no failure is told of when it leaves
            self._admit()
            self._refuse("other hosts", now)
        elif event & _FAILED:  # the next event is that this connection has ended
            self._failing = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._ended(value, now)

    def _admit(self) -> None:
        if len(self._waiting) == 1 and not self._unclear:
            self._known |= self._waiting.keys()
            self._waiting = {}
        else:
            self._unclear += 1

    def _ended(self, descriptor: int, now: float) -> None:
        """Whose handshake ended well it is, or a stranger's; of a frame too long libzmq tells no failure."""
        failing, self._failing = self._failing, False
        host, _ = self._waiting.pop(descriptor, ("", 0.0))
        if host and (failing or not self._unclear):
            self._refuse(host, now)
            return
        self._unclear -= bool(host)
        self._known.discard(descriptor)
        self._gone(descriptor)

    def _refuse(self, host: str, now: float) -> None:
        self.refused += 1
        self._failed.append(now + REMEMBERED_S)
        if host not in self._by_host and len(self._by_host) >= MOST_HOSTS:
            host = "other hosts"
        self._by_host[host] += 1
        count = self._by_host[host]
        if count >= 10 and str(count).strip("0") == "1":
            _log.warning(
                "%s connections from %s had not this run's keys: each was ended within %.0f s, and took no part in "
                "the run. At most %s wait here at once, so workers may take longer to connect. If the run does not "
                "own that host, keep it out with a firewall: see docs/explanation/threat-model.md",
                f"{count:,}",
                host,
                HANDSHAKE_S,
                self._most,
            )

    def _hold(self, now: float) -> None:
        """Has requests for connections dropped while too many strangers wait, and let through again after."""
        while self._failed and self._failed[0] <= now:
            self._failed.popleft()
        for descriptor, (_, until) in list(self._waiting.items()):
            if until > now:
                break
            del self._waiting[descriptor]  # it would have been ended: so it has the keys
            self._known.add(descriptor)
            self._unclear = max(0, self._unclear - 1)
        held = len(self._waiting) - self._unclear + len(self._failed) >= self._most
        if held == self._held or not self._can_hold:
            return
        try:
            _drop(self._listening) if held else _pass(self._listening)
            self._held = held
        except OSError as error:
            self._can_hold = False
            _log.warning("connections without keys cannot be limited on this system: %s", error)


def _host(descriptor: int) -> str:
    """Where a connection comes from; it may have ended meanwhile, and the descriptor be another file's."""
    try:
        found = net.socket(fileno=descriptor)
    except OSError:
        return "an unknown host"
    try:
        return str(found.getpeername()[0])
    except (OSError, IndexError, TypeError):
        return "an unknown host"
    finally:
        found.detach()


def _drop(listening: net.socket) -> None:
    """Attaches a filter that keeps nothing of any packet: "return 0"."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    listening.setsockopt(net.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _pass(listening: net.socket) -> None:
    listening.setsockopt(net.SOL_SOCKET, _DETACH_FILTER, 0)
