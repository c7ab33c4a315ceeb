"""A cluster of its own with two slots an executor, for `test_spark_exchange`: runs, and prints what it saw as JSON."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.data import open_source
from thinwire.errors import ConfigError
from thinwire.exchange.spark import link, post
from thinwire.models import mlp


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Overflowing(torch.optim.SGD):
    """Worker 1's fifth step overflows: its generator has a seed of its own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.steps += 1
        if self.steps == 5 and torch.initial_seed() == 1_000_004:
            with torch.no_grad():
                next(iter(self.param_groups[0]["params"])).view(-1)[0] = float("inf")
        return found


def overflowing(parameters: Any) -> torch.optim.Optimizer:
    return Overflowing(parameters, lr=0.05)


class Slow(nn.Module):
    """Steps that take as long as a network's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            import time

            time.sleep(0.03)
        return self.layer(x)


def processes() -> dict[int, tuple[int, str]]:
    """Parent and command of every process below this one, and of this one."""
    found: dict[int, tuple[int, str]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline") as file:
                found[int(name)] = (parent, file.read().replace("\0", " "))
        except OSError:
            continue
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, (parent, _) in found.items() if parent in ours} - ours
        ours, grown = ours | more, bool(more)
    return {pid: found[pid] for pid in ours if pid in found}


def listening() -> list[tuple[int, str]]:
    """Who of them listens at a TCP port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            inodes |= {line.split()[9] for line in file.readlines()[1:] if line.split()[3] == "0A"}
    seen = []
    for pid, (_, command) in processes().items():
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if any(link.removeprefix("socket:[").rstrip("]") in inodes for link in links):
            seen.append((pid, command))
    return seen


def executors() -> list[int]:
    return [pid for pid, (_, command) in processes().items() if "CoarseGrainedExecutorBackend" in command]


def remembered(kind: Any) -> list[Any]:
    """Everything of a kind that is made from here on."""
    made: list[Any] = []
    begin = kind.__init__

    def keep(self: Any, *given: Any) -> None:
        made.append(self)
        begin(self, *given)

    kind.__init__ = keep
    return made


def main() -> None:
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.task.maxFailures": "100",
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local-cluster[2,2,1024]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.executorEnv.PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    table = next(iter(open_source("digits").batches()))
    pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
    rows = list(zip(pixels, labels, strict=True))
    frame = spark.createDataFrame(rows, "pixels array<float>, label int").cache()

    made, shared = remembered(post.Post), remembered(post.Shared)

    def fit(strategy: tw.Strategy, **changes: Any) -> tw.Result:
        given: dict[str, Any] = {
            "inputs": ["pixels"],
            "strategy": strategy,
            "cluster": tw.Spark(workers=2),
            "exchange": "spark",
            "epochs": 3,
            "batch_size": 32,
            "validation": 0.2,
            "optimizer": sgd,
            "progress": False,
        }
        return tw.fit(changes.pop("model", mlp), changes.pop("data", frame), **(given | changes))

    said: dict[str, Any] = {}
    ports: list[Any] = []

    def look(event: events.Event) -> None:
        if isinstance(event, events.RoundLanded) and not ports:
            ports.extend(listening())

    ours = fit(tw.SparkNet(period=10), data="digits", callbacks=[look])  # the driver deals out the same rows twice
    mesh = fit(tw.SparkNet(period=10), data="digits", exchange="mesh")
    pairs = zip(ours.model.parameters(), mesh.model.parameters(), strict=True)
    said["sparknet"] = ours.summary
    said["differs"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    said["ports"] = [(pid, command[:200], processes().get(pid, (0, ""))[0]) for pid, command in ports]
    said["commands"] = {pid: command[:60] for pid, (_, command) in processes().items()}
    flaws: list[Any] = []
    kept = lambda event: flaws.append(vars(event)) if isinstance(event, events.NonFinite) else None  # noqa: E731
    flawed = fit(tw.SparkNet(period=5), epochs=1, optimizer=overflowing, callbacks=[kept])
    said["flawed"], said["flaws"] = flawed.summary, flaws
    said["flawed_is_finite"] = all(bool(p.isfinite().all()) for p in flawed.model.parameters())
    said["mpca"] = fit(tw.MPCA(), model=Slow, epochs=12).summary
    relay = fit(tw.Relay(quorum=1.0), model=Slow, epochs=12)
    said["relay"] = relay.summary
    said["accuracies"] = {"relay": [row["val_accuracy"] for row in relay.history if "val_accuracy" in row]}
    real = link.SparkWire
    link.SparkWire = functools.partial(real, direct_bytes=0)  # every contribution is read by a job
    shuffled = fit(tw.SparkNet(period=10), data="digits")
    link.SparkWire = functools.partial(real, apart=True)
    apart = fit(tw.SparkNet(period=10), data="digits")
    link.SparkWire = real
    said["apart"] = apart.summary
    pairs = zip(apart.model.parameters(), mesh.model.parameters(), strict=True)
    said["apart_differs"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    pairs = zip(shuffled.model.parameters(), mesh.model.parameters(), strict=True)
    said["shuffled"] = shuffled.summary
    said["shuffled_differs"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    before = set(os.listdir(spark.sparkContext._temp_dir))
    many = fit(tw.SparkNet(period=1), epochs=5, evaluate_every=200)
    said["many"] = many.summary
    deadline = time.monotonic() + 30.0
    while set(os.listdir(spark.sparkContext._temp_dir)) - before and time.monotonic() < deadline:
        time.sleep(0.5)  # the last of them may still be on its way
    said["left"] = len(set(os.listdir(spark.sparkContext._temp_dir)) - before)
    while len(spark.sparkContext._jsc.sc().getRDDStorageInfo()) > 1 and time.monotonic() < deadline:
        time.sleep(0.5)  # Spark lets go of rows when it comes to it
    said["cached"] = len(spark.sparkContext._jsc.sc().getRDDStorageInfo())
    said["broadcasts"], said["settled"] = sum(p.broadcasts for p in made), sum(p.settled for p in made)
    said["kept"] = sum(s._left > 0 for s in shared)

    killed: list[int] = []

    def kill(event: events.Event) -> None:
        if isinstance(event, events.RoundLanded) and event.round >= 2 and not killed:
            killed.append(executors()[0])
            os.kill(killed[0], signal.SIGKILL)

    died = fit(tw.SparkNet(period=10), epochs=8, callbacks=[kill])
    said["killed"], said["died"] = len(killed), died.summary
    refusals = {"easgd": tw.EASGD(), "quorum": tw.Relay(quorum=0.5)}
    said["refused"] = {}
    for name, strategy in refusals.items():
        try:
            fit(strategy)
        except ConfigError as error:
            said["refused"][name] = str(error)
    print("said:", json.dumps(said))
    spark.stop()


if __name__ == "__main__":
    main()
