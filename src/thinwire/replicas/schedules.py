"""Where a learning rate's schedule is, for checkpoints and for a replica that joins late."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without functions, which its factory makes again."""
    return {k: v for k, v in state.items() if not callable(v) and not k.startswith("_get_lr_called")}


def position(scheduler: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a newcomer needs; of a scheduler whose functions hold something only the rate of now."""
    state = None if scheduler is None else _moving(scheduler.state_dict())
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"scheduler": copy.deepcopy(state), "rates": rates}


def go_on(scheduler: Any, optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """Goes on where another replica was; without a schedule rates are the same anyway."""
    if scheduler is None:
        return
    if tree["scheduler"] is not None:
        scheduler.load_state_dict(tree["scheduler"])
    for group, rate in zip(optimizer.param_groups, tree["rates"], strict=True):
        group["lr"] = rate


def follow(scheduler: Any, group: dict[str, Any], index: int, *, before: float, now: float) -> None:
    """Gives a group of an optimizer another rate than it began with: the one it would have, had it begun with this."""
    group["lr"] = group["lr"] * now / before if before and scheduler is not None else now
    if "initial_lr" in group:
        group["initial_lr"] = now
    for one in getattr(scheduler, "_schedulers", [scheduler]):  # several, where they follow one another
        if hasattr(one, "base_lrs"):
            one.base_lrs[index] = now


def _moving(state: dict[str, Any]) -> dict[str, Any] | None:
    """What of a state can be sent; the rest are settings, which the factory makes again, or functions: None then."""
    found: dict[str, Any] = {}
    for name, value in plain(state).items():
        if name == "_schedulers":
            parts = [_moving(one) for one in value]
            if None in parts:
                return None
            found[name] = parts
        elif _travels(value):
            found[name] = value
        elif name == "lr_lambdas":
            return None
    return found


def _travels(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _travels(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_travels, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
