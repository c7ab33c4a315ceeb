"""Time to the target, method by method, as `thinwire bench comparison` measured it.

    thinwire bench comparison --save benchmarks/results
    python benchmarks/figures/comparison.py docs/images/comparison.svg

Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from saving import save

from thinwire_lab.bench.comparison import to_target
from thinwire_lab.bench.race import Race

RESULTS = Path(__file__).parents[1] / "results" / "comparison.json"
OURS, PAPERS, OTHERS = "#d55e00", "#0072b2", "#8a8a8a"
COLOURS = {"relay": OURS, "auto": OURS, "mpca": PAPERS, "easgd": PAPERS, "sparknet": PAPERS, "synchronous": PAPERS}


def draw(measured: dict[str, Any], picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    races = [(Race(**each["race"]), each["methods"]) for each in measured["races"]]
    figure, axes = plt.subplots(1, len(races), figsize=(4.1 * len(races), 4.2))
    for number, (race, methods) in enumerate(races):
        ordered = sorted(methods, key=lambda name: to_target(race, methods[name])[0], reverse=True)
        found = [to_target(race, methods[name]) for name in ordered]
        one = axes[number]
        one.barh(ordered, [seconds for seconds, _, _ in found], color=[COLOURS.get(n, OTHERS) for n in ordered])
        for row, (seconds, steps, reached) in enumerate(found):
            text = f" {seconds:.0f} s" if reached else f" not in {steps} steps"
            one.text(seconds, row, text, va="center", fontsize=8)
        one.set_xlim(0, 1.35 * max(seconds for seconds, _, _ in found))
        one.set_title(
            f"an exchange takes {race.ratio:g} step{'s' * (race.ratio != 1)}, {race.rate}", loc="left", fontsize=10
        )
        one.set_xlabel(f"seconds to a validation loss of {race.target:.3g}")
        one.spines[["top", "right"]].set_visible(False)
    save(figure, picture)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(json.loads(RESULTS.read_text())["measured"], sys.argv[1])
