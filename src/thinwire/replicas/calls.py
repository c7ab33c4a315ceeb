"""How a network is called with a batch's columns, and which tensor of its output losses and metrics by name take.

Networks of Hugging Face's libraries are called with keyword arguments, by the names of columns, and give a
`ModelOutput`; all others are called in the order of `inputs`. Nothing here imports those libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NAMED = {("transformers", "PreTrainedModel"), ("peft", "PeftModel"), ("peft", "PeftMixedModel")}
"""Classes whose networks are called by name: the library, and the class."""


class Given(NamedTuple):
    """What a network is called with, in order, and by which names."""

    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]


def unwrapped(module: Any) -> Any:
    """The network itself within one that is compiled or rounded."""
    while (inner := getattr(module, "_orig_mod", None)) is not None:
        module = inner
    return module


def takes_names(module: object) -> bool:
    """Whether a network is called by the names of columns: one of transformers, as it is, adapted or compiled."""
    module = unwrapped(module)
    return any((kind.__module__.partition(".")[0], kind.__name__) in _NAMED for kind in type(module).__mro__)


def arguments(module: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a network is called with: positional arguments, and those by name."""
    names, inputs = getattr(batch, "names", ()), tuple(batch.inputs)
    narrow = width_of(module)
    if narrow is not None:
        inputs = tuple(x.to(narrow) if x.dtype == torch.float32 else x for x in inputs)
    if names and takes_names(module):
        return (), dict(zip(names, inputs, strict=True))
    return inputs, {}


def width_of(module: nn.Module) -> torch.dtype | None:
    """The narrow type that all parameters of a network were made as, which its inputs are rounded to; None if wide."""
    types = getattr(module, "_types", None)
    found = set(types.values()) if types else {next((p.dtype for p in module.parameters()), torch.float32)}
    if len(found) != 1 or not found <= {torch.bfloat16, torch.float16}:
        return None
    own = {p.dtype for name, p in unwrapped(module).named_parameters() if not types or name not in types}
    return found.pop() if own <= found else None


def called(module: nn.Module, batch: Any) -> Any:
    """A network's output for a batch."""
    given, named = arguments(module, batch)
    return module(*given, **named)


def called_under(
    module: nn.Module, values: Mapping[str, Tensor], given: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> Any:
    """A network's output under other values of its parameters and buffers, given by their first names.

    `torch.func.functional_call` resolves shared tensors itself, by every name that they have. Where one layer is
    registered under two names it then leaves the other values in the layer: it swaps them in twice, and the second swap
    takes them for the layer's own.
    """
    first = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    everywhere = {}
    for path, layer in module.named_modules():
        for own, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            name = first.get(id(tensor), "")
            if name in values:
                everywhere[f"{path}.{own}" if path else own] = values[name]
    return torch.func.functional_call(module, everywhere, given, dict(named or {}), tie_weights=False)


def scores(output: Any) -> Any:
    """The tensor of an output: its `logits` where it has several by name, and else the output as it is.

    Of three dimensions, which are rows, positions and classes, classes come second, as torch's losses take them.
    """
    found = output.get("logits") if isinstance(output, Mapping) else None
    if not isinstance(found, Tensor):
        return output
    return found.transpose(1, 2) if found.dim() == 3 else found


def own_loss(output: Any) -> Tensor | None:
    """The loss that a network computed itself; None where its output has none."""
    found = output.get("loss") if isinstance(output, Mapping) else None
    return found if isinstance(found, Tensor) else None
