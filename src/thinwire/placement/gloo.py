"""Moves a group's tensors between processes through torch.distributed's gloo; members meet at a TCP store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, ProcessGroupGloo, TCPStore

SIOCGIFADDR = 0x8915
RENDEZVOUS_S = 60.0
LEAVE_S = 1.0


class Gloo:
    """One member's end; see `thinwire.placement.crew.Carrier`."""

    def __init__(self, part: int, size: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self._part, self._size = part, size
        self._host, self._port = host, port
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._listener: socket.socket | None = None

    @property
    def address(self) -> str:
        if self._listener is None:
            self._listener = socket.create_server((self._host, self._port))
            port = self._listener.getsockname()[1]
            self._store = TCPStore(
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._listener.detach(),
                timeout=timedelta(seconds=RENDEZVOUS_S),
            )
            self._address = f"{self._host}:{port}"
        return self._address

    def meet(self, address: str, name: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        interface = interface_of(self._host)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        store = self._store
        if self._part or store is None:
            patience = timedelta(seconds=min(RENDEZVOUS_S, timeout_s))
            store = TCPStore(host, int(port), is_master=False, timeout=patience)
        self._patience = timedelta(seconds=timeout_s)
        self._meeting = PrefixStore(name, store)
        own = PrefixStore("crew", self._meeting)
        self._group = ProcessGroupGloo(own, self._part, self._size, self._patience)

    def leave(self) -> None:
        """Releases the group on a thread of its own, because transfers under way may delay the release."""
        left, self._group = [self._group], None
        leaving = threading.Thread(target=left.clear, name="disband", daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def send(self, piece: Tensor, to: int, tag: int) -> Any:
        return self._met().send([piece], to, tag)

    def receive(self, into: Tensor, of: int, tag: int) -> Any:
        return self._met().recv([into], of, tag)

    def swap(self, came: Tensor, given: Tensor) -> Any:
        sizes = [len(given) // self._size] * self._size
        return self._met().alltoall_base(came, given, sizes, sizes, AllToAllOptions())

    def enter_world(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = PrefixStore("world", self._meeting)
            dist.init_process_group("gloo", store=own, rank=self._part, world_size=self._size, timeout=self._patience)

    def _met(self) -> Any:
        if self._group is None:
            raise RuntimeError("the workers of its group have not met")
        return self._group


def interface_of(host: str) -> str | None:
    """The name of the network interface with this address."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
