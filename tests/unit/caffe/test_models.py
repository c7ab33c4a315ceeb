"""Real trained networks: accuracy, OpenCV's opinion, round trips, and a run of 2014 gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from thinwire import caffe

from .places import cifar10, files, mnist

EVERPEACE = "everpeace_2014/cifar10"


def _tested(net: caffe.CaffeNet, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Accuracy and loss over a whole set, in batches of 100 as Caffe's own test phase takes them."""
    found = []
    with torch.no_grad():
        for start in range(0, len(images), 100):
            out = net(data=images[start : start + 100], label=labels[start : start + 100])
            found.append((float(out["accuracy"]), float(out["loss"])))
    return tuple(np.mean(found, axis=0).tolist())  # type: ignore[return-value]


@pytest.mark.processes  # a data set may have to be fetched
@pytest.mark.parametrize(
    ("folder", "accuracy", "loss"),
    [("everpeace_2014/mnist", 0.9905, 0.029182), ("nandahkrishna_lenet", 0.9905, 0.029757)],
)
def test_lenet_is_as_good_as_real_caffe_found_it(folder: str, accuracy: float, loss: float) -> None:
    at = files() / folder
    net = caffe.load(at / "lenet_train_test.prototxt", weights=at / "lenet_iter_10000.caffemodel", phase="TEST")
    assert _tested(net, *mnist("t10k")) == pytest.approx((accuracy, loss), abs=5e-7)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("iteration", "accuracy", "loss"), [(4000, 0.6854, 0.937706), (5000, 0.7491, 0.748170)])
def test_cifar10_quick_is_as_good_as_its_author_logged(iteration: int, accuracy: float, loss: float) -> None:
    at = files() / EVERPEACE
    weights = at / f"cifar10_quick_iter_{iteration}.caffemodel"
    net = caffe.load(at / "cifar10_quick_train_test.prototxt", weights=weights, phase="TEST")
    assert _tested(net, *cifar10("test_batch")) == pytest.approx((accuracy, loss), abs=1e-5)


@pytest.mark.long
@pytest.mark.processes
def test_a_run_of_2014_goes_on_from_its_model_and_solver_state() -> None:
    """The first 100 of its last 1,000 iterations; a log of them all is in docs/how-to/caffe.md."""
    at = files() / EVERPEACE
    net = caffe.load(at / "cifar10_quick_train_test.prototxt", weights=at / "cifar10_quick_iter_4000.caffemodel")
    solver = caffe.load_solver(at / "cifar10_quick_solver_lr1.prototxt", net)
    named = solver.load_state(at / "cifar10_quick_iter_4000.solverstate")
    assert (solver.iteration, solver.lr, Path(named).name) == (
        4000,
        pytest.approx(1e-4),
        "cifar10_quick_iter_4000.caffemodel",
    )
    images, labels = cifar10("data_batch_1")
    losses = {}
    for iteration in range(4000, 4101):
        rows = slice(100 * (iteration - 4000) % 10000, 100 * (iteration - 4000) % 10000 + 100)
        if iteration == 4100:
            images, labels = cifar10("data_batch_2")
            rows = slice(0, 100)
        out = net(data=images[rows], label=labels[rows])
        assert out.loss is not None
        losses[iteration] = float(out.loss.detach())
        solver.zero_grad()
        out.loss.backward()  # type: ignore[no-untyped-call]
        solver.step()
    assert losses[4000] == pytest.approx(0.719556, abs=2e-6)
    assert losses[4100] == pytest.approx(_logged(at, 4100), abs=2e-3)


def _logged(at: Path, iteration: int) -> float:
    """The training loss that the author's log has for an iteration, in its second run."""
    lines = [line for line in (at / "train_log.txt").read_text().splitlines() if f"Iteration {iteration}, loss" in line]
    return float(lines[-1].rpartition("=")[2])


