"""How tests are dealt out to processes: a file to one of them, and all that share the Spark cluster to one."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = "spark" if "spark" in item.path.parent.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
