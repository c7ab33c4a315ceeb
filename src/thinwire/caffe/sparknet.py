"""SparkNet's own API (the paper's Listings 1 to 3): layer constructors, nets that train, weights that average.

>>> params = NetParams(
...     RDDLayer("data", shape=[4, 2]),
...     RDDLayer("label", shape=[4, 1]),
...     LinearLayer("ip", ["data"], num_outputs=3),
...     SoftmaxWithLoss("loss", ["ip", "label"]),
... )
>>> net = Net(params)
>>> net.set_training_data([([0.0, 1.0], 0), ([1.0, 0.0], 1)])
>>> net.train(5)
>>> {name: [blob.shape for blob in blobs] for name, blobs in net.get_weights().items()}
{'ip': [(3, 2), (3,)]}
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from thinwire.caffe import schema
from thinwire.caffe.net import CaffeNet
from thinwire.caffe.prototxt import definition, written
from thinwire.caffe.solver import Settings, solver_for
from thinwire.errors import ConfigError, DataError
from thinwire.replicas.torch import resolve_device

Array = np.ndarray[Any, Any]


class Pool(enum.Enum):
    """How a PoolLayer pools."""

    MAX = "MAX"
    AVE = "AVE"
    STOCHASTIC = "STOCHASTIC"


class Activation(enum.Enum):
    """What an ActivationLayer computes."""

    RELU = "ReLU"
    SIGMOID = "Sigmoid"
    TANH = "TanH"


def _layer(name: str, kind: str, inputs: Sequence[str], **fields: Any) -> Any:
    return schema.message("LayerParameter")(name=name, type=kind, bottom=inputs, top=[name], **fields)


def _learnt(lr: Sequence[float]) -> list[dict[str, float]]:
    return [{"lr_mult": rate} for rate in lr]


def RDDLayer(name: str, *, shape: Sequence[int]) -> Any:  # noqa: N802 - the paper's names
    """Rows that `set_training_data` gives: a batch of this shape."""
    return _layer(name, "Input", (), input_param={"shape": [{"dim": shape}]})


def ConvLayer(  # noqa: N802
    name: str,
    inputs: Sequence[str],
    *,
    kernel: tuple[int, int],
    num_filters: int,
    stride: tuple[int, int] = (1, 1),
    pad: tuple[int, int] = (0, 0),
    group: int = 1,
    lr: Sequence[float] = (1.0, 2.0),
) -> Any:
    """A convolution; `lr` holds the multipliers of weight and bias."""
    given = {
        "num_output": num_filters,
        **dict(zip(("kernel_h", "kernel_w"), kernel, strict=True)),
        **dict(zip(("stride_h", "stride_w"), stride, strict=True)),
        **dict(zip(("pad_h", "pad_w"), pad, strict=True)),
        "group": group,
        "weight_filler": {"type": "xavier"},
        "bias_filler": {"type": "constant"},
    }
    return _layer(name, "Convolution", inputs, convolution_param=given, param=_learnt(lr))


def PoolLayer(  # noqa: N802
    name: str, inputs: Sequence[str], *, pool: Pool = Pool.MAX, kernel: tuple[int, int], stride: tuple[int, int]
) -> Any:
    """Pooling."""
    given = schema.message("PoolingParameter")(
        kernel_h=kernel[0], kernel_w=kernel[1], stride_h=stride[0], stride_w=stride[1]
    )
    given.pool = given.DESCRIPTOR.fields_by_name["pool"].enum_type.values_by_name[pool.value].number
    return _layer(name, "Pooling", inputs, pooling_param=given)


def LinearLayer(  # noqa: N802
    name: str, inputs: Sequence[str], *, num_outputs: int, lr: Sequence[float] = (1.0, 2.0)
) -> Any:
    """An inner product; `lr` holds the multipliers of weight and bias."""
    given = {"num_output": num_outputs, "weight_filler": {"type": "xavier"}, "bias_filler": {"type": "constant"}}
    return _layer(name, "InnerProduct", inputs, inner_product_param=given, param=_learnt(lr))


def ActivationLayer(name: str, inputs: Sequence[str], *, activation: Activation = Activation.RELU) -> Any:  # noqa: N802
    """A non-linearity."""
    return _layer(name, activation.value, inputs)


def DropoutLayer(name: str, inputs: Sequence[str], *, ratio: float = 0.5) -> Any:  # noqa: N802
    """Dropout, in training only."""
    return _layer(name, "Dropout", inputs, dropout_param={"dropout_ratio": ratio})


def SoftmaxWithLoss(name: str, inputs: Sequence[str]) -> Any:  # noqa: N802
    """The loss of scores and labels; with it comes their accuracy in testing."""
    return _layer(name, "SoftmaxWithLoss", inputs)


def NetParams(*layers: Any, name: str = "net") -> Any:  # noqa: N802
    """A network of these layers, the same message that a prototxt holds; an accuracy for testing comes with a loss."""
    net = schema.message("NetParameter")(name=name)
    for layer in layers:
        net.layer.add().CopyFrom(layer)
        if layer.type == "SoftmaxWithLoss" and not any(other.type == "Accuracy" for other in layers):
            more = _layer("accuracy", "Accuracy", list(layer.bottom), include=[{"phase": 1}])
            net.layer.add().CopyFrom(more)
    return net


def prototxt(params: Any) -> str:
    """A network's text, as Caffe writes it."""
    return written(params)


