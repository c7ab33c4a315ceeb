"""The driver program of a soak test: `python -m thinwire_lab.soak.drive`, with options on stdin, measurements on
stdout.

One fit on four workers. A thread kills workers in turn and measures the resources of processes. Measurements and the
run's rows are written to stdout immediately and not kept, because this process is measured too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire import events
from thinwire.strategies import strategy
from thinwire_lab.chaos.faults import executor_of
from thinwire_lab.soak import gauges
from thinwire_lab.soak.order import Order

ROWS, BATCH = 1797, 8
"""Rows of the built-in digits, and rows of a worker's step."""


class Paced(nn.Module):
    """A small network whose training steps take a fixed time, as on an accelerator."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self._step_s = step_s

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._step_s)
        found: Tensor = self.net(x.float() / 16)
        return found


def paced(step_s: float) -> nn.Module:
    """The network, with the same parameters on all workers."""
    torch.manual_seed(0)
    return Paced(step_s)


class FaultInjector:
    """Kills workers in turn and takes measurements while the run goes on."""

    def __init__(self, order: Order, session: Any) -> None:
        self._order, self._session = order, session
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._shared = gauges.shared()
        self.began = 0.0
        self.deaths: list[dict[str, Any]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def see(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerJoined):
            with self._lock:
                self._pids[event.worker] = event.pid
        elif isinstance(event, events.WorkerLost):
            with self._lock:
                self._pids.pop(event.worker, None)
        elif isinstance(event, events.Progressed):
            now = time.monotonic()
            if not self.began and event.worker == 0:
                self.began = now
                self.thread.start()
            rows = (round(now - self.began, 3) if self.began else 0.0, event.worker, event.rows)
            say({"row": rows})

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        order = self._order
        dying, looking = order.quiet_s, 0.0
        while not self._over.wait(0.1):
            now = time.monotonic() - self.began
            if now >= looking:
                self._look(now)
                looking = now + order.look_s
            if dying <= now < order.seconds and self._kill(now):
                dying = max(dying, now - order.every_s / 2) + order.every_s  # a late kill delays the next one

    def _kill(self, now: float) -> bool:
        number = len(self.deaths)
        victim = number % (self._order.workers - self._order.spare)
        with self._lock:
            pid = self._pids.get(victim)
        whole = self._order.executors and number % self._order.executors == self._order.executors - 1
        found = executor_of(pid) if pid is not None and whole else pid
        if found is None:
            return False  # the worker has not rejoined yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)
            self.deaths.append({"at_s": round(now, 1), "worker": victim, "executor": bool(whole)})
            return True
        return False

    def _look(self, now: float) -> None:
        held: dict[str, Any] = {"driver": gauges.of_process(os.getpid()), "machine": gauges.of_machine(self._shared)}
        with self._lock:
            spared = self._pids.get(self._order.workers - 1) if self._order.spare else None
        if spared is not None:
            held["worker"] = gauges.of_process(spared)
            executor = executor_of(spared)
            if executor is not None:
                held["executor"] = gauges.of_process(executor)
        if self._session is not None:
            with contextlib.suppress(Exception):  # the session may be stopping
                held["spark"] = gauges.of_spark(self._session)
        flat = {f"{who} {what}": value for who, each in held.items() for what, value in each.items()}
        say({"look": {"at_s": round(now, 1), "deaths": len(self.deaths), **flat}})


def say(found: dict[str, Any]) -> None:
    """Prints one line of JSON, which threads do not interleave."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs the soak test that stdin describes."""
    order = Order(**json.loads(sys.stdin.readline()))
    session = None
    where: Any = tw.Local(workers=order.workers, max_restarts=1_000_000)
    if order.place != "local":
        from thinwire.cluster.sessions import start_session

        inside = f"local-cluster[{order.workers},{order.slots},1024]"
        session = start_session(os.environ.get("THINWIRE_MASTER", inside), order.workers)
        where = tw.Spark(session=session, workers=order.workers)
    injector = FaultInjector(order, session)
    epoch_s = ROWS / order.workers / BATCH * order.step_s
    result = tw.fit(
        functools.partial(paced, order.step_s),
        "digits",
        inputs=["pixels"],
        strategy=strategy(order.strategy, {}),
        exchange=order.exchange,
        cluster=where,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        batch_size=BATCH,
        epochs=max(1, round(order.seconds / epoch_s)),
        callbacks=[injector.see],
        progress=False,
    )
    injector.end()
    say({"deaths": injector.deaths, "summary": result.summary, "order": dataclasses.asdict(order)})
    if session is not None:
        session.stop()


if __name__ == "__main__":
    main()
