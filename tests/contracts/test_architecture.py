"""The pages of the architecture and of its words name files that exist, and the first one every room of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "thinwire"
PAGES = ROOT / "docs" / "explanation"
TEXT, WORDS = ((PAGES / name).read_text() for name in ("architecture.md", "glossary.md"))
FILES = sorted(set(re.findall(r"\b(?:[a-z_]+/)*[a-z_]+\.py\b", TEXT + WORDS)) - {"__init__.py"})
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_the_page_names_exists(file: str) -> None:
    assert (SOURCE / file).is_file()


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_tells_of_every_room(room: str) -> None:
    assert f"`{room}/`" in TEXT
