"""`thinwire plan`: estimates the cost of a recipe on a cluster, layer by layer, before a run."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire import recipe as recipes
from thinwire.cli.first_rows import first_rows
from thinwire.cli.gains import Given, gains, given, sentences
from thinwire.cli.wiring import BATCH_SIZE, model_name, table_of
from thinwire.errors import ConfigError
from thinwire.models import model_by_name
from thinwire.planning import Graph, Machine, Plan, graph_on, plan, profiled, sizes_of
from thinwire.planning.profile import measured_flops
from thinwire.rules.period import balanced_period
from thinwire.rules.placement import Wire, best_group
from thinwire.rules.speedup import busy_share, naive_speedup
from thinwire.run.arguments import checked
from thinwire.run.sizing import between_of
from thinwire.strategies import Relay
from thinwire.units import SIZES, quantity, rate_bytes

Row = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one row of an input."""
HIDDEN = 0.1
"""Synchronous exchange is recommended where an exchange takes less than this share of a step."""


def show_plan(options: argparse.Namespace) -> int:
    """Prints a plan; returns the exit code."""
    measured = given(options)
    sys.path.insert(0, os.getcwd())  # for factories in the current folder
    chosen = recipes.load(options.recipe, options.changes)
    factory, rows, batch = _network(chosen, options.input)
    with torch.device("meta"):  # the network without memory for its parameters
        network = factory()
    graph = graph_on(network, [torch.empty(2, *shape, dtype=dtype, device="meta") for shape, dtype in rows])
    workers, group = options.workers, _group(options.group)
    if options.profile:
        graph = _profiled(factory, graph, rows, batch, workers if group in (None, "auto") else int(group))
    memory = None if options.memory is None else quantity("--memory", options.memory, SIZES)
    wire = Wire(options.latency / 1e3, rate_bytes(options.link, "--link"))
    machine = Machine(options.gflops * 1e9 if options.gflops else measured_flops(), memory, wire)
    sizes: list[Plan] = []
    if group == "auto":
        between = between_of(checked({"strategy": chosen.strategy}).get("strategy") or Relay())
        sizes = sizes_of(graph, workers, batch, machine=machine, between=between)
        found = min(sizes, key=lambda each: each.total_s)
    else:
        found = _fitting(graph, workers, batch, machine, group)
    advice = _advice(graph, found, workers, batch, machine, measured)
    told = gains(measured, workers)
    if options.json:
        print(
            json.dumps(
                _plain(found, advice) | {"sizes": [_size(each) for each in sizes]} | ({"speedup": told} if told else {})
            )
        )
    else:
        _print_sizes(sizes, found)
        _print(found, advice, workers, options.link)
        for line in sentences(told, workers):
            Console().print(line, highlight=False)
    return 0


def _group(given: str | None) -> Any:
    """Workers of a replica: a number, "auto", or None if not given."""
    if given is None or given == "auto":
        return given
    if not given.lstrip("-").isdigit():
        raise ConfigError(f"--group {given!r} is not a count; use 1 or more, or 'auto'")
    return int(given)


def _size(each: Plan) -> dict[str, float]:
    named = {"compute_s": each.compute_s, "within_s": each.exchange_s, "between_s": each.between_s}
    return {"group": each.group, **named, "total_s": each.total_s, "memory_bytes": each.memory_bytes}


