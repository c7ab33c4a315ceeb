"""Any element-wise torch optimizer as a pure rule: new parameters and state from old ones and a gradient."""

from __future__ import annotations

import contextlib
import copy
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.parameters import FlatParameters, Fragment

Factory = Callable[[Any], torch.optim.Optimizer]
STEP = "step"
BY_ANOTHER = "steps by another optimizer"
WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how an optimizer computes, and not what."""
NO_GROUP = -1
"""In place of a group's number: the optimizer does not hold these parameters."""


_KNOWN = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "step", "_opt_called", "_step_count"}
"""Attributes that every optimizer of torch has, and those that schedulers and scalers add."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
MOVING = ("lr", "betas", "momentum")
"""Settings of a group that schedules move."""


class Steps(Protocol):
    """What an optimizer has to know of steps beside their gradient; `thinwire.strategies.base.Taken` is one."""

    @property
    def fragment(self) -> Fragment: ...
    @property
    def steps(self) -> int: ...
    @property
    def before(self) -> int: ...
    @property
    def noise(self) -> float: ...
    @property
    def groups(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def absent(self) -> Collection[int]: ...
    @property
    def behind(self) -> Mapping[int, int]: ...


class Span(NamedTuple):
    """A stretch of the flat vector whose parameters take one step together."""

    fragment: Fragment
    group: int
    behind: int
    """How many updates these parameters had no gradient in."""


class FlatOptimizer:
    """An optimizer whose parameters lie in one flat vector, as a rule for any piece of that vector.

    Args:
        factory: makes the optimizer from parameters.
        made: what the factory made of these parameters; None gives every number the settings of a single parameter.
        parameters: where each parameter lies.
    """

    def __init__(
        self, factory: Factory, made: torch.optim.Optimizer | None = None, parameters: FlatParameters | None = None
    ) -> None:
        self.factory = factory
        self._starts: list[int] = [0] if parameters is None else list(parameters.offsets)
        self._made = factory([nn.Parameter(torch.zeros(1))]) if made is None else made
        self.settings: list[Mapping[str, Any]] = [dict(group) for group in self._made.param_groups]
        """The settings that the optimizer was made with, by group."""
        held = self._made.param_groups
        of = {id(p): number for number, group in enumerate(held) for p in group["params"]}
        tensors = held[0]["params"] if parameters is None else parameters.tensors
        self._group_of = [of.get(id(p), NO_GROUP) for p in tensors]
        self._first = [
            next((dict(self._made.state[p]) for p in group["params"] if p in self._made.state), {}) for group in held
        ]
        """What some optimizers keep of a parameter before its first step."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that the optimizer keeps beside a parameter, each as long as the parameter.

        Raises:
            ConfigError: It keeps something else beside a parameter than those and a count of its steps.
        """
        return tuple(dict.fromkeys(name for slots in self._slots_of for name in slots))

    @cached_property
    def _slots_of(self) -> list[tuple[str, ...]]:
        """Those of each group."""
        return [self._slots(number) for number in range(len(self._made.param_groups))]

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return self.factory(parameters)

    def spans(
        self, fragment: Fragment, absent: Collection[int] = (), behind: Mapping[int, int] | None = None
    ) -> list[Span]:
        """The stretches of a fragment that step, each as long as can be.

        Args:
            fragment: of the flat vector.
            absent: parameters, by number, that have no gradient and take no step.
            behind: how many updates each parameter had no gradient in.
        """
        found: list[Span] = []
        for index, piece in self.inside(fragment):
            group = self._group_of[index]
            if group == NO_GROUP or index in absent:
                continue
            late = 0 if behind is None else behind.get(index, 0)
            last = found[-1] if found else None
            if last is not None and (last.fragment.stop, last.group, last.behind) == (piece.start, group, late):
                found[-1] = Span(Fragment(last.fragment.start, piece.stop), group, late)
            else:
                found.append(Span(piece, group, late))
        return found

    def inside(self, fragment: Fragment) -> Iterator[tuple[int, Fragment]]:
        """The parameters that lie in a fragment, by number, and which stretch of it each takes, padding included."""
        index = max(0, bisect_right(self._starts, fragment.start) - 1)
        while index < len(self._starts) and self._starts[index] < fragment.stop:
            end = self._starts[index + 1] if index + 1 < len(self._starts) else fragment.stop
            if end > fragment.start:
                yield index, Fragment(max(fragment.start, self._starts[index]), min(fragment.stop, end))
            index += 1

    def step(
        self,
        model: Tensor,
        state: Sequence[Tensor],
        gradient: Tensor,
        steps: int,
        *,
        group: int = 0,
        times: int = 1,
        moving: Mapping[str, Any] = NOTHING,
    ) -> tuple[Tensor, list[Tensor]]:
        """A group's rule applied once, or several times, after so many steps.

        Args:
            model: the parameters.
            state: what the optimizer keeps beside them, in the order of `names`.
            gradient: the gradient of every one of these steps.
            steps: steps made before.
            group: by number.
            times: steps to make.
            moving: settings that differ from those that the optimizer was made with, such as the learning rate.

        Returns: the new parameters, and the new state in the order of `names`.

        >>> sgd = FlatOptimizer(lambda p: torch.optim.SGD(p, lr=0.5))
        >>> sgd.step(torch.tensor([3.0]), (), torch.tensor([2.0]), 0)
        (tensor([2.]), [])

        Downpour SGD (Dean et al. 2012) with the optimizer at the server; SINGA (Wang et al. 2015), Algorithm 3, line 8.
        """
        parameter = nn.Parameter(model.clone())
        parameter.grad = gradient
        optimizer = self._rule(group, [parameter])
        optimizer.param_groups[0].update(moving)
        mine = self._slots_of[group]
        if steps:
            kept = {n: value.clone() for n, value in zip(self.names, state, strict=True) if n in mine}
            optimizer.state[parameter] = {STEP: torch.tensor(float(steps)), **kept}
        for _ in range(times):
            optimizer.step()
        found = optimizer.state[parameter]
        moved = [
            found[n] if n in mine and isinstance(found.get(n), Tensor) else old.clone()
            for n, old in zip(self.names, state, strict=True)
        ]
        return parameter.data, moved

    def advance(self, model: Tensor, state: Sequence[Tensor], gradient: Tensor, taken: Steps) -> list[Tensor]:
        """The parameters and state of a stretch of the flat vector after steps by one gradient.

        The model comes first, then the state in the order of `names`. Stretches that take no step stay. A gradient that
        is the mean of several steps has less noise than each of them had, hence a smaller magnitude: steps are that
        much shorter, so that they are as long as they would be by one step's gradient after the other.
        """
        values = [model.clone(), *(value.clone() for value in state)]
        for span in self.spans(taken.fragment, taken.absent, taken.behind):
            near = Fragment(span.fragment.start - taken.fragment.start, span.fragment.stop - taken.fragment.start)
            parts = [near.of(value) for value in values]
            moving = dict(taken.groups[span.group]) if span.group < len(taken.groups) else {}
            if taken.noise != 1.0 and self.magnitudes:
                rate = moving.get("lr", self._made.param_groups[span.group]["lr"])
                moving["lr"] = rate / math.sqrt(taken.noise)
            stepped, kept = self.step(
                parts[0],
                parts[1:],
                near.of(gradient),
                max(0, taken.before - span.behind),
                group=span.group,
                times=taken.steps,
                moving=moving,
            )
            for part, value in zip(parts, (stepped, *kept), strict=True):
                part.copy_(value)
        return values

    @cached_property
    def magnitudes(self) -> dict[str, float]:
        """What the optimizer keeps of how large gradients are, as Adam does, by which it divides its steps.

        By name, the power of the gradient that it grows with. A magnitude is the same for a gradient and its negative.
        """
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(0))
        try:
            there, back, twice = (self._kept(factor * gradient) for factor in (1.0, -1.0, 2.0))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return {}
        even = [name for name, value in there.items() if value.any() and torch.equal(value, back[name])]
        powers = {name: math.log2(float(twice[name].abs().sum() / there[name].abs().sum())) for name in even}
        return {name: power for name, power in powers.items() if power > 0.5}  # Rprop's are step sizes

    def _kept(self, gradient: Tensor) -> dict[str, Tensor]:
        """What the first group's rule keeps beside zeros after one step by this gradient."""
        probe = nn.Parameter(torch.zeros_like(gradient))
        probe.grad = gradient
        optimizer = self._rule(0, [probe])
        optimizer.step()
        return {n: v for n, v in optimizer.state[probe].items() if isinstance(v, Tensor) and v.shape == gradient.shape}

    def state_for(self, parameter: Tensor, group: int, steps: int) -> dict[str, Any]:
        """What the optimizer keeps of a parameter after so many steps, zeros where it keeps tensors of its shape."""
        settings = self._made.param_groups[group]
        probe = nn.Parameter(torch.zeros_like(parameter))
        probe.grad = torch.zeros_like(parameter)
        optimizer = seated(self._made, [(settings, [probe], self._first[group])])
        optimizer.step()
        found = dict(optimizer.state[probe])
        for name, value in found.items():
            if name == STEP:
                found[name] = torch.full_like(value, float(steps)) if isinstance(value, Tensor) else steps
            elif isinstance(value, Tensor) and value.shape == parameter.shape:
                found[name] = torch.zeros_like(value)
        return found

    def begins(self, index: int, fragment: Fragment) -> bool:
        """Whether a parameter, by number, has its first value in a fragment."""
        return index < len(self._starts) and fragment.start <= self._starts[index] < fragment.stop

    def group_of(self, index: int) -> int:
        """The group that holds a parameter, by number; `NO_GROUP` where none does."""
        return self._group_of[index]

    @property
    def why_not_in_pieces(self) -> str:
        """Why the optimizer cannot step a model piece by piece, in a sentence for people; empty where it can."""
        name, advice = type(self._made).__name__, "use an optimizer such as SGD, Adam, AdamW, Adagrad or RMSprop"
        if getattr(self.factory, "on_workers_only", False):
            return f"{name}'s rates differ by parameter; {advice}"
        if hidden := hidden_by(self):
            return f"{name} {hidden}; {advice}"
        if not self.is_elementwise:
            return f"{name} steps the numbers of a tensor together; {advice}"
        try:
            _ = self.names
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def is_elementwise(self) -> bool:
        """Whether each number takes the step that it would take alone."""
        for group in range(len(self._made.param_groups)):
            generator = torch.Generator().manual_seed(group)
            start = torch.randn(4, 3, generator=generator)
            gradients = torch.randn(3, 4, 3, generator=generator) * 100  # more than anybody would clip to
            whole = self._stepped(group, [start], gradients[:, None])
            numbers = start.flatten()[:, None]
            each = [
                self._stepped(group, [x], g[:, None])
                for x, g in zip(numbers, gradients.view(3, -1, 1).unbind(1), strict=True)
            ]
            if not torch.allclose(whole, torch.cat(each), rtol=1e-5, atol=1e-6):
                return False
        return True

    @property
    def is_tensorwise(self) -> bool:
        """Whether each tensor takes the step that it would take alone."""
        for group in range(len(self._made.param_groups)):
            generator = torch.Generator().manual_seed(group)
            start = torch.randn(2, 4, 3, generator=generator)
            gradients = torch.randn(3, 2, 4, 3, generator=generator) * 100
            both = self._stepped(group, list(start), gradients)
            each = [self._stepped(group, [start[i]], gradients[:, i : i + 1]) for i in (0, 1)]
            if not torch.allclose(both, torch.cat(each), rtol=1e-5, atol=1e-6, equal_nan=True):
                return False
        return True

    def _stepped(self, group: int, start: Sequence[Tensor], gradients: Tensor) -> Tensor:
        """Parameters' numbers after steps with gradients of each; none is a number where the optimizer cannot step."""
        parameters = [nn.Parameter(values.clone()) for values in start]
        optimizer = self._rule(group, parameters)
        own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
        with contextlib.suppress(Exception):  # what else it keeps, such as a count of its steps, stays as it was
            vars(optimizer).update(copy.deepcopy(own))
        try:
            for step in gradients:
                for parameter, gradient in zip(parameters, step, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step()
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return torch.full((sum(values.numel() for values in start),), torch.nan)
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    def _rule(self, group: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer of a group's settings for other parameters, computing in the plainest way."""
        settings = self._made.param_groups[group]
        plain = {name: False for name in WAYS if name in settings}
        return seated(self._made, [({**settings, **plain}, parameters, self._first[group])])

    def _slots(self, group: int) -> tuple[str, ...]:
        """The names of the tensors that a group's rule keeps beside a parameter, each as long as the parameter."""
        probe = nn.Parameter(torch.ones(3))
        optimizer = self._rule(group, [probe])
        probe.grad = torch.ones(3)
        optimizer.step()
        found = []
        for name, value in optimizer.state[probe].items():
            if isinstance(value, Tensor) and value.shape == probe.shape:
                found.append(name)
            elif name != STEP and value is not None:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {name!r}, which is no tensor as long as its parameter; at table "
                    "servers use an optimizer such as SGD, Adam, AdamW, Adagrad or RMSprop"
                )
        return tuple(found)


def hidden_by(rule: FlatOptimizer) -> str:
    """What an optimizer steps by that is neither in its groups nor in its state, in words; empty for nothing."""
    own = {name: value for name, value in vars(rule._made).items() if name not in _KNOWN}
    inner = [name for name, value in own.items() if _holds_optimizer(value)]
    if inner:
        return f"{BY_ANOTHER}, {inner[0]!r}, inside it"
    probe = nn.Parameter(torch.ones(3))
    optimizer = rule._rule(0, [probe])
    with contextlib.suppress(Exception):
        vars(optimizer).update(copy.deepcopy(own))
    before = {name: _numbers(vars(optimizer).get(name)) for name in own}
    try:
        probe.grad = torch.ones(3)
        optimizer.step()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return ""  # told of elsewhere
    changed = [n for n, v in vars(optimizer).items() if n not in _KNOWN and _numbers(v) != before.get(n)]
    return f"keeps {changed[0]!r} outside its state" if changed else ""


def draws(rule: FlatOptimizer) -> bool:
    """Whether a step of an optimizer takes random numbers from torch's generator."""
    with torch.random.fork_rng(devices=()):
        before = torch.get_rng_state()
        rule._stepped(0, [torch.ones(4, 3)], torch.ones(1, 1, 4, 3))
        return not torch.equal(before, torch.get_rng_state())


def _holds_optimizer(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, torch.optim.Optimizer) for each in inside)


