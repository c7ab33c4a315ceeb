"""`thinwire bench strangers`: the effect of a thousand hostile connections without keys on a run.

As a program (`python -m thinwire_lab.bench.strangers`) it is the run: two workers that train until they are killed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from thinwire import events
from thinwire.errors import WorkerError
from thinwire.transport.admission import raise_descriptor_limit
from thinwire.transport.zmq import HUB_PIECE_BYTES, PIECE_BYTES
from thinwire_lab.bench.bare import BATCH_SIZE, mlp, synthetic
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.soak.gauges import of_process

CONNECTIONS = 1000
KINDS = ("silent", "half a greeting", "a frame of 63 MiB in pieces", "the longest frame in pieces")
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP's greeting, as libzmq sends it."""
FRAME_BYTES = 63 << 20
PIECE, PIECE_S = bytes(16 << 10), 0.05
"""Size of the pieces of a frame, and the pause of each stranger between two pieces."""
AGAIN_S = 0.2
"""Seconds after which a stranger connects again when its connection was closed."""
TURN_S, SETTLE_S, LOOK_S = 5.0, 6.0, 0.2
ROWS = 20_480
MEMORY_MB, DESCRIPTORS, SPEED = 100.0, 1000.0, 0.9
"""Targets: growth of a process during an attack in MB, open descriptors, and share of rows a second kept."""


def strangers(quick: bool, say: Say) -> Report:
    """Memory, descriptors and rows a second of a run, alternately with and without strangers."""
    raise_descriptor_limit()
    pairs = 1 if quick else 8
    found: list[dict[str, Any]] = []
    with _run() as run:
        for target in ("driver", "worker 0"):
            for pair in range(pairs):
                for besieged in (False, True) if pair % 2 == 0 else (True, False):
                    found.append(_turn(run, target, besieged=besieged, seconds=TURN_S / 2 if quick else TURN_S))
                    say(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found[-1].items()))
        time.sleep(SETTLE_S)
        after = {name: of_process(pid) for name, pid in run.pids.items()}
        lost = run.lost
    rows = [row for target in ("driver", "worker 0") for row in _rows(target, found)]
    rows.append(Row("both", "workers lost", float(lost), 0.0, at_most=True))
    measured = {"connections": CONNECTIONS, "kinds": KINDS, "turn_s": TURN_S, "turns": found, "after": after}
    return Report("strangers", rows, measured)


def _rows(target: str, found: list[dict[str, Any]]) -> Iterator[Row]:
    own = [turn for turn in found if turn["target"] == target]
    alone, besieged = ([turn for turn in own if turn["besieged"] is which] for which in (False, True))
    ratios = tuple(b["rows_per_s"] / a["rows_per_s"] for a, b in zip(alone, besieged, strict=True))
    kept = statistics.median(ratios)
    told = f"{statistics.median(turn['rows_per_s'] for turn in alone):,.0f} rows a second without"
    yield Row(target, "rows a second, with over without", kept, SPEED, told, spread=ratios, unit="x")
    for name, unit, limit in (("memory_mb", "MB", MEMORY_MB), ("descriptors", "", DESCRIPTORS)):
        grown = max(besieged, key=lambda turn: turn[f"{name}_most"] - turn[f"{name}_before"])
        before, most, after = (grown[f"{name}_{when}"] for when in ("before", "most", "after"))
        what = "memory, most that a turn added" if unit else "descriptors, most at once"
        value = most - before if unit else most
        yield Row(target, what, value, limit, f"{before:.4g} before, {after:.4g} after", at_most=True, unit=unit)


def _turn(run: _Run, target: str, *, besieged: bool, seconds: float) -> dict[str, Any]:
    """Measures the run for `seconds`, with strangers at one port or without."""
    pid = run.pids[target]
    before, most, mob = of_process(pid), dict[str, float](), None
    if besieged:
        mob = Mob(_port_of(pid), longest=HUB_PIECE_BYTES if target == "driver" else PIECE_BYTES)
        time.sleep(1.0)  # until the strangers have connected
    begun, done = time.monotonic(), run.done()
    while time.monotonic() < begun + seconds:
        time.sleep(LOOK_S)
        for name, value in of_process(pid).items():
            most[name] = max(most.get(name, 0.0), value)
    rate = (run.done() - done) / (time.monotonic() - begun)
    told: dict[str, Any] = {"target": target, "besieged": besieged, "rows_per_s": rate}
    if mob is not None:
        told |= mob.leave()
        time.sleep(SETTLE_S)
    after = of_process(pid)
    for name in ("memory_mb", "descriptors"):
        told |= {f"{name}_before": before[name], f"{name}_most": most[name], f"{name}_after": after[name]}
    return told


# -- the strangers ----------------------------------------------------------------------------------------------------


@dataclass
class Stranger:
    """One hostile connection, which connects again when it is closed."""

    kind: str
    frame_bytes: int
    """Size of the frame that it announces after the greeting; 0 for none."""
    socket: socket.socket | None = None
    at: float = 0.0
    """Time of its next action."""
    said: int = 0
    """Bytes of its frame that were sent; negative before the greeting."""


