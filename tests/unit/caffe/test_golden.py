"""Single layers and solvers against what real Caffe computed; skipped where its records are not at hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire import caffe
from thinwire.caffe.prototxt import parse
from thinwire.caffe.solver import Settings

from .places import SHARED, cifar10, files

CLOSE = 1e-4


def _names(kind: str) -> list[str]:
    path = SHARED / "caffe" / "golden" / f"{kind}.json"
    return [name for name in json.loads(path.read_text()) if name != "_"] if path.exists() else ["absent"]


def _case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = files() / "golden"
    with np.load(folder / "layers.npz") as arrays:
        mine = {k[len(name) + 1 :]: torch.from_numpy(arrays[k]) for k in arrays.files if k.startswith(f"{name}/")}
    return json.loads((folder / "layers.json").read_text())[name], mine


def _apart(found: Tensor | None, wanted: Tensor) -> float:
    found = torch.zeros_like(wanted) if found is None else found.detach()
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max()) / max(1e-12, float(wanted.abs().max()))


@pytest.mark.parametrize("name", _names("layers"))
def test_a_layer_computes_what_real_caffe_does_forward_and_backward(name: str) -> None:
    case, arrays = _case(name)
    net = caffe.loads(case["prototxt"], phase=case["phase"])
    blobs = net.params.get("l", [])
    with torch.no_grad():
        for index, blob in enumerate(blobs):
            assert blob.shape == arrays[f"param/{index}"].shape
            blob.copy_(arrays[f"param/{index}"])
    inputs = {k[3:]: v.clone().requires_grad_() for k, v in arrays.items() if k.startswith("in/")}
    out = net(**inputs)
    for top in case["outputs"]:
        assert _apart(out[top], arrays[f"out/{top}"]) < CLOSE
    for index, blob in enumerate(blobs):
        assert _apart(blob, arrays[f"param_after/{index}"]) < CLOSE
    if not case["backward"] or name == "embed":  # without force_backward Caffe went no way back in that one
        return
    diffs = {top: arrays[f"topdiff/{top}"] for top in case["outputs"] if f"topdiff/{top}" in arrays}
    if diffs:
        torch.autograd.backward([out[top] for top in diffs], list(diffs.values()))
    else:
        assert out.loss is not None
        out.loss.backward()  # type: ignore[no-untyped-call]
    for bottom, value in inputs.items():
        if arrays[f"indiff/{bottom}"].any():
            assert _apart(value.grad, arrays[f"indiff/{bottom}"]) < CLOSE, bottom
    for index, blob in enumerate(blobs):
        assert _apart(blob.grad, arrays[f"pdiff/{index}"]) < CLOSE, index


def test_an_embedding_learns_by_the_rows_that_were_looked_up() -> None:
    text = 'layer{name:"x" type:"Input" top:"x" input_param{shape{dim:2}}}'
    text += 'layer{name:"l" type:"Embed" bottom:"x" top:"y" embed_param{input_dim:3 num_output:2}}'
    net = caffe.loads(text)
    net(x=torch.tensor([2.0, 2.0]))["y"].sum().backward()  # type: ignore[no-untyped-call]
    weight, bias = net.params["l"]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0], [0, 0], [2, 2]]
    assert bias.grad is not None
    assert bias.grad.tolist() == [2, 2]


def _fixtures() -> list[str]:
    folder = SHARED / "caffe" / "layers_real_caffe"
    found = sorted(p.stem for p in folder.glob("*.prototxt") if p.with_suffix(".npy").exists())
    return found or ["absent"]


@pytest.mark.parametrize("name", _fixtures())
def test_a_fixture_written_by_real_caffe_comes_out_the_same(name: str) -> None:
    folder = files() / "layers_real_caffe"
    weights = folder / f"{name}.caffemodel"
    net = caffe.load(folder / f"{name}.prototxt", weights=weights if weights.exists() else None, phase="TEST")
    given = sorted(folder.glob(f"{name}.input*.npy")) or [folder / "blob.npy"]
    (found,) = net(*(np.load(path) for path in given)).values()
    wanted = np.load(folder / f"{name}.npy")
    assert found.numel() == wanted.size
    assert _apart(found.reshape(wanted.shape), torch.from_numpy(wanted)) < CLOSE


def test_layers_of_one_name_get_the_same_weights() -> None:
    folder = files() / "layers_real_caffe"
    net = caffe.load(folder / "shared_weights.prototxt", weights=folder / "shared_weights.caffemodel", phase="TEST")
    out = net(torch.tensor([[[[0.0, 2.0], [4.0, 6.0]]]]), torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]]]))
    assert out["sum"].flatten().tolist() == [12, 16]


def test_inputs_of_old_and_new_form_may_be_mixed() -> None:
    net = caffe.load(files() / "layers_real_caffe" / "net_input.prototxt", phase="TEST")
    blue_green, red = torch.randn(1, 2, 10, 11), torch.randn(1, 1, 10, 11)
    named = {"old_style_input_blue_green": blue_green, "old_style_input_red": red}
    out = net(**named, different_name_for_red=red, input_layer_blue_green=blue_green)
    assert torch.equal(out["output"], 2 * torch.cat([blue_green, red], 1))


def test_slices_splits_and_reshapes_without_any_shape_given() -> None:
    net = caffe.load(files() / "layers_real_caffe" / "reshape_and_slice_routines.prototxt", phase="TEST")
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(net(input=x)["output"], x.reshape(2, -1))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", _names("solvers"))
def test_a_solver_takes_real_caffes_path(name: str) -> None:
    folder = files() / "golden"
    case = json.loads((folder / "solvers.json").read_text())[name]
    images, labels = cifar10("data_batch_1")
    net = caffe.load(folder / "golden_net.prototxt", weights=folder / "cifar10_full_iter_40000.caffemodel")
    solver = caffe.parse_solver(case["solver"], net)
    for step, wanted in enumerate(case["losses"]):
        rows = slice(32 * step, 32 * step + 32)
        solver.zero_grad()
        for _ in range(solver.settings.iter_size):
            out = net(data=images[rows], label=labels[rows])
            assert out.loss is not None
            out.loss.backward()  # type: ignore[no-untyped-call]
        assert float(out["loss"].detach()) == pytest.approx(wanted, rel=CLOSE)
        solver.step()
    with np.load(folder / "solvers.npz") as arrays:
        for layer, blobs in net.params.items():
            for index, blob in enumerate(blobs):
                assert _apart(blob, torch.from_numpy(arrays[f"{name}/final/{layer}/{index}"])) < CLOSE


def test_every_learning_rate_policy_follows_caffes_table() -> None:
    for line in (files() / "golden" / "lr_policies.txt").read_text().splitlines():
        name, text, rates = line.split("|")
        settings = Settings.of(parse("SolverParameter", f"base_lr: 0.1 max_iter: 30 {text}", name))
        wanted = [float(rate) for rate in rates.split(",") if rate]
        assert [settings.rate(i) for i in range(len(wanted))] == pytest.approx(wanted, rel=1e-5), name
