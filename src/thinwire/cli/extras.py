"""Commands of other packages, found by entry points of the group `thinwire.commands`.

Installed packages are searched only when such a command is named or when help lists all commands, so that other
commands start without the search. Only the names in `EXTRAS` are looked up, so that installing a package cannot replace
or add a command unnoticed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "thinwire.commands"


@dataclass(frozen=True)
class Command:
    """The object to which an entry point refers."""

    options: Callable[[argparse.ArgumentParser], None]
    """Adds the command's options to its parser."""
    run: Callable[[argparse.Namespace], int]
    """Runs the command; returns its exit code."""


@dataclass(frozen=True)
class Extra:
    """A command that another package provides."""

    package: str
    """The distribution that provides the command."""
    help: str
    """The command's line in the list of commands."""

    def line(self, name: str) -> str:
        """The command's line in the list of commands, with the package to install if it is missing."""
        return self.help if _entry_point(name) else f"{self.help} (not installed: pip install {self.package})"


EXTRAS = {
    "bench": Extra("thinwire-lab", "run one of the measured comparisons"),
    "testbed": Extra("thinwire-lab", "Spark on an emulated network, and fault injection"),
}


def load(name: str) -> Command:
    """The command with that name.

    Raises:
        ConfigError: The package that provides the command is not installed.
    """
    entry_point = _entry_point(name)
    if entry_point is None:
        package = EXTRAS[name].package
        raise ConfigError(
            f"the command {name!r} is not installed: it comes with the package {package}, which this Python does not "
            f"have. Run: pip install {package}"
        )
    command: Command = entry_point.load()
    return command


def _entry_point(name: str) -> EntryPoint | None:
    """The entry point of a command; None if its package is absent, or only its metadata remain."""
    # searching all installed packages takes time: other commands avoid the import
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=GROUP, name=name)), None)
    return found if found is not None and find_spec(found.module.partition(".")[0]) else None
