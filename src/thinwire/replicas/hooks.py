"""Hooks on a network's parameters: functions that torch calls with a gradient, or once it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def hooked(module: nn.Module) -> list[str]:
    """The parameters, by name, whose gradients go through a hook."""
    return [name for name, p in module.named_parameters() if _before(p) or _after(p)]


def after_gradients(module: nn.Module) -> dict[int, list[Callable[[Any], Any]]]:
    """The hooks that are called once a gradient is there, by the id of their parameter."""
    return {id(p): list(_after(p).values()) for p in module.parameters() if _after(p)}


def _before(parameter: nn.Parameter) -> dict[int, Callable[[Any], Any]]:
    return parameter._backward_hooks or {}


def _after(parameter: nn.Parameter) -> dict[int, Callable[[Any], Any]]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
