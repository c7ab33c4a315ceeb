"""Whether a joint state that a peer gave is one that this worker's replica can take over."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire.protocol.forms import is_count, is_real


def fits(tree: dict[str, Any], replica: Any, *, replicated: bool) -> bool:
    """Whether the rest of a joint state, beside the joint model, has the form of this replica's own.

    The states of optimizer and scheduler are checked where these load them.
    """
    went, best, schedule = tree.get("went"), tree.get("best"), tree.get("schedule")
    if not is_count(tree.get("published")) or not (best is None or _is_model(best)):
        return False
    if not isinstance(went, list | tuple) or len(went) != 2 or not all(map(is_count, went)):
        return False
    if replicated:
        shared = tree.get("replica")
        return isinstance(shared, dict) and _like(shared.get("vector"), replica.vector) and _buffers(shared, replica)
    if not isinstance(schedule, dict) or not isinstance(schedule.get("rates"), list) or "scheduler" not in schedule:
        return False
    return all(map(is_real, schedule["rates"])) and _buffers(tree, replica)


def _is_model(best: Any) -> bool:
    """Whether this is the model of the best evaluation: tensors by name, or a member's part of them in two lists."""
    return isinstance(best, dict) and all(isinstance(value, Tensor | list) for value in best.values())


def _buffers(tree: dict[str, Any], replica: Any) -> bool:
    own, counts = replica.buffers.counts(), tree.get("counts")
    if not isinstance(counts, list) or len(counts) != len(own) or not all(map(is_count, counts)):
        return False
    return _like(tree.get("buffers"), replica.buffers.vector())


def _like(value: Any, own: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == own.shape and value.is_floating_point()
