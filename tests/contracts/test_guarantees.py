"""Every guarantee on the page of assumptions names tests, which are there and are run by `make test`."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "assumptions.md"
SECTION = PAGE.read_text().partition("## What is guaranteed\n")[2].partition("\n## ")[0]
GUARANTEES = [text for text in re.split(r"^- ", SECTION, flags=re.MULTILINE) if text.strip()]


@functools.cache
def found_in(path: str) -> dict[str, bool]:
    """The tests of a file, and whether each is for `make test-all` alone."""
    found: dict[str, bool] = {}
    body = ast.parse((ROOT / path).read_text()).body
    marks = [
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    whole = any(is_long(mark) for value in marks for mark in (value.elts if isinstance(value, ast.List) else [value]))
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.name] = whole or any(is_long(mark) for mark in node.decorator_list)
    return found


def is_long(mark: ast.expr) -> bool:
    """Whether a mark makes all of a test long; one of some of its parameters does not."""
    return ast.unparse(mark) == "pytest.mark.long"


@pytest.mark.parametrize("text", GUARANTEES, ids=lambda text: text.split("**")[1])
def test_a_guarantee_names_tests_that_make_test_runs(text: str) -> None:
    named = re.findall(r"`((?:lab/)?tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) == len(re.findall(r"`(?:lab/)?tests[/`]", text)), (
        "each is written as `path/of/file.py::test_name`"
    )
    assert named, "it names no test"
    for path, name in named:
        assert (ROOT / path).is_file(), f"{path} is not there"
        assert name in found_in(path), f"{path} has no test {name}"
    assert any(not found_in(path)[name] for path, name in named), "`make test` runs none of them"


def test_there_are_guarantees() -> None:
    assert len(GUARANTEES) >= 15
