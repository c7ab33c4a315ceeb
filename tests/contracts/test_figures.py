"""Figures in the README and in the documentation are those of the committed result files and of the tests."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS, RELAY, TUNE = "benchmarks/README.md", "docs/strategies/relay.md", "docs/how-to/tune.md"
CHOOSING, PLACE = "docs/tutorials/choosing-a-strategy.md", "docs/how-to/place.md"
CARD_EASGD, CARD_SYNCHRONOUS = "docs/strategies/easgd.md", "docs/strategies/synchronous.md"
ON_SPARK, PLAN, SIMULATE = "docs/how-to/train-on-spark.md", "docs/how-to/plan.md", "docs/how-to/simulate.md"
RACES = ("ratio 1 at 1gbit", "ratio 1 at 100mbit", "ratio 10 at 100mbit", "ratio 30 at 50mbit")
NUMBER = r"\**([-−]?\d[\d,]*(?:\.\d+)?)\**"


@functools.cache
def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def row(name: str, part: str, what: str) -> float:
    """The value of a benchmark's row."""
    (found,) = (float(r["value"]) for r in result(name)["rows"] if (r["part"], r["name"]) == (part, what))
    return found


def rows(name: str, part: str, *whats: str) -> list[float]:
    return [row(name, part, what) for what in whats]


def raced(what: str, *races: str, of: str = "") -> list[float]:
    return [row("comparison", race + of, what) for race in races or RACES]


def percent(name: str, method: str, ratio: float | None = None, *, among: str = "trials", **wanted: Any) -> float:
    """A method's accuracy, the mean over its seeds."""
    wanted = {"workers": 8, "method": method, "ratio": ratio} | wanted
    found = [t for t in result(name)[among] if all(t[key] == value for key, value in wanted.items())]
    return 100 * statistics.mean(float(t["val_accuracy" if "val_accuracy" in t else "accuracy"]) for t in found)


def drift(ratio: float | None, lr: float, method: str = "relay", **knobs: Any) -> float:
    """Batches of 16, the whole set."""
    return percent("stress", method, ratio, among="drift", lr=lr, batch=16, images=50000, steps=1000, knobs=knobs)


def driver_mb_per_hour() -> float:
    """Of the driver in the soak, by least squares over the time with deaths."""
    order = result("soak")["order"]
    end = order["quiet_s"] + 60 * order["minutes"]
    looks = [look for look in result("soak")["looks"] if order["quiet_s"] <= look["at_s"] <= end]
    slope, _ = statistics.linear_regression(
        [look["at_s"] / 3600 for look in looks], [look["driver memory_mb"] for look in looks]
    )
    return slope


def gains(method: str) -> list[float]:
    """MPCA's Fig. 13c: seconds of one worker over those of 2, 4 and 8."""
    alone = statistics.mean(r["seconds"] for r in result("papers")["alone"])
    return [alone / r["seconds"] for r in result("papers")["gain"] if r["strategy"].startswith(method + "(")]


def papers(key: str, *, workers: int | None = None) -> list[dict[str, Any]]:
    return [r for r in result("papers")[key] if workers is None or r["workers"] == workers]


def alone() -> float:
    """Steps to the papers' target with one worker."""
    return statistics.mean(r["steps"] for r in papers("alone"))


def period(run: dict[str, Any]) -> int:
    return int(re.findall(r"period=(\d+)", run["strategy"])[0])


def fig3(workers: int, *periods: int) -> list[float]:
    """SparkNet's: gain in steps by period, where communication is free."""
    steps = {period(r): r["steps"] for r in papers("sparknet", workers=workers)}
    return [alone() / steps[each] for each in periods]


def fig4() -> list[float]:
    """SparkNet's: gain of 8 workers with the best period, where an exchange takes 1, 10, 50 and 100 steps."""
    steps = {period(r): r["steps"] for r in papers("sparknet", workers=8)}
    return [max(alone() / (n * (1 + cost / each)) for each, n in steps.items()) for cost in (1, 10, 50, 100)]


def fig7(*periods: int) -> list[float]:
    """SparkNet's: mean accuracy between 100 and 150 s, where an exchange takes 12 steps."""
    curves = {period(r): r["curve"] for r in papers("sparknet", workers=8)}
    return [
        100 * statistics.mean(c[2] for c in curves[each] if 100 <= c[0] * (1 + 12 / each) * 0.1 <= 150)
        for each in periods
    ]


def ahead(key: str, *borders_s: float) -> list[float]:
    """MPCA's Fig. 10: points by which every second run is ahead of the one before it, mean by stretch of time."""
    runs = papers(key)
    points = [
        (
            first[1],
            statistics.mean(
                100 * (b["curve"][i][2] - a["curve"][i][2]) for a, b in zip(runs[::2], runs[1::2], strict=True)
            ),
        )
        for i, first in enumerate(runs[0]["curve"])
    ]
    stretches = itertools.pairwise((0.0, *borders_s, 1e9))
    return [statistics.mean(value for at, value in points if low <= at < high) for low, high in stretches]


