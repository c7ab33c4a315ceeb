"""Caffe's solvers as torch optimizers: their own update rules, policies, regularisation and saved states."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.caffe.blobs import blob_of, parsed, read_bytes
from thinwire.caffe.net import CaffeNet
from thinwire.caffe.prototxt import parse, read_solver
from thinwire.errors import ConfigError, DataError, nearest

TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")
_OLD_TYPES = dict(enumerate(TYPES))
POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")
_SLOTS = {"AdaDelta": 2, "Adam": 2}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A SolverParameter's values, as far as they bear on updates."""

    type: str = "SGD"
    base_lr: float = 0.01
    lr_policy: str = "fixed"
    gamma: float = 0.0
    power: float = 0.0
    stepsize: int = 0
    stepvalue: tuple[int, ...] = ()
    max_iter: int = 0
    momentum: float = 0.0
    momentum2: float = 0.999
    rms_decay: float = 0.99
    delta: float = 1e-8
    weight_decay: float = 0.0
    regularization_type: str = "L2"
    clip_gradients: float = -1.0
    iter_size: int = 1

    @classmethod
    def of(cls, given: Any, file: str = "solver") -> Settings:
        """What a SolverParameter says; refuses what no Caffe would take."""
        kind = (
            given.type if given.HasField("type") or not given.HasField("solver_type") else _OLD_TYPES[given.solver_type]
        )
        kind = {name.lower(): name for name in TYPES}.get(kind.lower(), kind)
        found = cls(
            type=kind,
            base_lr=given.base_lr,
            lr_policy=given.lr_policy or "fixed",
            gamma=given.gamma,
            power=given.power,
            stepsize=given.stepsize,
            stepvalue=tuple(given.stepvalue),
            max_iter=given.max_iter,
            momentum=given.momentum,
            momentum2=given.momentum2,
            rms_decay=given.rms_decay,
            delta=given.delta,
            weight_decay=given.weight_decay,
            regularization_type=given.regularization_type,
            clip_gradients=given.clip_gradients,
            iter_size=given.iter_size,
        )
        try:
            found._check()
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        return found

    def _check(self) -> None:
        if self.type not in TYPES:
            raise ConfigError(f"type {self.type!r} is not known. {nearest(self.type, TYPES)}")
        if self.lr_policy not in POLICIES:
            raise ConfigError(f"lr_policy {self.lr_policy!r} is not known. {nearest(self.lr_policy, POLICIES)}")
        if self.regularization_type not in ("L1", "L2"):
            raise ConfigError(f"regularization_type {self.regularization_type!r} is not known; use L1 or L2")
        if self.lr_policy in ("step", "sigmoid") and self.stepsize < 1 and self.lr_policy == "step":
            raise ConfigError("lr_policy 'step' needs a stepsize of at least 1")
        if self.lr_policy == "poly" and self.max_iter < 1:
            raise ConfigError("lr_policy 'poly' needs max_iter")
        if self.iter_size < 1:
            raise ConfigError(f"iter_size = {self.iter_size} is not possible; at least 1")
        if self.type in ("AdaGrad", "RMSProp") and self.momentum:
            raise ConfigError(f"momentum has no meaning for {self.type}; leave it out")
        for name in ("base_lr", "gamma", "power", "momentum", "momentum2", "rms_decay", "delta", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} = {getattr(self, name)} is not a finite number")

    def rate(self, iteration: int) -> float:
        """The learning rate at an iteration, by the policy.

        >>> Settings(base_lr=0.1, lr_policy="step", gamma=0.5, stepsize=7).rate(14)
        0.025
        """
        base, gamma = self.base_lr, self.gamma
        if self.lr_policy == "step":
            return base * _power(gamma, iteration // self.stepsize)
        if self.lr_policy == "exp":
            return base * _power(gamma, iteration)
        if self.lr_policy == "inv":
            return base * _power(1 + gamma * iteration, -self.power)
        if self.lr_policy == "multistep":
            return base * _power(gamma, sum(iteration >= value for value in self.stepvalue))
        if self.lr_policy == "poly":
            return base * _power(1 - iteration / self.max_iter, self.power)
        if self.lr_policy == "sigmoid":
            return base / (1 + _power(math.e, -gamma * (iteration - self.stepsize)))
        return base


def _power(number: float, exponent: float) -> float:
    """As C has it: what is too large is infinite, what is none is not a number."""
    try:
        return math.pow(number, exponent)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


class CaffeSolver(torch.optim.Optimizer):
    """Takes Caffe's steps. Sum the gradients of `iter_size` batches (call backward so often), then call `step`.

    Parameters may carry `lr_mult` and `decay_mult`, as those of a CaffeNet do.

    Args:
        parameters: what to train.
        settings: the solver's values.
        blobs: for reading solver states: every learnable blob in Caffe's order, those too that are not trained.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], settings: Settings, blobs: list[Tensor] | None = None
    ) -> None:
        self.settings = settings
        chosen = list(parameters)
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for parameter in chosen:
            key = (float(getattr(parameter, "lr_mult", 1.0)), float(getattr(parameter, "decay_mult", 1.0)))
            groups.setdefault(key, []).append(parameter)
        rate = settings.rate(0)
        super().__init__(
            [
                {"params": held, "lr": rate * lr, "lr_mult": lr, "decay_mult": decay, "iteration": 0}
                for (lr, decay), held in groups.items()
            ],
            {"lr": settings.base_lr},
        )
        self._blobs: list[Tensor] = list(chosen) if blobs is None else blobs

    @property
    def iteration(self) -> int:
        """How many steps were taken."""
        return int(self.param_groups[0]["iteration"])

    @property
    def lr(self) -> float:
        """The learning rate of the next step, before multipliers."""
        return self.settings.rate(self.iteration)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies one update from the gradients as they are now."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings, iteration, rate = self.settings, self.iteration, self.lr
        shrink = self._shrink() / settings.iter_size
        rule = _RULES[settings.type]
        for group in self.param_groups:
            decay = settings.weight_decay * group["decay_mult"]
            for parameter in group["params"]:
                given = parameter.grad
                gradient = torch.zeros_like(parameter) if given is None else given * shrink
                if decay:
                    gradient.add_(parameter.sign() if settings.regularization_type == "L1" else parameter, alpha=decay)
                history = self._history(parameter)
                parameter.sub_(rule(settings, gradient, history, rate * group["lr_mult"], iteration))
            group["iteration"] = iteration + 1
            group["lr"] = settings.rate(iteration + 1) * group["lr_mult"]
        return loss

    def _shrink(self) -> float:
        """By how much gradients are too long; before they are divided by iter_size, as in Caffe."""
        limit = self.settings.clip_gradients
        if limit < 0:
            return 1.0
        held = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = math.sqrt(sum(float(g.square().sum()) for g in held))
        return limit / length if length > limit else 1.0

    def _history(self, parameter: Tensor) -> list[Tensor]:
        state = self.state[parameter]
        if not state:
            for slot in range(_SLOTS.get(self.settings.type, 1)):
                state[f"history{slot}"] = torch.zeros_like(parameter)
        return [state[f"history{slot}"] for slot in range(len(state))]

    def load_state(self, path: str | os.PathLike[str]) -> str:
        """Goes on from a solverstate: its iteration and histories. Returns the weights file that it names."""
        name = os.fspath(path)
        given = parsed("SolverState", read_bytes(name), name)
        slots = _SLOTS.get(self.settings.type, 1)
        if len(given.history) != slots * len(self._blobs):
            raise DataError(
                f"{name!r} has {len(given.history)} histories; {self.settings.type} keeps {slots} for each of the "
                f"net's {len(self._blobs)} blobs: is it of this net and solver?"
            )
        try:
            histories = [blob_of(blob) for blob in given.history]
        except DataError as error:
            raise DataError(f"{name!r}: {error}") from error
        trained = {id(p) for group in self.param_groups for p in group["params"]}
        for index, blob in enumerate(self._blobs):
            if id(blob) not in trained:
                continue
            for slot in range(slots):
                history = histories[index + slot * len(self._blobs)]
                if history.values.size != blob.numel():
                    raise DataError(
                        f"{name!r}: history {index} has the shape {history.shape}, its blob {tuple(blob.shape)}"
                    )
                self._history(blob)[slot].copy_(history.tensor(tuple(blob.shape)))
        for group in self.param_groups:
            group["iteration"] = int(given.iter)
            group["lr"] = self.settings.rate(int(given.iter)) * group["lr_mult"]
        return str(given.learned_net)


def _sgd(s: Settings, gradient: Tensor, history: list[Tensor], rate: float, iteration: int) -> Tensor:
    return history[0].mul_(s.momentum).add_(gradient, alpha=rate)


def _nesterov(s: Settings, gradient: Tensor, history: list[Tensor], rate: float, iteration: int) -> Tensor:
    before = history[0] * s.momentum
    history[0].mul_(s.momentum).add_(gradient, alpha=rate)
    return history[0] * (1 + s.momentum) - before


def _adagrad(s: Settings, gradient: Tensor, history: list[Tensor], rate: float, iteration: int) -> Tensor:
    history[0].addcmul_(gradient, gradient)
    return gradient / (history[0].sqrt() + s.delta) * rate


def _rmsprop(s: Settings, gradient: Tensor, history: list[Tensor], rate: float, iteration: int) -> Tensor:
    history[0].mul_(s.rms_decay).addcmul_(gradient, gradient, value=1 - s.rms_decay)
    return gradient / (history[0].sqrt() + s.delta) * rate


def _adadelta(s: Settings, gradient: Tensor, history: list[Tensor], rate: float, iteration: int) -> Tensor:
    history[0].mul_(s.momentum).addcmul_(gradient, gradient, value=1 - s.momentum)
    update = gradient * ((history[1] + s.delta) / (history[0] + s.delta)).sqrt()
    history[1].mul_(s.momentum).addcmul_(update, update, value=1 - s.momentum)
    return update * rate


def _adam(s: Settings, gradient: Tensor, history: list[Tensor], rate: float, iteration: int) -> Tensor:
    first, second = s.momentum, s.momentum2
    history[0].mul_(first).add_(gradient, alpha=1 - first)
    history[1].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    correction = math.sqrt(1 - second ** (iteration + 1)) / (1 - first ** (iteration + 1))
    return history[0] / (history[1].sqrt() + s.delta) * (rate * correction)


_RULES = {
    "AdaDelta": _adadelta,
    "AdaGrad": _adagrad,
    "Adam": _adam,
    "Nesterov": _nesterov,
    "RMSProp": _rmsprop,
    "SGD": _sgd,
}


def load_solver(path: str | os.PathLike[str], net: CaffeNet) -> CaffeSolver:
    """The solver that a prototxt describes, for a net's parameters."""
    return solver_for(Settings.of(read_solver(path), os.fspath(path)), net)


def parse_solver(text: str, net: CaffeNet) -> CaffeSolver:
    """The solver that a prototxt's text describes, for a net's parameters."""
    return solver_for(Settings.of(parse("SolverParameter", text, "solver")), net)


def solver_for(settings: Settings, net: CaffeNet) -> CaffeSolver:
    """A solver with these settings, for a net's parameters."""
    if not net.is_ready:
        raise ConfigError("the net does not know the shapes of its parameters yet; load it with weights= or shapes=")
    blobs = [blob for _, _, blob in net.learnable()]
    trained = [blob for blob in blobs if isinstance(blob, nn.Parameter) and blob.requires_grad]
    return CaffeSolver(trained, settings, blobs)


class SolverFactory:
    """Makes the solver of a prototxt from parameters, as `fit` asks for it; picklable."""

    on_workers_only = True
    """Rates differ by parameter and step, which a table's servers know nothing of."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, parameters: Iterable[nn.Parameter]) -> CaffeSolver:
        return CaffeSolver([p for p in parameters if p.requires_grad], self.settings)

    def __repr__(self) -> str:
        return f"caffe {self.settings.type}"
