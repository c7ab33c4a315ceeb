"""What schedules came to, slice by slice, in one file: a hundred thousand are played in pieces that fit a night."""

from __future__ import annotations

import json
import os
from typing import Any

from thinwire.errors import ConfigError

MOST_FAILED = 100


def add(path: str, seeds: range, told: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Adds a slice to a file, and returns all that is in it now; `about` is of the last slice.

    Raises:
        ConfigError: Some of the seeds are in it already.
    """
    kept = check(path, seeds)
    kept["seeds"] = _joined([*kept["seeds"], [seeds.start, seeds.stop]])
    for name in ("played", "seconds", "virtual_s", "workers_lost"):
        kept[name] = round(kept.get(name, 0) + told[name], 1)
    for name in ("outcomes", "strategies"):
        before = kept.setdefault(name, {})
        kept[name] = {key: before.get(key, 0) + told[name].get(key, 0) for key in sorted({*before, *told[name]})}
    kept["failed"] = [*kept.get("failed", []), *told["failed"]][:MOST_FAILED]
    kept |= about
    with open(f"{path}.partial", "w") as file:
        file.write(json.dumps(kept, indent=1) + "\n")
    os.replace(f"{path}.partial", path)
    return kept


def check(path: str, seeds: range) -> dict[str, Any]:
    """What a file has, none of these seeds among it.

    Raises:
        ConfigError: Some of the seeds are in it already.
    """
    kept = _read(path)
    for first, end in kept["seeds"]:
        if seeds.start < end and first < seeds.stop:
            raise ConfigError(f"{path} has seeds {first}:{end} already; give others, or another file")
    return kept


def _read(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {"name": "schedules", "seeds": []}
    with open(path) as file:
        found: dict[str, Any] = json.load(file)
    return found


def _joined(slices: list[list[int]]) -> list[list[int]]:
    """Neighbours as one.

    >>> _joined([[10, 20], [0, 10], [30, 40]])
    [[0, 20], [30, 40]]
    """
    found: list[list[int]] = []
    for first, end in sorted(slices):
        if found and found[-1][1] == first:
            found[-1][1] = end
        else:
            found.append([first, end])
    return found
