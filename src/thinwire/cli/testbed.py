"""`thinwire testbed`: a command against a Spark cluster on an emulated network; what goes wrong on purpose."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from thinwire.errors import ConfigError
from thinwire.testing.sparkbed import SparkBed


def testbed(options: argparse.Namespace) -> int:
    """The act that was asked for; ended from outside, it takes down what it has set up."""
    with _unwinding():
        return _act(options)


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _act(options: argparse.Namespace) -> int:
    if options.act == "schedules":
        from thinwire.cli.schedules import schedules  # torch, which the other needs not

        return schedules(options)
    if options.act == "chaos":
        from thinwire.cli.chaos import chaos

        return chaos(options)
    if options.act == "soak":
        from thinwire.cli.soak import soak

        return soak(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Builds the cluster, runs the command on the driver's node, takes everything down; the command's exit code."""
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise ConfigError("testbed run needs a command: thinwire testbed run --nodes 4 -- python train.py")
    console = Console(stderr=True)
    with console.status(f"starting Spark on {options.nodes} nodes at {options.rate}"):
        cluster = SparkBed(options.nodes, options.rate, cores=options.cores, memory=options.memory).__enter__()
    try:
        console.print(f"Spark is at {cluster.master} (THINWIRE_MASTER), one executor on each of {options.nodes} nodes")
        return cluster.drive(words, stdin=sys.stdin, start_new_session=False).wait()
    finally:
        cluster.close()
