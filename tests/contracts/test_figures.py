"""Figures in the README and in the documentation are those of the committed result files and of the tests."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS, RELAY, TUNE = "benchmarks/README.md", "docs/strategies/relay.md", "docs/how-to/tune.md"
CHOOSING = "docs/tutorials/choosing-a-strategy.md"
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


def short() -> list[float]:
    """Relay and free communication in 1,000 steps with batches of 64."""
    return [percent("stress", method, 16.0, case="8 workers") for method in ("relay", "free")]


SYNC, MPCA, EASGD, SPARKNET = ("synchronous", "mpca", "easgd", "sparknet")
RESNET20 = functools.partial(percent, "ratios")
DEEP, WARM = functools.partial(percent, "ratios110_augmented"), functools.partial(percent, "ratios110_warmup")
TABLE = "share of the link used"
SPARK = "broadcast + treeReduce ÷ spark"
SIZES = ("1 MB", "10 MB", "50 MB")

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
        "Of real kills {}: {} on one machine and {} of",
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
        "| steps kept, Relay (int4, 9 to 11 fragments) | {} |",
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
    (RELAY, "{} against {} after 2,400 steps", lambda: [RESNET20("relay", 11.6), RESNET20("free")]),
    (RELAY, "{} against {} after 1,000 steps", short),
    (TUNE, "from {} to {} % where an exchange takes 64 steps", lambda: [DEEP("relay", 64.0), WARM("relay", 64.0)]),
    (CHOOSING, "in 1,000 steps {} against {} %", short),
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


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/assumptions.md"])
def test_the_accuracy_after_kills_is_the_one_that_the_tests_hold(page: str) -> None:
    kills = ("tests/e2e/test_failures.py", "tests/spark/test_executors_die.py")
    bound = r'assert (?:best\(result\)|max\(row\["val_accuracy"\].*\)) >= ([\d.]+)'
    held = {float(found) for path in kills for found in re.findall(bound, (ROOT / path).read_text())}
    assert len(held) == 1
    told = re.findall(r"best\s+evaluation[^.;]*?\s+reaches\s+(\d+)\s%", (ROOT / page).read_text())
    assert told
    assert {float(t) / 100 for t in told} == held
