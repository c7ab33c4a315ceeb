"""The joint model of one round on its way to be evaluated, saved, or both."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Publication(NamedTuple):
    """One publication at one worker, which has the same copy of the joint model as all others."""

    number: int
    model: Tensor
    joint: dict[str, Any] | None
    """The joint state, where it is saved."""
    save: str | None
    """The checkpoint's name; None where it is not saved."""
    own: dict[str, Any] | None
    """This worker's part of the checkpoint."""
    evaluate: bool