def lost_to_staleness() -> list[float]:
    """DeepSpark's Fig. 5: d and n / d."""
    gained = {r["workers"]: alone() / r["steps"] for r in papers("discrepancy")}
    return [*(n / gain for n, gain in gained.items()), *gained.values()]


def gained(method: str, ratio: float | None = 11.6, *, lr: float = 0.01, **knobs: Any) -> float:
    """The time in which one worker comes as far, over that of a run with small batches."""
    trials = result("gains")["trials"]
    alone = sorted((t["train_seconds"], t["accuracy"]) for t in trials if t["workers"] == 1)
    (found,) = (
        t for t in trials
        if t["workers"] == 8 and (t["method"], t["ratio"], t["lr"]) == (method, ratio, lr)
        and (method != "relay" or t["knobs"] == knobs)
    )  # fmt: skip
    for (before_s, before), (after_s, after) in itertools.pairwise([(0.0, 0.1), *alone]):
        if after >= found["accuracy"]:
            share = (found["accuracy"] - before) / (after - before)
            return float(before_s + share * (after_s - before_s)) / (result("gains")["steps"] * 0.1)
    raise AssertionError("one worker never came as far")


def equal_rows(ratio: int, **knobs: Any) -> list[float]:
    """Per cent by which Relay's loss is above plain SGD's, and the standard error."""
    lines = (ROOT / "benchmarks" / "results" / "equal_rows.jsonl").read_text().splitlines()
    runs = [r for r in map(json.loads, lines) if (r["ratio"], r["knobs"]) == (ratio, knobs)]
    above = [100 * (r["relay"] / r["plain"] - 1) for r in runs]
    return [statistics.mean(above), statistics.stdev(above) / len(above) ** 0.5]


def plain_losses() -> list[float]:
    lines = (ROOT / "benchmarks" / "results" / "equal_rows.jsonl").read_text().splitlines()
    found = [json.loads(line)["plain"] for line in lines]
    return [min(found), max(found)]


def told(name: str, part: str, what: str) -> list[float]:
    """The numbers in the words of a benchmark's row."""
    (found,) = (r["detail"] for r in result(name)["rows"] if (r["part"], r["name"]) == (part, what))
    return [float(each) for each in re.findall(r"\d+\.\d+", found)]


def busy(race: int) -> float:
    """Of Relay, evaluations and all: the mean over its seeds."""
    relay = result("comparison")["measured"]["races"][race]["methods"]["relay"]
    return statistics.mean(each["busy"] for each in (relay, *relay["again"]))


def seeds(race: int, method: str) -> list[dict[str, Any]]:
    """A method's runs in a race."""
    found = result("comparison")["measured"]["races"][race]["methods"][method]
    return [found, *found.get("again", ())]


def evaluations(race: int, method: str) -> list[int]:
    counts = [len(each["history"]) for each in seeds(race, method)]
    return sorted({min(counts), max(counts)})


def reached(race: int, method: str, window: int = 5) -> list[float]:
    """Seconds until the mean of the last evaluations is at the target, run by run of a method; infinite if never."""
    target = result("comparison")["measured"]["races"][race]["race"]["target"]

    def until(looks: list[dict[str, Any]]) -> float:
        for i in range(window, len(looks) + 1):
            if statistics.mean(look["val_loss"] for look in looks[i - window : i]) <= target:
                return float(looks[i - 1]["seconds"])
        return math.inf

    return [until(run["history"]) for run in seeds(race, method)]


def averaged(method: str, *races: int) -> list[float]:
    """Of the middle one of a method's runs."""
    return [statistics.median(reached(race, method)) for race in races or range(4)]


def middle_half(name: str, part: str, what: str) -> list[float]:
    """A benchmark's row, its middle half, and the milliseconds that its words name."""
    (found,) = (r for r in result(name)["rows"] if (r["part"], r["name"]) == (part, what))
    low, _, high = statistics.quantiles(found["spread"], n=4)
    return [found["value"], low, high, float(found["detail"].split()[0])]


def extent(name: str, part: str, what: str) -> list[float]:
    """Lowest and highest of a benchmark's row."""
    (found,) = (r["spread"] for r in result(name)["rows"] if (r["part"], r["name"]) == (part, what))
    return [min(found), max(found)]


def wire_s(size: str, *ways: str) -> list[float]:
    """Seconds of an exchange, the median of its turns."""
    return [statistics.median(result("wire")["measured"]["seconds"][size][way]) for way in ways]


