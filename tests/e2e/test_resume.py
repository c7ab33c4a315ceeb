"""A run that is killed as a whole goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.data import open_source
from thinwire.models import mlp

RECIPE = """
[model]
zoo = "mlp"
[data]
source = "digits"
inputs = ["pixels"]
validation = 0.2
[train]
epochs = 12
batch_size = 32
optimizer = { name = "sgd", lr = 0.05, momentum = 0.9 }
scheduler = { name = "step", step_size = 4, gamma = 0.5 }
[cluster]
workers = 2
[run]
checkpoint_every = 5
"""

BARRIER = {
    "sparknet": "sparknet --set strategy.period=5",
    "synchronous": "synchronous",
    "compressed": "sparknet --set strategy.period=5 --set exchange.codec=int8",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def command(recipe: Path, strategy: str, *more: str) -> list[str]:
    name, *rest = strategy.split()
    return [
        sys.executable,
        "-m",
        "thinwire.cli.main",
        "train",
        str(recipe),
        "--json",
        "--set",
        f"strategy.name={name}",
        *rest,
        *more,
    ]


def final_model(out: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(str(out / "checkpoints"))
    manifest = store.latest()
    assert manifest is not None
    joint = store.read_part(manifest, "joint")
    assert isinstance(joint, dict)
    return joint["model"]


def wait_for_checkpoints(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        log = out / "events.jsonl"
        if log.exists() and log.read_text().count('"checkpoint_saved"') >= count:
            return
        time.sleep(0.005)
    pytest.fail("no checkpoint came")


def workers_of(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [e["pid"] for e in lines if e["kind"] == "worker_joined"]


@pytest.mark.parametrize("strategy", BARRIER.values(), ids=BARRIER.keys())
def test_a_killed_run_resumes_to_the_same_parameters_bit_for_bit(recipe: Path, tmp_path: Path, strategy: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(command(recipe, strategy, "--out", str(whole)), check=True, timeout=100, capture_output=True)
    chance = random.Random(strategy)
    interrupted = command(recipe, strategy, "--out", str(cut))
    for kill in range(2):
        process = subprocess.Popen(interrupted, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_checkpoints(process, cut, 2 * (kill + 1))
        time.sleep(chance.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        interrupted = command(recipe, strategy, "--resume", str(cut))
    done = subprocess.run(interrupted, check=True, timeout=100, capture_output=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["epochs"] == 12.0
    expected, found = final_model(whole), final_model(cut)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_workers_leave_when_the_driver_is_killed(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = command(recipe, "relay", "--out", str(out), "--set", "train.epochs=10000")
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_checkpoints(process, out, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    alive = workers_of(out)
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
        time.sleep(0.05)
    assert not alive


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = command(recipe, "relay", "--out", str(out), "--set", "train.epochs=10000")
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for_checkpoints(process, out, 1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--resume {out}" in told.decode()
    again = command(recipe, "relay", "--resume", str(out), "--set", "train.steps=50")
    assert subprocess.run(again, timeout=100, capture_output=True).returncode == 0


def test_resume_from_a_folder_without_checkpoints_is_refused(recipe: Path, tmp_path: Path) -> None:
    done = subprocess.run(command(recipe, "relay", "--resume", str(tmp_path)), capture_output=True, timeout=60)
    assert done.returncode == 8
    assert "holds no complete checkpoint" in done.stderr.decode()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    path = folder / "recipe.toml"
    path.write_text(RECIPE.replace("checkpoint_every = 5", "checkpoint_every = 15"))
    line = command(path, "sparknet --set strategy.period=5 --set train.epochs=1", "--out", str(folder / "run"))
    subprocess.run(line, check=True, timeout=100, capture_output=True)
    return path


DAMAGES = {
    "a bit of the joint state": ("joint.*", lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]),
    "a bit of a worker's state": ("worker-1.*", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]),
    "a bit of the manifest": ("manifest.json", lambda data: data.replace(b'"version": 1', b'"version": 3')),
    "a part cut short": ("worker-0.*", lambda data: data[: len(data) // 2]),
    "a part gone": ("worker-0.*", lambda data: None),
    "no manifest": ("manifest.json", lambda data: None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(finished: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished.parent / "run", out)
    before, newest = (manifest.name for manifest in CheckpointStore(str(out / "checkpoints")).manifests())
    pattern, harm = DAMAGES[damage]
    (path,) = (out / "checkpoints" / newest).glob(pattern)
    data = harm(path.read_bytes())
    assert data != path.read_bytes()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    line = command(finished, "sparknet --set strategy.period=5 --set train.epochs=2", "--resume", str(out))
    done = subprocess.run(line, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"going on from checkpoint {before}; newer ones in {out} cannot be used: {newest}: " in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["epochs"] == 2.0
    assert summary["resumed_from"] == before
    assert list(summary["passed_over"]) == [newest]
    started = [json.loads(text) for text in (out / "events.jsonl").read_text().splitlines() if "run_started" in text]
    assert started[-1]["resumed_from"] == before
    assert started[-1]["passed_over"] == summary["passed_over"]
    whole, passed = CheckpointStore(str(out / "checkpoints")).newest_whole()
    assert whole is not None
    assert whole.name == summary["checkpoint"]
    assert not passed, "what was damaged is cleared away"


def test_when_every_checkpoint_is_damaged_the_run_ends_and_names_them(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished.parent / "run", out)
    for path in (out / "checkpoints").glob("*/joint.*"):
        path.write_bytes(path.read_bytes()[:-1])
    done = subprocess.run(command(finished, "sparknet", "--resume", str(out)), timeout=60, capture_output=True)
    assert done.returncode == 8
    told = done.stderr.decode()
    assert "holds no complete checkpoint; damaged are" in told
    assert all(path.name in told for path in (out / "checkpoints").iterdir())


SHORT: dict[str, Any] = {
    "inputs": ["pixels"],
    "strategy": tw.SparkNet(period=5),
    "cluster": tw.Local(workers=2, processes=False),
    "progress": False,
}
"""A run of two workers in this process."""


def test_the_best_model_of_before_is_given_back_after_a_resume(tmp_path: Path) -> None:
    """The later epochs, at a rate that ruins the model, are worse than those of the first run."""
    settings = SHORT | {"validation": 0.2, "restore_best": True}
    out = str(tmp_path / "run")
    good = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
    first = tw.fit(mlp, "digits", optimizer=good, epochs=4, out=out, **settings)
    bad = lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9)  # noqa: E731
    again = tw.fit(mlp, "digits", optimizer=bad, epochs=6, resume=out, **settings)
    best = max(row["val_accuracy"] for row in first.history)
    assert again.summary["val_accuracy"] < best - 0.2, "the rate was to ruin it"
    table = next(iter(open_source("digits").batches()))
    pixels = torch.tensor(table.column("pixels").storage.to_pylist())
    labels = torch.tensor(table.column("label").to_pylist())
    with torch.no_grad():
        assert (again.model(pixels).argmax(1) == labels).float().mean() > best - 0.05


def test_a_worker_without_a_part_in_the_checkpoint_goes_on_from_its_own_last_place(tmp_path: Path) -> None:
    """It had been lost when the checkpoint was written: nobody else's rows stand for its own."""
    settings = SHORT | {"epochs": 3}
    out = str(tmp_path / "run")
    first = tw.fit(mlp, "digits", out=out, **settings)
    store = CheckpointStore(f"{out}/checkpoints")
    found = store.latest()
    assert found is not None
    at = dict(found.meta["workers_at"])
    assert at["1"]["position"] == [3, 0]
    own = at["1"]["rows"] // 3
    meta = found.meta | {"workers_at": at | {"1": {"position": [1, 0], "steps": at["1"]["steps"] // 3, "rows": own}}}
    parts = tuple(part for part in found.parts if part.name != "worker-1")
    store.commit(dataclasses.replace(found, parts=parts, meta=meta))
    log: list[events.Event] = []
    again = tw.fit(mlp, "digits", resume=out, callbacks=[log.append], **settings)
    ended = [(e.worker, e.epoch) for e in log if isinstance(e, events.EpochEnded)]
    assert ended == [(1, 1), (1, 2)]
    assert again.summary["rows"] == first.summary["rows"]
