"""Speed-ups that the papers' models predict from a user's measurements, for `thinwire plan`."""

from __future__ import annotations

import argparse
import json
import math
import os
from typing import Any, NamedTuple

from thinwire.errors import ConfigError
from thinwire.rules.speedup import (
    asynchronous_s,
    asynchronous_speedup,
    naive_speedup,
    rounds_s,
    rounds_speedup,
    serial_s,
)

STOPPING = ("synchronous", "sparknet", "diloco")
"""Strategies whose workers wait for each exchange, so that a summary shows the time of an exchange."""


class Given(NamedTuple):
    """Measurements; None or empty where not given.

    Attributes:
        step_s: seconds of a step, C(b).
        exchange_s: seconds of an exchange of the whole model, S.
        alone: steps that one machine takes to the target, N.
        rounds: by τ, rounds to the target, M(τ).
        discrepancy: by τ, the cost of asynchrony, d(τ).
    """

    step_s: float | None
    exchange_s: float | None
    alone: float | None
    rounds: dict[int, float]
    discrepancy: dict[int, float]


def given(options: argparse.Namespace) -> Given:
    """The measurements in the command's options.

    Raises:
        ConfigError: A measurement is not a number above 0, or needs another that is missing.
    """
    step_s, exchange_s = options.step, options.exchange
    if options.run is not None:
        if step_s is not None or exchange_s is not None:
            raise ConfigError("--run tells step and exchange; leave --step and --exchange out")
        step_s, exchange_s = _of_a_run(options.run)
    for name, value in (("--step", step_s), ("--exchange", exchange_s), ("--alone", options.alone)):
        least = 0 if name == "--exchange" else math.ulp(0.0)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} {value:g} is not possible; give a measured value above 0")
    found = Given(
        step_s,
        exchange_s,
        options.alone,
        _by_period("--rounds", options.rounds),
        _by_period("--discrepancy", options.discrepancy),
    )
    if (found.rounds or found.discrepancy) and (step_s is None or exchange_s is None):
        name = "--rounds" if found.rounds else "--discrepancy"
        raise ConfigError(f"{name} needs measured times as well; give --step and --exchange, or --run")
    if found.rounds and found.alone is None:
        raise ConfigError("--rounds needs --alone, the steps that one machine takes to the same target")
    return found


def _by_period(name: str, text: str | None) -> dict[int, float]:
    """Parses numbers by τ.

    >>> _by_period("--rounds", "1:900,50:30")
    {1: 900.0, 50: 30.0}
    """
    found: dict[int, float] = {}
    for part in (text or "").split(",") if text is not None else ():
        period, _, value = part.partition(":")
        try:
            found[int(period)] = float(value)
        except ValueError as error:
            raise ConfigError(f"{name} {text!r} is not understood; write it as 1:900,10:110") from error
    if any(period < 1 or not 0 < value < math.inf for period, value in found.items()):
        raise ConfigError(f"{name} {text!r} is not possible; periods are 1 or more, and measured values are above 0")
    return found


def _of_a_run(folder: str) -> tuple[float, float]:
    """Seconds of a step and of an exchange, from the summary of a run whose workers wait for each exchange."""
    path = os.path.join(folder, "summary.json")
    try:
        with open(path, encoding="utf-8") as file:
            summary = json.load(file)
        strategy, rounds, step_s = summary["strategy"], summary["rounds"], summary["step_s"]
        waited = summary["train_seconds"] * (1 - summary["busy"]) - summary["evaluated_s"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--run {folder!r} has no summary.json of a run ({error}); name the out folder of a run"
        ) from None
    if strategy not in STOPPING or not rounds or not step_s:
        raise ConfigError(
            f"--run {folder!r} is of {strategy} with {rounds} rounds; the time of an exchange is known only where "
            "workers stop "
            f"for it: name a run of {', '.join(STOPPING)} with two workers or more, or give --step and --exchange"
        )
    return float(step_s), max(0.0, float(waited)) / rounds


def gains(found: Given, workers: int) -> dict[str, Any]:
    """Predictions of the papers' models; empty if step and exchange were not measured."""
    if found.step_s is None or found.exchange_s is None:
        return {}
    step_s, exchange_s = found.step_s, found.exchange_s
    told: dict[str, Any] = {
        "step_s": step_s,
        "exchange_s": exchange_s,
        "naive": naive_speedup(workers, step_s, exchange_s),
        "naive_limit": step_s / exchange_s if exchange_s else None,
    }
    if found.alone is not None:
        told["alone_s"] = serial_s(found.alone, step_s)
    if found.rounds and found.alone is not None:
        told["sparknet"] = [
            {
                "period": period,
                "seconds": rounds_s(count, period, step_s, exchange_s),
                "speedup": rounds_speedup(found.alone, {period: count}, step_s, exchange_s)[0],
                "free_speedup": found.alone / (period * count),
            }
            for period, count in sorted(found.rounds.items())
        ]
        told["best_speedup"], told["best_period"] = rounds_speedup(found.alone, found.rounds, step_s, exchange_s)
    if found.discrepancy:
        told["deepspark"] = [_asynchronous(found, workers, *pair) for pair in sorted(found.discrepancy.items())]
    return told


def _asynchronous(found: Given, workers: int, period: int, penalty: float) -> dict[str, Any]:
    assert found.step_s is not None
    assert found.exchange_s is not None
    settings: dict[str, Any] = {"workers": workers, "period": period, "penalty": penalty}
    told = {
        "period": period,
        "discrepancy": penalty,
        "speedup": asynchronous_speedup(found.step_s, found.exchange_s, **settings),
        "limit": workers / penalty,
    }
    if found.alone is not None:
        pair = asynchronous_s(found.alone, found.step_s, found.exchange_s, **settings)
        told["compute_s"], told["communicate_s"] = pair
    return told


def sentences(told: dict[str, Any], workers: int) -> list[str]:
    """The predictions in sentences."""
    if not told:
        return []
    lines = [
        f"measured: {told['step_s']:.3g} s a step, {told['exchange_s']:.3g} s an exchange. One batch shared by "
        f"{workers} workers: {told['naive']:.2g} times as fast as one (SparkNet §3.1.1)"
        + ("." if told["naive_limit"] is None else f", and never more than {told['naive_limit']:.2g} times.")
    ]
    if "alone_s" in told:
        lines.append(f"one machine alone: {told['alone_s']:,.0f} s to the target (SparkNet eq. 1).")
    for row in told.get("sparknet", ()):
        best = ", the best of these" if row["period"] == told["best_period"] else ""
        lines.append(
            f"sparknet, τ = {row['period']}: {row['seconds']:,.0f} s, {row['speedup']:.2g} times as fast (eq. 2); "
            f"{row['free_speedup']:.2g} times if exchanges took no time{best}."
        )
    for row in told.get("deepspark", ()):
        spent = f"{row['compute_s']:,.0f} s computing and {row['communicate_s']:,.0f} s " if "compute_s" in row else ""
        spent += "exchanging (DeepSpark eq. 2), " if spent else ""
        lines.append(
            f"deepspark, τ = {row['period']}, d = {row['discrepancy']:g}: {spent}{row['speedup']:.2g} times as fast "
            f"(eq. 3); {row['limit']:.2g} times as τ grows (eq. 4)."
        )
    return lines
