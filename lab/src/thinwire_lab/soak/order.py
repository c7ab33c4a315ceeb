"""The options of a soak test, and its start: a driver program of its own, here or on a testbed's first node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.errors import WorkerError

PLACES = ("bed", "spark", "local")


@dataclass(frozen=True)
class Order:
    """The options of a soak test.

    Args:
        minutes: length of the time with deaths.
        quiet_s: seconds without deaths before that.
        every_s: seconds between two deaths.
        place: "bed", Spark on an emulated network (needs root); "spark", a local-cluster of executors; "local".
        workers: number of workers.
        spare: number of workers, the last ones, that are never killed, so that their resources can be measured.
        executors: period of deaths that kill an executor with its worker; 0 for none.
        step_s: seconds of a step.
        exchange: "auto", "mesh" or "spark".
    """

    minutes: float = 60.0
    quiet_s: float = 60.0
    every_s: float = 60.0
    place: str = "bed"
    workers: int = 4
    spare: int = 1
    executors: int = 5
    strategy: str = "relay"
    step_s: float = 0.05
    exchange: str = "auto"
    look_s: float = 15.0

    @property
    def seconds(self) -> float:
        return self.quiet_s + 60.0 * self.minutes

    @property
    def slots(self) -> int:
        """Slots of each executor: an exchange by Spark's jobs needs one beside the worker's."""
        return 2 if self.exchange == "spark" else 1


def run(order: Order, say: Callable[[dict[str, Any]], None] = lambda line: None) -> dict[str, Any]:
    """Runs the soak test to its end; `say` gets every measurement.

    Raises:
        WorkerError: The run failed; the message has its last output.
    """
    slots = order.slots
    argv = [sys.executable, "-W", "ignore", "-m", "thinwire_lab.soak.drive"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-soak-", ignore_cleanup_errors=True))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        if order.place == "bed":
            from thinwire_lab.sparkbed import SparkBed

            process = stack.enter_context(SparkBed(order.workers, cores=slots, folder=folder)).drive(argv, **pipes)
        else:
            own = os.environ | {"TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
            process = subprocess.Popen(argv, start_new_session=True, env=own, **pipes)
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdin.close)
        stack.callback(process.stdout.close)
        process.stdin.write(json.dumps(asdict(order)) + "\n")
        process.stdin.flush()
        found: dict[str, Any] = {"looks": [], "rows": []}
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if "summary" in told:
                found |= told
            elif "row" in told:
                found["rows"].append(told["row"])
            else:
                found["looks"].append(told["look"])
                say(told["look"])
        code = process.wait(60)
        if code or "summary" not in found:
            log.seek(0)
            raise WorkerError(f"the soak ended with exit code {code}; its last output: {log.read()[-3000:]}")
    return found
