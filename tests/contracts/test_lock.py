"""requirements.lock holds what pyproject.toml asks for in development, each version with hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11, which the lock is for")
TREE = Path(__file__).parents[2]
LOCK = TREE / "requirements.lock"
LEFT_OUT = {"torch", "thinwire"}
"""The lock's header says why torch is."""


def asked() -> dict[str, Requirement]:
    """The project's requirements, those of its development, and of the extras named there."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    waiting, found = [*project["dependencies"], *extras["dev"]], {}
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == "thinwire":
            waiting += [each for extra in requirement.extras for each in extras[extra]]
        elif requirement.marker is None or requirement.marker.evaluate(default_environment() | {"extra": ""}):
            found[canonicalize_name(requirement.name)] = requirement
    return found


def locked() -> dict[str, tuple[str, int]]:
    """The lock's versions by name, with how many hashes each has."""
    blocks = re.split(r"\n(?=\S)", LOCK.read_text().replace("\\\n", ""))
    pins = [re.match(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*$", block) for block in blocks]
    assert all(pin or block.startswith("#") for pin, block in zip(pins, blocks, strict=True)), "another form of line"
    return {pin[1]: (pin[2], pin[3].count("--hash")) for pin in pins if pin}


def test_the_lock_has_a_version_with_hashes_for_all_that_is_asked_for() -> None:
    pins = locked()
    for name, requirement in asked().items():
        if name not in LEFT_OUT:
            assert name in pins, f"make lock: {name} is not in it"
            assert requirement.specifier.contains(pins[name][0], prereleases=True), (name, pins[name])
    assert all(count for _, count in pins.values())
    assert not LEFT_OUT & set(pins)
