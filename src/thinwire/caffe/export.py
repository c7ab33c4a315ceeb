"""A net's weights as safetensors, by layer and blob, and back."""

from __future__ import annotations

import os

import safetensors
import torch
from safetensors.torch import load_file, save_file

from thinwire.caffe.net import CaffeNet
from thinwire.errors import ConfigError, DataError


def save_safetensors(net: CaffeNet, path: str | os.PathLike[str]) -> None:
    """Writes every layer's blobs as `layer.weight`, `layer.bias`."""
    if not net.is_ready:
        raise ConfigError("the net has no parameters yet; call it once, or load it with shapes=")
    partial = f"{os.fspath(path)}.part"
    save_file(_named(net), partial)
    os.replace(partial, path)


@torch.no_grad()
def fill_from_safetensors(net: CaffeNet, path: str | os.PathLike[str]) -> None:
    """Copies what `save_safetensors` wrote into a net."""
    if not os.path.isfile(path):
        raise DataError(f"{os.fspath(path)!r} is not a file; give the path of a safetensors file")
    try:
        given = load_file(path)
    except safetensors.SafetensorError as error:
        raise DataError(f"{os.fspath(path)!r} cannot be read as safetensors: {error}") from error
    if not net.is_ready:
        raise ConfigError(f"{net.definition.file} does not tell the shapes of its inputs; give them as shapes=")
    net.materialise()
    for node in net.all_nodes():
        made = net.layer_of(node)
        for name in made.kept:
            key, mine = f"{node.name}.{name}", made.held(name)
            if key not in given or given[key].shape != mine.shape:
                have = tuple(given[key].shape) if key in given else "not there"
                raise DataError(f"{os.fspath(path)!r}: {key!r} is {have}; the net asks for {tuple(mine.shape)}")
            mine.copy_(given[key])


def _named(net: CaffeNet) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for node in net.all_nodes():
        made = net.layer_of(node)
        for name in made.kept:
            found.setdefault(f"{node.name}.{name}", made.held(name).detach().cpu().contiguous().clone())
    return found
