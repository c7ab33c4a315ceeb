"""Names of rounds: "train:12" is the thirteenth training round, "buffers:3" a one-off mean."""

from __future__ import annotations


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
