"""A run's keys and tokens are in no log, no event, no checkpoint, no process list and no page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.transport.zmq import Keys

from .surroundings import files, forms, leaks

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1800)


def run(kind: str, folder: Path) -> tuple[list[bytes], dict[str, Any]]:
    """A run in a process of its own, which leaves all that it showed in `shown`; its secrets, and what it came to."""
    for name in ("shown", "scratch", "temporary"):
        (folder / name).mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(folder / "temporary"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with open(folder / "shown" / "stdout", "wb") as out, open(folder / "shown" / "stderr", "wb") as error:
        words = [sys.executable, "-W", "ignore", "-m", "tests.security.shown_run", kind, str(folder)]
        done = subprocess.run(words, stdout=out, stderr=error, env=environment, cwd=folder, timeout=1700)
    assert done.returncode == 0, (folder / "shown" / "stderr").read_text(errors="replace")[-3000:]
    found = json.loads((folder / "secrets.json").read_text())
    return [secret.encode() for secret in found["secrets"]], found["told"]


def test_the_search_finds_a_secret_in_every_form() -> None:
    secret = Keys.make().client_secret
    assert len(forms(secret)) >= 12
    for form in forms(secret):
        assert leaks([secret], [("here", b"before" + form + b"after"), ("there", b"nothing")]) == ["here"]
    for before in (b"", b"a", b"ab", b"abc"):
        assert leaks([secret], [("here", base64.b64encode(before + secret + b"more"))]) == ["here"]


def test_a_local_run_shows_no_secret(tmp_path: Path) -> None:
    secrets, told = run("local", tmp_path)
    assert len(secrets) == 5, "four keys and the dashboard's token"
    assert told["local"]["complete"]
    assert told["local processes"] >= 4, "the driver, who starts workers, and two workers"
    shown = list(files(tmp_path / "shown"))
    names = " ".join(name for name, _ in shown)
    for wanted in ("events.jsonl", "summary.json", ".safetensors", "manifest.json", "stderr", "cmdline", "environ"):
        assert wanted in names
    assert sum("dashboard" in name for name, _ in shown) == 3
    assert leaks(secrets, shown) == []
    assert told["local guarded"] == told["local unguarded"] == [], "no file has one"
    assert {host for host, _, _ in told["local ports"]} == {"127.0.0.1"}
    assert list(files(tmp_path / "temporary")) == [], "nothing is left"


@pytest.mark.long
def test_runs_on_spark_show_no_secret(tmp_path: Path) -> None:
    """Over ports of the mesh, and over Spark's own jobs; with the code of one so large that it lies in a file."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    secrets, told = run("spark", tmp_path)
    assert len(secrets) == 5, "four keys, and the token of the run that has none"
    assert told["mesh"]["complete"]
    assert told["spark"]["complete"]
    assert told["plans"] == 3
    shown = list(files(tmp_path / "shown"))
    names = " ".join(name for name, _ in shown)
    for wanted in ("environment", "sql", "out/executors/0/stderr", "events.jsonl", "how the wire is shown", "cmdline"):
        assert wanted in names
    assert any(b"MapInArrow" in content for name, content in shown if "sql" in name), "plans are told"
    assert leaks(secrets, shown) == []
    assert told["mesh guarded"], "Spark keeps long code in a file"
    assert told["mesh unguarded"] == told["spark unguarded"] == [], "which is its owner's alone"
    assert {host for host, _, _ in told["mesh ports"]} == {"127.0.0.1"}, "what Spark calls this machine"
    assert told["mesh driver"] in {pid for _, pid, _ in told["mesh ports"]}
    assert all("java" in command or "pyspark.daemon" in command for _, _, command in told["spark ports"])
    assert told["spark driver"] not in {pid for _, pid, _ in told["spark ports"]}, "no port beside Spark's"
    left = leaks(secrets, [*files(tmp_path / "temporary"), *files(tmp_path / "scratch")])
    assert left == [], "nothing is left"
