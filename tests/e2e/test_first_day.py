"""A stranger's first day: an empty folder, the tutorials, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def parts(page: Path) -> list[tuple[str, str]]:
    """What is to be typed, in order: commands, and the pieces of one program."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def program(page: Path) -> str:
    return "\n\n".join(body for language, body in parts(page) if language == "python")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stranger_s_first_hour(shell: Any) -> None:
    page = TUTORIALS / "first-run.md"
    kinds = [language for language, _ in parts(page)]
    first, last = kinds.index("python"), len(kinds) - kinds[::-1].index("python")
    assert set(kinds[first:last]) == {"python"}, "one program, so that it can be run as one"
    (shell.folder / "first.py").write_text(program(page))
    before = "".join(shell.follow(body) for _, body in parts(page)[:first])
    assert re.search(r"thinwire \d", before)
    told = shell.run("python first.py", timeout_s=1200)
    assert float(re.search(r"([\d.]+) of the validation rows are right", told)[1]) > 0.9
    assert "12.0 epochs in all" in told
    after = "".join(shell.follow(body) for _, body in parts(page)[last:])
    assert "<html" in after
    assert '"epochs": 12.0' in after
    assert (shell.folder / "signs.pt").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_then_a_table_of_ones_own_predictions_and_a_run_that_goes_on(shell: Any) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    (shell.folder / "table.py").write_text(program(TUTORIALS / "dataframe-to-predictions.md"))
    told = shell.run("python table.py", timeout_s=1200)
    assert float(re.search(r"([\d.]+) of the rest are right", told)[1]) > 0.9
    assert "10.0 epochs in all" in told
    assert list((shell.folder / "predictions").glob("*.parquet"))
    assert (shell.folder / "ring-model" / "metadata").exists()
    log = [json.loads(line) for line in (shell.folder / "runs" / "rings" / "events.jsonl").read_text().splitlines()]
    assert [e["resumed_from"] is not None for e in log if e["kind"] == "run_started"] == [False, True]
