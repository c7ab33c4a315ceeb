"""Older forms of a network's message brought to the current one: V0 and V1 layers, inputs, transforms."""

from __future__ import annotations

from typing import Any

from thinwire.errors import ConfigError

V1_TYPES = {
    "ABSVAL": "AbsVal",
    "ACCURACY": "Accuracy",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "CONCAT": "Concat",
    "CONTRASTIVE_LOSS": "ContrastiveLoss",
    "CONVOLUTION": "Convolution",
    "DATA": "Data",
    "DECONVOLUTION": "Deconvolution",
    "DROPOUT": "Dropout",
    "DUMMY_DATA": "DummyData",
    "ELTWISE": "Eltwise",
    "EUCLIDEAN_LOSS": "EuclideanLoss",
    "EXP": "Exp",
    "FLATTEN": "Flatten",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "HINGE_LOSS": "HingeLoss",
    "IM2COL": "Im2col",
    "IMAGE_DATA": "ImageData",
    "INFOGAIN_LOSS": "InfogainLoss",
    "INNER_PRODUCT": "InnerProduct",
    "LRN": "LRN",
    "MEMORY_DATA": "MemoryData",
    "MULTINOMIAL_LOGISTIC_LOSS": "MultinomialLogisticLoss",
    "MVN": "MVN",
    "NONE": "",
    "POOLING": "Pooling",
    "POWER": "Power",
    "RELU": "ReLU",
    "SIGMOID": "Sigmoid",
    "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss",
    "SILENCE": "Silence",
    "SLICE": "Slice",
    "SOFTMAX": "Softmax",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "SPLIT": "Split",
    "TANH": "TanH",
    "THRESHOLD": "Threshold",
    "WINDOW_DATA": "WindowData",
}

V0_TYPES = {
    "accuracy": "ACCURACY",
    "bnll": "BNLL",
    "concat": "CONCAT",
    "conv": "CONVOLUTION",
    "data": "DATA",
    "dropout": "DROPOUT",
    "euclidean_loss": "EUCLIDEAN_LOSS",
    "flatten": "FLATTEN",
    "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT",
    "hinge_loss": "HINGE_LOSS",
    "im2col": "IM2COL",
    "images": "IMAGE_DATA",
    "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING",
    "relu": "RELU",
    "sigmoid": "SIGMOID",
    "softmax": "SOFTMAX",
    "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT",
    "tanh": "TANH",
    "window_data": "WINDOW_DATA",
}

_V0_PARAMETERS: dict[str, tuple[str, dict[str, str]]] = {
    "concat": ("concat_param", {"concat_dim": "concat_dim"}),
    "conv": (
        "convolution_param",
        {
            "num_output": "num_output",
            "biasterm": "bias_term",
            "weight_filler": "weight_filler",
            "bias_filler": "bias_filler",
            "pad": "pad",
            "kernelsize": "kernel_size",
            "group": "group",
            "stride": "stride",
        },
    ),
    "data": (
        "data_param",
        {"source": "source", "batchsize": "batch_size", "rand_skip": "rand_skip"},
    ),
    "dropout": ("dropout_param", {"dropout_ratio": "dropout_ratio"}),
    "hdf5_data": ("hdf5_data_param", {"source": "source", "batchsize": "batch_size"}),
    "images": (
        "image_data_param",
        {
            "source": "source",
            "batchsize": "batch_size",
            "rand_skip": "rand_skip",
            "shuffle_images": "shuffle",
            "new_height": "new_height",
            "new_width": "new_width",
        },
    ),
    "infogain_loss": ("infogain_loss_param", {"source": "source"}),
    "innerproduct": (
        "inner_product_param",
        {
            "num_output": "num_output",
            "biasterm": "bias_term",
            "weight_filler": "weight_filler",
            "bias_filler": "bias_filler",
        },
    ),
    "lrn": ("lrn_param", {"local_size": "local_size", "alpha": "alpha", "beta": "beta", "k": "k"}),
    "pool": (
        "pooling_param",
        {"pool": "pool", "kernelsize": "kernel_size", "stride": "stride", "pad": "pad"},
    ),
}
_TRANSFORM = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}


def upgraded(net: Any, lines: list[int]) -> tuple[Any, list[int]]:
    """The same network with `layer` only, inputs as Input layers, transforms in transform_param; and its lines."""
    if net.layer and net.layers:
        raise ConfigError("it has both `layer` and `layers`; a network is written in one form: rename one of them")
    current = type(net)()
    current.CopyFrom(net)
    current.ClearField("layers")
    if net.layers:
        old, lines = _without_padding(net.layers, lines)
        for layer in old:
            _from_v1(layer, current.layer.add())
    for layer in current.layer:
        _transform(layer)
        if layer.type == "BatchNorm":
            for spec in layer.param:  # its statistics are never learnt, whatever old files say
                spec.ClearField("lr_mult")
                spec.ClearField("decay_mult")
    return current, _inputs(current, lines)


