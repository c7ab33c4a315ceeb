"""The command line: runs, tables, JSON, and mistakes that are answered with the way out."""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import zmq

import thinwire
from thinwire.cli import version
from thinwire.cli.main import main

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "recipes" / "digits.toml")

pytestmark = pytest.mark.timeout(900)


def test_the_demo_recipe_trains_and_ends_in_a_table() -> None:
    """In a process of its own, as a user runs it."""
    line = [sys.executable, "-m", "thinwire", "train", DIGITS, "--set", "train.epochs=2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for word in ("relay", "workers", "steps", "seconds", "val accuracy", "busy", "bytes sent"):
        assert word in done.stdout
    assert "thinwire.run" not in done.stderr, "without being asked nothing is logged"
    assert "run_started" not in done.stderr


def test_json_is_the_last_line_and_holds_the_summary(command: Any, tmp_path: Path) -> None:
    done = command(
        "train", DIGITS, "--set", "strategy.name=sparknet", "--set", "train.epochs=2", "--json", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["strategy"] == "sparknet"
    assert summary["epochs"] == 2.0
    assert summary == json.loads((tmp_path / "summary.json").read_text())


def test_a_factory_beside_the_recipe_is_found(command: Any, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\ndef tiny():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "\ndef double(columns):\n    return columns | {'pixels': columns['pixels'] * 2}\n"
    )
    (tmp_path / "recipe.toml").write_text(
        '[model]\nfactory = "nets:tiny"\n[data]\nsource = "digits"\ntransform = "nets:double"\nvalidation = 0.1\n'
        '[train]\nepochs = 1\noptimizer = { name = "adam", lr = 0.01 }\n[strategy]\nname = "synchronous"\n'
        "stop_here = 1\n"
    )
    refused = command("train", "recipe.toml", folder=tmp_path)
    assert refused.returncode == 2
    assert "strategy.stop_here is not a knob of 'synchronous'" in refused.stderr
    (tmp_path / "recipe.toml").write_text((tmp_path / "recipe.toml").read_text().replace("stop_here = 1\n", ""))
    done = command("train", "recipe.toml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["train.epochz=3"], 2, "train.epochz is not known. Did you mean 'epochs'?"),
        (["trian.epochs=3"], 2, "[trian] is not a section of a recipe. Did you mean 'train'?"),
        (["train.epochs=many"], 2, "train.epochs = 'many' is str; it must be int"),
        (["strategy.name=rely"], 2, "Did you mean 'relay'?"),
        (["strategy.bitz=4"], 2, "Did you mean 'bits'?"),
        (["train.optimizer.name=sgdd"], 2, "Did you mean 'sgd'?"),
        (["train.optimizer={name='sgd', lrr=1}"], 2, "train.optimizer 'sgd' does not take"),
        (["train.scheduler={name='cosin'}"], 2, "Did you mean 'cosine'?"),
        (["cluster.kind=locl"], 2, "Did you mean 'local'?"),
        (["cluster.workers=0"], 2, "cluster.workers = 0 is too small"),
        (["model.zoo=cnn9"], 2, "Did you mean 'cnn8'?"),
        (["model.factory=nowhere:net"], 2, "needs one of zoo, factory and caffe"),
        (["data.source=digts"], 3, "Did you mean 'digits'?"),
        (["data.source=missing/*.parquet"], 3, "missing/*.parquet"),
        (["data.inputs=['pixel']"], 3, "Did you mean 'pixels'?"),
        (["train"], 2, "write it as --set train.epochs=5"),
        (["train.stop={patienc=3}"], 2, "Did you mean 'patience'?"),
        (["exchange.codec=int5"], 2, "int"),
    ],
)
def test_a_mistake_in_a_recipe_is_named_with_its_path(
    changes: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for change in changes for word in ("--set", change)]
    assert main(["train", DIGITS, "--json", *options]) == code
    assert message in capsys.readouterr().err


def test_a_recipe_that_is_not_there_or_not_toml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "none.toml")]) == 2
    assert "is not a file" in capsys.readouterr().err
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    assert main(["train", str(broken)]) == 2
    assert "is not valid TOML" in capsys.readouterr().err


