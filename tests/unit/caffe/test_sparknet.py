"""SparkNet's own API: the same graph as a prototxt, nets that train, weights that average."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from thinwire import caffe
from thinwire.caffe.sparknet import (
    Activation,
    ActivationLayer,
    ConvLayer,
    DropoutLayer,
    LinearLayer,
    Net,
    NetParams,
    Pool,
    PoolLayer,
    RDDLayer,
    SoftmaxWithLoss,
    WeightCollection,
    kept,
    prototxt,
)
from thinwire.errors import ConfigError, DataError

from .places import files


def lenet() -> object:
    return NetParams(
        RDDLayer("data", shape=[64, 1, 28, 28]),
        RDDLayer("label", shape=[64, 1]),
        ConvLayer("conv1", ["data"], kernel=(5, 5), num_filters=20),
        PoolLayer("pool1", ["conv1"], pool=Pool.MAX, kernel=(2, 2), stride=(2, 2)),
        ConvLayer("conv2", ["pool1"], kernel=(5, 5), num_filters=50),
        PoolLayer("pool2", ["conv2"], pool=Pool.MAX, kernel=(2, 2), stride=(2, 2)),
        LinearLayer("ip1", ["pool2"], num_outputs=500),
        ActivationLayer("relu1", ["ip1"], activation=Activation.RELU),
        LinearLayer("ip2", ["relu1"], num_outputs=10),
        SoftmaxWithLoss("loss", ["ip2", "label"]),
    )


def test_listing_2_is_the_network_of_the_prototxt() -> None:
    """Every parameter of Caffe's own LeNet has the same shape, filler and rate here."""
    theirs = caffe.load(files() / "nandahkrishna_lenet" / "lenet_train_test.prototxt", shapes={"data": (64, 1, 28, 28)})
    mine = caffe.loads(prototxt(lenet()))
    if not theirs.is_ready:
        theirs(data=np.zeros((64, 1, 28, 28), np.float32), label=np.zeros(64))
    assert list(mine.params) == list(theirs.params)
    for name in mine.params:
        for a, b in zip(mine.params[name], theirs.params[name], strict=True):
            assert a.shape == b.shape
            assert (a.lr_mult, a.decay_mult) == (b.lr_mult, b.decay_mult)  # type: ignore[attr-defined]
    assert sum(p.numel() for p in mine.parameters()) == 431_080


def small() -> object:
    return NetParams(
        RDDLayer("data", shape=[10, 2]),
        RDDLayer("label", shape=[10, 1]),
        LinearLayer("hidden", ["data"], num_outputs=8),
        ActivationLayer("tanh", ["hidden"], activation=Activation.TANH),
        DropoutLayer("drop", ["tanh"], ratio=0.1),
        LinearLayer("scores", ["drop"], num_outputs=2),
        SoftmaxWithLoss("loss", ["scores", "label"]),
    )


def rows(count: int = 200) -> list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], int]]:
    points = np.random.default_rng(0).normal(size=(count, 2))
    return [(p, int(p[0] > p[1])) for p in points]


def test_a_net_learns_and_two_average() -> None:
    nets = [Net(small(), seed=n) for n in range(2)]
    for net, mine in zip(nets, (rows()[:100], iter(rows()[100:])), strict=True):
        net.set_training_data(mine)
        net.set_validation_data(rows())
    before = nets[0].test(20)
    weights = nets[0].get_weights()
    for _ in range(20):
        for net in nets:
            net.set_weights(weights)
            net.train(10)
        weights = WeightCollection.mean(net.get_weights() for net in nets)
    nets[0].set_weights(weights, fresh=True)
    assert nets[0].test(20) > max(0.95, before)


def test_weights_add_scale_and_travel() -> None:
    one = WeightCollection({"a": [np.array([1.0, 2.0], np.float32)], "b": [np.array(4.0, np.float32)]})
    assert ((one + one) / 4 - one * 0.5)["a"][0].tolist() == [0, 0]
    assert (2 * one)["b"][0] == 8
    again = pickle.loads(pickle.dumps(one))
    assert isinstance(again, WeightCollection)
    assert list(again) == ["a", "b"]
    with pytest.raises(ConfigError, match="do not go together"):
        one + {"a": one["a"]}
    with pytest.raises(ConfigError, match="no weights to average"):
        WeightCollection.mean([])


def test_mistakes_are_named() -> None:
    net = Net(small())
    with pytest.raises(DataError, match="there is no training data; set it first"):
        net.train(1)
    with pytest.raises(DataError, match="the data has no rows"):
        net.set_training_data([])
    with pytest.raises(ConfigError, match=r"weights are of layers \['x'\]"):
        net.set_weights({"x": []})
    text = (
        'input: "x" layer { name: "i" type: "InnerProduct" bottom: "x" top: "i" inner_product_param { num_output: 1 } }'
    )
    with pytest.raises(ConfigError, match="does not tell its inputs' shapes"):
        Net(caffe.parse_net(text).net)


def test_what_is_kept_is_made_once_and_not_without_end() -> None:
    made = [kept(("test", number % 2), lambda: object()) for number in range(4)]
    assert made[0] is made[2]
    first = kept(("many", 0), object)
    for number in range(1, 40):
        kept(("many", number), object)
    assert kept(("many", 0), object) is not first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_net_on_a_gpu_begins_alike_learns_alike_and_gives_its_weights_to_one_on_the_host() -> None:
    nets = [Net(small(), device=device) for device in ("cuda", "cpu")]
    assert nets[0].device.type == "cuda" == next(nets[0].module.parameters()).device.type
    for name, blobs in nets[0].get_weights().items():
        for mine, theirs in zip(blobs, nets[1].get_weights()[name], strict=True):
            assert (mine == theirs).all(), name
    for net in nets:
        net.set_training_data(rows())
        net.set_validation_data(rows())
        net.train(200)
    assert nets[0].test(20) > 0.9
    nets[1].set_weights(nets[0].get_weights(), fresh=True)
    assert nets[1].test(20) == pytest.approx(nets[0].test(20), abs=0.02)


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="'cuda', but this worker sees no CUDA device"):
        Net(small(), device="cuda")
    assert Net(small()).device.type == "cpu"
