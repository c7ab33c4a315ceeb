"""Checks that the parts of a checkpoint are finite: a checkpoint with other values must not be committed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.rules.finite import count_not_finite, is_finite


def why_not_finite(tree: Mapping[str, Any]) -> str:
    """Why this part of a checkpoint must not be committed; empty where it may be.

    Buffers are not checked, because an infinity may be intended there. The optimizer's state is checked earlier.
    """
    if "joint" in tree:
        model, *others = [v for v in tree["joint"]["state"] if isinstance(v, Tensor)] or [torch.zeros(0)]
        if not is_finite(model):
            return f"{count_not_finite(model)} values of the joint model are not finite"
        if not all(map(is_finite, others)):
            return "the strategy's state beside the joint model is not finite"
        shared = tree.get("replica", {}).get("vector")
        return "the replicas' parameters are not finite" if shared is not None and not is_finite(shared) else ""
    if "replica" not in tree:
        return ""
    if not is_finite(tree["replica"]["vector"]):
        return "a replica's parameters are not finite"
    kept = [*tree["worker"], *(tree["residuals"] or [])]
    return "" if all(is_finite(v) for v in kept if isinstance(v, Tensor)) else "a worker's state is not finite"
