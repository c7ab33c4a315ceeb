"""Computes several replicas in one pass: their parameters are rows of one matrix, and vmap runs the network on all
rows.

For networks whose layers cost more to call than to compute, which is typical for runs with many workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.cluster.simulated.graphs import attributes_of, untouched
from thinwire.parameters import FlatParameters
from thinwire.replicas import BackPropagation, TorchReplica
from thinwire.replicas.calls import called_under
from thinwire.replicas.hooks import hooked


def can_vmap(replica: TorchReplica) -> bool:
    """Whether one pass through several replicas gives the results of separate passes, and is faster.

    Convolutions of several networks at once are slower than one after the other; recurrent layers do not support vmap.
    """
    plain = type(replica.spec.algorithm) is BackPropagation and replica.spec.precision == "float32"
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
    return (
        plain
        and not replica.searches
        and replica.is_plain
        and not hooked(replica.module)
        and replica.device.type == "cpu"
        and not any(isinstance(m, kinds) for m in replica.module.modules())
    )


class VmapBatching:
    """See `thinwire.cluster.simulated.gradient_batching.BatchMethod`; buffers are also rows of matrices."""

    least = 2

    def __init__(self, size: int, rows: int, device: torch.device) -> None:
        self._matrix = torch.zeros(rows, size, device=device)
        self._buffers: dict[str, Tensor] = {}
        self._unused: dict[tuple[bool, ...], set[str]] = {}
        """Parameters on which the loss does not depend: they get no gradient, rather than zeros. The key says which
        parameters require gradients."""

    def take_in(self, replica: TorchReplica, row: int) -> None:
        """Moves a replica's parameters and buffers into its row."""
        replica.parameters.move_to(self._matrix[row])
        for path, module in replica.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                whole = f"{path}.{name}" if path else name
                if whole not in self._buffers:
                    self._buffers[whole] = buffer.new_zeros((len(self._matrix), *buffer.shape))
                own = self._buffers[whole][row]
                own.copy_(buffer)
                module._buffers[name] = own
        replica.buffers = type(replica.buffers)(replica.module)

    def key(self, replica: TorchReplica, batch: Any) -> Any:
        return _trained(replica), *(
            None if t is None else (t.shape, t.dtype) for t in (*batch.inputs, batch.label, batch.weight)
        )

    def gradients(self, replicas: list[TorchReplica], rows: list[int], batches: list[Any]) -> list[float]:
        first = replicas[0]
        known = self._unused.get(_trained(first))
        unused = _unused(first, batches[0]) if known is None else known
        everyone = rows == list(range(len(self._matrix)))
        pick = slice(None) if everyone else torch.tensor(rows, device=self._matrix.device)
        parameters = _named(first.parameters, self._matrix[pick])
        buffers = {name: values if everyone else values[pick] for name, values in self._buffers.items()}
        inputs = tuple(torch.stack(column) for column in zip(*(b.inputs for b in batches), strict=True))
        labels, weights = _stacked([b.label for b in batches]), _stacked([b.weight for b in batches])

        def loss_of(parameters: Any, buffers: Any, inputs: Any, label: Any, weight: Any) -> Tensor:
            output = called_under(first.module, parameters | buffers, inputs)
            return first.objective.mean(output, label, weight)

        axes = (0, 0, 0, None if labels is None else 0, None if weights is None else 0)
        grown = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=axes, randomness="different")
        if known is None:  # the first pass may fail, and must not change buffers
            kept = {name: values.clone() for name, values in self._buffers.items()}
            try:
                grown(parameters, buffers, inputs, labels, weights)
            finally:
                for name, values in kept.items():
                    self._buffers[name].copy_(values)
            buffers = {name: values if everyone else values[pick] for name, values in self._buffers.items()}
            inputs = tuple(torch.stack(column) for column in zip(*(b.inputs for b in batches), strict=True))
            self._unused[_trained(first)] = unused
        found, losses = grown(parameters, buffers, inputs, labels, weights)
        if not everyone:
            for name, values in buffers.items():
                self._buffers[name][pick] = values
        for place, replica in enumerate(replicas):
            for name, parameter in zip(replica.parameters.names, replica.parameters.tensors, strict=True):
                parameter.grad = None if name in unused else found[name][place]
        told: list[float] = losses.detach().tolist()
        return told


def _trained(replica: TorchReplica) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in replica.parameters.tensors)


def _unused(replica: TorchReplica, batch: Any) -> set[str]:
    """Names of the parameters on which a batch's loss does not depend.

    Raises:
        RuntimeError: A pass changes attributes of the network, which each replica must do separately.
    """
    module, parameters = replica.module, replica.parameters
    with untouched(module):
        before, buffers = (attributes_of(module), _trained(replica)), list(module.buffers())
        given = [tensor.clone() for tensor in batch.inputs]  # a network may write into what it is given
        loss = replica.objective.mean(module(*given), batch.label, batch.weight)
        if (attributes_of(module), _trained(replica)) != before:
            raise RuntimeError("a pass changes the network's attributes, or which parameters it trains")
        if any(held is not now for held, now in zip(buffers, module.buffers(), strict=True)):
            raise RuntimeError("the network replaces a buffer by another tensor")
        asked = [p for p in parameters.tensors if p.requires_grad]
        found = torch.autograd.grad(loss, asked, allow_unused=True)
        used = {id(p) for p, gradient in zip(asked, found, strict=True) if gradient is not None}
    return {name for name, p in zip(parameters.names, parameters.tensors, strict=True) if id(p) not in used}


def _named(parameters: FlatParameters, matrix: Tensor) -> dict[str, Tensor]:
    """The parameters of all rows by name, as views of the matrix."""
    found = {}
    for name, offset, one in zip(parameters.names, parameters.offsets, parameters.tensors, strict=True):
        found[name] = matrix[:, offset : offset + one.numel()].view(len(matrix), *one.shape)
    return found


def _stacked(tensors: list[Tensor | None]) -> Tensor | None:
    return None if tensors[0] is None else torch.stack([t for t in tensors if t is not None])
