"""Finds the cheapest choice for every node of a graph with costs of nodes and edges, exactly, under a memory limit.

Nodes are eliminated one by one, those with fewest neighbours first. The result of an elimination is a table over the
choices of the node's neighbours. On a chain this is dynamic programming. On the branching graphs of networks tables
stay small, because branches join again. Under a memory limit a table holds all Pareto-optimal pairs of cost and memory;
for a large graph, with too many pairs, it holds a sample: the result then keeps the limit and is close to the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Assignment = tuple[int, ...]
EXACT_NODES, SAMPLE = 16, 64
"""Number of nodes up to which the result is exact under a limit, and pairs in a table for larger graphs."""


class Label(NamedTuple):
    """One combination of choices for the nodes eliminated so far."""

    cost: float
    memory: float
    picked: Any
    """None, a pair (node, choice), or a pair of these."""


class _Table(NamedTuple):
    nodes: tuple[int, ...]
    labels: dict[Assignment, list[Label]]


def cheapest(
    costs: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]],
    limit: float | None = None,
) -> tuple[int, ...] | None:
    """The choice for every node; None where no combination is within the limit.

    >>> costs = [[0, 1], [5, 0], [0, 1]]
    >>> border = [[0, 3], [3, 0]]
    >>> cheapest(costs, {(0, 1): border, (1, 2): border}, [[1, 1]] * 3)
    (1, 1, 1)
    >>> cheapest(costs, {(0, 1): border, (1, 2): border}, [[1, 9], [1, 2], [1, 9]], limit=10)
    (0, 0, 0)

    Args:
        costs: for each node, the cost of each choice.
        edges: for each pair of nodes, costs by the first's and the second's choice.
        memory: for each node, the memory of each choice.
        limit: largest sum of memory over all nodes.
    """
    free = _solve(costs, edges, memory, None)
    if free is None or limit is None or _held(free, memory) <= limit:
        return free
    if sum(min(each) for each in memory) > limit:
        return None
    return _solve(costs, edges, memory, limit)


def _held(chosen: Sequence[int], memory: Sequence[Sequence[float]]) -> float:
    return sum(memory[node][choice] for node, choice in enumerate(chosen))


def _solve(
    costs: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]],
    limit: float | None,
) -> tuple[int, ...] | None:
    tables: list[_Table] = []
    labels: dict[Assignment, list[Label]]
    for node, each in enumerate(costs):
        labels = {(c,): [Label(cost, memory[node][c], (node, c))] for c, cost in enumerate(each)}
        tables.append(_Table((node,), labels))
    for (first, second), border in edges.items():
        pairs = itertools.product(range(len(costs[first])), range(len(costs[second])))
        tables.append(_Table((first, second), {(a, b): [Label(border[a][b], 0.0, None)] for a, b in pairs}))
    most = None if len(costs) <= EXACT_NODES else SAMPLE
    least = {node: min(each) for node, each in enumerate(memory)}
    near: dict[int, set[int]] = {node: set() for node in range(len(costs))}
    of: dict[int, set[int]] = {node: set() for node in range(len(costs))}
    for number, table in enumerate(tables):
        for node in table.nodes:
            of[node].add(number)
            near[node] |= set(table.nodes) - {node}
    open_memory = sum(least.values())
    ended: list[_Table] = []
    while near:
        node = min(near, key=lambda n: (len(near[n]), n))
        scope = tuple(sorted(near.pop(node)))
        open_memory -= least[node]
        done = open_memory - sum(least[n] for n in scope)  # the least memory of all other nodes
        mine = [tables[number] for number in sorted(of[node])]
        slack = None if limit is None else limit - done
        merged = _eliminate(node, len(costs[node]), scope, [len(costs[n]) for n in scope], mine, slack, most)
        tables.append(_Table(scope, merged))
        for other in scope:
            near[other] = (near[other] | set(scope)) - {other, node}
            of[other] = (of[other] - of[node]) | {len(tables) - 1}
        if not scope:
            ended.append(tables[-1])
    best: list[Label] = [Label(0.0, 0.0, None)]
    for table in ended:
        best = _joined(best, table.labels[()], limit, most)
    if not best:
        return None
    chosen = [0] * len(costs)
    stack = [min(best, key=lambda label: label.cost).picked]
    while stack:
        found = stack.pop()
        if found is not None:
            if isinstance(found[0], int):
                chosen[found[0]] = found[1]
            else:
                stack.extend(found)
    return tuple(chosen)


def _eliminate(
    node: int,
    choices: int,
    scope: tuple[int, ...],
    sizes: list[int],
    tables: list[_Table],
    slack: float | None,
    most: int | None,
) -> dict[Assignment, list[Label]]:
    """The Pareto-optimal labels of a node, for every combination of its neighbours' choices."""
    found: dict[Assignment, list[Label]] = {}
    for given in itertools.product(*(range(size) for size in sizes)):
        known = dict(zip(scope, given, strict=True))
        labels: list[Label] = []
        for choice in range(choices):
            known[node] = choice
            ways = [Label(0.0, 0.0, None)]
            for table in tables:
                ways = _joined(ways, table.labels[tuple(known[n] for n in table.nodes)], slack, most)
            labels += ways
        found[given] = _pareto_optimal(labels, slack, most)
    return found


def _joined(one: list[Label], other: list[Label], slack: float | None, most: int | None) -> list[Label]:
    """All combinations of both lists that are Pareto-optimal."""
    ways = [Label(a.cost + b.cost, a.memory + b.memory, _pair(a.picked, b.picked)) for a in one for b in other]
    return _pareto_optimal(ways, slack, most)


def _pareto_optimal(labels: list[Label], slack: float | None, most: int | None) -> list[Label]:
    if slack is None:
        return [min(labels, key=lambda label: label.cost)] if labels else []
    kept: list[Label] = []
    for label in sorted((way for way in labels if way.memory <= slack), key=lambda way: (way.memory, way.cost)):
        if not kept or label.cost < kept[-1].cost:
            kept.append(label)
    if most is not None and len(kept) > most:  # an even sample that includes both ends
        kept = [kept[place * (len(kept) - 1) // (most - 1)] for place in range(most)]
    return kept


def _pair(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else (one, other)
