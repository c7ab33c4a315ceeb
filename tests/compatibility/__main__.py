"""Runs all cells and writes the page: `python -m tests.compatibility`."""

from __future__ import annotations

import warnings

from tests.compatibility.cells import SECTIONS
from tests.compatibility.page import PAGE, keys, written

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sections = {section.title: section for section in SECTIONS}
    found = {(title, row, column): sections[title].outcome(row, column) for title, row, column in keys()}
    PAGE.write_text(written(found))
    print(f"{PAGE}: {len(found)} cells")