class Mob:
    """A thousand strangers at one port, run by one thread of this process."""

    def __init__(self, port: int, *, longest: int, count: int = CONNECTIONS) -> None:
        self._port, self._selector = port, selectors.DefaultSelector()
        kinds = list(zip(KINDS, (0, 0, FRAME_BYTES, longest), strict=True))
        self._all = [Stranger(*kinds[number % len(kinds)]) for number in range(count)]
        self._told: collections.Counter[str] = collections.Counter()
        self._most = 0
        self._leaves = threading.Event()
        self._thread = threading.Thread(target=self._stay, daemon=True)
        self._thread.start()

    def leave(self) -> dict[str, int]:
        """Ends the strangers; returns their counts."""
        self._leaves.set()
        self._thread.join()
        return {"connected_most": self._most, **self._told}

    def _stay(self) -> None:
        while not self._leaves.is_set():
            now = time.monotonic()
            for one in self._all:
                if one.at <= now:
                    self._act(one, now)
            for key, mask in self._selector.select(timeout=0.02):
                self._hear(key.data, mask)
            self._most = max(self._most, sum(one.said != 0 for one in self._all))
        for one in self._all:
            self._drop(one)
        self._selector.close()
        self._told["cpu_ms"] = int(1000 * time.thread_time())

    def _act(self, one: Stranger, now: float) -> None:
        if one.socket is None:
            one.socket, one.at, one.said = socket.socket(), now + 3600.0, 0
            one.socket.setblocking(False)
            one.socket.connect_ex(("127.0.0.1", self._port))
            self._selector.register(one.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, one)
            self._told["tried"] += 1
        elif one.frame_bytes and one.said > 0:
            self._say(one, PIECE)
            one.at = now + PIECE_S

    def _hear(self, one: Stranger, mask: int) -> None:
        if one.socket is None:
            return
        if one.said == 0 and mask & selectors.EVENT_WRITE:
            self._begin(one)
        elif mask & selectors.EVENT_READ:
            try:
                ended = not one.socket.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                ended = True
            if ended:
                self._told["shown out"] += 1
                self._drop(one)
            elif one.frame_bytes and one.said < 0:  # after the greeting begins a command frame that never ends
                one.said, one.at = 1, 0.0
                self._say(one, b"\x06" + struct.pack(">Q", one.frame_bytes))

    def _begin(self, one: Stranger) -> None:
        assert one.socket is not None
        if one.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop(one)
            return
        self._told["connected"] += 1
        one.said = -1
        self._selector.modify(one.socket, selectors.EVENT_READ, one)
        if one.kind != "silent":
            self._say(one, GREETING[:20] if one.kind == "half a greeting" else GREETING)

    def _say(self, one: Stranger, data: bytes) -> None:
        assert one.socket is not None
        try:
            self._told["bytes"] += one.socket.send(data)
        except BlockingIOError:
            return
        except OSError:
            self._told["shown out"] += 1
            self._drop(one)

    def _drop(self, one: Stranger) -> None:
        if one.socket is not None:
            self._selector.unregister(one.socket)
            one.socket.close()
        one.socket, one.at, one.said = None, time.monotonic() + AGAIN_S, 0


def _port_of(pid: int) -> int:
    """The TCP port on which a process listens, the lowest if there are several."""
    return min(_ports_of(pid))


def _ports_of(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    with open("/proc/net/tcp") as table:
        bound = {words[9]: int(words[1].rpartition(":")[2], 16) for words in map(str.split, table) if words[3] == "0A"}
    found: set[int] = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:[") and link[8:-1] in bound:
                found.add(bound[link[8:-1]])
    if found:
        return found
    raise WorkerError(f"process {pid} listens at no port; check that the run is still alive")


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The attacked run, in processes of its own."""

    pids: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    _rows: dict[int, int] = field(default_factory=dict)
    stepping: threading.Event = field(default_factory=threading.Event)

    def done(self) -> float:
        """Rows that all workers have trained on."""
        return float(sum(self._rows.values()))

    def follow(self, lines: Any) -> None:
        for line in lines:
            told = json.loads(line)
            if told["kind"] == "joined":
                self.pids[f"worker {told['worker']}"] = told["pid"]
            elif told["kind"] == "lost":
                self.lost += 1
            else:
                self._rows[told["worker"]] = told["rows"]
                if len(self._rows) == 2 and min(self._rows.values()) > ROWS:
                    self.stepping.set()


@contextlib.contextmanager
def _run() -> Iterator[_Run]:
    found = _Run()
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire_lab.bench.strangers"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as driver:
        found.pids["driver"] = driver.pid
        threading.Thread(target=found.follow, args=(driver.stdout,), daemon=True).start()
        try:
            if not found.stepping.wait(120.0):
                raise WorkerError("the run under attack did not begin within two minutes; see its output")
            yield found
        finally:
            driver.kill()


def main() -> None:
    """Trains until the process is killed, and prints its progress."""
    from thinwire.cluster.local import Local
    from thinwire.run.session import fit
    from thinwire.strategies import SparkNet

    def say(event: events.Event) -> None:
        told: dict[str, Any] = {}
        if isinstance(event, events.WorkerJoined):
            told = {"kind": "joined", "worker": event.worker, "pid": event.pid}
        elif isinstance(event, events.WorkerLost):
            told = {"kind": "lost", "worker": event.worker}
        elif isinstance(event, events.Progressed):
            told = {"kind": "progressed", "worker": event.worker, "rows": event.rows}
        if told:
            print(json.dumps(told), flush=True)

    x, y = synthetic(ROWS)
    fit(
        mlp,
        {"pixels": x, "label": y},
        strategy=SparkNet(period=20),
        cluster=Local(workers=2, threads=1),
        epochs=10**9,
        batch_size=BATCH_SIZE,
        callbacks=[say],
        progress=False,
    )


if __name__ == "__main__":
    main()
