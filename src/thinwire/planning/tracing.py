"""Traces a network with torch.fx, with errors that name the module, the line, and what to do."""

from __future__ import annotations

import copy
import inspect
import os
import random
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from thinwire.errors import ConfigError

OWN = (os.path.dirname(torch.__file__) + os.sep, __file__)
"""Files whose lines belong to tracing and not to the network itself."""


class _FrozenError(Exception):
    """Tracing would record a value that has to be computed anew at every step."""


class _Tracer(fx.Tracer):
    """Traces `forward` with a given number of inputs; its other arguments have their defaults.

    A module of torch.nn, or one with `as_one_layer = True`, is one layer: it is called, not traced into.
    """

    proxy_buffer_attributes = True

    def __init__(self, inputs: int | None) -> None:
        super().__init__()
        self._inputs = inputs
        self._drawn = _generators()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        names = input_names(self.root, self._inputs)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _generators() != self._drawn:
            raise _FrozenError("random numbers were drawn here, or just before, and would be the same at every step")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and a.requires_grad and not isinstance(a, nn.Parameter):
            raise _FrozenError("a tensor was computed from parameters that were not taken from a module by name")
        return super().create_arg(a)


def is_layer(module: nn.Module, name: str) -> bool:
    """Whether a module is called as one layer, rather than looked into."""
    return bool(getattr(module, "as_one_layer", False)) or fx.Tracer().is_leaf_module(module, name)


def _generators() -> tuple[Any, ...]:
    """The states of all generators of random numbers."""
    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), numpy[1].tobytes(), *numpy[2:], torch.get_rng_state().numpy().tobytes()


def input_names(module: nn.Module, count: int | None = None) -> list[str]:
    """The arguments of `forward` that get the network's inputs; by default the required ones."""
    name = type(module).__name__
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    needed = sum(p.default is p.empty for p in named)
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            raise ConfigError(
                f"{name}.forward takes {p.name!r} by keyword only, and inputs are given by position; give it a default"
            )
    count = needed or 1 if count is None else count
    if count < needed or (rest is None and count > len(named)):
        allowed = f"{needed} or more" if rest is not None else str(needed)
        allowed += f" to {len(named)}" if rest is None and needed < len(named) else ""
        raise ConfigError(
            f"{name} takes {allowed} inputs ({', '.join(p.name for p in named)}), and is given {count}; name the "
            "columns for it with inputs=[…]"
        )
    more = [f"{rest}_{place}" for place in range(count - len(named))]
    return [*(p.name for p in named[:count]), *more]


def traced_of(module: nn.Module, inputs: int | None = None) -> fx.GraphModule:
    """A network traced by torch.fx.

    Args:
        module: the network.
        inputs: number of inputs with which it is called; by default the arguments that its `forward` requires.

    Raises:
        ConfigError: The network cannot be traced; the message names the module and the line.
    """
    tracer, before = _Tracer(inputs), set(vars(module))
    try:
        return fx.GraphModule(module, tracer.trace(module))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_why(module, tracer, error)) from error
    finally:
        for name in set(vars(module)) - before:  # attributes that tracing has added
            delattr(module, name)


def _why(module: nn.Module, tracer: _Tracer, error: Exception) -> str:
    """The error message: what could not be traced, where, and what to do."""
    within = [path for path, _ in tracer.module_stack.values()]
    while within and tracer.is_leaf_module(module.get_submodule(within[-1]), within[-1]):
        within.pop()  # the layer was about to be called
    path = within[-1] if within else ""
    inner = type(module.get_submodule(path)).__name__
    where = f"{path} ({inner})" if path else inner
    frame = _frame(traceback.extract_tb(error.__traceback__))
    if frame is not None:
        where += f" at {frame.filename}:{frame.lineno}"
        where += f", `{frame.line}`" if frame.line else ""
    said = (str(error).splitlines() or [""])[0]
    said = said if isinstance(error, _FrozenError) else f"{type(error).__name__}: {said}"
    remedy = (
        f"set as_one_layer = True in the class {inner}"
        if path
        else "move those lines into a module of their own, whose class says as_one_layer = True"
    )
    return (
        f"the layers of {type(module).__name__} could not be read: {where}: {said}. A plan or a placement needs a "
        "network that torch.fx can trace, whose forward has no branches and loops on values or shapes of its inputs. "
        f"Where what these lines give for a row depends on that row alone, {remedy}: then it is placed as one layer. "
        "Else train with placement=tw.Whole()"
    )


def _frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost line of the network's own code; of torch's layers where there is none."""
    own = [f for f in frames if not f.filename.startswith(OWN)]
    layers = [f for f in frames if f"{os.sep}torch{os.sep}nn{os.sep}" in f.filename]
    return next(reversed(own or layers), None)


def without_memory(traced: fx.GraphModule) -> fx.GraphModule:
    """A copy whose tensors have no memory; a tensor that occurs in several places stays one tensor."""
    memo: dict[int, Any] = {}
    for module in traced.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                memo[id(tensor)] = tensor.detach().to("meta")
    found: fx.GraphModule = copy.deepcopy(traced, memo)
    return found


class MetaInterpreter(fx.Interpreter):
    """Runs a network on tensors without memory."""

    at = ""
    """The layer that is running, for messages."""

    def run_node(self, n: fx.Node) -> Any:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        self.at = "" if module is None else f"at layer {n.target} ({type(module).__name__}): "
        return super().run_node(n)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A layer's output on tensors without memory; a layer with `as_one_layer` that needs values is run on zeros.

        A layer may define a method `infer`, which returns its output without computing it.
        """
        module = self.fetch_attr(str(target))
        try:
            return module(*args, **kwargs)
        except Exception:
            if not getattr(module, "as_one_layer", False):
                raise
            if callable(getattr(module, "infer", None)):
                return module.infer(*args, **kwargs)
            return _on_zeros(module, args, kwargs)


def _on_zeros(module: nn.Module, args: Any, kwargs: Any) -> Any:
    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.zero_()
        given = tree_map(lambda x: torch.zeros_like(x, device="cpu") if isinstance(x, Tensor) else x, (args, kwargs))
        found = real(*given[0], **given[1])
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, found)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a layer's output, which may be a tensor, tuple, list or dictionary."""
    if isinstance(value, Tensor):
        return value
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for each in values if (found := first_tensor(each)) is not None), None)