def nats(case: str, method: str) -> float:
    (found,) = (t for t in result("stress")["trials"] if (t["case"], t["method"]) == (case, method))
    return float(found["val_loss"])


def against_easgd(method: str, race: str) -> float:
    return raced(method, race)[0] / raced(EASGD, race)[0]


def synchronous_against_ddp() -> float:
    """Where an exchange takes one step: the mean of two races."""
    return statistics.mean(raced(SYNC, race)[0] / raced("ddp", race)[0] for race in RACES[:2])


def plans_off_by() -> list[float]:
    """Per cent, in seconds."""
    off = rows("placement", "seconds, off by", "data", "model", "hybrid")
    assert max(rows("placement", "bytes, off by", "data", "model", "hybrid")) < 0.01
    return [100 * min(off), 100 * max(off)]


def forecasts_off_by() -> list[float]:
    """Per cent at most, rounded up."""
    return [math.ceil(100 * max(float(r["value"]) for r in result("forecast")["rows"]))]


def drawn(svg: str, colour: str) -> tuple[float, float]:
    """The last point of a method's line in the README's first picture: bytes sent, validation accuracy in per cent."""
    text = (ROOT / "docs" / "images" / svg).read_text()
    ends = re.findall(rf'd="(M[^"]*)"[^>]*stroke: {colour}', text)
    x, y = (float(each) for each in re.findall(r"[ML] ([\d.]+) ([\d.]+)", ends[0])[-1])
    ticks = [(float(a), float(b)) for a, b in re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"', text)]
    (left, base), (right, _), above = ticks[0], ticks[1], ticks[6]
    return 10 ** (5 + (x - left) / (right - left)), 80 + 5 * (base - y) / (base - above[1])


def kills_after_the_mend() -> list[float]:
    """By arena too; seed 11 was the bout that failed, and what was wrong was mended before seed 15."""
    bouts = [bout for bout in result("chaos")["bouts"] if bout["seed"] >= 15]
    assert not any(bout["wrong"] for bout in bouts)
    return [
        sum(b["kills"] for b in bouts if b["arena"] in arenas)
        for arenas in (("local", "spark"), ("local",), ("spark",))
    ]


def behind() -> list[float]:
    """MPCA's Fig. 10c: evaluations at which weighting by steps is behind, in the mean of seeds and in single ones."""
    runs = papers("stragglers")
    single = [
        [b["curve"][i][2] - a["curve"][i][2] for a, b in zip(runs[::2], runs[1::2], strict=True)]
        for i in range(len(runs[0]["curve"]))
    ]
    flat = [each for points in single for each in points]
    return [sum(statistics.mean(p) < 0 for p in single), len(single), sum(each < 0 for each in flat), len(flat)]


def deepspark(low_s: float, high_s: float) -> list[float]:
    """DeepSpark's Fig. 4: mean accuracy in a stretch of time, of periods 10, 20 and 50 and of the adaptive one."""
    return [
        100 * statistics.mean(point[2] for point in run["curve"] if low_s <= point[1] < high_s)
        for run in papers("deepspark")
    ]


def gauges(*names: str) -> list[float]:
    """Of the soak: early and late."""
    return [value for name in names for value in itemgetter("early", "late")(result("soak")["gauges"][name])]


def gpu(*methods: str) -> list[float]:
    return [result("gpu")["of_the_steps_without"][each] for each in methods]


def short() -> list[float]:
    """Relay and free communication in 1,000 steps with batches of 64."""
    return [percent("stress", method, 16.0, case="8 workers") for method in ("relay", "free")]


SYNC, MPCA, EASGD, SPARKNET = ("synchronous", "mpca", "easgd", "sparknet")
RESNET20 = functools.partial(percent, "ratios")
DEEP, WARM = functools.partial(percent, "ratios110_augmented"), functools.partial(percent, "ratios110_warmup")
TABLE = "share of the link used"
SPARK = "broadcast + treeReduce ÷ spark"
SIZES = ("1 MB", "10 MB", "50 MB")
CODED = ("encode_feedback", "accumulate")
CODECS = ("float32", "bfloat16", "int8", "int4", "int2")

CLAIMS: list[tuple[str, str, Callable[[], list[float]]]] = [
    (BENCHMARKS, "| Relay | {} | {} | {} | {} |", lambda: raced("relay")),
    (BENCHMARKS, "| Auto | {} | {} | {} | {} |", lambda: raced("auto")),
    (BENCHMARKS, "| MPCA | {} | {} | {} | not in 500 steps |", lambda: raced(MPCA, *RACES[:3])),
    (BENCHMARKS, "| EASGD | {} | {} | {} | {} |", lambda: raced(EASGD)),
    (BENCHMARKS, "| SparkNet | {} | {} | {} | {} |", lambda: raced(SPARKNET)),
    (BENCHMARKS, "| Synchronous | {} | {} | | |", lambda: raced(SYNC, *RACES[:2])),
    (BENCHMARKS, "| TorchDistributor, DDP | {} | {} | {} | {} |", lambda: raced("ddp")),
    (BENCHMARKS, "| DDP, half precision | {} | {} | {} | {} |", lambda: raced("ddp half")),
    (BENCHMARKS, "| DDP, PowerSGD | {} | {} | {} | {} |", lambda: raced("ddp powersgd")),
    (BENCHMARKS, "| post-local SGD | {} | {} | {} | {} |", lambda: raced("post-local sgd")),
    (
        BENCHMARKS,
        "evaluations left out | {} | {} | {} | {} | ≥",
        lambda: raced("share of a worker's time spent in steps", of=", relay"),
    ),
    (
        BENCHMARKS,
        "exchanges nothing | {} | {} | {} | {} | |",
        lambda: raced("steps in the same time as one machine, which exchanges nothing", of=", relay"),
    ),
    (
        BENCHMARKS,
        "DDP with PowerSGD | | | {}, {}, {}, {} | {}, at least {}, {}, {} |",
        lambda: [
            value
            for race in RACES[2:]
            for method in (SPARKNET, MPCA, EASGD, "ddp powersgd")
            for value in raced(f"faster than {method}", race, of=", relay")
        ],
    ),
    (
        BENCHMARKS,
        "above plain SGD's, same seeds | {} | {} | {} | {} |",
        lambda: raced("loss after equal rows, above plain SGD's by", of=", relay"),
    ),
    (
        BENCHMARKS,
        "best fixed strategy's | {} | {} | {} | {} |",
        lambda: raced("against the best", of=", auto"),
    ),
    (
        BENCHMARKS,
        "free communication reach {} %",
        lambda: [RESNET20("free")],
    ),
    (
        BENCHMARKS,
        "`Relay` reaches {} (two seeds), {}, {} (two seeds) and {} %",
        lambda: [RESNET20("relay", ratio) for ratio in (11.6, 29.2, 64.0, 107.8)],
    ),
    (
        BENCHMARKS,
        "MPCA has {}, the same as `Relay`, SparkNet {} and EASGD {} %",
        lambda: [RESNET20(method, 11.6) for method in (MPCA, SPARKNET, EASGD)],
    ),
    (BENCHMARKS, "`Relay` has {} % against {} %", short),
    (
        BENCHMARKS,
        "`Relay` {} and {} at ratio 11.6 and 64, MPCA {} and {}, SparkNet {} and {};",
        lambda: [DEEP(method, ratio) for method in ("relay", MPCA, SPARKNET) for ratio in (11.6, 64.0)],
    ),
    (
        BENCHMARKS,
        "free communication {} %, `Relay` {} at ratio 64 and {} at 11.6",
        lambda: [WARM("free"), WARM("relay", 64.0), WARM("relay", 11.6)],
    ),
    (
        BENCHMARKS,
        "Relay {}, {}, {}; MPCA {}, {}, {}; EASGD {}, {}, {}; SparkNet {}, {}, {}.",
        lambda: [gain for method in ("Relay", "MPCA", "EASGD", "SparkNet") for gain in gains(method)],
    ),
    (BENCHMARKS, "{} % of the rows a second were kept", lambda: [100 * result("soak")["goodput"]]),
    (BENCHMARKS, "steadily: {} MB an hour", lambda: [driver_mb_per_hour()]),
    (
        BENCHMARKS,
        "{} schedules were played ({} workers lost)",
        lambda: [
            result("schedules")["played"],
            result("schedules")["workers_lost"],
        ],
    ),
    (
        BENCHMARKS,
        "There were {} real kills: {} on one machine and {} of",
        lambda: [result("chaos")["totals"][key] for key in ("kills", "kills_local", "kills_spark")],
    ),
    (BENCHMARKS, "| a worker loses its process every minute | {} |", lambda: [result("deaths")["rows"][0]["value"]]),
    (BENCHMARKS, "| a worker loses its executor every minute | {} |", lambda: [result("deaths")["rows"][1]["value"]]),
    (
        BENCHMARKS,
        "| steps kept, MPCA, its pull on both sides | {} |",
        lambda: rows("exchange", "steps kept at 1gbit", "mpca, pull left out"),
    ),
    (
        BENCHMARKS,
        "| steps kept, MPCA, its pull on the CPU counted against it | {} |",
        lambda: rows("exchange", "steps kept at 1gbit", "mpca, pull on the CPU"),
    ),
    (
        BENCHMARKS,
        "| steps kept, Relay (int4, 9 fragments) | {} |",
        lambda: rows("exchange", "steps kept at 1gbit", "relay"),
    ),
    (
        BENCHMARKS,
        "| gloo ÷ ours, 1gbit, CURVE | {} (",
        lambda: rows("exchange", "gloo ÷ ours, seconds", "1gbit, CURVE"),
    ),
    (
        BENCHMARKS,
        "| 2 workers | 0.95 ({}) | 0.94 ({}) |",
        lambda: rows("table", TABLE, "2 workers, 1 server", "2 workers, 2 servers"),
    ),
    (
        BENCHMARKS,
        "| 4 workers | 2.81 ({}) | 2.25 ({}) | 1.84 ({}) | **1.61 ({})**",
        lambda: rows("table", TABLE, "4 workers, 1 server", *(f"4 workers, {n} servers" for n in (2, 3, 4))),
    ),
    (BENCHMARKS, "use it, float32 | {} | {} | {} |", lambda: rows("wire", SPARK, *SIZES)),
    (BENCHMARKS, "use it, bfloat16 | {} | {} | {} |", lambda: rows("wire", SPARK + " in bfloat16", *SIZES)),
    (
        BENCHMARKS,
        "| ingest ÷ identity `mapInArrow`, 1,024 MB | {} (",
        lambda: rows("ingest", "ingest ÷ identity", "1024 MB"),
    ),
    (
        RELAY,
        "{} % with free communication. With its default settings Relay has {} at R = 11.6 and {} at R = 64",
        lambda: [
            drift(None, 0.1, "free"),
            drift(11.6, 0.1),
            drift(64.0, 0.1, momentum=0.3),
        ],
    ),
    (RELAY, "and {} with ten fragments and μ = 0 (R = 64)", lambda: [drift(64.0, 0.1, momentum=0.0)]),
    (
        RELAY,
        "it has {} with the whole model in 8 bits landing one step late (R = 1), {} with three",
        lambda: [
            drift(1.0, 0.1, momentum=0.0, bits=8, fragments=1),
            drift(11.6, 0.1, momentum=0.0, bits=8, fragments=3),
        ],
    ),
    (
        RELAY,
        "0.025 it is {} with μ = 0 against {} free",
        lambda: [drift(11.6, 0.025, momentum=0.0), drift(None, 0.025, "free")],
    ),
    (RELAY, "0.025 with μ = 0.5 has {} at R", lambda: [drift(11.6, 0.025, momentum=0.5)]),
    (
        RELAY,
        "above plain SGD's with μ = 0 (five seeds) and {} ± {} % with 0.3",
        lambda: equal_rows(30, fragments=9, momentum=0.3),
    ),
    (RELAY, "after 500 steps is {} ± {} % above plain", lambda: equal_rows(30, fragments=9, momentum=0.0)),
    (
        BENCHMARKS,
        "Relay is {} ± {} % above plain SGD at ratio 10 and {} ± {} % at 30",
        lambda: equal_rows(10) + equal_rows(30),
    ),
    (BENCHMARKS, "after 500 steps lies between {} and {} over twelve seeds", plain_losses),
    (
        BENCHMARKS,
        "every ten steps: `busy` in the summary | {} | {} | {} | {} |",
        lambda: [busy(race) for race in range(4)],
    ),
    (
        BENCHMARKS,
        "at ratio 10 SparkNet {}, EASGD {} to {} and MPCA {} to {}, and at ratio 30 SparkNet {}, EASGD {} and MPCA {}",
        lambda: [n for race in (2, 3) for method in (SPARKNET, EASGD, MPCA) for n in evaluations(race, method)],
    ),
    (
        BENCHMARKS,
        "8 workers: {} at τ = 1, {} at 10, {} at 50, {} at 100; 4 workers: {}, {}, {}, {}; 2: {}, {}, {}, not reached",
        lambda: fig3(8, 1, 10, 50, 100) + fig3(4, 1, 10, 50, 100) + fig3(2, 1, 10, 50),
    ),
    (BENCHMARKS, "8 workers gain {} there, {} where it takes 10, {} at 50, {} at 100 |", fig4),
    (
        BENCHMARKS,
        "10, 50 and 100 average {}, {} and {} %: close, 50 slightly ahead; τ = 1 averages {} %",
        lambda: fig7(10, 50, 100, 1),
    ),
    (
        BENCHMARKS,
        "ahead by {} points on average in the first 30 s and by {} after that",
        lambda: ahead("extrapolation", 30),
    ),
    (
        BENCHMARKS,
        "ahead by {} points on average in the first minute, {} in the second and {} in the last two",
        lambda: ahead("stragglers", 60, 120),
    ),
    (BENCHMARKS, "behind at {} of {} evaluations, single seeds at {} of {} |", behind),
    (
        BENCHMARKS,
        "between 60 and 80 s 10, 20 and 50 average {}, {} and {} %, adaptive, from 10 on, {} %",
        lambda: deepspark(60, 80),
    ),
    (BENCHMARKS, "d = {}, {}, {}, {}; n / d = {}, {}, {}, {} (one seed each)", lost_to_staleness),
    (BENCHMARKS, "free communication gains {} at 0.01.", lambda: [gained("free", None)]),
    (
        BENCHMARKS,
        "default settings gains {}, MPCA {}, SparkNet {} and EASGD {}; `Relay` at 64 gains {}.",
        lambda: [*(gained(method) for method in ("relay", MPCA, SPARKNET, EASGD)), gained("relay", 64.0)],
    ),
    (
        BENCHMARKS,
        "which the others were not: {} (rate 0.02, μ = 0.3) and {} (0.01, μ = 0.5)",
        lambda: [gained("relay", lr=0.02, momentum=0.3), gained("relay", momentum=0.5)],
    ),
    (
        BENCHMARKS,
        "Relay {} and MPCA {} times the steps of no exchange, SparkNet, which waits, {}.",
        lambda: gpu("relay", MPCA, SPARKNET),
    ),
    (
        BENCHMARKS,
        "| until all is shown, once the server has read it | {} s",
        lambda: rows("dashboard", "page", "until all is shown when the server has read it"),
    ),
    *(
        (
            BENCHMARKS,
            f"| {kind}, {threads} | {{}} |",
            functools.partial(rows, "overhead", "one worker ÷ bare loop", f"{kind}, {threads}"),
        )
        for kind in ("mlp", "cnn")
        for threads in ("1 thread", "2 threads")
    ),
    *(
        (
            BENCHMARKS,
            f"| {name}, {rate} | {{}} / {{}} s |",
            functools.partial(told, "forecast", "time per round, off by", f"{name.lower()} at {rate}"),
        )
        for name in ("Synchronous", "SparkNet", "MPCA")
        for rate in ("1gbit", "100mbit")
    ),
    (
        PLACE,
        "takes {} s by rows, {} s by features and {} s as planned",
        lambda: told("placement", "steps a second", "hybrid over the better of data and model"),
    ),
    (RELAY, "{} against {} after 2,400 steps", lambda: [RESNET20("relay", 11.6), RESNET20("free")]),
    (RELAY, "{} against {} after 1,000 steps", short),
    (TUNE, "from {} to {} % where an exchange takes 64 steps", lambda: [DEEP("relay", 64.0), WARM("relay", 64.0)]),
    (CHOOSING, "in 1,000 steps {} against {} %", short),
    (
        BENCHMARKS,
        "at ratio 30 they take {} of the {} s that it needs",
        lambda: [seeds(3, "ddp powersgd")[0]["history"][0]["seconds"], *raced("ddp powersgd", RACES[3])],
    ),
    (
        RELAY,
        "16 of them {} % against {} free, 8 of them {} against {} (1,000 steps); 32 of them {} against {} (600 steps)",
        lambda: [
            percent("stress", method, 16.0, case=f"{n} workers", workers=n)
            for n in (16, 8, 32)
            for method in ("relay", "free")
        ],
    ),
    (
        RELAY,
        "64 train ({} % after 300 steps)",
        lambda: [percent("stress", "relay", 16.0, case="64 workers", workers=64)],
    ),
    (
        RELAY,
        "an LSTM {} nats against {} free at R = 16, {} at 64; a small transformer {} against {} at 16, {} at 64.",
        lambda: [
            nats(f"{network}{more}", method)
            for network in ("lstm", "transformer")
            for more, method in (("", "relay"), ("", "free"), (", ratio 64", "relay"))
        ],
    ),
    (RELAY, "by 30 %): {} %, where even", lambda: [percent("stress", "relay", 16.0, case="uneven")]),
    (RELAY, "(four kills in 100 s): {} %, where no kill", lambda: [percent("stress", "relay", 16.0, case="failing")]),
    (
        RELAY,
        "R = 11.6: {} % with μ = 0, {} with 0.5, and {} free",
        lambda: [
            percent("gains", "relay", 11.6, lr=0.01, knobs={}),
            percent("gains", "relay", 11.6, lr=0.01, knobs={"momentum": 0.5}),
            percent("gains", "free", None, lr=0.01),
        ],
    ),
    (CARD_SYNCHRONOUS, "it took {} times as long as torch's DDP", lambda: [synchronous_against_ddp()]),
    (
        CARD_EASGD,
        "in int4, took {} of EASGD's time to a target where an exchange takes 10 steps and {} where it takes 30",
        lambda: [against_easgd("relay", race) for race in RACES[2:]],
    ),
    (CARD_EASGD, "took {} of it at 10", lambda: [against_easgd(MPCA, RACES[2])]),
    (
        RELAY,
        "in the committed races {} to {} rounds in 500 steps",
        lambda: [pick(run["rounds"] for race in range(4) for run in seeds(race, "relay")) for pick in (min, max)],
    ),
    (
        ON_SPARK,
        "a round of 1 MB took {} s, where a mesh took {} s, and {} s where each",
        lambda: wire_s("1 MB", "spark", "mesh", "spark, apart"),
    ),
    (ON_SPARK, "a round of 50 MB took {} s, {} s and {} s", lambda: wire_s("50 MB", "spark", "mesh", "spark, apart")),
    (PLAN, "three such plans were off by {} to {} % in seconds", plans_off_by),
    (SIMULATE, "were off by {} % or less in time per round", forecasts_off_by),
    *(
        (
            BENCHMARKS,
            f"| {name}, averaged |{' {} |' * len(races or RACES)}{rest}",
            functools.partial(averaged, method, *races),
        )
        for name, method, races, rest in (
            ("Relay", "relay", (), ""),
            ("Auto", "auto", (), ""),
            ("MPCA", MPCA, (0, 1, 2), " not in 500 steps |"),
            ("EASGD", EASGD, (0, 1, 2), " in one of three seeds |"),
            ("SparkNet", SPARKNET, (0, 1, 2), " in one of three seeds |"),
            ("Synchronous", SYNC, (0, 1), " | |"),
            ("TorchDistributor, DDP", "ddp", (), ""),
            ("DDP, half precision", "ddp half", (), ""),
            ("DDP, PowerSGD", "ddp powersgd", (), ""),
            ("post-local SGD", "post-local sgd", (), ""),
        )
    ),
    (
        BENCHMARKS,
        "at 10 Relay takes {} of the time of the next",
        lambda: [averaged("relay", 2)[0] / averaged(MPCA, 2)[0]],
    ),
    (
        BENCHMARKS,
        "takes {} times as long as DDP at both races of ratio 1 ({} and {} s, {} and {} s)",
        lambda: [
            synchronous_against_ddp(),
            *(raced(method, race)[0] for race in RACES[:2] for method in (SYNC, "ddp")),
        ],
    ),
    (
        BENCHMARKS,
        "| time over DDP's | {} | {} | {} | {} |",
        lambda: [ours / theirs for ours, theirs in zip(raced("relay"), raced("ddp"), strict=True)],
    ),
    (
        BENCHMARKS,
        "Of the kills {} are of the bouts after that fix (from seed 15 on), {} on one machine and {} on Spark",
        kills_after_the_mend,
    ),
    (
        BENCHMARKS,
        "In {} schedules all workers that held the joint model died, as drawn, and the run reported it; in {} a",
        lambda: [result("schedules")["outcomes"][key] for key in ("lost", "incomplete")],
    ),
    (
        BENCHMARKS,
        "from a median of {} MB early to {} MB late",
        lambda: gauges("executor memory_mb"),
    ),
    (
        BENCHMARKS,
        "The median of a worker's memory was {} MB early and late, Spark's heap fell from {} to {} MB",
        lambda: gauges("worker memory_mb", "spark heap_mb")[1:],
    ),
    (
        BENCHMARKS,
        "the run made {} rounds in {} steps",
        lambda: [result("soak")["summary"][key] for key in ("rounds", "steps")],
    ),
    (
        BENCHMARKS,
        "| 100mbit | {} | {} | {} | {} | {} |",
        lambda: rows("exchange", "seconds per exchange at 100mbit", *CODECS),
    ),
    (
        BENCHMARKS,
        "| 1gbit | {} | {} | {} | {} | {} |",
        lambda: rows("exchange", "seconds per exchange at 1gbit", *CODECS),
    ),
    (
        BENCHMARKS,
        "those in int4 took {} to {} s, those in int8 {} to {} s",
        lambda: [s for codec in ("int4", "int8") for s in extent("exchange", "seconds per exchange at 1gbit", codec)],
    ),
    (
        BENCHMARKS,
        "in float32 from {} to {}, in bfloat16 from {} to {}.",
        lambda: extent("wire", SPARK, "50 MB") + extent("wire", SPARK + " in bfloat16", "50 MB"),
    ),
    *(
        (
            BENCHMARKS,
            f"| {name} | {{}} | {{}} |",
            functools.partial(lambda name: [rows("codecs", f"{k} ÷ axpy", name)[0] for k in CODED], name),
        )
        for name in ("bfloat16", "int8", "int4", "sign2", "sign1")
    ),
    (
        BENCHMARKS,
        "with four workers and four servers the shares lie between {} and {}.",
        lambda: extent("table", TABLE, "4 workers, 4 servers"),
    ),
    (
        BENCHMARKS,
        "| transform ÷ one row a forward pass | {} (",
        lambda: rows("predict", "transform ÷ row by row", "mlp"),
    ),
    *(
        (
            BENCHMARKS,
            f"| {part}, {name} | {{}} | {{}} … {{}} | {{}} |",
            functools.partial(middle_half, "finite", part, name),
        )
        for part, name in (
            ("a step", "mlp, 6,576 parameters"),
            ("a step", "cnn8, 22,704 parameters"),
            ("a sum of 4 at its owner", "float32, 262,144 numbers"),
            ("a sum of 4 at its owner", "bfloat16, 524,288 numbers"),
            ("a sum of 4 at its owner", "int8, 1,048,576 numbers"),
            ("a sum of 4 at its owner", "int2, 4,194,304 numbers"),
            ("a contribution", "SparkNet, 4,000,000 numbers"),
            ("a merge", "SparkNet, 4,000,000 numbers"),
            ("a contribution", "Relay, 4,000,000 numbers"),
            ("a merge", "Relay, 4,000,000 numbers"),
        )
    ),
]
"""Page, phrase, and what the result files say of the numbers in its braces."""


@pytest.mark.parametrize(("page", "phrase", "values"), CLAIMS, ids=[f"{page}: {phrase}" for page, phrase, _ in CLAIMS])
def test_a_figure_is_that_of_its_file(page: str, phrase: str, values: Callable[[], list[float]]) -> None:
    words = [re.escape(word).replace(r"\{\}", NUMBER) for word in phrase.split()]
    found = re.findall(r"\s+".join(words), (ROOT / page).read_text())
    assert len(found) == 1, f"{page} has {len(found)} passages like {phrase!r}; change the phrase here with the page"
    shown = [found[0]] if isinstance(found[0], str) else list(found[0])
    expected = values()
    assert len(shown) == len(expected)
    for text, value in zip(shown, expected, strict=True):
        plain = text.replace(",", "").replace("−", "-")
        half = 0.5 * 10.0 ** -len(plain.partition(".")[2])
        assert abs(float(plain) - value) <= half + 1e-9, f"{page} says {text} where the file has {value:.5g}"


def test_the_strategies_of_the_first_picture_end_as_close_as_the_readme_says() -> None:
    colours = ("#e69f00", "#56b4e9", "#cc79a7", "#009e73", "#d55e00")
    sent, reached = zip(*(drawn("strategies.svg", colour) for colour in colours), strict=True)
    assert "within half a percentage point" in (ROOT / "README.md").read_text()
    assert max(reached) - min(reached) <= 0.5
    assert "more than a hundredfold" in (ROOT / "README.md").read_text()
    assert max(sent) / min(sent) > 100


def test_what_did_not_come_to_the_target_did_not() -> None:
    """Of the table of averaged losses."""
    page = (ROOT / BENCHMARKS).read_text()
    assert f"| one machine, averaged |{' not in 500 steps |' * 4}" in page
    assert all(math.isinf(seconds) for seconds in averaged("one machine"))
    assert math.isinf(*averaged(MPCA, 3))
    for method in (EASGD, SPARKNET):
        assert [math.isinf(seconds) for seconds in sorted(reached(3, method))] == [False, True, True]


@pytest.mark.parametrize("page", ["README.md", BENCHMARKS])
def test_a_page_with_the_race_says_when_it_was_run(page: str) -> None:
    raced_on = result("comparison")["measured"]["raced"]
    ours, others = raced_on["relay, auto"]["date"][:10], raced_on["all others"]["date"][:10]
    words = " ".join((ROOT / page).read_text().split())
    assert re.search(rf"Relay and Auto were raced on {ours}\b[^.]*(\.[^.]*)?\bothers\b[^.]*\b{others}\b", words)


def test_every_result_stands_in_the_table_of_dates_with_its_own() -> None:
    page = (ROOT / BENCHMARKS).read_text()
    told = dict(re.findall(r"^\| `([\w.]+\.jsonl?)` \| (\d{4}-\d\d-\d\d) \|", page, re.MULTILINE))
    files = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert set(told) == files, "a result that nobody can date: put it into the table, or take it out"
    for name in files - {"equal_rows.jsonl"}:  # which holds none
        found = result(name.removesuffix(".json"))
        date = found["date"] if "date" in found else max(run["date"] for run in found["runs"])
        assert told[name] == date[:10], name


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/assumptions.md"])
def test_the_accuracy_after_kills_is_the_one_that_the_tests_hold(page: str) -> None:
    kills = ("tests/e2e/test_failures.py", "tests/spark/test_executors_die.py")
    bound = r'assert (?:best\(result\)|max\(row\["val_accuracy"\].*\)) >= ([\d.]+)'
    held = {float(found) for path in kills for found in re.findall(bound, (ROOT / path).read_text())}
    assert len(held) == 1
    told = re.findall(r"best\s+evaluation[^.;]*?\s+reaches\s+(\d+)\s%", (ROOT / page).read_text())
    assert told
    assert {float(t) / 100 for t in told} == held
