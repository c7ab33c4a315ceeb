"""Networks by name, and functions that are named as networks may be."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, final

from torch import nn

from thinwire.errors import ConfigError, nearest
from thinwire.models.augment import ChannelMean, Crop, Mirror, Shift
from thinwire.models.boltzmann import crbm, dbm, dbn, dbn_classifier, gaussian_rbm, rbm
from thinwire.models.cifar import fully_connected, resnet20, resnet110, three_convolutions
from thinwire.models.codes import denoising_autoencoder, sparse_autoencoder
from thinwire.models.large import alexnet, googlenet, resnet34, resnet152, vgg_a
from thinwire.models.sequences import char_lstm, char_lstm_peephole, char_rnn
from thinwire.models.small import cnn8, cnn28, lenet, mlp
from thinwire.models.tables import deepfm, dlrm, residual_mlp, two_tower
from thinwire.values import known_only

ZOO: dict[str, Callable[..., nn.Module]] = {
    made.__name__: made
    for made in (
        alexnet,
        char_lstm,
        char_lstm_peephole,
        char_rnn,
        cnn8,
        cnn28,
        crbm,
        dbm,
        dbn,
        dbn_classifier,
        deepfm,
        denoising_autoencoder,
        dlrm,
        fully_connected,
        gaussian_rbm,
        googlenet,
        lenet,
        mlp,
        rbm,
        residual_mlp,
        resnet20,
        resnet34,
        resnet110,
        resnet152,
        sparse_autoencoder,
        three_convolutions,
        two_tower,
        vgg_a,
    )
}


OF_TABLES = frozenset({"deepfm", "dlrm", "residual_mlp", "two_tower"})
"""Networks that need to know a table's columns."""


@final
@dataclass(frozen=True)
class ZooModel:
    """A network of the zoo with settings, in plain values: a factory that is stored as data."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known_only("model", self.settings, tuple(inspect.signature(model_by_name(self.name)).parameters), self.name)

    def __call__(self) -> nn.Module:
        return ZOO[self.name](**self.settings)

    @property
    def needs_columns(self) -> bool:
        """Whether it is of a table, and has not been told of its columns."""
        return self.name in OF_TABLES and not {"sizes", "numbers"} & set(self.settings)

    def of_columns(self, shape: Mapping[str, Any]) -> ZooModel:
        """The same, told of a table's columns."""
        return ZooModel(self.name, {**shape, **self.settings})


def model_by_name(name: str) -> Callable[..., nn.Module]:
    """A network of the zoo, or the factory that "package.module:function" names."""
    if ":" not in name:
        if name not in ZOO:
            raise ConfigError(
                f"model.zoo = {name!r} is not known. {nearest(name, ZOO)} "
                "A factory of your own is named as 'package.module:function'."
            )
        return ZOO[name]
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"model.factory = {name!r}: {error}; is its folder on PYTHONPATH?") from error
    if not callable(getattr(found, attribute, None)):
        raise ConfigError(f"model.factory = {name!r}: {module} has no function {attribute!r}")
    return cast(Callable[[], nn.Module], getattr(found, attribute))


def imported(key: str, name: str) -> Any:
    """What else a caller or a recipe names as "package.module:function": a loss, a transform."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two of no name of a module
        raise ConfigError(f"{key} = {name!r}: {error}; write it as 'package.module:function'") from error


__all__ = [
    "OF_TABLES",
    "ZOO",
    "ChannelMean",
    "Crop",
    "Mirror",
    "Shift",
    "ZooModel",
    "cnn28",
    "cnn8",
    "imported",
    "lenet",
    "mlp",
    "model_by_name",
]