def _inputs(net: Any, lines: list[int]) -> list[int]:
    """Puts the inputs that a network names in fields of their own in front, as Input layers."""
    if not net.input:
        return lines
    front = []
    kind = type(net)().layer.add
    for index, name in enumerate(net.input):
        layer = kind(name=name, type="Input", top=[name])
        if index < len(net.input_shape):
            layer.input_param.shape.add().CopyFrom(net.input_shape[index])
        elif len(net.input_dim) >= 4 * (index + 1):
            layer.input_param.shape.add().dim.extend(net.input_dim[4 * index : 4 * index + 4])
        front.append(layer)
    behind = list(net.layer)
    kept = [type(layer)() for layer in behind]
    for copy, layer in zip(kept, behind, strict=True):
        copy.CopyFrom(layer)
    for field in ("layer", "input", "input_shape", "input_dim"):
        net.ClearField(field)
    net.layer.extend(front + kept)
    return [0] * len(front) + lines


def _transform(layer: Any) -> None:
    """Moves what a data layer's own parameter says of scale, mean, crop and mirror to transform_param."""
    for name in ("data_param", "image_data_param", "window_data_param"):
        if not layer.HasField(name):
            continue
        own = getattr(layer, name)
        for field in ("scale", "mean_file", "crop_size", "mirror"):
            if own.HasField(field):
                setattr(layer.transform_param, field, getattr(own, field))
                own.ClearField(field)


def _from_v1(old: Any, new: Any) -> None:
    if old.HasField("layer"):
        _from_v0(old)
    kinds = old.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number
    new.type = V1_TYPES[kinds[old.type].name]
    new.name = old.name
    for field in ("bottom", "top", "loss_weight", "include", "exclude", "blobs"):
        getattr(new, field).extend(getattr(old, field))
    for descriptor, value in old.ListFields():
        if descriptor.name.endswith("_param"):
            getattr(new, descriptor.name).CopyFrom(value)
    for index in range(max(len(old.param), len(old.blobs_lr), len(old.weight_decay), len(old.blob_share_mode))):
        spec = new.param.add()
        if index < len(old.param) and old.param[index]:
            spec.name = old.param[index]
        if index < len(old.blobs_lr):
            spec.lr_mult = old.blobs_lr[index]
        if index < len(old.weight_decay):
            spec.decay_mult = old.weight_decay[index]
        if index < len(old.blob_share_mode):
            spec.share_mode = old.blob_share_mode[index]


def _from_v0(old: Any) -> None:
    """Fills a V1 layer from the V0 layer inside it."""
    inner = old.layer
    if inner.type not in V0_TYPES:
        raise ConfigError(f"layer {inner.name!r}: type {inner.type!r} is none of the oldest form; write it as `layer`")
    old.name = inner.name
    old.type = old.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_name[V0_TYPES[inner.type]].number
    for field in ("blobs", "blobs_lr", "weight_decay"):
        getattr(old, field).extend(getattr(inner, field))
    if inner.HasField("hdf5_output_param"):
        old.hdf5_output_param.CopyFrom(inner.hdf5_output_param)
    parameter, names = _V0_PARAMETERS.get(inner.type, ("", {}))
    for given, meant in names.items():
        if inner.HasField(given):
            _put(getattr(old, parameter), meant, getattr(inner, given))
    for given, meant in _TRANSFORM.items():
        if inner.HasField(given):
            setattr(old.transform_param, meant, getattr(inner, given))
    old.ClearField("layer")


def _put(parameter: Any, name: str, value: Any) -> None:
    field = parameter.DESCRIPTOR.fields_by_name[name]
    target = getattr(parameter, name)
    if field.message_type is not None:
        target.CopyFrom(value)
    elif hasattr(target, "append"):
        target.append(value)
    else:
        setattr(parameter, name, value)


def _without_padding(layers: Any, lines: list[int]) -> tuple[list[Any], list[int]]:
    """V0's padding layers folded into the layer that reads them."""
    kept, at = [], []
    padded: dict[str, tuple[str, int]] = {}
    for layer, line in zip(layers, lines, strict=True):
        if layer.HasField("layer") and layer.layer.type == "padding":
            padded[layer.top[0] if layer.top else ""] = (layer.bottom[0] if layer.bottom else "", layer.layer.pad)
            continue
        copy = type(layer)()
        copy.CopyFrom(layer)
        for index, name in enumerate(copy.bottom):
            if name in padded:
                copy.bottom[index], pad = padded[name]
                copy.layer.pad = pad
        kept.append(copy)
        at.append(line)
    return kept, at
