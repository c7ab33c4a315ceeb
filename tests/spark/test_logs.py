"""Workers on executors log as the driver does, on their own standard error."""

from __future__ import annotations

import json
from typing import Any

import pytest

import thinwire as tw
from thinwire import logs

from .conftest import PATIENT, Clusters


def records_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]


@pytest.mark.timeout(900)
def test_tasks_log_with_run_worker_and_generation(
    spark: Any, clusters: Clusters, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THINWIRE_LOG", "json")
    cluster = tw.Spark(workers=2, preflight=False)
    try:
        tw.fit("mlp", "digits", inputs=["pixels"], cluster=cluster, deadlines=PATIENT, epochs=1, progress=False)
    finally:
        logs.start(None)
    driver = [record for record in records_in(capfd.readouterr().err) if record["logger"] == "thinwire.run"]
    (name,) = {record["run"] for record in driver}
    records = [record for record in records_in(clusters.told()) if record["run"] == name]
    for worker in (0, 1):
        own = [record for record in records if record["worker"] == worker]
        assert "generation 1 has formed, of workers [0, 1]" in {record["message"] for record in own}
        assert {record["generation"] for record in own} == {None, 1}
