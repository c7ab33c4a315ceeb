"""A cluster's network on one machine: namespaces joined by a bridge, each held to a rate.

Every node is a network namespace with one interface, `eth0`; the bridge that joins them lies in a namespace of its own,
so that the machine's own network sees nothing of it::

    node 0 [eth0] ── [port0] ┐
    node 1 [eth0] ── [port1] ┼ bridge        a tbf rate limit at both ends of every cable:
    node 2 [eth0] ── [port2] ┘               eth0's is what a node sends, its port's what it receives

Namespaces carry the process id of their maker, so that what a killed run left behind is found and removed by the next.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from thinwire.errors import ConfigError, ThinwireError, TimedOutError
from thinwire.units import rate_bits

_NAME = re.compile(r"^tw(\d+)-\d+(?:n\d+|sw)$")
_QUEUE_MS = 50
_COMMAND_S = 20.0
_KILL_S = 10.0
_serial = itertools.count()


class TestbedError(ThinwireError):
    """The network could not be set up."""

    __test__ = False


class Testbed:
    """So many nodes, joined by a network of the given rate; a context manager.

    Args:
        nodes: how many.
        rate: of every node in each direction, such as "1gbit" or "100mbit"; None leaves it to the machine.
        subnet: the first three numbers of the nodes' addresses, which exist in the namespaces only.
    """

    __test__ = False  # the name begins as pytest's own do

    def __init__(self, nodes: int, rate: str | None = "1gbit", *, subnet: str = "10.77.0") -> None:
        if not 1 <= nodes <= 200:
            raise ConfigError(f"nodes = {nodes} is not possible; use 1 to 200")
        if rate is not None:
            rate_bits(rate)
        self.nodes, self.rate = nodes, rate
        self._subnet = subnet
        self._prefix = f"tw{os.getpid()}-{next(_serial)}"
        self._started: dict[int, list[subprocess.Popen[Any]]] = {}

    @staticmethod
    def why_not() -> str | None:
        """Why there can be no testbed on this machine; None where there can."""
        return _why_not()

    def __enter__(self) -> Testbed:
        if why := self.why_not():
            raise TestbedError(f"there can be no testbed here: {why}")
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the nodes --------------------------------------------------------------------------------------------------

    def address(self, node: int) -> str:
        """A node's IP address, for the other nodes."""
        self._check(node)
        return f"{self._subnet}.{node + 1}"

    def namespace(self, node: int) -> str:
        """The name of a node's namespace, as `ip netns` knows it."""
        self._check(node)
        return f"{self._prefix}n{node}"

    def popen(self, node: int, argv: Sequence[str], **kw: Any) -> subprocess.Popen[Any]:
        """Starts a command on a node, in a session of its own; `close` ends it at the latest."""
        kw.setdefault("start_new_session", True)
        process: subprocess.Popen[Any] = subprocess.Popen(["ip", "netns", "exec", self.namespace(node), *argv], **kw)
        self._started.setdefault(node, []).append(process)
        return process

    def run(self, node: int, argv: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node to its end; its output comes back as text."""
        process = self.popen(node, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise TimedOutError(
                f"{' '.join(argv)} on node {node} took more than {timeout_s:g} s; give it more, or look at why it hangs"
            ) from None
        finally:
            self._started[node].remove(process)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kill(self, node: int) -> None:
        """Ends everything that runs on a node with SIGKILL, as a power cut would; the network stays."""
        _kill_all([self.namespace(node)])
        for process in self._started.pop(node, []):
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it may not have entered the namespace yet
            process.wait(_KILL_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    # -- the network ------------------------------------------------------------------------------------------------

    def throttle(self, node: int, rate: str | None) -> None:
        """Holds a node to another rate, both ways; None takes the limit away."""
        ends = [(self.namespace(node), "eth0"), (self._switch, f"port{node}")]
        for namespace, device in ends:
            base = ["tc", "-netns", namespace, "qdisc"]
            if rate is None:
                _command(*base, "delete", "dev", device, "root", check=False)
                continue
            # A burst must hold two segments and what the rate passes in a millisecond, or it caps the rate; one that
            # holds more lets short messages pass as if there were no limit, which no cable does.
            tick = int(rate_bits(rate) / 8 / 1000)
            segment = min(64 << 10, max(2 << 10, tick))
            burst = max(2 * segment, tick)
            _command("ip", "-netns", namespace, "link", "set", device, "gso_max_size", str(segment))
            limit = ["rate", f"{rate_bits(rate):.0f}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
            _command(*base, "replace", "dev", device, "root", "tbf", *limit)

    def sent_bytes(self, node: int) -> int:
        """What a node has put on its cable so far, headers and all, as its interface counts it."""
        told = json.loads(_command("ip", "-netns", self.namespace(node), "-s", "-j", "link", "show", "eth0"))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def cut(self, node: int) -> None:
        """Pulls a node's cable at the bridge: nothing gets through, and nobody is told."""
        self.namespace(node)
        _command("ip", "-netns", self._switch, "link", "set", f"port{node}", "down")

    def heal(self, node: int) -> None:
        """Puts the cable back."""
        self.namespace(node)
        _command("ip", "-netns", self._switch, "link", "set", f"port{node}", "up")

    def close(self) -> None:
        """Ends every process on the nodes and removes the network; harmless when called twice."""
        _kill_all([name for name, _ in _namespaces() if name.startswith(self._prefix)])
        for node in list(self._started):
            self.kill(node)
        _remove([name for name, _ in _namespaces() if name.startswith(self._prefix)])

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _switch(self) -> str:
        return f"{self._prefix}sw"

    def _check(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise ConfigError(f"node {node} is not of this testbed; it has nodes 0 to {self.nodes - 1}")

    def _build(self) -> None:
        switch = self._switch
        _command("ip", "netns", "add", switch)
        _command("ip", "-netns", switch, "link", "add", "bridge", "type", "bridge")
        _command("ip", "-netns", switch, "link", "set", "bridge", "up")
        for node in range(self.nodes):
            name = self.namespace(node)
            _command("ip", "netns", "add", name)
            inside = ["ip", "-netns", name]
            peer = ["peer", "name", f"port{node}", "netns", switch]
            _command(*inside, "link", "add", "eth0", "type", "veth", *peer)
            _command("ip", "-netns", switch, "link", "set", f"port{node}", "master", "bridge", "up")
            _command(*inside, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            _command(*inside, "link", "set", "lo", "up")
            _command(*inside, "link", "set", "eth0", "up")
            if self.rate is not None:
                self.throttle(node, self.rate)


def remove_leftovers() -> list[str]:
    """Removes the namespaces of runs whose process is gone, with what still runs in them; returns their names."""
    stale = [name for name, pid in _namespaces() if not os.path.exists(f"/proc/{pid}")]
    _kill_all(stale)
    _remove(stale)
    return stale


@functools.cache
def _why_not() -> str | None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing; install iproute2"
    name = f"tw{os.getpid()}-{next(_serial)}sw"
    try:
        _command("ip", "netns", "add", name)
        _command("tc", "-netns", name, "qdisc", "add", "dev", "lo", "root", "tbf", *_PROBE)
        _command("ip", "-netns", name, "link", "add", "probe", "type", "bridge")
        _command("ip", "-netns", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
    except TestbedError as error:
        return str(error)
    finally:
        _remove([name])
    return None


_PROBE = ["rate", "1gbit", "burst", "128kb", "latency", f"{_QUEUE_MS}ms"]


def _command(*words: str, check: bool = True) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TestbedError(f"`{' '.join(words)}` failed: {error}") from error
    if check and done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise TestbedError(f"`{' '.join(words)}` failed: {said}")
    return done.stdout


def _namespaces() -> Iterator[tuple[str, int]]:
    """The testbed namespaces of this machine and the processes that made them."""
    try:
        listed = _command("ip", "netns", "list", check=False)
    except TestbedError:
        return
    for line in listed.splitlines():
        name = line.split()[0] if line.split() else ""
        if found := _NAME.match(name):
            yield name, int(found[1])


def _pids(names: Sequence[str]) -> list[int]:
    return [int(pid) for name in names for pid in _command("ip", "netns", "pids", name, check=False).split()]


def _kill_all(names: Sequence[str]) -> None:
    """Ends all processes in these namespaces; what they start meanwhile is found on the next look."""
    deadline = time.monotonic() + _KILL_S
    while (pids := _pids(names)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        _command("ip", "netns", "delete", name, check=False)
