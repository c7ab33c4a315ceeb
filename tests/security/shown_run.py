"""A run on this machine or on Spark that writes down, beside its secrets, all that it shows; for `test_keys`."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import nn

import thinwire as tw
from tests.security.surroundings import Slow, family, leaks, listening, processes
from thinwire import events
from thinwire.dashboard import Dashboard
from thinwire.exchange.spark import link
from thinwire.transport.zmq import Keys

SETTINGS: dict[str, Any] = {"strategy": tw.SparkNet(period=5), "epochs": 3, "batch_size": 32, "validation": 0.2}
UI = ("/jobs/", "/stages/", "/storage/", "/environment/", "/executors/", "/SQL/")
REST = ("jobs", "stages?details=true", "environment", "allexecutors", "storage/rdd", "sql?details=true&length=1000")


class Large(Slow):
    """So large that Spark sends its tasks' code as a broadcast, by way of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(1 << 19), requires_grad=False)


class Notebook:
    """What was shown, in files of one folder; and the secrets, in another that nobody searches."""

    def __init__(self, shown: Path, secrets: Path) -> None:
        self._shown, self._file = shown, secrets
        self.secrets: list[str] = []
        self.told: dict[str, Any] = {}

    def record(self) -> None:
        """Keeps the keys and tokens of all runs from here on."""
        make, wire = Keys.make, link.SparkWire

        def keys() -> Keys:
            made = make()
            for name in ("server_public", "server_secret", "client_public", "client_secret"):
                self.secrets.append(getattr(made, name).decode())
            return made

        def wired(run: str, token: str, **more: Any) -> link.SparkWire:
            self.secrets.append(token)
            found = wire(run, token, **more)
            self.write("how the wire is shown", f"{found!r} {found}".encode())
            return found

        Keys.make = keys  # type: ignore[method-assign]
        link.SparkWire = wired  # type: ignore[assignment, misc]

    def write(self, name: str, content: bytes) -> None:
        path = self._shown / name.replace("/", "_")
        path.write_bytes(content)

    def close(self) -> None:
        self._file.write_text(json.dumps({"secrets": self.secrets, "told": self.told}))


def page_of(url: str, notes: Notebook) -> None:
    """What the dashboard tells those who have its token."""
    where = urlsplit(url)
    token = parse_qs(where.query)["token"][0]
    notes.secrets.append(token)
    for path in ("/", "/metrics", "/stream"):
        connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=300)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        told = b"".join(answer.readline() for _ in range(4)) if path == "/stream" else answer.read()
        assert answer.status == 200
        notes.write(f"dashboard {path}", told)
        connection.close()


def holding(folder: Path, secrets: list[str]) -> dict[str, bool]:
    """Files with a secret, and whether their owner alone can come to them."""
    found = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            ways = [path, *(parent for parent in path.parents if folder in parent.parents)]
            with contextlib.suppress(OSError):  # it may be gone meanwhile
                if leaks([s.encode() for s in secrets], [(str(path), path.read_bytes())]):
                    found[str(path)] = any(not stat.S_IMODE(way.stat().st_mode) & 0o077 for way in ways)
    return found


def looking(notes: Notebook, name: str, more: Callable[[], None], *folders: str) -> Callable[[events.Event], None]:
    """A callback that looks around once, while rounds land; also into folders of temporary files."""
    seen: list[bool] = []
    before = set(listening())

    def look(event: events.Event) -> None:
        if isinstance(event, events.RoundLanded) and event.round >= 1 and not seen:
            seen.append(True)
            for number, (what, content) in enumerate(processes()):
                notes.write(f"{name} {number} {what}", content)
            notes.told[f"{name} processes"] = len(family())
            known = family()
            new = set(listening()) - before
            notes.told[f"{name} ports"] = sorted((port.host, port.pid, known.get(port.pid, "")[:60]) for port in new)
            notes.told[f"{name} driver"] = os.getpid()
            places = (tempfile.gettempdir(), *folders)
            held = {path: own for place in places for path, own in holding(Path(place), notes.secrets).items()}
            notes.told[f"{name} guarded"] = sorted(path for path, own in held.items() if own)
            notes.told[f"{name} unguarded"] = sorted(path for path, own in held.items() if not own)
            more()

    return look


def local(notes: Notebook, out: str) -> None:
    page = Dashboard("0.0.0.0")
    look = looking(notes, "local", lambda: page_of(page.url, notes))
    result = tw.fit(
        Slow(), "digits", cluster=tw.Local(workers=2), out=out, callbacks=[page, look], progress=True, **SETTINGS
    )
    page.close()
    notes.told["local"] = result.summary


def spark(notes: Notebook, out: str, scratch: str) -> None:
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.task.maxFailures": "100",
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.network.timeout": "600s",
        "spark.local.dir": scratch,
        "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{out}",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    builder = SparkSession.builder.master("local-cluster[2,2,1024]").appName("shown")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("INFO")
    from thinwire.data import open_source

    table = next(iter(open_source("digits").batches()))
    pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
    rows = list(zip(pixels, labels, strict=True))
    frame = session.createDataFrame(rows, "pixels array<float>, label int").cache()

    def ui() -> None:
        at = session.sparkContext.uiWebUrl
        api = f"/api/v1/applications/{session.sparkContext.applicationId}"
        for path in (*UI, *(f"{api}/{name}" for name in REST)):
            with urllib.request.urlopen(at + path, timeout=300) as answer:
                notes.write(f"ui {len(notes.secrets)} {path}", answer.read())
        notes.told["plans"] = notes.told.get("plans", 0) + 1

    for exchange, model in (("mesh", Large()), ("spark", Slow())):
        look = looking(notes, exchange, ui, scratch)
        cluster = tw.Spark(workers=2)
        given = SETTINGS | {"inputs": ["pixels"], "exchange": exchange, "cluster": cluster, "callbacks": [look]}
        result = tw.fit(model, frame, out=f"{out}/{exchange}", progress=True, **given)
        notes.told[exchange] = result.summary
    ui()
    application = session.sparkContext.applicationId
    session.stop()
    logs = Path(_find_spark_home(), "work", application)  # where a cluster of this machine keeps its executors' folders
    shutil.move(logs, f"{out}/executors")


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("py4j").setLevel(logging.INFO)  # at DEBUG it writes every command, tasks' code among them
    notes = Notebook(folder / "shown", folder / "secrets.json")
    notes.record()
    out = str(folder / "shown" / "out")
    os.makedirs(out)
    if kind == "local":
        local(notes, out)
    else:
        spark(notes, out, str(folder / "scratch"))
    notes.close()


if __name__ == "__main__":
    main()
