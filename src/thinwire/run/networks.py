"""What of a network cannot be trained by workers, as far as one pass through it shows."""

from __future__ import annotations

import copy
import hashlib
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.parameters import changed_shape, check_trainable
from thinwire.placement import Placement
from thinwire.placement.deferred import kept_generators
from thinwire.replicas import TrainSpec
from thinwire.replicas.hooks import hooked
from thinwire.replicas.objectives import OptimizerFactory
from thinwire.replicas.torch import build_module
from thinwire.rules.optimizer import FlatOptimizer
from thinwire.strategies import Relay, Strategy, name_of

_log = logging.getLogger("thinwire.run")


def copied(module: nn.Module) -> nn.Module:
    """A copy of a network, as workers get one."""
    computed = {}
    for layer in module.modules():  # such as the weight of `nn.utils.weight_norm`, which no copy can be made of
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                computed[id(value)] = value.detach().clone()
    return copy.deepcopy(module, computed)


def refuse_instance(network: object) -> None:
    """Refuses a network that is given as it is, and whose copies would train otherwise.

    Raises:
        ConfigError: Its parameters cannot be trained, or have hooks, which no copy has.
    """
    if not isinstance(network, nn.Module):
        return
    check_trainable(network)  # a copy shares no memory any more
    if names := hooked(network):
        raise ConfigError(
            f"parameter {names[0]!r} of {type(network).__name__} has a hook on its gradient, which no copy of the "
            "model has; give a function that makes the model and registers the hook: every worker calls it"
        )


def refuse_one_for_all(network: Any, seed: int, workers: int) -> None:
    """Refuses a function that returns one network each time, where workers are threads, which would train it together.

    Raises:
        ConfigError: It does.
    """
    if isinstance(network, nn.Module) or workers == 1:
        return
    try:
        with kept_generators():
            first, second = build_module(network, seed), build_module(network, seed)
    except Exception as error:  # it is told of where a row is tried
        _log.info("the model cannot be made here: %s: %s", type(error).__name__, error)
        return
    if not {id(p) for p in first.parameters()}.isdisjoint(id(p) for p in second.parameters()):
        kind = type(first).__name__
        what = f"the same {kind}" if first is second else f"a {kind} of the same parameters"
        raise ConfigError(
            f"the function that makes the model returns {what} each time, and {workers} workers in one process would "
            "train it together; give the model itself, which is copied, or a function that makes a new one"
        )


def signature_of(module: nn.Module) -> str:
    """A digest of what a checkpoint holds of a network: its trained parameters and its buffers by name and shape."""
    trained = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
    kept = [(name, tuple(buffer.shape)) for name, buffer in _exchanged(module).items()]
    return hashlib.blake2b(repr((trained, kept)).encode(), digest_size=8).hexdigest()


class Steps(NamedTuple):
    """How a run takes its steps, as far as a network or an optimizer may not go together with it."""

    elsewhere: str | None = None
    """What steps parameters in another place than the replica that computed with them, in words; None for nothing."""
    together: str | None = None
    """What makes one step of several batches, in words; None where each has a step of its own."""
    equal: str | None = None
    """The strategy whose replicas are equal since they take equal steps, by name."""


def steps_of(strategy: Strategy, placement: Placement, spec: TrainSpec, workers: int) -> Steps:
    """How a run takes its steps."""
    name, jointly = name_of(strategy), isinstance(strategy, Relay) and _sends_gradients(strategy, spec.optimizer)
    where = None
    if strategy.timing == "async" and strategy.subject == "gradients":
        where = f"servers of {name} step them"
    elif jointly and not placement.shares:
        where = f"{name} steps them jointly"
    elif placement.shares:
        where = f"{placement!r} has each member step a part of them"
    together = None
    if workers > 1 and (strategy.subject == "gradients" or jointly):
        together = f"{name} steps by the mean of all workers' gradients"
    elif placement.shares:
        together = f"members of {placement!r} share out the rows of a step"
    elif spec.accumulate > 1:
        together = f"accumulate = {spec.accumulate} computes the rows of a step in pieces"
    return Steps(where, together, name if strategy.replicated and not placement.shares and workers > 1 else None)


def _sends_gradients(strategy: Relay, factory: OptimizerFactory) -> bool:
    try:
        return strategy.steps_jointly(FlatOptimizer(factory, factory(iter([nn.Parameter(torch.zeros(1))]))))
    except Exception:  # told of where the optimizer is made of the model's own parameters
        return False


class Held(NamedTuple):
    """A network's tensors before a pass, by name: a pass may change buffers, and their values only."""

    parameters: dict[str, tuple[nn.Parameter, Tensor]]
    """Each with a copy of its values."""
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]
    """By module and name, each with a copy of its values."""
    modes: dict[nn.Module, bool]
    """Whether modules train."""
    shapes: dict[str, torch.Size]
    """Of the buffers that workers exchange."""

    @classmethod
    def of(cls, module: nn.Module) -> Held:
        """What a network holds now."""
        parameters = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
        buffers = [
            (each, name, buffer, buffer.detach().clone())
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        shapes = {name: buffer.shape for name, buffer in _exchanged(module).items()}
        return cls(parameters, buffers, {each: each.training for each in module.modules()}, shapes)

    def put_back(self) -> None:
        """Leaves buffers and modes as they were: a function may have returned a module that the user goes on using."""
        for module, name, buffer, value in self.buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(value)
        for module, training in self.modes.items():
            module.training = training

    def refuse_changes(self, module: nn.Module, elsewhere: str | None) -> None:
        """Refuses a network whose passes have changed what workers hold outside of it.

        Raises:
            ConfigError: It has put another parameter in place of one, has changed the values of one that others step,
                or the shape of a buffer.
        """
        now = dict(module.named_parameters())
        kind = type(module).__name__
        for name in {**self.parameters, **now}:
            if name not in now or name not in self.parameters or now[name] is not self.parameters[name][0]:
                raise ConfigError(
                    f"a forward pass of {kind} makes parameter {name!r}, or replaces it, and workers exchange those "
                    "that are there when the run begins; make all parameters in __init__, and change their values only"
                )
        if elsewhere is not None:
            for name, (parameter, before) in self.parameters.items():
                if not torch.equal(parameter.detach(), before):
                    raise ConfigError(
                        f"a forward pass of {kind} changes the values of parameter {name!r}, and {elsewhere}, which "
                        "would undo it; use a strategy whose workers step whole replicas, such as tw.SparkNet(), or a "
                        "parametrization (torch.nn.utils.parametrize)"
                    )
        for name, buffer in _exchanged(module).items():
            if name in self.shapes and buffer.shape != self.shapes[name]:
                raise ConfigError(changed_shape(name, self.shapes[name], buffer.shape))


def _exchanged(module: nn.Module) -> dict[str, Tensor]:
    persistent = set(module.state_dict())
    return {name: b for name, b in module.named_buffers() if name in persistent and b.is_floating_point()}
