"""`thinwire bench finite`: the cost of checks for NaN and infinity, in steps, sums and merges."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from thinwire.exchange import joint
from thinwire.exchange.joint import JointState
from thinwire.exchange.round import CHUNK_BYTES, Chunk, Lane, Round
from thinwire.models import cnn8, mlp
from thinwire.parameters import Fragment
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.rules.compression import codec, warm_up
from thinwire.strategies import Relay, SparkNet
from thinwire_lab.bench.report import Report, Row, Say

WORKERS = 4
SIZE = 4_000_000
"""Numbers in the vector that is contributed and merged."""
ROWS = 64
TARGET = 1.25
"""Largest ratio of the time with checks to the time without."""
Act = Callable[[], object]


def finite(quick: bool, say: Say) -> Report:
    """Processor time with the check over that without it, measured in turn on one thread."""
    repeats = 3 if quick else 60
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    try:
        for part, name, checked, plain in (*_steps(), *_sums(), *_joints()):
            say(f"{part}, {name}")
            pairs = [_pair(checked, plain, even=turn % 2 == 0) for turn in range(repeats + 1)][1:]
            ratios = tuple(a / b for a, b in pairs)
            detail = f"{1e3 * statistics.median(b for _, b in pairs):.3g} ms without"
            value = statistics.median(ratios)
            rows.append(Row(part, name, value, TARGET, detail, spread=ratios, at_most=True, unit="x"))
    finally:
        torch.set_num_threads(threads)
    return Report("finite", rows, {"workers": WORKERS, "size": SIZE, "rows": ROWS})


def _pair(checked: Act, plain: Act, *, even: bool) -> tuple[float, float]:
    took = {}
    for act in (checked, plain) if even else (plain, checked):
        began = time.thread_time()
        act()
        took[act] = time.thread_time() - began
    return took[checked], took[plain]


def _steps() -> Iterator[tuple[str, str, Act, Act]]:
    for name, model, shape in (("mlp", mlp, (64,)), ("cnn8", cnn8, (1, 8, 8))):
        spec = TrainSpec(loss="cross_entropy", optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
        replica = TorchReplica(model, spec)
        batch: Any = SimpleNamespace(
            inputs=(torch.randn(ROWS, *shape),), label=torch.randint(10, (ROWS,)), weight=None, num_rows=ROWS
        )

        def plain(replica: Any = replica, batch: Any = batch) -> None:
            replica.gradient(batch)
            replica.update()

        def checked(replica: Any = replica, batch: Any = batch) -> None:
            assert replica.flaw(replica.gradient(batch)) is None
            replica.update()

        yield "a step", f"{name}, {replica.parameters.size:,} parameters", checked, plain


def _sums() -> Iterator[tuple[str, str, Act, Act]]:
    for name in ("float32", "bfloat16", "int8", "sign2", "sign1"):
        packing = codec(name)
        warm_up(packing)
        size = CHUNK_BYTES * 8 // packing.bits
        residual = torch.zeros(size) if packing.lossy else None
        lane = Lane(packing, residual, residual)
        parts: Any = {w: (1.0, packing.encode(torch.randn(size))) for w in range(1, WORKERS)}
        parts[0] = (1.0, torch.randn(size))
        summed = Round("train:0", Fragment(0, size), lane, (Chunk(0, 0, size, True),), 0.0, torch.empty(size))

        def checked(summed: Round = summed, parts: Any = parts) -> None:
            assert summed.sum(0, parts) is not None

        def plain(summed: Round = summed, parts: Any = parts) -> None:
            with mock.patch.object(Round, "_is_finite", _unlooked):
                summed.sum(0, parts)

        yield f"a sum of {WORKERS} at its owner", f"{name}, {size:,} numbers", checked, plain


def _unlooked(*args: object) -> bool:
    return True


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    with mock.patch.object(joint, "is_finite", _unlooked):
        yield


def _joints() -> Iterator[tuple[str, str, Act, Act]]:
    whole = Fragment(0, SIZE)
    for strategy in (SparkNet(), Relay(fragments=1)):
        state = JointState(strategy, torch.randn(SIZE), WORKERS)
        values, out, setting = torch.randn(SIZE), torch.empty(SIZE), state.cuts.newest.setting

        def contribute(state: JointState = state, values: Any = values, out: Any = out) -> None:
            assert state.contribution(whole, values, out) is not None

        mean = torch.zeros(SIZE)

        def merge(state: JointState = state, mean: Any = mean, out: Any = out, setting: Any = setting) -> None:
            state.merge(whole, mean, 0, setting, out)

        for part, act in (("a contribution", contribute), ("a merge", merge)):

            def plain(act: Act = act) -> None:
                with _unchecked():
                    act()

            yield part, f"{type(strategy).__name__}, {SIZE:,} numbers", act, plain
