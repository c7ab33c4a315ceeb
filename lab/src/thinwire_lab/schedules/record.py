"""Accumulates results of schedules in one file, slice by slice, so that many seeds can run in several sessions."""

from __future__ import annotations

import json
import os
from typing import Any

from thinwire.errors import ConfigError

MOST_FAILED = 100


def add(path: str, seeds: range, told: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Adds a slice to a file, and returns the file's content; `about` describes the last slice.

    Raises:
        ConfigError: The file already has some of the seeds.
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
    """The content of a file that has none of these seeds.

    Raises:
        ConfigError: The file already has some of the seeds.
    """
    kept = _read(path)
    for first, end in kept["seeds"]:
        if seeds.start < end and first < seeds.stop:
            raise ConfigError(f"{path} has seeds {first}:{end} already; give other seeds, or another file")
    return kept


def _read(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {"name": "schedules", "seeds": []}
    with open(path) as file:
        found: dict[str, Any] = json.load(file)
    return found


def _joined(slices: list[list[int]]) -> list[list[int]]:
    """Joins adjacent slices.

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