def _numbers(value: Any) -> Any:
    """The numbers that a value holds, in a form that can be compared."""
    if isinstance(value, Tensor):
        return tuple(value.shape), tuple(value.detach().flatten().tolist())
    if isinstance(value, Mapping):
        return tuple((repr(key), _numbers(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(_numbers, value))
    return value if isinstance(value, bool | int | float | str) else None


def seated(
    made: torch.optim.Optimizer, groups: Sequence[tuple[Mapping[str, Any], Sequence[nn.Parameter], Mapping[str, Any]]]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind for other parameters.

    Args:
        made: the optimizer whose kind it is.
        groups: of each its settings, its parameters, and what is kept of a parameter before its first step.
    """
    found: torch.optim.Optimizer = object.__new__(type(made))
    shared = {name: value for name, value in vars(made).items() if name not in ("state", "param_groups", "step")}
    vars(found).update(shared, state=defaultdict(dict), param_groups=[])
    for settings, parameters, first in groups:
        found.param_groups.append({**settings, "params": list(parameters)})
        for parameter in parameters if first else ():
            found.state[parameter] = {name: _as_long(value, parameter) for name, value in first.items()}
    return found


def _as_long(value: Any, parameter: Tensor) -> Any:
    """A parameter's first state for another: single numbers stay, tensors have their first value throughout."""
    if not isinstance(value, Tensor) or not value.dim():
        return value.clone() if isinstance(value, Tensor) else value
    return value.reshape(-1)[:1].expand(parameter.numel()).reshape(parameter.shape).clone()
