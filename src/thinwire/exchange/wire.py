"""pyzmq links: authenticated and encrypted with keys made per run. Headers are JSON, payloads raw bytes; no pickle."""

from __future__ import annotations

import json
import logging
import socket as net
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from thinwire.engine.ports import COORDINATOR, Header, Message
from thinwire.errors import ProtocolError

MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20
MOST_DIGITS = 18
_ZERO_COPY_BYTES = 16 << 10
STRANGERS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Connections of those who lack the keys, or whose protocol is another one."""
_log = logging.getLogger("thinwire.wire")
_zap_log = logging.getLogger("thinwire.wire.zap")
_zap_log.setLevel(logging.WARNING)  # below it pyzmq writes clients' keys


@dataclass(frozen=True)
class Keys:
    """One run's CURVE keys: who lacks them can neither listen nor be heard. Never printed, logged or put in a path."""

    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Keys:
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())


class _OnlyThisRun:
    """Lets in the one client key of the run."""

    def __init__(self, keys: Keys) -> None:
        self._allowed = zmq.utils.z85.decode(keys.client_public)

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = key == self._allowed or key == zmq.utils.z85.encode(self._allowed)
        if not allowed:
            _log.warning("refused a connection with a key that is not of this run")
        return allowed


class _Sockets:
    """A zmq context with an authenticator, and sockets with this run's keys and limits."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.context = zmq.Context(io_threads=1)
        self._authenticator = ThreadAuthenticator(self.context, log=_zap_log)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_OnlyThisRun(keys))

    def server(self, host: str) -> tuple[Any, str]:
        socket = self._limited(self.context.socket(zmq.ROUTER))
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.server_public, self._keys.server_secret
        socket.router_handover = True
        port = socket.bind_to_random_port(f"tcp://{host}")
        return socket, f"tcp://{host}:{port}"

    def client(self, address: str, identity: bytes) -> Any:
        socket = self._limited(self.context.socket(zmq.DEALER))
        socket.identity = identity
        socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
        socket.curve_serverkey = self._keys.server_public
        socket.connect(address)
        return socket

    def close(self) -> None:
        self._authenticator.stop()
        self.context.destroy(linger=0)

    def _limited(self, socket: Any) -> Any:
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.sndhwm = socket.rcvhwm = 0
        socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 10000
        socket.linger = 0
        return socket


@dataclass(frozen=True)
class ZmqWire:
    """A run's wire, as it travels to workers: where the coordinator is, and the keys to reach it."""

    keys: Keys
    coordinator: str
    host: str | None
    """Where this machine's workers are reached by others; None for the address that leads to the coordinator."""

    def link(self, worker: int, attempt: int) -> ZmqLink:
        """A worker's end."""
        return ZmqLink(
            me=worker,
            attempt=attempt,
            keys=self.keys,
            coordinator=self.coordinator,
            host=self.host or _own_address(self.coordinator),
        )


class ZmqLink:
    """A worker's link; see `thinwire.engine.ports.Link`."""

    def __init__(self, *, me: int, attempt: int, keys: Keys, coordinator: str, host: str) -> None:
        self._identity = f"{me}.{attempt}".encode()
        self._sockets = _Sockets(keys)
        self._inbox, self.address = self._sockets.server(host)
        self._monitor = self._inbox.get_monitor_socket(STRANGERS)
        self._outboxes: dict[int, Any] = {COORDINATOR: self._sockets.client(coordinator, self._identity)}
        self._addresses: dict[int, str] = {}
        self._waker, self._woken = self._pair()
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        for socket in (self._inbox, self._outboxes[COORDINATOR], self._woken):
            self._poller.register(socket, zmq.POLLIN)
        self.refused = 0

    def connect(self, peers: Mapping[int, str]) -> None:
        for peer, address in list(self._addresses.items()):
            if peers.get(peer) != address:
                self._outboxes.pop(peer).close(linger=0)
                del self._addresses[peer]
        for peer, address in peers.items():
            if peer not in self._addresses:
                self._outboxes[peer] = self._sockets.client(address, self._identity)
                self._addresses[peer] = address

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        socket = self._outboxes.get(peer)
        if socket is not None:
            _send(socket, [], header, payload)

    def receive(self, timeout_s: float) -> list[Message]:
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        found: list[Message] = []
        if self._woken in ready:
            while self._woken.poll(0):
                self._woken.recv()
        for socket, skip in ((self._outboxes[COORDINATOR], 0), (self._inbox, 1)):
            if socket not in ready:
                continue
            for _ in range(256):
                try:
                    frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                message = _parse(frames, skip)
                if message is None:
                    self.refused += 1
                else:
                    found.append(message if skip else message._replace(sender=COORDINATOR))
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self.refused += 1
        return found

    def wake(self) -> None:
        with self._wake_lock:
            if not self._waker.closed:  # the thread that was to be woken may have ended just now
                self._waker.send(b"")

    def close(self) -> None:
        self._outboxes[COORDINATOR].close(linger=2000)
        for peer in self._addresses:
            self._outboxes[peer].close(linger=500)
        self._inbox.disable_monitor()
        self._monitor.close(linger=0)
        self._inbox.close()
        with self._wake_lock:
            self._waker.close()
        self._woken.close()
        self._sockets.close()

    def _pair(self) -> tuple[Any, Any]:
        left, right = self._sockets.context.socket(zmq.PAIR), self._sockets.context.socket(zmq.PAIR)
        name = f"inproc://wake-{id(self)}"
        right.bind(name)
        left.connect(name)
        return left, right


