"""Whether the parts of a checkpoint are finite: no checkpoint that is not may be committed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.rules.finite import count_not_finite, is_finite


def why_not_finite(tree: Mapping[str, Any]) -> str:
    """Why this part of a checkpoint must not be committed; an empty text where it may be.

    Buffers are not checked, since an infinity there may be meant. The optimizer's state is checked before.
    """
    if "joint" in tree:
        model, *others = [v for v in tree["joint"]["state"] if isinstance(v, Tensor)] or [torch.zeros(0)]
        if not is_finite(model):
            return f"{count_not_finite(model)} values of the joint model are not finite"
        if not all(map(is_finite, others)):
            return "what the strategy keeps beside the joint model is not finite"
        shared = tree.get("replica", {}).get("vector")
        return "the replicas' parameters are not finite" if shared is not None and not is_finite(shared) else ""
    if "replica" not in tree:
        return ""
    if not is_finite(tree["replica"]["vector"]):
        return "a replica's parameters are not finite"
    kept = [*tree["worker"], *(tree["residuals"] or [])]
    return "" if all(is_finite(v) for v in kept if isinstance(v, Tensor)) else "what a worker keeps is not finite"
