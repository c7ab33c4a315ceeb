"""When a run in which workers keep skipping steps has diverged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PER_DROP, LIMIT = 8, 80
"""A skipped step adds PER_DROP to a worker's score, a step that is taken subtracts 1. The run ends when all workers
are at LIMIT: after ten skipped steps in a row, and never where fewer than a ninth of the steps are skipped."""


def has_diverged(progress: Iterable[Mapping[str, Any]], *, over: bool) -> bool:
    """Whether every worker skips its steps. At the end of a short run half of its steps are enough.

    >>> has_diverged([{"steps": 40, "score": 80}, {"steps": 40, "score": 72}], over=False)
    False
    >>> has_diverged([{"steps": 3, "score": 16}], over=True), has_diverged([{"steps": 3, "score": 8}], over=True)
    (True, False)
    """
    stepping = [(int(each.get("steps", 0)), int(each.get("score", 0))) for each in progress if each.get("steps")]
    return bool(stepping) and all(
        score >= (min(LIMIT, max(1, PER_DROP * steps // 2)) if over else LIMIT) for steps, score in stepping
    )
