"""A pipeline stage: consecutive layers, through which the rows of the whole group pass in microbatches.

Rows go to the first stage and labels to the last one. `torch.distributed.pipelining` lets each stage work on one
microbatch while its neighbours work on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from thinwire.errors import ConfigError
from thinwire.placement.build import stage_of, switched
from thinwire.placement.crew import Crew
from thinwire.placement.deferred import frugal, network_of
from thinwire.placement.kinds import Pipeline
from thinwire.placement.portions import Portion
from thinwire.placement.replica import GroupReplica, Part
from thinwire.planning.graph import Graph, graph_on
from thinwire.replicas.sparse import make_dense
from thinwire.replicas.torch import TrainSpec, resolve_device


def cuts(graph: Graph) -> list[int]:
    """Numbers of nodes before which a network can be cut: one value crosses, and no parameter is on both sides."""
    assert graph.traced is not None
    nodes = [node for node in graph.traced.graph.nodes if node.op != "output"]
    number = {node: place for place, node in enumerate(nodes)}
    modules = dict(graph.traced.named_modules(remove_duplicate=False))
    crossing: list[set[fx.Node]] = [set() for _ in nodes]
    used: dict[int | str, list[int]] = {}
    for node in nodes:
        last = max((number.get(user, len(nodes)) for user in node.users), default=number[node])
        if node.op != "get_attr":
            for place in range(number[node] + 1, min(last, len(nodes) - 1) + 1):
                crossing[place].add(node)
        if node.op == "call_module":
            for tensor in modules[str(node.target)].parameters():
                used.setdefault(id(tensor), []).append(number[node])
        elif node.op == "get_attr":
            used.setdefault(str(node.target), []).extend(number.get(user, len(nodes)) for user in node.users)
    fixed = {place for places in used.values() for place in range(min(places) + 1, max(places) + 1)}
    found = []
    for place in range(1, len(nodes)):
        names = [node.name for node in crossing[place]]
        one = names[0] if len(names) == 1 and place not in fixed else ""
        if one in graph.sorts and one in graph.places and graph.layers[graph.places[one]].batch_dim == 0:
            found.append(place)
    return found


def stages(graph: Graph, count: int) -> list[int]:
    """Borders of the stages that minimise the largest sum of work and parameters in a stage."""
    assert graph.traced is not None
    nodes = [node for node in graph.traced.graph.nodes if node.op != "output"]
    work, memory = sum(x.flops for x in graph.layers) or 1.0, graph.parameters or 1
    weight, held = [0.0] * len(nodes), [0] * len(nodes)
    of = {layer.node: layer for layer in graph.layers}
    for place, node in enumerate(nodes):
        layer = of.get(node.name)
        if layer is not None:
            weight[place], held[place] = layer.flops / work + layer.parameters / memory, layer.parameters
    sums, before = [0.0, *itertools.accumulate(weight)], [0, *itertools.accumulate(held)]
    ends = [0, *cuts(graph), len(nodes)]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, count + 1):
        row: dict[int, tuple[float, int]] = {}
        for b in range(stage, len(ends)):
            options = [
                (max(cost, sums[ends[b]] - sums[ends[a]]), a)
                for a, (cost, _) in best[-1].items()
                if before[ends[b]] > before[ends[a]]  # each stage needs parameters
            ]
            if options:
                row[b] = min(options)
        best.append(row)
    if len(ends) - 1 not in best[count]:
        raise ConfigError(
            f"the network cannot be cut into {count} stages: a stage begins where a single value is passed on, and has "
            "parameters of its own; use a smaller group, or Planned"
        )
    found, at = [len(ends) - 1], len(ends) - 1
    for stage in range(count, 0, -1):
        at = best[stage][at][1]
        found.append(at)
    return [ends[place] for place in reversed(found)]


class StageReplica(GroupReplica):
    """One stage of a pipeline."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        spec: TrainSpec,
        worker: int,
        *,
        placement: Pipeline,
        crew: Crew,
        examples: Sequence[Tensor],
        rows: int,
    ) -> None:
        self.crew = crew
        self.device = resolve_device(spec.device)
        self._pieces = placement.microbatches
        self._small = -(-rows // self._pieces)
        with frugal():
            self._make(model, spec, worker, examples)
        self._schedule: Any = None
        self._formed: str | None = None
        self._labels: Any = None

    def _make(
        self,
        model: nn.Module | Callable[[], nn.Module],
        spec: TrainSpec,
        worker: int,
        examples: Sequence[Tensor],
    ) -> None:
        crew = self.crew
        whole, value = network_of(model, spec.seed)
        make_dense(whole)
        graph = graph_on(
            whole, [torch.empty(self._small, *x.shape[1:], dtype=x.dtype, device="meta") for x in examples]
        )
        borders = stages(graph, crew.size)
        self.ways = [f"stage {place}" for place in borders]
        built, entering, leaving = stage_of(
            graph, borders[crew.part], borders[crew.part + 1], crew, value, switched(whole, len(examples))
        )
        self.module = built.module.to(self.device)
        self._built = built
        self._entering = [_empty(shape, dtype, crew.part > 0) for shape, dtype in entering]
        self._leaving = [_empty(shape, dtype, True) for shape, dtype in leaving]
        own = {p.name: t for p, t in built.copies if isinstance(t, nn.Parameter) and t.requires_grad}
        kept = {p.name: t for p, t in built.copies if not isinstance(t, nn.Parameter)}
        self._equip(spec, worker, Part(own, kept), whole)

    @property
    def _last(self) -> bool:
        return self.crew.part == self.crew.size - 1

    # -- stepping ---------------------------------------------------------------------------------------------------

    def gradient(self, batch: Any) -> float:
        if not self._met:
            self.meet(batch)
        self._met = False
        for parameter in self.parameters.tensors:
            parameter.grad = None
        total, counts = self._small * self._pieces, list(self.crew.rows)
        rows, last = [total] * self.crew.size, self.crew.size - 1
        inputs = [self._handed(_padded(x, total), 0, rows) for x in batch.inputs]
        self._labels = tuple(
            None if each is None else self._handed(_padded(each, total), last, rows)
            for each in (batch.label, batch.weight)
        )
        place = torch.arange(total * self.crew.size)
        self._valid = torch.cat([torch.arange(total) < count for count in counts])
        self._weights = self._told
        losses: list[Tensor] = []
        schedule = self._running()
        with self.crew.together(among_others=True), self.autocast():
            if self.crew.part == 0:
                schedule.step(*inputs)
            elif self._last:
                schedule.step(target=place, losses=losses)
            else:
                schedule.step()
        return sum(each[0] for each in self.crew.tell([sum(float(each.detach()) for each in losses)]))

    def meet(self, batch: Any | None, *said: float) -> list[list[float]]:
        told = super().meet(batch, *said)
        self._told = [each[1] for each in told]
        return told

    def _running(self) -> Any:
        """The schedule, rebuilt after each meeting of the group."""
        if self._schedule is None or self._formed != self.crew.formed:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            class Stage(PipelineStage):
                def _recv_meta(self, src_stage: int) -> Any:
                    raise RuntimeError("shapes are known in advance: a stage unpickles no message of a neighbour")

            self.crew.enter_world()
            stage = Stage(
                self.module,
                self.crew.part,
                self.crew.size,
                self.device,
                input_args=tuple(self._entering),
                output_args=tuple(self._leaving),
            )
            count = self._pieces * self.crew.size
            self._schedule = Schedule1F1B(stage, count, loss_fn=self._loss, scale_grads=False)
            self._formed = self.crew.formed
        return self._schedule

    def _loss(self, output: Tensor, place: Tensor) -> Tensor:
        """A microbatch's share of the mean loss of all rows; padding rows do not count."""
        valid = self._valid[place]
        rows = place[valid]
        member = int(place[0]) // (self._small * self._pieces)
        if not len(rows) or not self._weights[member]:
            return output.sum() * 0.0
        label, weight = (None if each is None else each[rows] for each in self._labels)
        counted = self.objective.weight_of(label, weight, len(rows))
        if not counted:
            return output.sum() * 0.0
        return self.objective.mean(output[valid], label, weight) * (counted / sum(self._weights))

    def _handed(self, x: Tensor, to: int, rows: Sequence[int]) -> Tensor:
        """All members' rows, concatenated, on the member `to`; no rows on the others."""
        empty = x[:0]
        pieces = [x if part == to else empty for part in range(self.crew.size)]
        shapes = [[count if self.crew.part == to else 0, *x.shape[1:]] for count in rows]
        return torch.cat(self.crew.hand(pieces, shapes))

    # -- without gradients ------------------------------------------------------------------------------------------

    def _forward(self, batch: Any) -> Any:
        rows = list(self.crew.rows)
        values: Any = [self._handed(x, 0, rows) for x in batch.inputs]
        size = self.crew.size
        with self.autocast(), torch.no_grad():
            for part in range(size):
                if part == self.crew.part:
                    values = [self.module(*values)]
                if part < size - 1:
                    values = [self._passed(values[0], part)]
        return self._returned(values[0], rows)

    def _passed(self, x: Tensor, part: int) -> Tensor:
        """A stage's output, passed on to the next stage."""
        mine = self._leaving[0] if self.crew.part == part else self._entering[0] if self.crew.part == part + 1 else None
        shape = [0] if mine is None else [sum(self.crew.rows) * mine.shape[0] // self._small, *mine.shape[1:]]
        dtype = torch.float32 if mine is None else mine.dtype
        nothing = torch.empty(0, dtype=dtype)
        given = self.crew.part == part
        pieces = [x.to(dtype) if given and to == part + 1 else nothing for to in range(self.crew.size)]
        shapes = [shape if self.crew.part == part + 1 and of == part else [0] for of in range(self.crew.size)]
        came = self.crew.hand(pieces, shapes)
        return came[part] if self.crew.part == part + 1 else nothing

    def _returned(self, output: Tensor, rows: Sequence[int]) -> Tensor:
        """The last stage's output for this member's own rows."""
        last = self.crew.size - 1
        shape = torch.zeros(9)
        if self._last:
            shape[0] = output.dim()
            shape[1 : 1 + output.dim()] = torch.tensor(output.shape)
        told = [int(n) for n in self.crew.tell(shape.tolist())[last]]
        full = told[1 : 1 + told[0]]
        nothing = torch.empty(0)
        pieces = list(torch.split(output.float(), list(rows))) if self._last else [nothing] * self.crew.size
        own = [rows[self.crew.part], *full[1:]]
        return self.crew.hand(pieces, [own if part == last else [0] for part in range(self.crew.size)])[last]

    def _portions(self) -> Iterator[tuple[Portion, str]]:
        for portion, tensor in self._built.copies:
            if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
                yield portion, portion.name


def _empty(shape: tuple[int, ...], dtype: torch.dtype, trained: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained and dtype.is_floating_point)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Pads `x` to a number of rows, with copies of its first row."""
    if len(x) == rows:
        return x
    return torch.cat([x, x[:1].expand(rows - len(x), *x.shape[1:])])
