"""Sparse gradients of embeddings: kept where a worker steps by itself with an optimizer that takes them, else dense.

A dense gradient of the same rows gives the same step, save for SparseAdam, which leaves rows alone that a batch does
not touch and takes no dense gradient: it is refused where gradients are dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError


def is_sparse(module: nn.Module) -> bool:
    """Whether a module's gradient is sparse."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def make_dense(module: nn.Module) -> None:
    """Has all embeddings of a module make dense gradients from now on."""
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False


def leave_unchecked(module: nn.Module) -> None:
    """Says to torch, which warns otherwise, that sparse tensors are not checked, unless the caller has them checked."""
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    if any(is_sparse(part) for part in module.modules()) and not checks.is_enabled():
        checks.disable()


def takes_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps along sparse gradients, and keeps no sparse state, which a checkpoint cannot hold.

    >>> takes_sparse(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    True
    >>> takes_sparse(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
    False
    """
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SparseAdam:
        return True
    plain = not any(group.get("weight_decay") or group.get("fused") for group in groups)
    if type(optimizer) is torch.optim.SGD:
        return plain and not any(group.get("momentum") for group in groups)
    return type(optimizer) is torch.optim.Adagrad and plain


def refuse_sparse_adam(made: Any, module: nn.Module, *, dense: str | None, clip_norm: float | None) -> None:
    """Refuses SparseAdam where a gradient would be dense.

    Args:
        made: an optimizer of the module's parameters.
        module: the network.
        dense: what makes gradients dense, in words.
        clip_norm: largest norm of a gradient.
    """
    if not isinstance(made, torch.optim.SparseAdam):
        return
    instead = "use Adam, AdamW or Adagrad, which take dense gradients, or tw.Relay() with whole replicas"
    if dense is not None:
        raise ConfigError(f"train.optimizer SparseAdam takes sparse gradients only, and {dense}: {instead}")
    if clip_norm is not None:
        raise ConfigError(
            f"train.optimizer SparseAdam takes sparse gradients only, and clip_norm = {clip_norm} makes them dense: "
            "leave clip_norm out, or use Adam, AdamW or Adagrad"
        )
    rare = {id(p) for part in module.modules() if is_sparse(part) for p in part.parameters()}
    held = {id(p) for group in made.param_groups for p in group["params"]}
    other = [name for name, p in module.named_parameters() if id(p) in held - rare and p.requires_grad]
    if other:
        raise ConfigError(
            f"train.optimizer SparseAdam takes sparse gradients only, and that of {other[0]!r} is dense; use Adam, "
            "AdamW or Adagrad, or nn.Embedding(…, sparse=True) throughout"
        )
