"""A member's part of a replica, with the interface of any replica: a flat vector that takes steps."""

from __future__ import annotations

import contextlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.placement.buckets import buckets
from thinwire.placement.build import build, switched
from thinwire.placement.crew import Crew
from thinwire.placement.deferred import frugal, network_of
from thinwire.placement.kinds import Layered
from thinwire.placement.portions import Portion
from thinwire.planning.graph import graph_on
from thinwire.replicas.evaluation import Sums, Tally, in_mode, measured_anew, norms_of
from thinwire.replicas.objectives import OptimizerFactory
from thinwire.replicas.sparse import make_dense
from thinwire.replicas.torch import TorchReplica, TrainSpec, in_pieces, optimizer_of, resolve_device
from thinwire.rules.optimizer import seated

PIECE = "piece of "
"""Prefix of the name of a parameter of which a member steps only a piece."""
ROWS, WEIGHT = 0, 1
"""Indices of rows and of the rows' weight in the numbers that members exchange."""


class Part(nn.Module):
    """A member's tensors by name, with the methods of a module that `FlatParameters` and `Buffers` call."""

    def __init__(self, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self._own, self._kept = parameters, buffers

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._own.items()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self._kept.items()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from self._own.values()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**self._own, **self._kept}


class PartOptimizer:
    """Builds optimizers for a member's part that act as they would on the whole network."""

    def __init__(self, whole: nn.Module, part: Part) -> None:
        self._part = part
        self._stand_ins = {id(p): stand_in(p) for p in whole.parameters()}
        self._named = {name: self._stand_ins[id(p)] for name, p in whole.named_parameters(remove_duplicate=False)}

    def made_by(self, factory: OptimizerFactory, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer that a factory builds for the whole network's parameters, reduced to those of this member.

        The factory gets the network's parameters in order and with their shapes, since it may depend on both.
        """
        made = optimizer_of(factory, list(self._stand_ins.values()), device)
        of = {id(p): number for number, group in enumerate(made.param_groups) for p in group["params"]}
        if len(made.param_groups) == 1 and all(id(p) in of for p in self._stand_ins.values()):
            return optimizer_of(factory, list(self._part.parameters()), device)
        groups: list[list[nn.Parameter]] = [[] for _ in made.param_groups]
        for name, parameter in self._part.named_parameters():
            number = of.get(id(self._named[name.removeprefix(PIECE)]))
            if number is not None:
                groups[number].append(parameter)
        first: list[Any] = [
            next((made.state[p] for p in g["params"] if p in made.state), {}) for g in made.param_groups
        ]
        return seated(made, list(zip(made.param_groups, groups, first, strict=True)))


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape and attributes that takes no memory."""
    found = nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


class GroupReplica(TorchReplica, ABC):
    """Base of all parts of a replica: steps that the members take together."""

    crew: Crew

    def _equip(self, spec: TrainSpec, worker: int, part: Part, whole: nn.Module) -> None:
        self._part, self._model = part, PartOptimizer(whole, part)
        self._outfit(spec, part, worker)
        if self.parameters.narrow:
            name, kind = next(iter(self.parameters.narrow.items()))
            raise ConfigError(
                f"parameter {name!r} is {kind}, and a placement trains float32: model.float(), or tw.Whole()"
            )
        self._share = 1.0
        self._met = False
        self.spare: Any = None

    def optimizer_by(self, factory: OptimizerFactory) -> torch.optim.Optimizer:
        return self._model.made_by(factory, self.device)

    def stand_in(self, batch: Any) -> None:
        """Sets a batch for taking part in steps after the member's own rows are done."""
        self.spare = batch

    def meet(self, batch: Any | None, *said: float) -> list[list[float]]:
        """Begins a pass: members exchange their rows, the rows' weight, and further numbers."""
        rows, weight = (batch or self.spare).num_rows, 0.0
        if batch is not None:
            weight = self.weight_of(batch)
        told = self.crew.tell([rows, weight, *said])
        self.crew.rows = [int(each[ROWS]) for each in told]
        total = sum(each[WEIGHT] for each in told)
        self._share = weight / total if total else 0.0
        self._met = True
        return told

    def agree(self, *said: bool) -> tuple[bool, ...]:
        told = self.crew.tell([float(each) for each in said])
        return tuple(any(column) for column in zip(*told, strict=True))

    def clip(self) -> None:
        """Clips the gradient of the whole replica to the largest norm."""
        if self.spec.clip_norm is None:
            return
        own = sum(float(p.grad.square().sum()) for p in self.parameters.tensors if p.grad is not None)
        norm = math.sqrt(sum(each[0] for each in self.crew.tell([own])))
        if norm > self.spec.clip_norm:
            for parameter in self.parameters.tensors:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.spec.clip_norm / (norm + 1e-6))

    @contextlib.contextmanager
    def _wearing(self, model: Tensor, buffers: dict[str, Tensor] | None) -> Iterator[None]:
        """The network with another vector's parameters, and other buffers, inside the block."""
        own = [parameter.data for parameter in self.parameters.tensors]
        kept = {name: value.clone() for name, value in self._part._kept.items()} if buffers is not None else {}
        with torch.no_grad():
            try:
                for parameter, view in zip(
                    self.parameters.tensors, self.parameters.views(model.to(self.device)), strict=True
                ):
                    parameter.data = view
                for name, value in (buffers or {}).items():
                    self._part._kept[name].copy_(value)
                yield
            finally:
                for parameter, data in zip(self.parameters.tensors, own, strict=True):
                    parameter.data = data
                for name, value in kept.items():
                    self._part._kept[name].copy_(value)

    def evaluate(self, batches: Iterable[Any], model: Tensor, buffers: dict[str, Tensor]) -> Sums:
        tally, mine = Tally(self.objective, self._metrics), iter(batches)
        try:
            with in_mode(self.module, training=False), self._wearing(model, buffers):
                while True:
                    batch = next(mine, None)
                    if not any(each[WEIGHT + 1] for each in self.meet(batch, float(batch is not None))):
                        break
                    output = self._forward(batch or self.spare)
                    if batch is not None:
                        tally.add(batch, output)
        finally:
            self._met = False
        return tally.sums()

    def recalibrate(self, batches: Iterator[Any], model: Tensor) -> None:
        if not any(each[0] for each in self.crew.tell([float(len(norms_of(self.module)))])):
            return
        with measured_anew(self.module), self._wearing(model, None):
            for batch in batches:
                self.meet(batch)
                self._forward(batch)
        self._met = False

    @abstractmethod
    def _forward(self, batch: Any) -> Any:
        """The output for this member's own rows."""

    def state_of(self, model: Tensor, buffers: dict[str, Tensor]) -> dict[str, Any]:
        """This member's part of the whole state_dict: portions, and a tensor for each."""
        named = self.parameters.named(model)
        portions, tensors = [], []
        for portion, name in self._portions():
            value = named.get(name)  # views, since memory may not suffice for a copy of a part
            if value is None:
                value = buffers.get(name, self._part.state_dict()[name]).clone()
            portions.append(portion.to_json())
            tensors.append(value.detach().cpu())
        return {"portions": portions, "tensors": tensors}

    def pieces_of(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        numbered = dict(enumerate(state["tensors"]))
        return [
            {"portions": [state["portions"][i] for i in piece], "tensors": list(piece.values())}
            for piece in in_pieces(numbered)
        ]

    @abstractmethod
    def _portions(self) -> Iterator[tuple[Portion, str]]:
        """The member's portions of the whole network, each with the name of its tensor here."""


class ShardedReplica(GroupReplica):
    """A part whose layers are placed one by one: members share rows in some layers and features in others."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        spec: TrainSpec,
        worker: int,
        *,
        placement: Layered,
        crew: Crew,
        examples: Sequence[Tensor],
        rows: int,
    ) -> None:
        self.crew = crew
        self.device = resolve_device(spec.device)
        with frugal():
            self._make(model, spec, worker, placement, examples, rows)
        self._wait_for_parameters()

    def _make(
        self,
        model: nn.Module | Callable[[], nn.Module],
        spec: TrainSpec,
        worker: int,
        placement: Layered,
        examples: Sequence[Tensor],
        rows: int,
    ) -> None:
        crew = self.crew
        whole, value = network_of(model, spec.seed)
        make_dense(whole)
        graph = graph_on(whole, [torch.empty(2, *x.shape[1:], dtype=x.dtype, device="meta") for x in examples])
        self.ways = placement.ways(graph, rows * crew.size)
        self._parts = build(graph, self.ways, crew, value, switched(whole, len(examples)))
        self.module = self._parts.module.to(self.device)
        copies = [(p.name, t) for p, t in self._parts.copies if isinstance(t, nn.Parameter) and t.requires_grad]
        self._buckets = buckets(crew, copies)
        own = {p.name: t for p, t in self._parts.shares if isinstance(t, nn.Parameter) and t.requires_grad}
        own |= {f"{PIECE}{p.name}": t for bucket in self._buckets for p, t in bucket.portions()}
        kept = {p.name: t for p, t in (*self._parts.shares, *self._parts.copies) if not isinstance(t, nn.Parameter)}
        self._equip(spec, worker, Part(own, kept), whole)

    def _wait_for_parameters(self) -> None:
        """Makes each layer wait, when it is called, for the buckets of its own parameters.

        Parameters that the network reads itself, such as those of an `nn.ParameterList`, or those of a layer that the
        network does not call, are waited for before its first layer.
        """
        of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        network = self._parts.module
        read = [str(node.target) for node in network.graph.nodes if node.op == "get_attr"]
        loose = {id(operator.attrgetter(name)(network)) for name in read}
        self._at_once = {of[i] for i in loose if i in of}
        for module in self.module.modules():
            # some layers read the parameters of their sublayers
            mine = {of[id(p)] for p in module.parameters() if id(p) in of}
            if module is not self.module and mine:
                module.register_forward_pre_hook(lambda *_, mine=mine: [bucket.ready() for bucket in mine] and None)

    def _spread(self) -> None:
        for bucket in reversed(self._buckets):  # the buckets of the first layers first
            bucket.spread()
        for bucket in self._at_once:
            bucket.ready()

    def gradient(self, batch: Any) -> float:
        if not self._met:
            self.meet(batch)
        self._met = False
        for parameter in self.parameters.tensors:
            parameter.grad = None
        self._spread()
        with self.autocast():
            output = self.module(*batch.inputs)
            loss = self.objective.mean(output, batch.label, batch.weight)
        for bucket in self._buckets:
            bucket.ready()
        value = float(loss.detach())
        (loss * self._share).backward()  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            bucket.settle()
        return value

    def _forward(self, batch: Any) -> Any:
        self._spread()
        with self.autocast():
            output = self.module(*batch.inputs)
        for bucket in self._buckets:
            bucket.ready()
        return output

    def _portions(self) -> Iterator[tuple[Portion, str]]:
        for portion, tensor in self._parts.shares:
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue
            yield portion, portion.name
        for bucket in self._buckets:
            for portion, _ in bucket.portions():
                yield portion, f"{PIECE}{portion.name}"
        if self.crew.part == 0:
            for portion, tensor in self._parts.copies:
                if not isinstance(tensor, nn.Parameter):
                    yield portion, portion.name
