"""`thinwire doctor`, on the cluster of these tests; and where there is none, as an operator runs it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinwire.cli.main import main
from thinwire.cluster import preflight
from thinwire.errors import ConfigError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two files of Parquet, one of which has no rows."""
    for name, rows in (("a", 40), ("b", 0)):
        pq.write_table(pa.table({"x": np.zeros(rows, np.float32)}), tmp_path / f"{name}.parquet")
    return tmp_path


def test_versions_and_rows_are_shown_and_an_empty_partition_is_warned_of(
    files: Path, unstopped: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--workers", "2", "--data", str(files), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["workers"] == 2
    assert sorted(probe["task"] for probe in report["probes"]) == [0, 1]
    assert all(probe["driver"] is None and probe["packages"]["torch"] for probe in report["probes"])
    assert report["problems"] == []
    assert sorted(report["rows"]) == [0, 40], "a worker for each file, and one file has no rows"
    assert any("1 of 2 partitions are empty" in warning for warning in report["warnings"])


def test_rows_that_are_not_there_are_a_problem_and_the_exit_code_says_so(
    tmp_path: Path, unstopped: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"x": np.zeros(0, np.float32)}), tmp_path / "none.parquet")
    assert main(["doctor", "--workers", "2", "--data", str(tmp_path)]) == ConfigError.exit_code
    assert "the data has no rows" in capsys.readouterr().out


def test_a_spark_connect_server_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Spark's own client would try for many minutes, past this test's deadline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["doctor", "--master", f"sc://127.0.0.1:{port}"]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert f"sc://127.0.0.1:{port}" in told
    assert "refused" in told


def test_a_master_that_is_none_is_named_in_a_sentence() -> None:
    command = [sys.executable, "-m", "thinwire", "doctor", "--master", "spork://host:7077"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "master = 'spork://host:7077' gave no Spark session" in done.stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, spark: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written to"):
        preflight.examine(spark, 1, "127.0.0.1", str(tmp_path / "file" / "run"))
