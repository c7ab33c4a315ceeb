"""Caffe's files: networks and solvers as text, weights, means, solver states and images as protobuf."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import numpy as np

from tests.fuzz.of_files import written
from tests.fuzz.target import Target
from thinwire import caffe
from thinwire.caffe import blobs as binary
from thinwire.caffe import schema, weights
from thinwire.caffe.prototxt import parse
from thinwire.caffe.solver import Settings, solver_for
from thinwire.caffe.sources import decoded
from thinwire.errors import ConfigError, DataError

NET = """name: "n"
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 5 dim: 5 } } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 2 kernel_size: 3 } }
layer { name: "p" type: "Pooling" bottom: "c" top: "p" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "i" type: "InnerProduct" bottom: "p" top: "i" inner_product_param { num_output: 3 } }
"""
OLD = """input: "x" input_dim: 1 input_dim: 2 input_dim: 5 input_dim: 5
layers { name: "r" type: RELU bottom: "x" top: "x" }
"""
SOLVER = 'base_lr: 0.1 lr_policy: "step" gamma: 0.5 stepsize: 7 momentum: 0.9 type: "Adam" iter_size: 2 max_iter: 10'
WORDS = tuple(
    f"{word}".encode()
    for word in (
        "layer {",
        "type: ",
        "name: ",
        "bottom: ",
        "top: ",
        "dim: ",
        "num_output: ",
        "kernel_size: ",
        "4294967295",
        "-1",
        "{",
        "}",
        '"',
        "Concat",
        "Slice",
        "Eltwise",
        "LRN",
        "BatchNorm",
        "Scale",
        "Reshape",
        "Flatten",
        "Softmax",
        "Dropout",
        "Crop",
        "LSTM",
        "include { phase: TEST }",
        "axis: ",
        "group: ",
    )
)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _prototxt(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        caffe.parse_net(_text(data))


def _network(data: bytes) -> None:
    with contextlib.suppress(ConfigError, DataError):
        caffe.CaffeNet(caffe.parse_net(_text(data))).prepare({})


def _solver(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        Settings.of(parse("SolverParameter", _text(data), "solver")).rate(1000)


def _weights(data: bytes) -> None:
    with contextlib.suppress(DataError):
        for blobs in weights.read_weights(written("weights", data)).values():
            for blob in blobs:
                blob.tensor()


def _weights_seeds() -> list[bytes]:
    net, path = caffe.loads(NET), written("seed", b"")
    caffe.save(net, path)
    with open(path, "rb") as file:
        return [file.read(), _blob((2, 3)), _blob((1, 1, 1, 2), legacy=True)]


def _blob(shape: tuple[int, ...], *, legacy: bool = False) -> bytes:
    made = schema.message("BlobProto", raw=True)()
    made.data = np.ones(int(np.prod(shape)), "<f4").tobytes()
    if legacy:
        made.num, made.channels, made.height, made.width = shape
    else:
        made.shape.dim.extend(shape)
    found: bytes = made.SerializeToString()
    return found


def _mean(data: bytes) -> None:
    with contextlib.suppress(DataError):
        binary.read_mean(written("mean", data))


@functools.cache
def _trained() -> Any:
    net = caffe.loads(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } } '
        'layer { name: "i" type: "InnerProduct" bottom: "x" top: "i" inner_product_param { num_output: 1 } }'
    )
    return solver_for(Settings(), net)


def _state(data: bytes) -> None:
    with contextlib.suppress(DataError):
        _trained().load_state(written("state", data))


def _state_seeds() -> list[bytes]:
    made = schema.message("SolverState", raw=True)(iter=3, learned_net="x.caffemodel")
    for shape in ((1, 2), (1,)):
        made.history.add().ParseFromString(_blob(shape))
    return [made.SerializeToString()]


def _datum(data: bytes) -> None:
    with contextlib.suppress(DataError):
        found, _ = decoded(data)
        assert found.ndim == 3


def _datum_seeds() -> list[bytes]:
    datum = schema.message("Datum")
    plain = datum(channels=1, height=2, width=2, label=3, data=b"abcd")
    floats = datum(channels=1, height=1, width=2, label=3, float_data=[0.5, 1.0])
    found = [plain.SerializeToString(), floats.SerializeToString()]
    from PIL import Image

    for kind in ("PNG", "JPEG"):
        sink = io.BytesIO()
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(sink, kind)
        if len(sink.getvalue()) < 900:
            found.append(datum(data=sink.getvalue(), encoded=True, label=1).SerializeToString())
    return found


TARGETS = (
    Target("prototxt", _prototxt, lambda: [NET.encode(), OLD.encode()], "networks as text", 1024, WORDS),
    Target(
        "network",
        _network,
        lambda: [NET.encode(), OLD.encode()],
        "networks as text, and the modules they stand for",
        1024,
        WORDS,
        changes=200,
    ),
    Target(
        "solver",
        _solver,
        lambda: [SOLVER.encode()],
        "solvers as text",
        512,
        (b"lr_policy: ", b'"poly"', b'"inv"', b'"sigmoid"', b"1e39", b"-1"),
    ),
    Target("weights", _weights, _weights_seeds, "caffemodels", 2048),
    Target("mean", _mean, lambda: [_blob((2, 3)), _blob((1, 1, 1, 2), legacy=True)], "binaryproto means", 512),
    Target("state", _state, _state_seeds, "solver states", 512),
    Target("datum", _datum, _datum_seeds, "images of an LMDB folder, encoded or not", 1024),
)
