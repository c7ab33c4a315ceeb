"""`thinwire bench exchange`: the cost of an exchange on the network, on the processor, and for simultaneous steps."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thinwire_lab.bench.codecs import LOSSY, codec_costs, ratios
from thinwire_lab.bench.processes import Processes
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.testbed import Testbed

SIZE = 25_000_000
"""Parameters of the exchanged model: those of ResNet-50."""
STEP_S = 0.2
GOODPUT_TARGET, CODEC_TARGET, STEPS_TARGET = 0.9, 5.0, 0.97
CODECS = ("float32", *LOSSY)
FEWER = {"int8": 3.5, "int4": 7.0, "sign2": 13.0, "sign1": 25.0}
"""Targets: by which factor fewer bytes than float32 cross the network."""
STRATEGIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("mpca, pull left out", "mpca", {"pull": 0.0, "pull_peak": 0.0}),
    ("mpca, pull on the CPU", "mpca", {}),
    ("relay", "relay", {}),
)
"""An accelerator would compute MPCA's pull in a fraction of a millisecond; the CPU adds 25M numbers each step."""


@dataclass(frozen=True)
class _Amount:
    """Numbers of repetitions."""

    blocks: int
    block: int
    codec_repeats: int
    per_codec: int
    warm_up: int
    steps: int
    turns: int


FULL = _Amount(blocks=4, block=3, codec_repeats=9, per_codec=5, warm_up=15, steps=40, turns=2)
QUICK = _Amount(blocks=1, block=2, codec_repeats=2, per_codec=2, warm_up=8, steps=10, turns=1)


def exchange(quick: bool, say: Say) -> Report:
    """All four parts; without network namespaces, the parts that need them are reported as skipped."""
    amount = QUICK if quick else FULL
    rows: list[Row] = []
    measured: dict[str, Any] = {"size": SIZE, "step_s": STEP_S}
    why_not = Testbed.why_not()
    skipped: list[str] = []
    if why_not is None:
        _goodput(amount, "1gbit", rows, measured, say)
    _goodput(amount, None, rows, measured, say)
    _codecs(amount, rows, measured, say)
    if why_not is None:
        _steps_kept(amount, rows, measured, say)
        for rate in ("1gbit",) if quick else ("1gbit", "100mbit"):
            _by_codec(amount, rate, rows, measured, say)
    else:
        skipped = [f"{part}: {why_not}" for part in ("goodput at 1gbit", "steps kept", "seconds by codec")]
    return Report("exchange", rows, measured, skipped)


@contextlib.contextmanager
def _network(rate: str | None, workers: int = 2) -> Iterator[Testbed | None]:
    """A testbed with one node for each worker and one for the coordinator; without a rate, plain loopback."""
    if rate is None:
        yield None
        return
    with Testbed(workers + 1, rate) as bed:
        yield bed


def _goodput(amount: _Amount, rate: str | None, rows: list[Row], measured: dict[str, Any], say: Say) -> None:
    where = rate or "loopback"
    with _network(rate) as bed:
        for plain in (False, True):
            carrier = "plain" if plain else "CURVE"
            say(f"goodput at {where}: {carrier} and gloo in turn")
            options = {"size": SIZE, "codec": "float32", "blocks": amount.blocks, "block": amount.block}
            options |= {"gloo": True, "interface": "eth0" if bed else "lo"}
            ours, theirs = _exchanges(Processes(bed, plain=plain), options)
            middle = statistics.median(theirs)
            target = GOODPUT_TARGET if bed and not plain else None
            detail = f"{statistics.median(ours):.3f} s, gloo {middle:.3f} s"
            spread = tuple(middle / t for t in ours)
            rows.append(
                Row("gloo ÷ ours, seconds", f"{where}, {carrier}", statistics.median(spread), target, detail, spread)
            )
            measured.setdefault("goodput", {})[f"{where} {carrier}"] = {"ours_s": ours, "gloo_s": theirs}


def _exchanges(processes: Processes, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of each exchange on the slower worker: thinwire's and gloo's."""
    results = processes.run("exchange_seconds", options)
    if not all(r["right"] for r in results):
        raise AssertionError("an exchange gave another mean than it should")
    ours = [max(times) for times in zip(*(r["ours"] for r in results), strict=True)]
    theirs = [max(times) for times in zip(*(r["theirs"] for r in results), strict=True)]
    return ours, theirs


def _codecs(amount: _Amount, rows: list[Row], measured: dict[str, Any], say: Say) -> None:
    say("codecs against one axpy")
    costs = codec_costs(SIZE, amount.codec_repeats)
    measured["codecs_s"] = costs
    for name in LOSSY:
        for kind in ("encode_feedback", "accumulate"):
            spread = tuple(ratios(costs, name, kind))
            detail = f"{statistics.median(costs[name][kind]) * 1e3:.0f} ms"
            value = statistics.median(spread)
            rows.append(Row("codec ÷ axpy", f"{name} {kind}", value, CODEC_TARGET, detail, spread, at_most=True))


def _steps_kept(amount: _Amount, rows: list[Row], measured: dict[str, Any], say: Say) -> None:
    for label, name, knobs in STRATEGIES:
        kept: list[float] = []
        told: dict[str, Any] = {}
        for turn in range(amount.turns):
            say(f"steps kept: {label}, {turn + 1} of {amount.turns}")
            options = {"size": SIZE, "name": name, "knobs": knobs, "codec": "float32", "step_s": STEP_S}
            options |= {"warm_up": amount.warm_up, "steps": amount.steps}
            with _network("1gbit") as bed:
                on = Processes(bed).run("paced_steps", options | {"exchanging": True})
            with _network("1gbit", 1) as bed:
                off = Processes(bed, workers=1).run("paced_steps", options | {"exchanging": False})
            without = off[0]["steps_per_s"]
            kept += [worker["steps_per_s"] / without for worker in on]
            told = on[0]
            measured.setdefault("steps_kept", {}).setdefault(label, []).append({"on": on, "off": off})
        detail = f"{told['rounds']} rounds in {amount.warm_up + amount.steps} steps, {told['codec']}"
        detail += f" × {told['fragments']}"
        rows.append(Row("steps kept at 1gbit", label, statistics.median(kept), STEPS_TARGET, detail, tuple(kept)))


def _by_codec(amount: _Amount, rate: str, rows: list[Row], measured: dict[str, Any], say: Say) -> None:
    with _network(rate) as bed:
        assert bed is not None
        crossed: dict[str, float] = {}
        for name in CODECS:
            say(f"seconds per exchange at {rate}: {name}")
            before = bed.sent_bytes(0)
            block = amount.per_codec if rate == "1gbit" else max(2, amount.per_codec // 2)
            options = {"size": SIZE, "codec": name, "blocks": 1, "block": block, "gloo": False, "interface": "eth0"}
            ours, _ = _exchanges(Processes(bed), options)
            measured.setdefault("by_codec_s", {}).setdefault(rate, {})[name] = ours
            value = statistics.median(ours)
            rows.append(Row(f"seconds per exchange at {rate}", name, value, None, "", tuple(ours), unit="s"))
            crossed[name] = (bed.sent_bytes(0) - before) / (block + 1)  # plus one exchange that opens the connections
        measured.setdefault("by_codec_bytes", {})[rate] = crossed
        for name, target in FEWER.items():
            fewer, detail = crossed["float32"] / crossed[name], f"{crossed[name] / 1e6:.1f} MB at the interface"
            rows.append(Row(f"float32's bytes on the wire ÷ ours at {rate}", name, fewer, target, detail))
