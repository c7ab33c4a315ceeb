"""The base of a network: parameters that need no gradient, which workers neither exchange nor hand back.

Each worker makes the base itself, so that it must come out equal everywhere: a digest tells whether it did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError


def frozen_names(module: nn.Module) -> set[str]:
    """The names of the parameters that need no gradient, all names of those that have several."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def base_digest(module: nn.Module) -> str:
    """A fingerprint of the frozen parameters' names, types, shapes and values; empty where there are none."""
    hashed, any_there = hashlib.blake2b(digest_size=16), False
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and not parameter.is_meta:
            any_there = True
            hashed.update(f"{name}:{parameter.dtype}:{tuple(parameter.shape)};".encode())
            hashed.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest() if any_there else ""


def without_base(module: nn.Module) -> dict[str, Tensor]:
    """A network's state without its frozen parameters."""
    left_out = frozen_names(module)
    return {name: value for name, value in module.state_dict().items() if name not in left_out}


def load_over_base(module: nn.Module, state: Mapping[str, Tensor], *, assign: bool = False) -> None:
    """Loads a state that may leave the frozen parameters out; nothing else may be missing or unknown."""
    left_out = frozen_names(module) - set(state)
    own = {name: value for name, value in module.state_dict().items() if name in left_out}
    module.load_state_dict({**own, **state}, assign=assign)


def refuse_other_base(module: nn.Module, digest: str, where: str) -> None:
    """Raises a ConfigError where a network's frozen parameters are not those that the digest is of.

    Args:
        module: the network.
        digest: of those that are meant.
        where: what the message begins with: whose parameters these are.
    """
    if base_digest(module) != digest:
        count = len(frozen_names(module))
        raise ConfigError(
            f"{where} has other frozen parameters ({count} by name) than the network that is trained, and they are "
            "neither sent nor saved with it; let the function that makes the network load them from one place, or draw "
            "them under torch's seed, or give the network itself instead of a function"
        )
