"""Names of rounds and checkpoints: their form, order and parsing in one place.

"train:12" is the thirteenth training round, "buffers:3" a one-off mean; "000003-step-21" is a checkpoint.
"""

from __future__ import annotations

import re

FINAL = "final"
"""Suffix of names of rounds and checkpoints that are made once, at the end of a run."""
_AFTER_ALL_STEPS = 1 << 62


def before(key: str, landed: int) -> bool:
    """Whether a round is one of the first `landed` training rounds.

    >>> before("train:2", 3), before("train:3", 3), before("buffers:0", 3)
    (True, False, False)
    """
    round = train_number(key)
    return round is not None and round < landed


def train_number(key: str) -> int | None:
    """The number of a training round; None for any other."""
    return number(key, "train")


def number(key: str, kind: str) -> int | None:
    """The number of a round of this kind; None for any other."""
    found, _, text = key.partition(":")
    return int(text) if found == kind and text.isdecimal() else None


def checkpoint_name(number: int, steps: int) -> str:
    """The name of a checkpoint that all workers publish under a number; the last checkpoint has the next number.

    >>> checkpoint_name(3, 21)
    '000003-step-21'
    """
    return f"{number:06d}-step-{steps}"


def final_checkpoint_name(number: int) -> str:
    """The name of a run's last checkpoint.

    >>> final_checkpoint_name(4)
    '000004-final'
    """
    return f"{number:06d}-{FINAL}"


def checkpoint_number(name: str) -> int:
    """The number under which workers publish a checkpoint.

    >>> checkpoint_number("000003-step-21")
    3
    """
    return int(name.partition("-")[0])


def checkpoint_order(name: str) -> list[int]:
    """The sort key of a checkpoint's name: its number, then its steps; the last checkpoint of a run sorts last.

    >>> checkpoint_order("000005-step-96") < checkpoint_order("000005-step-104") < checkpoint_order("000005-final")
    True
    """
    return [int(number) for number in re.findall("[0-9]+", name)] + [_AFTER_ALL_STEPS] * name.endswith(FINAL)
