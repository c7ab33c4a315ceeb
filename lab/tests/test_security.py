"""Where the laboratory makes words into code or programs; thinwire's own places are in tests/security."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.security.test_unpickling import found_in, imported_from

SOURCES = Path(__file__).parents[1] / "src" / "thinwire_lab"
ALLOWED = {
    ("chaos/trial.py", "subprocess.Popen"): "this Python, without a shell",
    ("chaos/host.py", "subprocess.run"): "programs named here, of a bout's own folder",
    ("commands/bench.py", "subprocess.run"): "this repository's own figures",
    ("soak/order.py", "subprocess.Popen"): "this Python, without a shell",
    ("testbed.py", "subprocess.Popen"): "for benchmarks",
    ("testbed.py", "subprocess.run"): "for benchmarks",
}
OUTSIDE = ("bench/",)
"""Programs of this repository that start each other; they read nothing from elsewhere."""


def test_every_place_where_bytes_become_code_is_listed_with_its_reason() -> None:
    trees = {p.relative_to(SOURCES).as_posix(): ast.parse(p.read_text()) for p in sorted(SOURCES.rglob("*.py"))}
    inside = {name: tree for name, tree in trees.items() if not name.startswith(OUTSIDE)}
    found = {(name, call) for name, tree in inside.items() for call in found_in(tree) | imported_from(tree)}
    assert found == set(ALLOWED)
