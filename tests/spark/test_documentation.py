"""Code of the documentation that needs Spark runs, on the cluster of these tests."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, example_here, page_here, run_here

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
PAGES = (
    "how-to/clusters.md",
    "how-to/migrate/elephas.md",
    pytest.param("how-to/migrate/torchdistributor.md", marks=pytest.mark.long),
    pytest.param("how-to/migrate/horovod.md", marks=pytest.mark.long),
    pytest.param("how-to/migrate/sparktorch.md", marks=pytest.mark.long),
)
EXAMPLES = (
    "spark_digits.py",
    pytest.param("sql_to_table.py", marks=pytest.mark.long),
    pytest.param("stream.py", marks=pytest.mark.long),
    pytest.param("sparknet_by_hand.py", marks=pytest.mark.long),
    pytest.param("optuna_search.py", marks=pytest.mark.long),
)
NEEDS = {"optuna_search.py": "optuna"}
"""Packages of examples that no extra brings."""


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_as_one_program(unstopped: Any, page: str, tmp_path: Path) -> None:
    page_here(ROOT / "docs" / page, tmp_path)


@pytest.mark.long
def test_the_example_of_flights_comes_to_an_auc(unstopped: Any, tmp_path: Path) -> None:
    folder = Path(os.environ.get("THINWIRE_FLIGHTS", ROOT.parent / "shared" / "data" / "tabular" / "nycflights13"))
    if not (folder / "flights.parquet").exists():
        pytest.skip("the tables of nycflights13 are not here: name their folder in THINWIRE_FLIGHTS")
    printed = run_here(ROOT / "examples" / "flights.py", str(folder), folder=tmp_path)
    found = [float(number) for number in re.findall(r"0\.\d{4}", printed)]
    assert found[0] == pytest.approx(found[1], abs=1e-3), "the workers' AUC is Spark ML's"
    assert found[0] > 0.7


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints_something(unstopped: Any, name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    assert len(example_here(name, folder=tmp_path).split()) > 3
