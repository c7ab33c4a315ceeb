"""How tests are spread over the processes of `pytest -n`."""

from __future__ import annotations

import pytest

TOGETHER = {"spark", "testbed", "test_bench.py"}
"""Tests that share a Spark session, or the machine's network namespaces: one process runs them all."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TOGETHER & set(item.path.parts):
            item.add_marker(pytest.mark.xdist_group("cluster"))
