"""The version of thinwire as installed; it stands in pyproject.toml and nowhere else."""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("thinwire")
except metadata.PackageNotFoundError:  # a source tree on the path
    __version__ = "0+unknown"
