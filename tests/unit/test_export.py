"""`thinwire export`: a saved model as an ONNX file, without Spark and without the network's code."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save
from torch import nn

from thinwire.cli.main import main
from thinwire.models.program import ROWS, exported

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def saved(folder: Path, module: nn.Module, examples: list[torch.Tensor], **more: Any) -> Path:
    """A model as `TorchModel.save` writes it on a file system."""
    names = [f"column {i}" for i in range(len(examples))]
    data = {"weights": save(module.state_dict()), "program": exported(module, examples)}
    told = {name: {"size_bytes": len(each), "digest": digest_of(each)} for name, each in data.items()}
    form = {"format": 1, "version": "0", "more": {}, "code": {"transform": {"kind": "value", "value": None}}}
    form |= told["weights"] | {"program": told["program"]} | more
    metadata = {"class": "c", "uid": "u", "paramMap": {"inputCols": names}, "defaultParamMap": {}, "thinwire": form}
    (folder / "metadata").mkdir(parents=True)
    (folder / "metadata" / "part-00000.txt").write_text(json.dumps(metadata) + "\n")
    for name, content in data.items():
        (folder / name).mkdir()
        for piece in (1, 0):  # read in the order of the pieces, whatever the files are called
            half = [content[: len(content) // 2], content[len(content) // 2 :]][piece]
            table = pa.table({"piece": pa.array([piece], pa.int32()), "data": [half]})
            pq.write_table(table, folder / name / f"part-{1 - piece}.parquet")
    return folder


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 3), nn.Embedding(9, 3), nn.LayerNorm(3)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.left(x)) + self.right(kind))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2))
        self.layers = nn.Sequential(*first, nn.Flatten(), nn.Linear(36, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("kind", [Two, Convolutions])
def test_an_exported_file_gives_the_network_s_numbers_for_any_number_of_rows(
    kind: type[nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed: pip install 'thinwire[onnx]'")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'thinwire[onnx]'")
    torch.manual_seed(0)
    module = kind().eval()
    examples = [torch.randn(ROWS, 4), torch.arange(ROWS)] if kind is Two else [torch.randn(ROWS, 3, 8, 8)]
    folder, target = saved(tmp_path / "model", module, examples), tmp_path / "net.onnx"
    assert main(["export", str(folder), "--onnx", str(target)]) == 0
    assert f"written to {target}" in capsys.readouterr().out
    evaluator = reference.ReferenceEvaluator(str(target))
    assert evaluator.input_names == [f"column {i}" for i in range(len(examples))]
    assert evaluator.output_names == ["output"]
    for rows in (1, 3, ROWS):
        given = [x[:rows] for x in examples]
        with torch.no_grad():
            expected = module(*given).numpy()
        feed = {name: x.numpy() for name, x in zip(evaluator.input_names, given, strict=True)}
        (found,) = evaluator.run(None, feed)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_without_the_packages_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from thinwire.models import onnx_file

    folder = saved(tmp_path / "model", nn.Linear(4, 2), [torch.randn(ROWS, 4)])
    monkeypatch.setattr(onnx_file, "PACKAGES", ("torch", "onnx_that_is_not_there"))
    assert main(["export", str(folder), "--onnx", str(tmp_path / "x.onnx")]) == 2
    assert "onnx_that_is_not_there is not installed: pip install 'thinwire[onnx]'" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"program": {"size_bytes": 0, "digest": ""}, "more": {"unexported": "it branches"}}, 8, "it branches"),
        ({"program": {"size_bytes": 5, "digest": ""}}, 8, "bytes of program where 5 belong"),
        ({"digest": "0" * 64}, 8, "the weights in .* are damaged"),
        ({"format": 9}, 8, "is of format 9"),
    ],
    ids=["none", "cut short", "changed", "newer"],
)
def test_a_folder_that_cannot_be_exported_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], code: int, told: str
) -> None:
    folder = saved(tmp_path / "model", nn.Linear(4, 2), [torch.randn(ROWS, 4)], **change)
    assert main(["export", str(folder), "--onnx", str(tmp_path / "x.onnx")]) == code
    assert re.search(told, capsys.readouterr().err)
    assert main(["export", str(tmp_path / "nowhere"), "--onnx"]) == 8
    assert "it has no metadata" in capsys.readouterr().err


def test_a_hostile_folder_is_refused_without_spark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "model", nn.Linear(4, 2), [torch.randn(ROWS, 4)])
    text = json.dumps({"format": 1, "nodes": [{"op": "os.system", "args": ["true"], "kwargs": {}}]}).encode()
    hostile = struct.pack("<Q", len(text)) + text
    (metadata,) = (folder / "metadata").iterdir()
    content = json.loads(metadata.read_text())
    content["thinwire"]["program"] = {"size_bytes": len(hostile), "digest": digest_of(hostile)}
    metadata.write_text(json.dumps(content))
    for file in (folder / "program").iterdir():
        file.unlink()
    pq.write_table(pa.table({"piece": [0], "data": [hostile]}), folder / "program" / "part-0.parquet")
    assert main(["export", str(folder), "--onnx", str(tmp_path / "x.onnx")]) == 8
    assert "the program of a saved model cannot be used" in capsys.readouterr().err
