"""What a prototxt means: phases, sharing, in-place layers, multipliers, old forms, and errors with their line."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire
from thinwire import caffe
from thinwire.caffe.layers import REGISTRY
from thinwire.errors import ConfigError, DataError

DATA = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  data_param { source: "train_lmdb" batch_size: 8 } }
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  data_param { source: "test_lmdb" batch_size: 4 } }
"""
BODY = """
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "drop1" type: "Dropout" bottom: "ip1" top: "ip1" dropout_param { dropout_ratio: 0.5 } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2" inner_product_param { num_output: 3
  weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
NET = f'name: "small"\n{DATA}{BODY}'
SHAPES = {"data": (8, 1, 2, 5), "label": (8,)}


def _rows(count: int = 8) -> dict[str, Tensor]:
    return {"data": torch.randn(count, 1, 2, 5), "label": torch.randint(0, 3, (count,))}


def test_it_is_reached_as_an_attribute_of_the_package() -> None:
    assert thinwire.caffe is caffe  # type: ignore[attr-defined]


def test_a_net_has_both_phases_and_one_set_of_parameters() -> None:
    net = caffe.loads(NET, shapes=SHAPES)
    assert list(net(**_rows())) == ["loss"]
    assert torch.count_nonzero(net.blobs["ip1"] == 0) > 0
    net.eval()
    out = net(**_rows(5))
    assert sorted(out) == ["accuracy", "loss"]
    assert {name: [tuple(b.shape) for b in blobs] for name, blobs in net.params.items()} == {
        "ip1": [(6, 10), (6,)],
        "ip2": [(3, 6), (3,)],
    }
    assert sum(p.numel() for p in net.parameters()) == 66 + 21


def test_after_a_call_every_blob_is_there_as_in_place_layers_left_it() -> None:
    net = caffe.loads(NET, phase="TEST", shapes=SHAPES)
    net(**_rows())
    assert sorted(net.blobs) == ["accuracy", "data", "ip1", "ip2", "label", "loss"]
    assert (net.blobs["ip1"] >= 0).all()


def test_inputs_come_by_name_or_in_order_and_wrong_names_are_refused() -> None:
    net = caffe.loads(NET, phase="TEST", shapes=SHAPES)
    rows = _rows()
    assert torch.equal(net(**rows)["loss"], net(rows["data"].numpy(), rows["label"].numpy())["loss"])
    with pytest.raises(DataError, match=r"'lable' is no input.*Did you mean 'label'"):
        net(data=rows["data"], lable=rows["label"])
    with pytest.raises(DataError, match="3 inputs are given; the net takes data, label"):
        net(1, 2, 3)


def test_without_labels_the_layers_that_need_them_are_left_out() -> None:
    net = caffe.loads(NET, phase="TEST", shapes=SHAPES)
    out = net(data=_rows()["data"])
    assert list(out) == ["ip2"]
    assert out.loss is None
    with pytest.raises(DataError, match="layer 'ip1' reads blob 'data'"):
        net(label=_rows()["label"])


def test_shapes_that_nobody_told_come_with_the_first_call() -> None:
    net = caffe.loads(NET)
    assert not net.is_ready
    with pytest.raises(ConfigError, match="load it with weights= or shapes="):
        caffe.parse_solver("base_lr: 0.1", net)
    net(**_rows())
    assert net.is_ready
    assert caffe.parse_solver("base_lr: 0.1", net).lr == pytest.approx(0.1)


def test_shapes_may_come_from_weights(tmp_path: Path) -> None:
    first = caffe.loads(NET, shapes=SHAPES)
    caffe.save(first, tmp_path / "x.caffemodel")
    second = caffe.loads(NET, weights=tmp_path / "x.caffemodel")
    assert second.is_ready
    for name, blobs in first.params.items():
        for mine, theirs in zip(blobs, second.params[name], strict=True):
            assert torch.equal(mine, theirs)


def test_multipliers_reach_the_solver_and_a_zero_freezes() -> None:
    net = caffe.loads(NET.replace("param { lr_mult: 1 }", "param { lr_mult: 0 }"), shapes=SHAPES)
    solver = caffe.parse_solver('base_lr: 0.5 lr_policy: "fixed" weight_decay: 0.1', net)
    assert [(g["lr_mult"], g["decay_mult"], len(g["params"])) for g in solver.param_groups] == [(2, 0, 1), (1, 1, 2)]
    frozen = net.params["ip1"][0].detach().clone()
    out = net(**_rows())
    assert out.loss is not None
    out.loss.backward()  # type: ignore[no-untyped-call]
    solver.step()
    assert torch.equal(net.params["ip1"][0], frozen)
    assert solver.iteration == 1


def test_parameters_of_one_name_are_one() -> None:
    shared = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 4 } } }
    layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" } param { name: "b" }
      inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
    layer { name: "c" type: "InnerProduct" bottom: "a" top: "c" param { name: "w" } param { name: "b" }
      inner_product_param { num_output: 4 } }
    layer { name: "s" type: "Reduction" bottom: "c" top: "s" loss_weight: 0.5 }
    """
    net = caffe.loads(shared)
    assert net.params["a"][0] is net.params["c"][0]
    out = net(torch.randn(2, 4))
    assert out.loss is not None
    assert float(out.loss.detach()) == pytest.approx(0.5 * float(out["s"].detach()))
    assert len(list(net.parameters())) == 2
    again = copy.deepcopy(net)
    assert again.params["a"][0] is again.params["c"][0]


