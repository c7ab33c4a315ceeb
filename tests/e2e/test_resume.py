"""A run that is killed as a whole goes on from its last checkpoint as if nothing had happened.

What a kill leaves is a folder as it is at some moment: most runs here are virtual, and go on from a copy that was made
while they ran. What signals do to processes is seen on real ones.
"""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.cli.main import main
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


def words(recipe: Path, strategy: str, *more: str) -> list[str]:
    name, *rest = strategy.split()
    return ["train", str(recipe), "--json", "--set", f"strategy.name={name}", *rest, *more]


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command as a process, which does not outlive the test."""
    started = []

    def begin(*asked: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "thinwire.cli.main", *asked]
        started.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def final_model(out: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(str(out / "checkpoints"))
    manifest = store.latest()
    assert manifest is not None
    joint = store.read_part(manifest, "joint")
    assert isinstance(joint, dict)
    return joint["model"]


def wait_for_checkpoints(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    log = out / "events.jsonl"
    while not log.exists() or log.read_text().count('"checkpoint_saved"') < count:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)


def workers_of(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [e["pid"] for e in lines if e["kind"] == "worker_joined"]


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize(
    "strategy", [tw.SparkNet(period=5), tw.Synchronous(), tw.DiLoCo(period=5)], ids=lambda each: type(each).__name__
)
def test_a_run_cut_short_twice_comes_to_the_same_parameters_bit_for_bit(
    tmp_path: Path, strategy: tw.Strategy, codec: str
) -> None:
    if isinstance(strategy, tw.Synchronous):
        strategy, codec = tw.Synchronous(codec=codec), "float32"  # it has a codec of its own
    settings = SHORT | {
        "strategy": strategy,
        "codec": codec,
        "epochs": 6,
        "checkpoint_every": 5,
        "validation": 0.2,
        "batch_size": 32,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    }

    def run(folder: Path, saved: int, copy: Path | None, **more: Any) -> tw.Result:
        """A run whose folder is copied when so many checkpoints have been saved."""
        left = [saved]

        def see(event: events.Event) -> None:
            left[0] -= isinstance(event, events.CheckpointSaved)
            if copy is not None and not left[0] and not copy.exists():
                shutil.copytree(folder, copy)

        return tw.fit(mlp, "digits", callbacks=[see], **(settings | more))

    whole, once, twice = (tmp_path / name for name in ("whole", "once", "twice"))
    run(whole, 4, once, out=str(whole))
    run(once, 9, twice, resume=str(once))
    done = run(twice, 0, None, resume=str(twice))
    assert done.summary["epochs"] == 6.0
    first, second = (CheckpointStore(str(out / "checkpoints")).latest() for out in (whole, twice))
    assert first is not None
    assert second is not None
    assert first.name == second.name
    for name, value in final_model(whole).items():
        assert torch.equal(value, final_model(twice)[name]), name


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("sparknet", 1),
        *(pytest.param(name, 2, marks=pytest.mark.long) for name in BARRIER),
    ],
)
def test_a_killed_run_resumes_to_the_same_parameters_bit_for_bit(
    recipe: Path, tmp_path: Path, start: Start, strategy: str, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(words(recipe, BARRIER[strategy], "--out", str(whole))) == 0
    chance = random.Random(strategy)
    interrupted = words(recipe, BARRIER[strategy], "--out", str(cut))
    for kill in range(kills):
        process = start(*interrupted)
        wait_for_checkpoints(process, cut, 2 * (kill + 1))
        time.sleep(chance.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        interrupted = words(recipe, BARRIER[strategy], "--resume", str(cut))
    assert main(interrupted) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["epochs"] == 12.0
    expected, found = final_model(whole), final_model(cut)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_workers_leave_when_the_driver_is_killed(recipe: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "run"
    process = start(*words(recipe, "relay", "--out", str(out), "--set", "train.epochs=10000"))
    wait_for_checkpoints(process, out, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    alive = workers_of(out)
    assert alive
    while alive:  # until the test's own deadline
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(recipe: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "run"
    process = start(*words(recipe, "relay", "--out", str(out), "--set", "train.epochs=10000"))
    wait_for_checkpoints(process, out, 1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert f"--resume {out}" in told.decode()
    assert main(words(recipe, "relay", "--resume", str(out), "--set", "train.steps=50")) == 0


def test_resume_from_a_folder_without_checkpoints_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(recipe, "relay", "--resume", str(tmp_path))) == 8
    assert "holds no complete checkpoint" in capsys.readouterr().err


SHORT: dict[str, Any] = {
    "inputs": ["pixels"],
    "strategy": tw.SparkNet(period=5),
    "cluster": tw.Simulated(workers=2, step_s=0.01),
    "progress": False,
}
"""A run of two workers in virtual time."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch with two checkpoints."""
    out = tmp_path_factory.mktemp("finished") / "run"
    tw.fit(mlp, "digits", out=str(out), epochs=1, batch_size=32, checkpoint_every=15, **SHORT)
    return out


DAMAGES = {
    "a bit of the joint state": ("joint.*", lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]),
    "a bit of a worker's state": ("worker-1.*", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]),
    "a bit of the manifest": ("manifest.json", lambda data: data.replace(b'"version": 1', b'"version": 3')),
    "a part cut short": ("worker-0.*", lambda data: data[: len(data) // 2]),
    "a part gone": ("worker-0.*", lambda data: None),
    "no manifest": ("manifest.json", lambda data: None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    finished: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before, newest = (manifest.name for manifest in CheckpointStore(str(out / "checkpoints")).manifests())
    pattern, harm = DAMAGES[damage]
    (path,) = (out / "checkpoints" / newest).glob(pattern)
    data = harm(path.read_bytes())
    assert data != path.read_bytes()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    summary = tw.fit(mlp, "digits", resume=str(out), epochs=2, batch_size=32, **SHORT).summary
    assert f"going on from checkpoint {before}; newer ones in {out} cannot be used: {newest}: " in caplog.text
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


def test_when_every_checkpoint_is_damaged_the_run_ends_and_names_them(
    finished: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for path in (out / "checkpoints").glob("*/joint.*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert main(words(recipe, "sparknet", "--resume", str(out))) == 8
    told = capsys.readouterr().err
    assert "holds no complete checkpoint; damaged are" in told
    assert all(path.name in told for path in (out / "checkpoints").iterdir())


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
