"""Workers on executors log as the driver does, on their own standard error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import thinwire as tw
from thinwire.cluster.sessions import start_session
session = start_session(None, 2)
tw.fit("mlp", "digits", inputs=["pixels"], cluster=tw.Spark(workers=2, session=session), epochs=1, progress=False)
session.stop()
"""


@pytest.mark.timeout(300)
def test_tasks_log_with_run_worker_and_generation(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    (tmp_path / "fit.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "fit.py"],
        cwd=tmp_path,
        env=os.environ | {"THINWIRE_LOG": "json", "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"time"')]
    assert len({record["run"] for record in records}) == 1
    driver = {record["pid"] for record in records if record["logger"] == "thinwire.run"}
    for worker in (0, 1):
        own = [r for r in records if r["worker"] == worker and r["pid"] not in driver]
        assert "generation 1 has formed, of workers [0, 1]" in {record["message"] for record in own}
        assert {record["generation"] for record in own} == {None, 1}