def test_a_shared_blob_of_another_shape_needs_permission() -> None:
    text = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }
    layer { name: "a" type: "Scale" bottom: "x" top: "a" param { name: "w" } scale_param { filler { value: 3 } } }
    layer { name: "r" type: "Reshape" bottom: "a" top: "r" reshape_param { shape { dim: 0 dim: 2 dim: 3 } } }
    layer { name: "c" type: "Scale" bottom: "r" top: "c" param { name: "w" } scale_param { num_axes: 2 } }
    """
    with pytest.raises(ConfigError, match=r"prototxt:5: layer 'c'.*shapes must agree"):
        caffe.loads(text)
    net = caffe.loads(text.replace('c" param { name: "w" }', 'c" param { name: "w" share_mode: PERMISSIVE }'))
    assert net(torch.ones(2, 6))["c"].flatten().tolist() == [9.0] * 12


def test_layers_of_one_name_in_two_phases_share_their_parameters() -> None:
    text = (
        NET
        + """
    layer { name: "extra" type: "Scale" bottom: "ip2" top: "extra" include { phase: TRAIN } }
    layer { name: "extra" type: "Scale" bottom: "ip2" top: "extra" include { phase: TEST } scale_param { axis: 1 } }
    """
    )
    net = caffe.loads(text, shapes=SHAPES)
    with torch.no_grad():
        net.params["extra"][0].fill_(7)
    net.eval()
    assert net.params["extra"][0].tolist() == [7, 7, 7]


def test_rules_of_stages_and_levels_choose_layers() -> None:
    text = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 } } }'
    text += 'layer { name: "a" type: "AbsVal" bottom: "x" top: "a" include { stage: "deploy" not_stage: "old" } }'
    text += 'layer { name: "b" type: "AbsVal" bottom: "x" top: "b" exclude { min_level: 2 } }'
    one = torch.ones(1)
    assert list(caffe.loads(text)(one)) == ["b"]
    assert list(caffe.loads(text, stages=["deploy"])(one)) == ["a", "b"]
    assert list(caffe.loads(text, stages=["deploy", "old"])(one)) == ["b"]
    assert list(caffe.loads(text, stages=["deploy"], level=2)(one)) == ["a"]


def test_a_net_travels() -> None:
    net = caffe.loads(NET, phase="TEST", shapes=SHAPES)
    rows = _rows()
    wanted = net(**rows)["loss"].detach()
    for other in (pickle.loads(pickle.dumps(net)), cloudpickle.loads(cloudpickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(other(**rows)["loss"], wanted)
        assert other.params["ip1"][1].lr_mult == 2
        assert other.definition.lines == net.definition.lines


def test_an_unknown_layer_is_named_with_its_line_before_anything_runs() -> None:
    with pytest.raises(
        ConfigError, match=r"prototxt:17: layer 'new' \(Relu\): type 'Relu' is not supported. Did you mean 'ReLU'"
    ):
        caffe.loads(NET + 'layer { name: "new" type: "Relu" bottom: "ip2" top: "new" }')
    with pytest.raises(ConfigError, match=r"prototxt:2: .*no field named .nam"):
        caffe.loads('name: "x"\nlayer { nam: "y" }')


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ('type: "ReLU" bottom: "ip3" top: "y"', "its bottom 'ip3' is no top of an earlier layer. Did you mean 'ip2'"),
        ('type: "ReLU" bottom: "ip2" top: "loss"', "its top 'loss' is already made"),
        ('type: "ReLU" bottom: "ip2"', "it has 0 tops; it takes 1"),
        ('type: "Convolution" bottom: "data" top: "y" convolution_param { num_output: 3 }', "kernel_size is missing"),
        ('type: "Pooling" bottom: "data" top: "y" pooling_param { kernel_size: 9 }', "does not fit into 2"),
        ('type: "Pooling" bottom: "data" top: "y" pooling_param { kernel_size: 2 stride: 0 }', r"stride = \(0, 0\)"),
        ('type: "InnerProduct" bottom: "data" top: "y" inner_product_param { num_output: 99999999 }', "numbers"),
        ('type: "Concat" bottom: "data" bottom: "ip2" top: "y"', "Number of dimensions of tensors must match"),
        ('type: "Slice" bottom: "ip2" top: "y" top: "z"', "does not divide into 2"),
        ('type: "Python" bottom: "ip2" top: "y" python_param { module: "m" layer: "Mine" }', "not registered"),
        ('type: "Dropout" bottom: "ip2" top: "y" dropout_param { dropout_ratio: 2 }', "at least 0 and below 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(layer: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"prototxt:17: layer 'new' .*{said}"):
        caffe.loads(f'{NET}layer {{ name: "new" {layer} }}', shapes=SHAPES)


def test_rows_that_do_not_fit_name_the_layer() -> None:
    net = caffe.loads(NET, shapes=SHAPES)
    with pytest.raises(DataError, match=r"prototxt:8: layer 'ip1' .*with bottoms \[\(8, 7\)\]"):
        net(data=torch.randn(8, 7), label=torch.zeros(8))


def test_users_add_layers_of_their_own() -> None:
    fields = "message LayerParameter\n  double_param 9100 DoubleParameter\nmessage DoubleParameter\n  times 1 float =2"

    @caffe.layer("Double", fields=fields)
    class Double(caffe.Layer):
        def __init__(self, spec: object) -> None:
            super().__init__(spec)
            self.times = spec.double_param.times  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.times

    try:
        text = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 } } }'
        text += 'layer { name: "d" type: "Double" bottom: "x" top: "d" double_param { times: 5 } }'
        assert caffe.loads(text)(torch.ones(2))["d"].tolist() == [5, 5]
    finally:
        del REGISTRY["Double"]


def test_the_first_form_of_all_is_read() -> None:
    text = """
    layers { layer { name: "d" type: "data" source: "x" batchsize: 4 scale: 0.5 cropsize: 3 } top: "data" top: "label" }
    layers { layer { name: "p" type: "padding" pad: 1 } bottom: "data" top: "padded" }
    layers { layer { name: "c" type: "conv" num_output: 2 kernelsize: 3 blobs_lr: 1 blobs_lr: 2
             weight_filler { type: "gaussian" std: 0.1 } } bottom: "padded" top: "c" }
    layers { layer { name: "r" type: "relu" } bottom: "c" top: "c" }
    layers { layer { name: "i" type: "innerproduct" num_output: 3 biasterm: false } bottom: "c" top: "i" }
    layers { layer { name: "l" type: "softmax_loss" } bottom: "i" bottom: "label" }
    """
    net = caffe.loads(text, shapes={"data": (4, 1, 3, 3), "label": (4,)})
    assert [tuple(b.shape) for blobs in net.params.values() for b in blobs] == [(2, 1, 3, 3), (2,), (3, 18)]
    assert net.params["c"][1].lr_mult == 2  # type: ignore[attr-defined]
    assert net.definition.net.layer[0].transform_param.scale == 0.5
    out = net(data=torch.randn(4, 1, 3, 3), label=torch.zeros(4))
    assert net.blobs["c"].shape == (4, 2, 3, 3)
    assert out.loss is not None  # a loss without a top counts all the same
    assert list(out) == ["(automatic)"]
    with pytest.raises(ConfigError, match="type 'wonder' is none of the oldest form"):
        caffe.loads('layers { layer { name: "d" type: "wonder" } }')


def test_layers_of_the_second_form_keep_names_rates_and_sharing() -> None:
    text = """
    input: "x" input_dim: 2 input_dim: 4 input_dim: 1 input_dim: 1
    layers { name: "a" type: INNER_PRODUCT bottom: "x" top: "a" param: "w" blobs_lr: 3 weight_decay: 0
             inner_product_param { num_output: 4 bias_term: false weight_filler { type: "xavier" } } }
    layers { name: "b" type: INNER_PRODUCT bottom: "a" top: "b" param: "w"
             inner_product_param { num_output: 4 bias_term: false } }
    """
    net = caffe.loads(text)
    assert net.params["a"][0] is net.params["b"][0]
    assert (net.params["a"][0].lr_mult, net.params["a"][0].decay_mult) == (3, 0)  # type: ignore[attr-defined]


def test_weights_of_another_network_are_refused_by_name(tmp_path: Path) -> None:
    net = caffe.loads(NET, shapes=SHAPES)
    caffe.save(net, tmp_path / "x.caffemodel")
    with pytest.raises(
        DataError, match=r"layer 'ip1' .*its weight has the shape \(6, 4\), and the file's is \(6, 10\)"
    ):
        caffe.loads(NET, weights=tmp_path / "x.caffemodel", shapes={"data": (8, 4), "label": (8,)})
    with pytest.raises(DataError, match=r"no layer of prototxt has weights in .*which holds ip1, ip2"):
        caffe.loads(NET.replace('"ip', '"other'), weights=tmp_path / "x.caffemodel")
    with pytest.raises(DataError, match="is not a file"):
        caffe.loads(NET, weights=tmp_path / "y.caffemodel")


def test_batch_norm_statistics_are_buffers_that_travel_with_the_weights(tmp_path: Path) -> None:
    text = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 2 } } }'
    text += 'layer { name: "n" type: "BatchNorm" bottom: "x" top: "n" }'
    net = caffe.loads(text)
    x = torch.randn(4, 2)
    for _ in range(3):
        net(x)
    assert not list(net.parameters())
    assert float(net.params["n"][2]) == pytest.approx(1 + 0.999 + 0.999**2)
    caffe.save(net, tmp_path / "n.caffemodel")
    again = caffe.loads(text, weights=tmp_path / "n.caffemodel", phase="TEST")
    net.eval()
    assert torch.equal(again(x)["n"], net(x)["n"])


def test_fillers_draw_what_caffe_draws() -> None:
    text = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 300 } } }'
    text += 'layer { name: "i" type: "InnerProduct" bottom: "x" top: "i" inner_product_param { num_output: 200 %s } }'
    torch.manual_seed(0)

    def weight(filler: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return caffe.loads(text % f"weight_filler {{ {filler} }}").params["i"][0].detach().numpy()

    assert np.abs(weight('type: "xavier"')).max() == pytest.approx(np.sqrt(3 / 300), rel=1e-2)
    assert np.abs(weight('type: "xavier" variance_norm: FAN_OUT')).max() == pytest.approx(np.sqrt(3 / 200), rel=1e-2)
    assert weight('type: "msra" variance_norm: AVERAGE').std() == pytest.approx(np.sqrt(2 / 250), rel=2e-2)
    assert weight('type: "positive_unitball"').sum(1) == pytest.approx(1, rel=1e-5)
    assert (weight('type: "gaussian" std: 3 sparse: 20') != 0).mean() == pytest.approx(0.1, rel=0.1)
    assert weight('type: "uniform" min: 2 max: 3').min() >= 2
    with pytest.raises(ConfigError, match=r"filler type 'gauss' is not known. Did you mean 'gaussian'"):
        weight('type: "gauss"')


def test_stochastic_pooling_draws_in_training_and_expects_in_testing() -> None:
    text = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 1 dim: 2 dim: 2 } } }'
    text += 'layer { name: "p" type: "Pooling" bottom: "x" top: "p" pooling_param { pool: STOCHASTIC kernel_size: 2 } }'
    net = caffe.loads(text)
    x = torch.tensor([[[[1.0, 0.0], [3.0, 0.0]]]])
    torch.manual_seed(0)
    drawn = [float(net(x)["p"]) for _ in range(400)]
    assert set(drawn) == {1.0, 3.0}
    assert np.mean(drawn) == pytest.approx(2.5, abs=0.15)
    net.eval()
    assert float(net(x)["p"]) == 2.5