def _print_sizes(sizes: Sequence[Plan], best: Plan) -> None:
    """Prints the time of a step in groups of each size, with the best one in bold."""
    if not sizes:
        return
    table = Table(title="a step in groups of each size: the shortest is taken", title_justify="left")
    for name in ("group", "computing", "within groups", "between groups", "all", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in sizes:
        times = [_ms(seconds) for seconds in (each.compute_s, each.exchange_s, each.between_s, each.total_s)]
        memory = f"{each.memory_bytes / 2**30:.2f} GiB"
        table.add_row(str(each.group), *times, memory, style="bold" if each.group == best.group else None)
    Console().print(table)


def _fitting(graph: Graph, workers: int, batch: int, machine: Machine, group: int | None) -> Plan:
    """The plan for a group of the given size, or else of the smallest size for which a replica fits into memory."""
    if workers < 1:
        raise ConfigError(f"--workers {workers} is too small; use 1 or more")
    sizes = [group] if group is not None else [size for size in range(1, workers + 1) if workers % size == 0]
    if group is not None and (group < 1 or workers % group):
        raise ConfigError(f"--group {group} does not divide {workers} workers; use one of its divisors")
    for size in sizes:
        try:
            return plan(graph, size, batch * size, machine)
        except ConfigError:
            if size == sizes[-1]:
                raise
    raise AssertionError("there is a last size")


def _advice(graph: Graph, found: Plan, workers: int, batch: int, machine: Machine, measured: Given) -> dict[str, Any]:
    """The recommended strategy across replicas, and whether several workers are faster than one."""
    replicas = workers // found.group
    vector_bytes = 4 * graph.parameters / found.group
    exchange_s = machine.wire.seconds(2 * vector_bytes * (replicas - 1) / replicas, 2 * (replicas - 1))
    exchange_s = exchange_s if measured.exchange_s is None or replicas == 1 else measured.exchange_s
    step_s = found.step_s if measured.step_s is None else measured.step_s
    period = balanced_period(exchange_s, step_s) if replicas > 1 else 1
    overlap = max(1, math.ceil(exchange_s / step_s))
    strategy = "synchronous" if replicas == 1 or exchange_s <= HIDDEN * step_s else "relay"
    together = workers * batch / step_s
    if strategy == "synchronous":
        together = workers * batch / (step_s + exchange_s)
    alone = batch / (found.alone_s / found.group * step_s / found.step_s)
    return {
        "replicas": replicas,
        "exchange_s": exchange_s,
        "step_s": step_s,
        "strategy": strategy,
        "sparknet_period": period,
        "sparknet_busy": busy_share(period, step_s, exchange_s) if replicas > 1 else 1.0,
        "overlap_period": overlap,
        "shared_batch_speedup": naive_speedup(replicas, step_s, exchange_s) if replicas > 1 else 1.0,
        "rows_per_s": together,
        "one_machine_rows_per_s": alone,
        "worth_it": together > alone,
        "singa_group": best_group(graph.parameters, graph.features, workers, batch * workers),
    }


def _print(found: Plan, advice: dict[str, Any], workers: int, link: str) -> None:
    console = Console()
    title = (
        f"{workers} workers at {link}: {advice['replicas']} replicas of {found.group}, {found.rows} rows a step each"
    )
    table = Table(title=title, title_justify="left")
    for name, justify in (("layer", "left"), ("what", "left"), ("placed", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("param.", "features", "sent", "exchange", "compute"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in found.placed:
        if part.layer.parameters or part.cost.sent_bytes:
            row = [part.layer.name, part.layer.what, part.placement, _count(part.layer.parameters)]
            row += [_count(part.layer.features), _mb(part.cost.sent_bytes), _ms(part.seconds), _ms(part.compute_s)]
            table.add_row(*row)
    table.add_section()
    parameters = sum(part.layer.parameters for part in found.placed)
    features = sum(part.layer.features for part in found.placed)
    totals = ["all", "", "", _count(parameters), _count(features), _mb(found.sent_bytes), _ms(found.exchange_s)]
    table.add_row(*totals, _ms(found.compute_s), style="bold")
    console.print(table)
    _print_connections(console, found)
    console.print(f"memory of a worker: {found.memory_bytes / 2**30:.2f} GiB", highlight=False)
    for name, (step_s, sent, memory) in found.alternatives.items():
        console.print(
            f"{name}: {_ms(step_s)} a step instead of {_ms(found.step_s)}, {_mb(sent)} sent, {memory / 2**30:.2f} GiB",
            highlight=False,
        )
    for name, memory in found.too_large.items():
        console.print(f"{name}: does not fit, it needs {memory / 2**30:.2f} GiB", highlight=False)
    for line in _sentences(found, advice):
        console.print(line, highlight=False)


def _print_connections(console: Console, found: Plan) -> None:
    """Prints the redistributions between layers; the rows of the layers after them include their costs."""
    if not found.connections:
        return
    table = Table(title="connection layers, counted with the layer after each", title_justify="left")
    for name in ("after", "before", "from", "to", "what"):
        table.add_column(name)
    for name in ("sent", "exchange"):
        table.add_column(name, justify="right", no_wrap=True)
    for each, cost, seconds in found.connections:
        ends = [found.placed[place].layer.name for place in (each.source, each.target)]
        table.add_row(*ends, each.before, each.after, each.what, _mb(cost.sent_bytes), _ms(seconds))
    console.print(table)


def _sentences(found: Plan, advice: dict[str, Any]) -> list[str]:
    lines = []
    if advice["replicas"] > 1:
        lines.append(
            f"between replicas: one float32 exchange takes {_ms(advice['exchange_s'])}, "
            f"a step {_ms(advice['step_s'])}; "
            + (
                "synchronous is cheap enough."
                if advice["strategy"] == "synchronous"
                else f"relay hides it behind {_steps(advice['overlap_period'])}; sparknet with period "
                f"{advice['sparknet_period']} steps for {advice['sparknet_busy']:.0%} of the time."
            )
        )
        lines.append(
            f"one batch shared by all replicas, averaged at every step, would be {advice['shared_batch_speedup']:.2g} "
            "times as fast as on one (Amdahl's law, SparkNet §3.1)."
        )
    rates = f"{advice['rows_per_s']:,.0f} rows/s together, {advice['one_machine_rows_per_s']:,.0f} on one machine"
    if advice["worth_it"]:
        lines.append(f"predicted: {rates}.")
    else:
        lines.append(f"predicted: {rates}: one machine is faster.")
    return lines


def _plain(found: Plan, advice: dict[str, Any]) -> dict[str, Any]:
    layers = [
        {
            "name": part.layer.name,
            "what": part.layer.what,
            "placement": part.placement,
            "parameters": part.layer.parameters,
            "features": part.layer.features,
            "sent_bytes": part.cost.sent_bytes,
            "exchange_s": part.seconds,
            "compute_s": part.compute_s,
        }
        for part in found.placed
    ]
    borders = [
        {
            "after": found.placed[each.source].layer.name,
            "before": found.placed[each.target].layer.name,
            "from": each.before,
            "to": each.after,
            "what": each.what,
            "sent_bytes": cost.sent_bytes,
            "exchange_s": seconds,
        }
        for each, cost, seconds in found.connections
    ]
    names = ("sent_bytes", "exchange_s", "compute_s", "step_s", "memory_bytes")
    totals = {name: getattr(found, name) for name in names}
    others = {
        name: dict(zip(("step_s", "sent_bytes", "memory_bytes"), each, strict=True))
        for name, each in found.alternatives.items()
    }
    whole = {"group": found.group, "layers": layers, "connections": borders, "totals": totals, "alternatives": others}
    return whole | {"too_large": dict(found.too_large)} | advice


def _profiled(factory: Callable[[], nn.Module], graph: Graph, rows: Sequence[Row], batch: int, group: int) -> Graph:
    """The graph with layer times of this machine, on one thread, for the rows of one worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    examples = [
        torch.rand(batch, *shape) if dtype.is_floating_point else torch.zeros(batch, *shape, dtype=dtype)
        for shape, dtype in rows
    ]
    try:
        return profiled(graph, factory(), examples, group)
    finally:
        torch.set_num_threads(threads)


def _network(chosen: recipes.Recipe, given: str | None) -> tuple[Callable[[], nn.Module], list[Row], int]:
    """The factory of a recipe's network, one row of each of its inputs, and the rows of a worker's step."""
    if given is not None and not re.fullmatch(r"\d+(x\d+)*", given):
        raise ConfigError(f"--input {given!r} is not a shape; write it as 3x224x224")
    shape = None if given is None else tuple(int(part) for part in given.split("x"))
    if chosen.model.caffe is not None or chosen.train.solver is not None:
        from thinwire.cli.caffe import network

        found, shapes = network(chosen, shape)
        batch = chosen.train.batch_size or found.batch_size or BATCH_SIZE
        return found.model, [(each, torch.float32) for each in shapes], batch
    batch = chosen.train.batch_size or BATCH_SIZE
    if shape is not None:
        return model_by_name(model_name(chosen)), [(shape, torch.float32)], batch
    table = table_of(chosen)
    factory = model_by_name(table.model) if isinstance(table.model, str) else table.model
    rows = first_rows(chosen, table.inputs, table.transform).values()
    return factory, [(tuple(x.shape[1:]), x.dtype) for x in rows], batch


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def _count(number: float) -> str:
    if number < 10_000:
        return f"{number:,.0f}" if number else ""
    return f"{number / 1e3:,.0f} k" if number < 1e6 else f"{number / 1e6:,.1f} M"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size else ""


def _ms(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.1f} ms"
