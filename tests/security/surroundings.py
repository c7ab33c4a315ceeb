"""What a run shows to those around it: its processes, the ports they listen at, and whether a secret is somewhere."""

from __future__ import annotations

import base64
import contextlib
import html
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch
import zmq
from torch import nn
from zmq.utils import z85


class Slow(nn.Module):
    """A network whose steps take 20 ms: there is time to do something to the run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.02)
        return self.layer(x.flatten(1))


class Port(NamedTuple):
    """One that a process listens at."""

    pid: int
    host: str
    number: int


def family() -> dict[int, str]:
    """Commands of this process and of all below it."""
    found: dict[int, tuple[int, str]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            found[int(name)] = parent, Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, (parent, _) in found.items() if parent in ours} - ours
        ours, grown = ours | more, bool(more)
    return {pid: found[pid][1] for pid in ours if pid in found}


def listening() -> list[Port]:
    """Every TCP port of the family, with the address that it is bound to."""
    bound: dict[str, tuple[str, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, _, number = words[1].rpartition(":")
                bound[f"socket:[{words[9]}]"] = _address(address), int(number, 16)
    found = set()
    for pid in family():
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # of this process itself, the one that lists them is gone
                    link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    found |= {Port(pid, *bound[link])} if link in bound else set()
    return sorted(found)


def _address(text: str) -> str:
    """As /proc writes it: words of 32 bits, each in this machine's own order."""
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def forms(secret: bytes) -> set[bytes]:
    """A secret as it may be written: itself, Z85 undone, hex, Base64 at any offset, and escaped."""
    raw = [secret]
    if len(secret) == 40:
        raw.append(z85.decode(secret))
    found = set(raw) | {html.escape(secret.decode()).encode(), quote(secret.decode()).encode()}
    for one in raw:
        found |= {one.hex().encode(), one.hex().upper().encode()}
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            for offset in range(3):  # without the letters that depend on what is before and after it
                found.add(encode(b"\0" * offset + one)[4 if offset else 0 : -4])
    return {one for one in found if len(one) >= 16}


def leaks(secrets: Iterable[bytes], places: Iterable[tuple[str, bytes]]) -> list[str]:
    """The names of places that hold a secret in some form."""
    needles = {form for secret in secrets for form in forms(secret)}
    assert needles
    return [name for name, content in places if any(needle in content for needle in needles)]


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder; others may take files and folders away meanwhile."""
    for path in sorted(Path(root, name) for root, _, names in os.walk(folder) for name in names):
        if path.is_file():
            try:
                yield str(path), path.read_bytes()
            except OSError:
                continue


def processes() -> Iterator[tuple[str, bytes]]:
    """Arguments and environment of the family, as process lists show them."""
    for pid in family():
        for kind in ("cmdline", "environ"):
            try:
                yield f"{kind} of {pid}", Path(f"/proc/{pid}/{kind}").read_bytes()
            except OSError:
                continue


def stranger(address: str, public: bytes, secret: bytes, server: bytes | None) -> zmq.Socket[bytes]:
    """A client with keys of its own, or with none, that asks for a seat."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger, socket.identity = 0, b"0.7"
    if server is not None:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, server
    socket.connect(address)
    for header in (b'{"t":"join","a":7,"address":"tcp://127.0.0.1:9"}', b'{"t":"fetch","a":7,"name":"train","i":0}'):
        socket.send(header)
    return socket


def visitor(port: Port, said: bytes) -> socket.socket | None:
    """A plain connection that says something, or nothing."""
    try:
        found = socket.create_connection((port.host, port.number), timeout=300)
        found.settimeout(0.0)
        found.send(said) if said else None
    except OSError:
        return None
    return found


def poll(true: Callable[[], bool], timeout_s: float = 600.0) -> None:
    """Waits for something to be so."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.05)
