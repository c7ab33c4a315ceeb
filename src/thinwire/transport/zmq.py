"""pyzmq links: authenticated and encrypted with keys made per run. Headers are JSON, payloads raw bytes; no pickle.

A message is a header and perhaps a payload, each in as many frames as it takes. libzmq makes room for a frame when its
length is announced, before it knows who sends it; so each end takes only short frames. The driver, which receives
little, takes shorter ones than a worker, whose chunks (`thinwire.exchange.round`) pass whole.
"""

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

from thinwire.errors import ProtocolError
from thinwire.events import Event
from thinwire.protocol.forms import Header
from thinwire.protocol.messages import COORDINATOR, Message, is_address
from thinwire.transport.admission import BACKLOG, HANDSHAKE_S, WATCHED, Admission, raise_descriptor_limit
from thinwire.transport.ports import Traffic
from thinwire.transport.tcp_info import TcpTraffic

MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
PIECE_BYTES, HUB_PIECE_BYTES = 9 << 17, 63 << 10
"""Of a header or payload in one frame to a worker, where a packed chunk fits in, and to the driver."""
ENCRYPTION_BYTES = 1 << 10
"""More than encryption adds to a frame, which is 33."""
MOST_DIGITS = 18
_ZERO_COPY_BYTES = 16 << 10
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
        raise_descriptor_limit()
        self.context = zmq.Context(io_threads=1)
        self._authenticator = ThreadAuthenticator(self.context, log=_zap_log)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_OnlyThisRun(keys))

    def server(self, host: str, piece_bytes: int) -> tuple[Any, net.socket, str]:
        """A socket that takes pieces of this size, what it listens with, and its address."""
        socket = self._limited(self.context.socket(zmq.ROUTER), piece_bytes)
        self._authenticated(socket)
        socket.router_handover = True
        listening = net.socket(net.AF_INET, net.SOCK_STREAM)
        listening.bind((host, 0))
        listening.listen(BACKLOG)
        listening.setblocking(False)
        own = listening.dup()
        socket.setsockopt(zmq.USE_FD, own.detach())  # libzmq closes it
        address = f"tcp://{host}:{listening.getsockname()[1]}"
        socket.bind(address)
        return socket, listening, address

    def client(self, address: str, identity: bytes) -> Any:
        socket = self._limited(self.context.socket(zmq.DEALER), PIECE_BYTES)
        socket.identity = identity
        self._authenticating(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def pair(self, name: str) -> tuple[Any, Any]:
        """Two ends inside of this process, for two threads."""
        left, right = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        right.bind(f"inproc://{name}-{id(self)}")
        left.connect(f"inproc://{name}-{id(self)}")
        return left, right

    def close(self) -> None:
        self._authenticator.stop()
        self.context.destroy(linger=0)

    def _authenticated(self, socket: Any) -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.server_public, self._keys.server_secret

    def _authenticating(self, socket: Any) -> None:
        socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
        socket.curve_serverkey = self._keys.server_public

    def _limited(self, socket: Any, piece_bytes: int) -> Any:
        socket.maxmsgsize = piece_bytes + ENCRYPTION_BYTES
        socket.handshake_ivl = int(HANDSHAKE_S * 1000)
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
    """A worker's link; see `thinwire.transport.ports.Link`."""

    def __init__(self, *, me: int, attempt: int, keys: Keys, coordinator: str, host: str) -> None:
        self._identity = f"{me}.{attempt}".encode()
        self._sockets = _Sockets(keys)
        self._inbox, listening, self.address = self._sockets.server(host, PIECE_BYTES)
        self._door = Admission(self._inbox.get_monitor_socket(WATCHED), listening)
        self._outboxes: dict[int, Any] = {COORDINATOR: self._sockets.client(coordinator, self._identity)}
        self._addresses: dict[int, str] = {}
        self._counted = TcpTraffic()
        self._waker, self._woken = self._sockets.pair("wake")
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        for socket in (self._inbox, self._outboxes[COORDINATOR], self._woken):
            self._poller.register(socket, zmq.POLLIN)
        self._malformed = 0

    @property
    def refused(self) -> int:
        return self._malformed + self._door.refused

    def connect(self, peers: Mapping[int, str]) -> None:
        for peer, address in list(self._addresses.items()):
            if peers.get(peer) != address:
                self._outboxes.pop(peer).close(linger=0)
                del self._addresses[peer]
        for peer, address in peers.items():
            if peer in self._addresses:
                continue
            try:
                self._outboxes[peer] = self._sockets.client(_checked(address), self._identity)
            except (ProtocolError, zmq.ZMQError) as error:  # a round that stalls brings a generation, which tries again
                self._malformed += 1
                _log.warning("cannot connect to worker %s: %s", peer, error)
            else:
                self._addresses[peer] = address

    def watch(self, peer: int, happenings: int) -> Any:
        """A socket on which these happenings of the connection to a peer are told."""
        return self._outboxes[peer].get_monitor_socket(happenings)

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        socket = self._outboxes.get(peer)
        if socket is not None:
            _send(socket, [], header, payload, HUB_PIECE_BYTES if peer == COORDINATOR else PIECE_BYTES)

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
                    self._malformed += 1
                else:
                    found.append(message if skip else message._replace(sender=COORDINATOR))
        return found

    def traffic(self) -> Traffic | None:
        return self._counted.read(list(self._addresses.values()))

    def wake(self) -> None:
        with self._wake_lock:
            if not self._waker.closed:  # the thread that was to be woken may have ended just now
                self._waker.send(b"")

    def close(self) -> None:
        self._outboxes[COORDINATOR].close(linger=2000)
        for peer in self._addresses:
            self._outboxes[peer].close(linger=500)
        self._inbox.disable_monitor()
        self._door.close()
        self._inbox.close()
        with self._wake_lock:
            self._waker.close()
        self._woken.close()
        self._sockets.close()


class ZmqHub:
    """The coordinator's link; see `thinwire.transport.ports.Hub`."""

    def __init__(self, *, keys: Keys, host: str) -> None:
        self._sockets = _Sockets(keys)
        self._router, listening, self.address = self._sockets.server(host, HUB_PIECE_BYTES)
        self._router.router_mandatory = True
        self._telling, self._told = self._sockets.pair("gone")
        self._door = Admission(self._router.get_monitor_socket(WATCHED), listening, self._tell)
        self._poller = zmq.Poller()
        for one in (self._router, self._told):
            self._poller.register(one, zmq.POLLIN)
        self._connections: dict[int, tuple[int, int]] = {}
        """By file descriptor, who was last heard through it."""
        self._broken: list[tuple[int, int]] = []
        self._malformed = 0

    @property
    def refused(self) -> int:
        return self._malformed + self._door.refused

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None:
        try:
            _send(self._router, [f"{worker}.{attempt}".encode()], header, payload, PIECE_BYTES)
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
                self._malformed += 1
            else:
                found.append(message)
                self._connections[frames[0].get(zmq.SRCFD)] = (message.sender, message.header.get("a", 0))
        self._notice()
        return found

    def broken(self) -> list[tuple[int, int]]:
        found, self._broken = self._broken, []
        return found

    def notices(self) -> list[Event]:
        return []

    def _notice(self) -> None:
        """After what came before the break was read: who has gone says nothing more."""
        while self._told.poll(0):
            gone = self._connections.pop(int(self._told.recv()), None)
            if gone is not None:
                self._broken.append(gone)

    def _tell(self, descriptor: int) -> None:
        """On the door's thread: a connection has ended."""
        self._telling.send(str(descriptor).encode())

    def close(self) -> None:
        self._router.disable_monitor()
        self._door.close()
        for one in (self._telling, self._told):
            one.close(linger=0)
        self._router.close(linger=1000)
        self._sockets.close()


def _checked(address: Any) -> str:
    """An address of TCP: another's would reach into this process, or into files."""
    if not is_address(address) or not address.startswith("tcp://"):
        raise ProtocolError(f"{address!r} is no address of TCP; a worker's is tcp://HOST:PORT")
    return str(address)


def _own_address(coordinator: str) -> str:
    """The address of this machine on the way to the coordinator; nothing is sent to find it."""
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    with net.socket(net.AF_INET, net.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _send(to: Any, prefix: list[bytes], header: Header, payload: memoryview | None, piece_bytes: int) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}")
    frames = [*prefix, *_header_frames(text, piece_bytes)]
    if payload is not None:
        if payload.nbytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"a payload of {payload.nbytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
        frames += _pieces(payload, piece_bytes)
    to.send_multipart(frames, copy=payload is None or payload.nbytes < _ZERO_COPY_BYTES)


def _header_frames(text: bytes, piece_bytes: int) -> list[Any]:
    """A header as it is; one too long for a frame has the number of its frames before it, which no JSON begins with."""
    if len(text) <= piece_bytes:
        return [text]
    count = -(-(len(text) + 1) // piece_bytes)
    return _pieces(memoryview(bytes([count]) + text), piece_bytes)


def _pieces(data: memoryview, piece_bytes: int) -> list[Any]:
    if data.nbytes <= piece_bytes:
        return [data]
    whole = data.cast("B")
    return [whole[start : start + piece_bytes] for start in range(0, whole.nbytes, piece_bytes)]


def _whole(frames: list[Any], most_bytes: int) -> memoryview | None:
    """What was cut into these frames, as `_pieces` does it; None where it was not, or is too long."""
    if len(frames) == 1:
        found = memoryview(frames[0].buffer)
        return found if found.nbytes <= most_bytes else None
    sizes = [len(frame) for frame in frames]
    if not sizes or sum(sizes) > most_bytes or min(sizes[:-1]) < HUB_PIECE_BYTES or not 0 < sizes[-1] <= sizes[0]:
        return None
    return memoryview(bytearray().join([frame.buffer for frame in frames])) if set(sizes[:-1]) == {sizes[0]} else None


def _parse(frames: list[Any], skip: int) -> Message | None:
    """A message, or None when it is not of the form: counted by the caller, never trusted."""
    body = frames[skip:]
    first = bytes(body[0].buffer[:1]) if body else b""
    count = first[0] if first and first < b" " else 1
    text, parts = _whole(body[:count], MAX_HEADER_BYTES + 1), body[count:]
    payload = _whole(parts, MAX_PAYLOAD_BYTES) if parts else None
    if text is None or len(body) < count or (parts and payload is None):
        return None
    try:
        header = json.loads(bytes(text[first < b" " :]))
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
    return Message(sender, header, payload)
