"""The page of state machines says what their tables say, and shows each table of the source."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.machines import MACHINES, PAGE, page

SOURCE = Path(__file__).parents[2] / "src" / "thinwire"


def test_the_page_is_what_make_machines_writes() -> None:
    assert PAGE.read_text() == page(), "run `make machines`"


def test_every_table_of_transitions_is_on_the_page() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Transitions":
                found.add(str(path.relative_to(SOURCE)))
    assert found == {machine.file for machine in MACHINES}


def test_the_owner_that_the_page_names_is_the_only_class_that_moves_the_machine() -> None:
    """Each owner has one method that assigns the state, and no other file calls a table's `after`."""
    callers: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for kind in [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]:
            for node in ast.walk(kind):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr == "after"
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "TRANSITIONS"
                ):
                    callers.setdefault(kind.name, set()).add(path.name)
    assert set(callers) == {machine.owner for machine in MACHINES}
