"""Cost of packing: encoding with error feedback, and accumulating, relative to one axpy on as many floats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from thinwire.rules.compression import CODECS, codec, warm_up
from thinwire_lab.bench.report import Report, Row, Say

LOSSY = tuple(name for name, each in CODECS.items() if each.lossy)


SIZE, TURNS, QUICK_TURNS = 25_000_000, 41, 5
TARGET = 1.5


def codecs(quick: bool, say: Say) -> Report:
    """Both operations of every lossy codec: the fastest run over the fastest axpy, least disturbed by other work."""
    turns = QUICK_TURNS if quick else TURNS
    say(f"codecs against one axpy, {turns} turns")
    costs = codec_costs(SIZE, turns)
    least = min(costs["axpy"]["seconds"])
    rows = []
    for name in LOSSY:
        for kind in ("encode_feedback", "accumulate"):
            spread = tuple(t / a for t, a in zip(costs[name][kind], costs["axpy"]["seconds"], strict=True))
            best = min(costs[name][kind])
            detail = f"{best * 1e3:.1f} ms, axpy {least * 1e3:.1f} ms"
            rows.append(Row(f"{kind} ÷ axpy", name, best / least, TARGET, detail, spread, at_most=True))
    return Report("codecs", rows, {"size": SIZE, "seconds": costs})


def codec_costs(size: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Processor seconds of one axpy and of both operations of every codec, measured in turn on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values, total, residual = torch.randn(size), torch.zeros(size), torch.zeros(size)
        found: dict[str, dict[str, list[float]]] = {"axpy": {"seconds": []}}
        packed = {}
        for name in LOSSY:
            warm_up(codec(name))
            packed[name] = torch.empty(codec(name).size_bytes(size), dtype=torch.uint8)
            found[name] = {"encode_feedback": [], "accumulate": []}
        for _ in range(repeats + 1):
            found["axpy"]["seconds"].append(_timed(lambda: total.add_(values, alpha=0.5)))
            for name in LOSSY:
                chosen, out = codec(name), packed[name]
                encode, add = found[name]["encode_feedback"], found[name]["accumulate"]
                encode.append(_timed(lambda c=chosen, o=out: c.encode_feedback(values, residual, out=o)))  # type: ignore[misc]
                add.append(_timed(lambda c=chosen, o=out: c.accumulate(o, 0.5, total)))  # type: ignore[misc]
            residual.zero_()
            total.zero_()
    finally:
        torch.set_num_threads(threads)
    return {name: {kind: times[1:] for kind, times in kinds.items()} for name, kinds in found.items()}


def ratios(costs: dict[str, dict[str, Any]], name: str, kind: str) -> list[float]:
    """A codec's times over the median time of axpy."""
    axpy = statistics.median(costs["axpy"]["seconds"])
    return [t / axpy for t in costs[name][kind]]


def _timed(act: Callable[[], object]) -> float:
    began = time.thread_time()  # excludes the processor time of other programs
    act()
    return time.thread_time() - began