class WeightCollection(dict[str, list[Array]]):
    """Weights by layer, as a list each. They add, subtract and scale as vectors do."""

    def _with(self, other: Mapping[str, list[Array]], what: Callable[[Array, Array], Array]) -> WeightCollection:
        if list(self) != list(other):
            raise ConfigError(f"weights of layers {list(self)} and {list(other)} do not go together; use one network's")
        return WeightCollection(
            {name: [what(a, b) for a, b in zip(mine, other[name], strict=True)] for name, mine in self.items()}
        )

    def __add__(self, other: Mapping[str, list[Array]]) -> WeightCollection:
        return self._with(other, np.add)

    def __sub__(self, other: Mapping[str, list[Array]]) -> WeightCollection:
        return self._with(other, np.subtract)

    def __mul__(self, factor: float) -> WeightCollection:
        return WeightCollection({name: [blob * np.float32(factor) for blob in held] for name, held in self.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> WeightCollection:
        return self * (1 / divisor)

    @classmethod
    def mean(cls, collections: Iterable[WeightCollection]) -> WeightCollection:
        """The average of several."""
        held = list(collections)
        if not held:
            raise ConfigError("there are no weights to average; give at least one WeightCollection")
        total = held[0]
        for one in held[1:]:
            total = total + one
        return total / len(held)


class Net:
    """A network that trains on rows it is given, by Caffe's solver.

    Args:
        params: what `NetParams` or a prototxt file's definition gives.
        solver: a solver's settings; SGD with momentum as Caffe's LeNet has it, unless said.
        seed: of the first weights.
        device: "cpu", "cuda", or "auto": CUDA where there is one. The first weights are the same on each.
    """

    def __init__(self, params: Any, solver: Settings | None = None, *, seed: int = 0, device: str = "auto") -> None:
        self.device = resolve_device(device)
        torch.manual_seed(seed)
        self._net = CaffeNet(definition(params, "NetParams"))
        self._net.prepare({})
        if not self._net.is_ready:
            raise ConfigError("the network does not tell its inputs' shapes; begin it with RDDLayer(name, shape=…)")
        self._net.materialise()
        self._net.to(self.device)
        settings = Settings(momentum=0.9, weight_decay=5e-4, lr_policy="inv", gamma=1e-4, power=0.75)
        self._solver = solver_for(solver or settings, self._net)
        self._shapes = [self._net.known_shapes()[name] for name in self._net.inputs]
        self._rows: dict[bool, tuple[Array, Array]] = {}
        self._next = {True: 0, False: 0}

    @property
    def module(self) -> CaffeNet:
        """The torch module inside."""
        return self._net

    def set_training_data(self, data: Iterable[tuple[Any, int]]) -> None:
        """Takes the rows to train on, as (array, label); they are gone through in their order, again and again."""
        self._set(True, data)

    def set_validation_data(self, data: Iterable[tuple[Any, int]]) -> None:
        """Takes the rows to test on, as (array, label)."""
        self._set(False, data)

    def _set(self, training: bool, data: Iterable[tuple[Any, int]]) -> None:
        rows = list(data)
        if not rows:
            raise DataError("the data has no rows; give each net some: use fewer partitions")
        images = np.stack([np.asarray(image, np.float32) for image, _ in rows])
        self._rows[training] = images, np.asarray([label for _, label in rows])
        self._next[training] = 0

    def _batch(self, training: bool) -> list[torch.Tensor]:
        if training not in self._rows:
            raise DataError(f"there is no {'training' if training else 'validation'} data; set it first")
        images, labels = self._rows[training]
        size = self._shapes[0][0]
        chosen = np.arange(self._next[training], self._next[training] + size) % len(images)
        self._next[training] = int((chosen[-1] + 1) % len(images))
        batch = [torch.from_numpy(images[chosen].reshape(self._shapes[0])), torch.from_numpy(labels[chosen])]
        return [each.to(self.device) for each in batch]

    def train(self, num_steps: int) -> None:
        """Takes so many steps."""
        self._net.train()
        for _ in range(num_steps):
            out = self._net(*self._batch(True))
            if out.loss is None:
                raise ConfigError("the network has no loss; end it with SoftmaxWithLoss")
            self._solver.zero_grad()
            out.loss.backward()
            self._solver.step()

    def test(self, num_steps: int) -> float:
        """The accuracy over so many batches of validation rows; without an Accuracy layer, the loss."""
        self._net.eval()
        with torch.no_grad():
            found = [self._net(*self._batch(False)) for _ in range(num_steps)]
        self._net.train()
        scores = [out.get("accuracy", out.loss) for out in found]
        return float(np.mean([float(score) for score in scores if score is not None]))

    def get_weights(self) -> WeightCollection:
        """A copy of all weights."""
        return WeightCollection(
            {name: [blob.detach().cpu().numpy().copy() for blob in blobs] for name, blobs in self._net.params.items()}
        )

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Sequence[Any]], *, fresh: bool = False) -> None:
        """Takes these weights in place of its own; `fresh` forgets the momentum that led to those."""
        if fresh:
            self._solver.state.clear()
        mine = self._net.params
        if set(weights) != set(mine):
            raise ConfigError(f"weights are of layers {list(weights)}, the net's are {list(mine)}; use one network's")
        for name, blobs in mine.items():
            for blob, value in zip(blobs, weights[name], strict=True):
                blob.copy_(torch.as_tensor(np.asarray(value)))


_KEPT: dict[Hashable, Any] = {}
MOST_KEPT = 16


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """What was made under a key in this process before, or else what is made now.

    Spark's Python processes outlive their tasks, so that a net kept there has its rows, and its place among them, in
    the next round too, if the task reads all rows that it is given. Which process runs which task is Spark's to say:
    one partition's net may be in several.
    """
    if key not in _KEPT:
        while len(_KEPT) >= MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = make()
    return _KEPT[key]