@pytest.mark.parametrize(
    ("prototxt", "weights"),
    [
        ("everpeace_2014/mnist/lenet.prototxt", "everpeace_2014/mnist/lenet_iter_10000.caffemodel"),
        (f"{EVERPEACE}/cifar10_quick.prototxt", f"{EVERPEACE}/cifar10_quick_iter_5000.caffemodel"),
    ],
)
def test_opencv_agrees_and_reads_what_is_written(prototxt: str, weights: str, tmp_path: Path) -> None:
    net = caffe.load(files() / prototxt, weights=files() / weights, phase="TEST")
    (shape,) = net.known_shapes().values()
    x = np.random.default_rng(0).normal(size=(2, *shape[1:])).astype(np.float32)
    (mine,) = net(x).values()
    for path in (files() / weights, tmp_path / "again.caffemodel"):
        if path.parent == tmp_path:
            caffe.save(net, path)
        theirs = cv2.dnn.readNetFromCaffe(str(files() / prototxt), str(path))
        theirs.setInput(x)
        assert np.abs(theirs.forward() - mine.detach().numpy()).max() <= 1e-4 * float(mine.detach().abs().max())


@pytest.mark.parametrize("name", ["bvlc_reference_caffenet", "alexnet"])
def test_opencv_agrees_on_large_networks_with_random_weights(name: str, tmp_path: Path) -> None:
    text = (files() / "sparknet/models/bvlc_reference_caffenet/train_val.prototxt").read_text()
    deploy = _deployed(text, alexnet=name == "alexnet")
    prototxt, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    prototxt.write_text(deploy)
    torch.manual_seed(0)
    net = caffe.load(prototxt, phase="TEST")
    caffe.save(net, weights)
    x = np.random.default_rng(0).normal(scale=50, size=(1, 3, 227, 227)).astype(np.float32)
    with torch.no_grad():
        mine = net(x)["fc8"].numpy()
    theirs = cv2.dnn.readNetFromCaffe(str(prototxt), str(weights))
    theirs.setInput(x)
    assert np.abs(theirs.forward() - mine).max() <= 1e-4 * np.abs(mine).max()


def _deployed(text: str, *, alexnet: bool) -> str:
    """A training network without its data and loss; AlexNet normalises before it pools, CaffeNet after."""
    from google.protobuf import text_format

    layers = {x.name: x for x in caffe.parse_net(text).net.layer if x.type not in ("Input", "Data", "Accuracy")}
    del layers["loss"]
    names = list(layers)
    if alexnet:
        for number in (1, 2):
            pool, norm = names.index(f"pool{number}"), names.index(f"norm{number}")
            names[pool], names[norm] = names[norm], names[pool]
            layers[f"norm{number}"].bottom[0] = f"conv{number}"
            layers[f"pool{number}"].bottom[0] = f"norm{number}"
            layers[f"conv{number + 1}"].bottom[0] = f"pool{number}"
    body = "".join(f"layer {{\n{text_format.MessageToString(layers[name])}}}\n" for name in names)
    return f'name: "net"\ninput: "data"\ninput_shape {{ dim: 1 dim: 3 dim: 227 dim: 227 }}\n{body}'


@pytest.mark.parametrize(
    "path", ["everpeace_2014/mnist/lenet", f"{EVERPEACE}/cifar10_quick", "nandahkrishna_lenet/lenet"]
)
def test_a_caffemodel_goes_in_and_out_without_loss(path: str, tmp_path: Path) -> None:
    at = files() / path
    weights = sorted(at.parent.glob(f"{at.name}_iter_*.caffemodel"))[-1]
    net = caffe.load(f"{at}_train_test.prototxt", weights=weights)
    caffe.save(net, tmp_path / "out.caffemodel")
    before, after = caffe.read_weights(weights), caffe.read_weights(tmp_path / "out.caffemodel")
    assert list(before) == list(after)
    for name in before:
        for old, new in zip(before[name], after[name], strict=True):
            assert old.values.tobytes() == new.values.tobytes()
            assert np.squeeze(old.values.reshape(old.shape)).shape == np.squeeze(new.values.reshape(new.shape)).shape
