"""Damaged and hostile files: a clear error or a correct parse; never a crash, a hang or a huge allocation."""

from __future__ import annotations

import random
import re
import resource
from pathlib import Path

import pytest

from thinwire import caffe
from thinwire.caffe import weights
from thinwire.caffe.prototxt import parse
from thinwire.caffe.solver import Settings
from thinwire.errors import ThinwireError

CASES = 5000
NUMBERS = ("-1", "0", "1", "2", "7", "4096", "2147483647", "4294967295", "99999999999", "1e39", "nan", "0.5")
WORDS = (*NUMBERS, "{", "}", "layer", '"', "#", ":", "true", "\x00", "é")
NET = """
name: "every"
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 4 dim: 9 dim: 9 } } }
layer { name: "t" type: "Input" top: "t" input_param { shape { dim: 2 } } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 6 kernel_size: 3 stride: 2
  pad: 1 group: 2 weight_filler { type: "xavier" } } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" relu_param { negative_slope: 0.1 } }
layer { name: "p" type: "Pooling" bottom: "c" top: "p" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "n" type: "LRN" bottom: "p" top: "n" lrn_param { local_size: 3 alpha: 0.1 norm_region: WITHIN_CHANNEL } }
layer { name: "b" type: "BatchNorm" bottom: "n" top: "b" }
layer { name: "s" type: "Slice" bottom: "b" top: "s1" top: "s2" slice_param { slice_point: 2 } }
layer { name: "j" type: "Concat" bottom: "s1" bottom: "s2" top: "j" concat_param { axis: 1 } }
layer { name: "d" type: "Deconvolution" bottom: "j" top: "d" convolution_param { num_output: 2 kernel_size: 2 } }
layer { name: "f" type: "Reshape" bottom: "d" top: "f" reshape_param { shape { dim: 0 dim: -1 } } }
layer { name: "i" type: "InnerProduct" bottom: "f" top: "i" inner_product_param { num_output: 5 } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "i" bottom: "t" top: "l" loss_param { ignore_label: 3 } }
"""
SOLVER = 'base_lr: 0.1 lr_policy: "step" gamma: 0.5 stepsize: 7 momentum: 0.9 type: "Adam" iter_size: 2 max_iter: 10'


def _damaged(data: bytes, chance: random.Random) -> bytes:
    """A file cut short, with bytes changed, pieces left out, doubled or put elsewhere, or hostile words put in."""
    if chance.random() < 0.5:  # a file that is still well-formed, with numbers that are not
        places = list(re.finditer(rb"\b\d+(\.\d+)?\b", data))
        for place in sorted(chance.sample(places, min(len(places), chance.randint(1, 2))), key=lambda m: -m.start()):
            data = data[: place.start()] + chance.choice(NUMBERS).encode() + data[place.end() :]
        return data
    found = bytearray(data)
    for _ in range(chance.randint(1, 2)):
        if not found:
            break
        at = chance.randrange(len(found))
        end = min(len(found), at + chance.choice((1, 1, 2, 8, 40)))
        kind = chance.randrange(6)
        if kind == 0:
            del found[chance.randrange(len(found)) :]
        elif kind == 1:
            found[at] = chance.randrange(256)
        elif kind == 2:
            del found[at:end]
        elif kind == 3:
            found[at:at] = found[at:end]
        elif kind == 4:
            found[at:end] = chance.choice(WORDS).encode()
        else:
            other = chance.randrange(len(found))
            found[other:other] = found[at:end]
    return bytes(found)


@pytest.mark.long
def test_damaged_prototxts_are_refused_or_read() -> None:
    chance = random.Random(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"read": 0, "refused": 0}
    for _ in range(CASES):
        text = _damaged(NET.encode(), chance).decode("utf-8", "replace")
        try:
            net = caffe.CaffeNet(caffe.parse_net(text))
            net.prepare({})  # all but the memory, which `load` takes at once and within its limits
            outcomes["read"] += 1
        except ThinwireError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > CASES // 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


@pytest.mark.long
def test_damaged_caffemodels_are_refused_or_read(tmp_path: Path) -> None:
    chance = random.Random(2)
    caffe.save(caffe.loads(NET), tmp_path / "whole.caffemodel")
    whole = (tmp_path / "whole.caffemodel").read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"read": 0, "refused": 0}
    path = tmp_path / "damaged.caffemodel"
    for _ in range(CASES):
        path.write_bytes(_damaged(whole, chance))
        try:
            weights.read_weights(path)
            outcomes["read"] += 1
        except ThinwireError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > CASES // 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


@pytest.mark.long
def test_damaged_solvers_are_refused_or_read() -> None:
    chance = random.Random(3)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(CASES):
        text = _damaged(SOLVER.encode(), chance).decode("utf-8", "replace")
        try:
            Settings.of(parse("SolverParameter", text, "solver")).rate(1000)
            outcomes["read"] += 1
        except ThinwireError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > CASES // 20


@pytest.mark.parametrize(
    "text",
    [
        "layer {" * 100_000,
        "layer { include { " * 5000,
        'name: "' + "x" * 1_000_000,
        "layers { layer { " * 9,
        "\x00",
        "}",
    ],
    ids=["nested", "deeper", "long", "old", "nothing", "closed"],
)
def test_texts_made_to_harm_are_refused(text: str) -> None:
    with pytest.raises(ThinwireError) as caught:
        caffe.loads(text)
    assert len(str(caught.value)) < 1000
