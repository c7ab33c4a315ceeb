"""What packing costs: encode with error feedback, and accumulate, against one axpy over as many floats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from thinwire.rules.compression import codec, warm_up

LOSSY = ("bfloat16", "int8", "int4", "int2")


def codec_costs(size: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds of one axpy, and of both halves of every codec; one thread, in turn, so that all see the same machine."""
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
    """A codec's times over the median axpy's."""
    axpy = statistics.median(costs["axpy"]["seconds"])
    return [t / axpy for t in costs[name][kind]]


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
