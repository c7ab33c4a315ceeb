"""Where Caffe does not do the obvious: gradients it holds back, ties, edges, phases, what files may leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire import caffe
from thinwire.errors import ConfigError, DataError, ThinwireError


def inputs(**shapes: tuple[int, ...]) -> str:
    text = ""
    for name, shape in shapes.items():
        dims = " ".join(f"dim: {d}" for d in shape)
        text += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'
    return text


def one(kind: str, bottoms: str, *, tops: str = "y", more: str = "", **shapes: tuple[int, ...]) -> caffe.CaffeNet:
    wires = " ".join(f'bottom: "{b}"' for b in bottoms.split()) + " " + " ".join(f'top: "{t}"' for t in tops.split())
    return caffe.loads(inputs(**shapes) + f'layer {{ name: "l" type: "{kind}" {wires} {more} }}')


def gradient(net: caffe.CaffeNet, top: str, *values: Any, seed: Any = None) -> Tensor:
    x = torch.tensor(values[0], requires_grad=True)
    out = net(x, *(torch.tensor(v) for v in values[1:]))[top]
    out.backward(torch.ones_like(out) if seed is None else torch.tensor(seed))
    assert x.grad is not None
    return x.grad


def test_a_saturated_loss_still_has_its_gradient() -> None:
    net = one("SoftmaxWithLoss", "x t", x=(1, 3), t=(1,))
    assert gradient(net, "y", [[0.0, 200.0, 0.0]], [0]).tolist() == [[-1, 1, 0]]
    gains = one("InfogainLoss", "x t h", x=(1, 2), t=(1,), h=(1, 1, 2, 2))
    assert gradient(gains, "y", [[0.0, 60.0]], [0], [[[[1.0, 0.0], [0.0, 1.0]]]]).tolist() == [[-1, 1]]
    logistic = one("MultinomialLogisticLoss", "x t", x=(1, 2), t=(1,))
    assert gradient(logistic, "y", [[0.5, 0.5]], [1]).tolist() == [[0, -2]]
    assert float(gradient(logistic, "y", [[0.0, 1.0]], [0])[0, 0]) == pytest.approx(-1e20, rel=1e-4)


def test_probabilities_beside_a_loss_pass_no_gradient() -> None:
    net = one("SoftmaxWithLoss", "x t", tops="y p", x=(1, 2), t=(1,))
    x = torch.zeros(1, 2, requires_grad=True)
    out = net(x, torch.zeros(1))
    assert out["p"].tolist() == [[0.5, 0.5]]
    assert not out["p"].requires_grad


def test_mvn_goes_back_by_caffes_formula_and_has_four_axes() -> None:
    net = one("MVN", "x", more="mvn_param { eps: 0.1 }", x=(1, 1, 1, 4))
    found = gradient(net, "y", [[[[1.0, 2.0, 4.0, 8.0]]]], seed=[[[[1.0, 0.0, 0.0, 2.0]]]]).flatten().tolist()
    assert found == pytest.approx([0.2737, -0.1527, -0.2864, 0.1654], abs=1e-4)
    assert not gradient(net, "y", [[[[3.0] * 4]]]).isnan().any()
    assert one("MVN", "x", x=(2, 3, 4))(torch.randn(2, 3, 4))["y"].shape == (2, 3, 4, 1)


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_recurrent_layers_go_on_where_the_last_call_ended(kind: str) -> None:
    more = 'recurrent_param { num_output: 3 weight_filler { type: "uniform" min: -1 max: 1 } }'
    net = one(kind, "x c", more=more, x=(2, 1, 4), c=(2, 1))
    x, going, begin = torch.randn(2, 1, 4), torch.ones(2, 1), torch.tensor([[0.0], [1.0]])
    first = net(x, begin)["y"].detach()
    second = net(x, going)["y"].detach()
    assert not torch.allclose(first, second)
    assert torch.allclose(first, net(x, begin)["y"])


def test_exposed_states_pass_no_gradient() -> None:
    more = 'recurrent_param { num_output: 3 expose_hidden: true weight_filler { type: "uniform" min: -1 max: 1 } }'
    net = one("LSTM", "x c h0 c0", tops="y hT cT", more=more, x=(2, 1, 4), c=(2, 1), h0=(1, 1, 3), c0=(1, 1, 3))
    out = net(torch.randn(2, 1, 4), torch.ones(2, 1), torch.randn(1, 1, 3), torch.randn(1, 1, 3))
    assert out["hT"].shape == out["cT"].shape == (1, 1, 3)
    assert not out["hT"].requires_grad
    assert torch.equal(out["hT"][0], out["y"][-1])


def test_of_equal_maxima_the_second_has_the_gradient() -> None:
    net = one("Eltwise", "a b c", more="eltwise_param { operation: MAX }", a=(1,), b=(1,), c=(1,))
    values = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    net(*values)["y"].backward()  # type: ignore[no-untyped-call]
    assert [None if v.grad is None else float(v.grad) for v in values] == [0, 1, 0]


def test_a_constant_power_has_a_gradient_of_zero() -> None:
    net = one("Power", "x", more="power_param { power: 0 }", x=(2,))
    assert gradient(net, "y", [2.0, float("nan")]).tolist() == [0, 0]


def test_parameters_outside_the_loss_decay_all_the_same() -> None:
    text = inputs(x=(1, 1)) + 'layer { name: "a" type: "Scale" bottom: "x" top: "a" }'
    text += 'layer { name: "b" type: "Scale" bottom: "x" top: "b" }'
    net = caffe.loads(text)
    solver = caffe.parse_solver("base_lr: 0.1 weight_decay: 0.5", net)
    net(torch.ones(1, 1))["a"].sum().backward()  # type: ignore[no-untyped-call]
    solver.step()
    assert float(net.params["b"][0].detach()) == pytest.approx(0.95)


def test_a_layer_keeps_to_a_phase_of_its_own_and_a_net_to_its_stages() -> None:
    net = one("Dropout", "x", more="phase: TEST", x=(100,))
    assert (net(torch.ones(100))["y"] == 1).all()
    text = 'state { stage: "deploy" }' + inputs(x=(1,))
    text += 'layer { name: "a" type: "AbsVal" bottom: "x" top: "a" include { stage: "deploy" } }'
    assert list(caffe.loads(text)(torch.ones(1))) == ["a"]


@pytest.mark.parametrize(
    ("shape", "more", "wanted"),
    [
        ((2, 4, 5, 5), "axis: -3 kernel_size: 3", (2, 6, 3, 3)),
        ((2, 3, 4, 5, 5), "axis: 2 kernel_size: 3", (2, 3, 6, 3, 3)),
        ((2, 4), "", (2, 6)),
        ((2, 4, 9), "kernel_size: 3", (2, 6, 7)),
        ((2, 4, 5, 5, 5), "kernel_size: 3", (2, 6, 3, 3, 3)),
    ],
)
def test_convolutions_over_any_axes(shape: tuple[int, ...], more: str, wanted: tuple[int, ...]) -> None:
    settings = f'convolution_param {{ num_output: 6 {more} weight_filler {{ type: "xavier" }} }}'
    assert one("Convolution", "x", more=settings, x=shape)(torch.randn(shape))["y"].shape == wanted


def test_small_shapes_that_caffe_gives() -> None:
    assert one("SPP", "x", more="spp_param { pyramid_height: 1 }", x=(2, 3, 4, 4))(torch.randn(2, 3, 4, 4))[
        "y"
    ].shape == (2, 3, 1, 1)
    pool = "pooling_param { kernel_h: 2 kernel_w: 1 stride: 3 pad_h: 1 pad_w: 0 }"
    assert one("Pooling", "x", more=pool, x=(1, 1, 5, 5))(torch.randn(1, 1, 5, 5))["y"].shape == (1, 1, 2, 2)
    dummy = 'layer { name: "d" type: "DummyData" top: "a" top: "b" '
    dummy += "dummy_data_param { num: 2 num: 3 channels: 4 height: 1 width: 1 } }"
    assert [tuple(v.shape) for v in caffe.loads(dummy)().values()] == [(2, 4, 1, 1), (3, 4, 1, 1)]
    assert one("ArgMax", "x", x=(3,))(torch.randn(3))["y"].shape == (3, 1, 1)
    unit = one("LSTMUnit", "c x k", tops="d h", c=(1, 2, 3), x=(1, 2, 12), k=(1, 2))
    assert unit(torch.zeros(1, 2, 3), torch.zeros(1, 2, 12), torch.ones(1, 2))["h"].shape == (1, 2, 3)


def test_a_bilinear_filler_of_odd_size_is_symmetric() -> None:
    more = 'convolution_param { num_output: 1 kernel_size: 3 bias_term: false weight_filler { type: "bilinear" } }'
    net = one("Deconvolution", "x", more=more, x=(1, 1, 4, 4))
    assert net.params["l"][0][0, 0].tolist() == [[0.25, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 0.25]]


def test_the_other_phase_may_be_incomplete_until_it_is_used() -> None:
    text = """
    layer { name: "d" type: "Input" top: "data" top: "label" include { phase: TRAIN }
      input_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } }
    layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param { num_output: 2 } }
    layer { name: "p" type: "Python" bottom: "i" top: "p" include { phase: TEST } python_param { layer: "Nobody" } }
    layer { name: "l" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "l" include { phase: TRAIN } }
    """
    net = caffe.loads(text, phase="TRAIN")
    assert list(net(torch.randn(4, 3), torch.zeros(4))) == ["l"]
    net.eval()
    with pytest.raises(ConfigError, match="Python layer 'Nobody' is not registered"):
        net(torch.randn(4, 3))
    with pytest.raises(ConfigError, match="use 'TRAIN' or 'TEST'"):
        caffe.loads(text, phase="train")  # type: ignore[arg-type]


def test_each_phase_has_its_own_input_shapes() -> None:
    text = """
    layer { name: "d" type: "Input" top: "data" include { phase: TRAIN } input_param { shape { dim: 4 dim: 3 } } }
    layer { name: "t" type: "Input" top: "label" include { phase: TRAIN } input_param { shape { dim: 4 } } }
    layer { name: "d" type: "Input" top: "data" include { phase: TEST } input_param { shape { dim: 1 dim: 3 } } }
    layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param { num_output: 2 } }
    layer { name: "l" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "l" include { phase: TRAIN } }
    """
    net = caffe.loads(text)
    assert net.known_shapes() == {"data": (4, 3), "label": (4,)}
    net.eval()
    assert list(net(torch.randn(1, 3))) == ["i"]


def test_weights_do_not_override_what_the_prototxt_says(tmp_path: Path) -> None:
    text = 'layer { name: "d" type: "Data" top: "data" data_param { source: "x" batch_size: 1 } }'
    text += 'layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param { num_output: %d } }'
    caffe.save(caffe.loads(text % 3, shapes={"data": (1, 4)}), tmp_path / "x.caffemodel")
    with pytest.raises(DataError, match=r"its weight would have the shape \(2, 4\), and the file's is \(3, 4\)"):
        caffe.loads(text % 2, weights=tmp_path / "x.caffemodel")
    assert caffe.loads(text % 3, weights=tmp_path / "x.caffemodel").is_ready


def test_large_declared_images_cost_nothing_before_they_are_there() -> None:
    import tracemalloc

    tracemalloc.start()
    one("Pooling", "x", more="pooling_param { pool: AVE kernel_size: 1 }", x=(1, 1, 40000, 40000))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_thousands_of_layers_of_one_name_are_read_in_no_time() -> None:
    """Work that grew with the square of them, or worse, would not end within the test's time."""
    text = inputs(x=(1,)) + 'layer { name: "a" type: "AbsVal" bottom: "x" top: "x" }' * 10000
    assert len(caffe.loads(text).layers) == 10001


@pytest.mark.parametrize(
    ("kind", "more", "shape"),
    [("Embed", "embed_param { num_output: 2 input_dim: 3 }", (2,)), ("Softmax", "softmax_param { axis: 7 }", (2, 2))],
)
def test_what_goes_wrong_in_a_call_names_the_layer(kind: str, more: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ThinwireError, match=f"layer 'l' \\({kind}\\)"):
        one(kind, "x", more=more, x=shape)(torch.full(shape, 99.0))
