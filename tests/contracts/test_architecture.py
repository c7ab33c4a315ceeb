"""The pages of the architecture and of its words name files that exist; imports between modules have no cycle."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
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


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of thinwire that a file imports, also within functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module} & modules
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
    return found


def test_imports_have_no_cycle() -> None:
    files = {
        ".".join(["thinwire", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    graph = {name: imports_of(path, set(files)) - {name} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {error.args[1]}")