class ZmqHub:
    """The coordinator's link; see `thinwire.engine.ports.Hub`."""

    def __init__(self, *, keys: Keys, host: str) -> None:
        self._sockets = _Sockets(keys)
        self._router, self.address = self._sockets.server(host)
        self._router.router_mandatory = True
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED | STRANGERS)
        self._poller = zmq.Poller()
        for one in (self._router, self._monitor):
            self._poller.register(one, zmq.POLLIN)
        self._connections: dict[int, tuple[int, int]] = {}
        """By file descriptor, who was last heard through it."""
        self._broken: list[tuple[int, int]] = []
        self.refused = 0

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None:
        try:
            _send(self._router, [f"{worker}.{attempt}".encode()], header, payload)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has gone; membership will notice by itself
                raise

    def receive(self, timeout_s: float) -> list[Message]:
        found: list[Message] = []
        if not self._poller.poll(int(timeout_s * 1000)):
            return found
        for _ in range(1024):
            try:
                frames = self._router.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            message = _parse(frames, 1)
            if message is None:
                self.refused += 1
            else:
                found.append(message)
                self._connections[frames[0].get(zmq.SRCFD)] = (message.sender, message.header.get("a", 0))
        self._notice()
        return found

    def broken(self) -> list[tuple[int, int]]:
        found, self._broken = self._broken, []
        return found

    def _notice(self) -> None:
        """After what came before the break was read: who has gone says nothing more."""
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            if told["event"] & STRANGERS:
                self.refused += 1
                continue
            gone = self._connections.pop(int(told["value"]), None)
            if gone is not None:
                self._broken.append(gone)

    def close(self) -> None:
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=1000)
        self._sockets.close()


def _own_address(coordinator: str) -> str:
    """The address of this machine on the way to the coordinator; nothing is sent to find it."""
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    with net.socket(net.AF_INET, net.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _send(to: Any, prefix: list[bytes], header: Header, payload: memoryview | None) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}")
    frames: list[Any] = [*prefix, text]
    if payload is not None:
        frames.append(payload)
    small = payload is None or payload.nbytes < _ZERO_COPY_BYTES
    to.send_multipart(frames, copy=small)


def _parse(frames: list[Any], skip: int) -> Message | None:
    """A message, or None when it is not of the form: counted by the caller, never trusted."""
    body = frames[skip:]
    if not 1 <= len(body) <= 2 or len(body[0].buffer) > MAX_HEADER_BYTES:
        return None
    try:
        header = json.loads(bytes(body[0].buffer))
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or not isinstance(header.get("t"), str) or type(header.get("a", 0)) is not int:
        return None
    sender = COORDINATOR
    if skip:  # whose frames say so: digits only, since the coordinator's number is below zero
        worker = frames[0].bytes.split(b".")[0]
        if not worker.isdigit() or len(worker) > MOST_DIGITS:
            return None
        sender = int(worker)
    return Message(sender, header, body[1].buffer if len(body) == 2 else None)
