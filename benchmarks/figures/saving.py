"""A figure as SVG, for the eye, and as PNG, for where SVG is not shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(figure: Any, picture: str) -> None:
    """Writes both beside each other; without a date, so that the same numbers give the same file."""
    figure.tight_layout()
    for ending in (".svg", ".png"):
        metadata = {"Date": None} if ending == ".svg" else None
        figure.savefig(Path(picture).with_suffix(ending), dpi=120, metadata=metadata)
