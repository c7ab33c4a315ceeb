"""A cluster's network on one machine: namespaces joined by a bridge, each limited to a rate.

Every node is a network namespace with one interface, `eth0`. The bridge that joins them has a namespace of its own, so
that the machine's own network is not affected::

    node 0 [eth0] ── [port0] ┐
    node 1 [eth0] ── [port1] ┼ bridge        a tbf rate limit at both ends of every cable:
    node 2 [eth0] ── [port2] ┘               at eth0 for what a node sends, at its port for what it receives

Names of namespaces contain the process ID of their maker, so that a later run finds and removes those of a killed run.
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
    """Nodes joined by a network of a given rate; a context manager.

    Args:
        nodes: number of nodes.
        rate: rate of every node in each direction, such as "1gbit" or "100mbit"; None sets no limit.
        subnet: first three numbers of the nodes' addresses, which exist only in the namespaces.
    """

    __test__ = False  # tells pytest that this class is not a test

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
        """Why this machine cannot run a testbed; None where it can."""
        return _why_not()

    def __enter__(self) -> Testbed:
        if why := self.why_not():
            raise TestbedError(f"a testbed cannot run here: {why}")
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
        """The name of a node's namespace, as `ip netns` shows it."""
        self._check(node)
        return f"{self._prefix}n{node}"

    def popen(self, node: int, argv: Sequence[str], **kw: Any) -> subprocess.Popen[Any]:
        """Starts a command on a node, in a session of its own; `close` ends it if it still runs."""
        kw.setdefault("start_new_session", True)
        process: subprocess.Popen[Any] = subprocess.Popen(["ip", "netns", "exec", self.namespace(node), *argv], **kw)
        self._started.setdefault(node, []).append(process)
        return process

    def run(self, node: int, argv: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node to its end; returns its output as text."""
        process = self.popen(node, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise TimedOutError(
                f"{' '.join(argv)} on node {node} took more than {timeout_s:g} s; give it more time, or find out why "
                "it hangs"
            ) from None
        finally:
            self._started[node].remove(process)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kill(self, node: int) -> None:
        """Ends all processes on a node with SIGKILL, like a power failure; the network stays."""
        _kill_all([self.namespace(node)])
        for process in self._started.pop(node, []):
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the process may not have entered the namespace yet
            process.wait(_KILL_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    # -- the network ------------------------------------------------------------------------------------------------

    def throttle(self, node: int, rate: str | None) -> None:
        """Limits a node to another rate, in both directions; None removes the limit."""
        ends = [(self.namespace(node), "eth0"), (self._switch, f"port{node}")]
        for namespace, device in ends:
            base = ["tc", "-netns", namespace, "qdisc"]
            if rate is None:
                _command(*base, "delete", "dev", device, "root", check=False)
                continue
            # A burst must hold two segments and the bytes of a millisecond, or it caps the rate. A larger burst would
            # let short messages pass without a limit, unlike any cable.
            tick = int(rate_bits(rate) / 8 / 1000)
            segment = min(64 << 10, max(2 << 10, tick))
            burst = max(2 * segment, tick)
            _command("ip", "-netns", namespace, "link", "set", device, "gso_max_size", str(segment))
            limit = ["rate", f"{rate_bits(rate):.0f}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
            _command(*base, "replace", "dev", device, "root", "tbf", *limit)

    def sent_bytes(self, node: int) -> int:
        """Bytes that a node has sent so far, headers included, as its interface counts them."""
        told = json.loads(_command("ip", "-netns", self.namespace(node), "-s", "-j", "link", "show", "eth0"))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def cut(self, node: int) -> None:
        """Disconnects a node at the bridge: no packet passes, and no process is notified."""
        self.namespace(node)
        _command("ip", "-netns", self._switch, "link", "set", f"port{node}", "down")

    def heal(self, node: int) -> None:
        """Reconnects a node."""
        self.namespace(node)
        _command("ip", "-netns", self._switch, "link", "set", f"port{node}", "up")

    def close(self) -> None:
        """Ends all processes on the nodes and removes the network; may be called repeatedly."""
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
            raise ConfigError(f"node {node} is not a node of this testbed; it has nodes 0 to {self.nodes - 1}")

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
    """Removes namespaces whose maker has ended, and the processes in them; returns their names."""
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
    """The testbed namespaces of this machine, with the process IDs of their makers."""
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
    """Ends all processes in these namespaces; repeats until no new ones are found."""
    deadline = time.monotonic() + _KILL_S
    while (pids := _pids(names)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        _command("ip", "netns", "delete", name, check=False)