def test_an_out_folder_that_cannot_be_made_is_named(command: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    done = command("train", DIGITS, "--out", str(tmp_path / "taken" / "a"))
    assert done.returncode == 2
    assert f"out = '{tmp_path}/taken/a' cannot be written to (Not a directory" in done.stderr


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--resume runs/a" in told
    assert "Exit codes" in told


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_plan_is_printed_layer_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "model.zoo=alexnet", "--input", "3x227x227", "--gflops", "50"]
    assert main(["plan", DIGITS, "--workers", "16", "--group", "4", *changes]) == 0
    out = capsys.readouterr().out
    for word in ("Conv2d", "data", "column", "all data parallel", "all model parallel", "rows/s together"):
        assert word in out
    assert main(["plan", DIGITS, "--workers", "8", "--memory", "1gb", "--json", *changes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["group"] == 1, "a replica fits into one worker"
    assert sum(layer["parameters"] for layer in found["layers"]) == 60_965_224
    assert main(["plan", DIGITS, "--workers", "8", "--memory", "600mb", "--json", *changes]) == 0
    assert json.loads(capsys.readouterr().out)["group"] > 1


def test_a_plan_chooses_the_size_of_groups_and_shows_connection_layers(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "model.zoo=alexnet", "--input", "3x227x227", "--gflops", "500", "--link", "100mbit"]
    changes += ["--set", "strategy.name=synchronous"]
    assert main(["plan", DIGITS, "--workers", "8", "--group", "auto", "--json", *changes]) == 0
    found = json.loads(capsys.readouterr().out)
    totals = {each["group"]: each["total_s"] for each in found["sizes"]}
    assert set(totals) == {1, 2, 4, 8}
    assert found["group"] == min(totals, key=totals.__getitem__) > 1
    for each in found["sizes"]:
        assert each["total_s"] == pytest.approx(each["compute_s"] + each["within_s"] + each["between_s"])
    borders = found["connections"]
    assert borders
    assert {each["after"] for each in borders} | {each["before"] for each in borders} <= {
        layer["name"] for layer in found["layers"]
    }
    assert sum(each["sent_bytes"] for each in borders) <= found["totals"]["sent_bytes"]
    assert main(["plan", DIGITS, "--workers", "8", "--group", "auto", *changes]) == 0
    out = capsys.readouterr().out
    for word in ("between groups", "connection layers", "all-gather"):
        assert word in out
    assert main(["plan", DIGITS, "--workers", "8", "--group", "many", *changes]) == 2
    assert "--group 'many'" in capsys.readouterr().err


def test_a_plan_takes_the_shape_of_the_recipe_s_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DIGITS, "--workers", "4", "--link", "100mbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(layer["parameters"] for layer in found["layers"]) == 22_698
    assert found["strategy"] == "relay"
    assert found["sparknet_period"] > 1
    assert found["sparknet_busy"] == pytest.approx(5 / 6, rel=0.1)
    assert 0 < found["shared_batch_speedup"] < 4


def test_a_plan_of_a_caffe_recipe_has_the_layers_of_its_training_phase(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "recipes/caffe.toml"
    assert main(["plan", recipe, "--workers", "4", "--group", "2", "--gflops", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"Convolution", "Pooling", "InnerProduct", "SoftmaxWithLoss"} <= {layer["what"] for layer in found["layers"]}
    assert sum(layer["parameters"] for layer in found["layers"]) == 160 + 16_448 + 650
    assert found["totals"]["compute_s"] > 0
    assert main(["plan", recipe, "--workers", "2", "--group", "2", "--profile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["compute_s"] > 0
    assert main(["plan", recipe, "--workers", "2", "--input", "3x8x8"]) == 2
    assert "its prototxt says 1x8x8; leave --input out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["char_lstm", "char_lstm_peephole", "denoising_autoencoder"])
def test_networks_with_optional_arguments_are_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", f"model.zoo={name}", "--input", "64", "--gflops", "10"]
    assert main(["plan", DIGITS, "--workers", "4", "--group", "2", "--json", *changes]) == 0
    assert sum(layer["parameters"] for layer in json.loads(capsys.readouterr().out)["layers"]) > 4_000


def test_a_caffe_recipe_is_not_placed_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    placed = ["--set", "placement.kind=planned", "--set", "placement.group_size=2"]
    assert main(["train", "recipes/caffe.toml", *placed]) == 2
    assert "CaffeNet cannot be placed: its losses are of a whole batch" in capsys.readouterr().err


def test_a_plan_counts_with_layer_times_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DIGITS, "--workers", "2", "--group", "2", "--profile", "--json"]) == 0
    timed = json.loads(capsys.readouterr().out)
    assert main(["plan", DIGITS, "--workers", "2", "--group", "2", "--gflops", "1e9", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in timed["layers"]] == [layer["name"] for layer in counted["layers"]]
    assert timed["totals"]["compute_s"] > counted["totals"]["compute_s"]
    assert {layer["name"] for layer in timed["layers"] if layer["compute_s"] == 0} <= {
        "input_1",
        "output",
        "x",
        "input",
    }


def test_a_recipe_names_a_placement(capsys: pytest.CaptureFixture[str]) -> None:
    placed = ["--set", "placement.kind=planned", "--set", "placement.group_size=2", "--set", "train.epochs=1"]
    assert main(["train", DIGITS, "--json", "--set", "cluster.workers=2", *placed]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["placement"], summary["group_size"], summary["complete"]) == ("planned", 2, True)
    assert main(["train", DIGITS, "--set", "placement.kind=whole", "--set", "placement.microbatches=2"]) == 2
    assert "placement.microbatches is not a setting of whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "8", "--group", "3"], "does not divide 8 workers"),
        (["--workers", "0"], "use 1 or more"),
        (["--workers", "2", "--link", "fast"], "write a number above 0 and a unit, one of kbit, mbit, gbit"),
        (["--workers", "2", "--input", "3,8"], "write it as 3x224x224"),
        (["--workers", "2", "--memory", "1kb"], "the most frugal one needs"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", DIGITS, *options]) == 2
    assert message in capsys.readouterr().err


def test_the_version_names_the_parts_without_importing_the_slow_ones() -> None:
    code = "import sys\nfrom thinwire.cli.main import main\ntry: main(['--version'])\nfinally: print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=800)
    *lines, modules = done.stdout.splitlines()
    told = dict(line.split(" ", 1) for line in lines)
    assert list(told)[:3] == ["thinwire", "protocol", "Python"]
    assert told["thinwire"] == metadata.version("thinwire") == thinwire.__version__
    assert told["Python"] == platform.python_version()
    for package in ("torch", "pyarrow", "pyzmq", "numba", "numpy"):
        assert told[package] == metadata.version(package)
    assert told["libzmq"] == zmq.zmq_version()
    assert told["platform"] == platform.platform()
    assert "pyspark" in told
    assert not set(ast.literal_eval(modules)) & {"torch", "pyspark", "pyarrow", "numba"}


def test_the_version_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setitem(sys.modules, "zmq", None)
    told = version.parts()
    assert told["no-such-package"] == told["libzmq"] == "not installed"


def test_logs_of_driver_and_workers_name_run_worker_and_generation() -> None:
    """In a process of its own, whose standard error its workers have too."""
    line = [sys.executable, "-m", "thinwire", "train", DIGITS, "--set", "train.epochs=1", "--json"]
    asked = os.environ | {"THINWIRE_LOG": "json"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=800, cwd=ROOT, env=asked)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (name,) = {record["run"] for record in records}
    driver = {record["pid"] for record in records if record["logger"] == "thinwire.run"}
    assert len(driver) == 1
    told = {record["message"] for record in records}
    assert {"run_started", "worker_joined", "generation_formed", "run_ended"} <= told
    (started,) = (record for record in records if record["message"] == "run_started")
    assert started["event"]["run"] == name
    for worker in (0, 1):
        own = [r for r in records if r["worker"] == worker and r["pid"] not in driver]
        assert {"thinwire.worker", "thinwire.exchange"} <= {record["logger"] for record in own}
        assert own[-1]["message"] == f"worker {worker} ends"
        assert own[-1]["generation"] == 1, "also the main thread knows it"
