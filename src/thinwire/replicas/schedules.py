"""Where a learning rate's schedule is, for checkpoints and for a replica that joins late."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from thinwire.errors import ConfigError

Asked = list[float | None]
"""The rates that an optimizer's groups were asked for; None where one is a tensor."""


class Begun(NamedTuple):
    """How a group begins: its rate, and the one that a scheduler keeps as its first, if there is a scheduler."""

    rate: Any
    first: Any


def begun(optimizer: torch.optim.Optimizer) -> list[Begun]:
    """How the groups of an optimizer begin, before a state is loaded."""
    return [Begun(group["lr"], group.get("initial_lr")) for group in optimizer.param_groups]


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without functions, which its factory makes again."""
    return {k: v for k, v in state.items() if not callable(v) and not k.startswith("_get_lr_called")}


def resume(
    scheduler: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, *,
    first: list[Begun], then: Asked, now: Asked,
) -> None:  # fmt: skip
    """Goes on with a saved schedule, after the optimizer's own state was loaded.

    With rates other than the run began with, they are what they would be by now, had it begun with these. A schedule
    that the run had none of begins here.

    Args:
        scheduler: as its factory made it, or None.
        optimizer: whose rates it moves.
        state: the scheduler's; None where there was none.
        first: how the optimizer's groups began here.
        then: rates that the earlier run was asked for.
        now: and this one.
    """
    if scheduler is None:
        for group, before, rate in zip(optimizer.param_groups, then, now, strict=True):
            if rate is not None and rate != before:
                group["lr"] = rate
    elif state is None:
        _begin(optimizer, first)
    else:
        _check_kind(scheduler, state)
        if then == now:
            scheduler.load_state_dict(state)
        else:
            _replay(scheduler, optimizer, state, first=first, then=then, now=now)


def position(scheduler: Any, optimizer: torch.optim.Optimizer, asked: Asked) -> dict[str, Any]:
    """What a newcomer needs; of a scheduler that holds other objects only the rate of now."""
    if scheduler is None:
        return {"scheduler": None, "rates": [], "asked": asked}
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    state = _moving(scheduler, scheduler.state_dict())
    return {"scheduler": copy.deepcopy(state) if _travels(state) else None, "rates": rates, "asked": asked}


def go_on(scheduler: Any, optimizer: torch.optim.Optimizer, tree: dict[str, Any], asked: Asked) -> None:
    """Goes on where another replica was; without a schedule rates are the same anyway."""
    if scheduler is None or not tree["rates"]:
        return
    then, state = tree.get("asked", asked), tree["scheduler"]  # older trees lack what was asked for
    if state is not None:
        _check_kind(scheduler, state)
        if then != asked:
            _replay(scheduler, optimizer, state, first=begun(optimizer), then=then, now=asked)
            return
        scheduler.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, tree["rates"], strict=True):
        group["lr"] = rate
    if then != asked:
        _scale(optimizer, then, asked)


def _begin(optimizer: torch.optim.Optimizer, first: list[Begun]) -> None:
    for group, begins in zip(optimizer.param_groups, first, strict=True):
        group["lr"] = begins.rate
        if begins.first is not None:
            group["initial_lr"] = begins.first


def _replay(
    scheduler: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any], *,
    first: list[Begun], then: Asked, now: Asked,
) -> None:  # fmt: skip
    """Moves a fresh schedule as far as another is; one that follows evaluations is scaled."""
    count = _count(state)
    if count is None or isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.load_state_dict(state)
        _scale(optimizer, then, now)
        return
    _begin(optimizer, first)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for _ in range(count):
        scheduler.step()


def _count(state: dict[str, Any]) -> int | None:
    """How often a scheduler has moved; one of several that move together counts for all."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    return next((_count(one) for one in state.get("_schedulers", ())), None)


def _scale(optimizer: torch.optim.Optimizer, then: Asked, now: Asked) -> None:
    for group, before, rate in zip(optimizer.param_groups, then, now, strict=True):
        if rate is not None and rate != before:
            group["lr"] = group["lr"] * rate / before if before else rate


def _check_kind(scheduler: Any, state: dict[str, Any]) -> None:
    own, saved = (len(one) if one else 0 for one in (getattr(scheduler, "_schedulers", ()), state.get("_schedulers")))
    if own != saved:
        counts = [f"{count} schedulers" if count else "one scheduler" for count in (saved, own)]
        raise ConfigError(
            f"the earlier run had {counts[0]}, this one has {counts[1]} (a warm-up counts as one); "
            "go on with the scheduler that the run began with, its warm-up included"
        )


def _moving(scheduler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state without what cannot be sent and need not be: torch's milestones are a setting, made again."""
    found = plain(state)
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        found.pop("milestones", None)
    if "_schedulers" in found:
        pairs = zip(scheduler._schedulers, found["_schedulers"], strict=True)
        found["_schedulers"] = [_moving(one, its) for one, its in pairs]
    return found


def _travels(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _travels(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_travels, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
