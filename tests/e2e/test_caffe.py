"""Caffe's files from the command line: shown, converted, trained by a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.programs import page_here

from thinwire import caffe
from thinwire.caffe.sources import write_lmdb

ROOT = Path(__file__).parents[2]
NET = str(ROOT / "recipes" / "caffe" / "digits_train_val.prototxt")
SOLVER = str(ROOT / "recipes" / "caffe" / "digits_solver.prototxt")


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have room for all they say."""
    monkeypatch.setenv("COLUMNS", "160")


def test_a_network_a_solver_and_weights_are_shown(command: Any, tmp_path: Path) -> None:
    shown = command("caffe", "show", NET)
    assert shown.returncode == 0, shown.stderr
    assert "64×16×4×4" in shown.stdout
    assert "17,258" in shown.stdout
    solver = command("caffe", "show", SOLVER)
    assert "inv" in solver.stdout
    caffe.save(caffe.load(NET), tmp_path / "x.caffemodel")
    assert "16×1×3×3, 16" in command("caffe", "show", str(tmp_path / "x.caffemodel")).stdout


def test_weights_are_converted_and_come_back_the_same(command: Any, tmp_path: Path) -> None:
    there, back = tmp_path / "x.safetensors", tmp_path / "back.caffemodel"
    torch.manual_seed(1)
    caffe.save(caffe.load(NET), tmp_path / "x.caffemodel")
    done = command("caffe", "convert", NET, "--weights", str(tmp_path / "x.caffemodel"), "--out", str(there))
    assert done.returncode == 0, done.stderr
    assert "17,258 parameters of 3 layers" in done.stdout
    done = command("caffe", "convert", NET, "--weights", str(there), "--out", str(back))
    assert done.returncode == 0, done.stderr
    assert back.read_bytes() == (tmp_path / "x.caffemodel").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["show", "nowhere.prototxt"], 2, "is not a file"),
        (["show", NET, "--input", "8by8"], 2, "is not a shape"),
        (["convert", NET, "--out", "x.pt"], 2, "--weights is missing"),
        (["convert", NET, "--weights", "nowhere.caffemodel", "--out", "x.safetensors"], 3, "is not a file"),
        (["convert", NET, "--weights", NET, "--out", "x.safetensors"], 3, "is not a NetParameter"),
        (["shwo"], 2, "'shwo' is not a command. Did you mean 'show'"),
    ],
)
def test_mistakes_are_answered(command: Any, arguments: list[str], code: int, said: str) -> None:
    done = command("caffe", *arguments)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_the_caffe_recipe_trains_and_leaves_a_caffemodel(command: Any, tmp_path: Path) -> None:
    done = command("train", "recipes/caffe.toml", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 200
    assert summary["val_accuracy"] >= 0.9
    net = caffe.load(NET, weights=tmp_path / "model.caffemodel", phase="TEST")
    assert float(net.params["conv1"][0].detach().abs().sum()) > 0


def test_rows_come_from_the_folder_that_the_data_layer_names(command: Any, tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    rows = [(chance.integers(0, 256, (1, 8, 8)).astype(np.uint8), i % 10) for i in range(200)]
    for name in ("train_lmdb", "test_lmdb"):
        write_lmdb(tmp_path / name, rows)
    text = Path(NET).read_text()
    start, end = text.index("layer {"), text.index('layer {\n  name: "conv1"')
    data = ""
    for phase, name in (("TRAIN", "train_lmdb"), ("TEST", "test_lmdb")):
        data += f'layer {{ name: "d" type: "Data" top: "data" top: "label" include {{ phase: {phase} }} '
        data += "transform_param { scale: 0.00390625 } "
        data += f'data_param {{ source: "{name}" batch_size: 20 backend: LMDB }} }}\n'
    (tmp_path / "net.prototxt").write_text(text[:start] + data + text[end:])
    solver = 'net: "net.prototxt" base_lr: 0.01 momentum: 0.9 max_iter: 10 test_interval: 5'
    (tmp_path / "solver.prototxt").write_text(solver)
    (tmp_path / "r.toml").write_text('[train]\nsolver = "solver.prototxt"\n[strategy]\nname = "synchronous"\n')
    done = command("train", "r.toml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["rows"]) == (10, 400)
    assert 0 <= summary["val_accuracy"] <= 1
    named = command("train", "r.toml", "--json", "--set", "data.source=lmdb:test_lmdb", folder=tmp_path)
    assert named.returncode == 0, named.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.zoo=cnn8", "[model] names both a Caffe network"),
        ("train.scheduler={ name = 'step', step_size = 1 }", "leave train.scheduler out"),
        ("model.caffe=nowhere.prototxt", "is not a file"),
        ("strategy={ name = 'parameter_table' }", "cannot step at servers"),
        ("train.solver=nowhere.prototxt", "is not a file"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(command: Any, change: str, said: str) -> None:
    done = command("train", "recipes/caffe.toml", "--set", change)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_code_of_the_how_to_runs(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    page_here(ROOT / "docs" / "how-to" / "caffe.md", tmp_path)
    assert (tmp_path / "out.caffemodel").exists()
