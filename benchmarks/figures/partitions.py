"""Larger networks gain more from being shared out: Shrivastava et al.'s model-parallel figure, and SINGA's Fig. 7.

    thinwire bench placement --save benchmarks/results
    python benchmarks/figures/partitions.py docs/images/placement.svg

Needs matplotlib. The figure in `docs/how-to/place.md` is made by it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from saving import save

RESULTS = Path(__file__).parents[1] / "results" / "placement.json"
COLOURS = ("#767676", "#009e73", "#0072b2", "#d55e00")


def draw(measured: dict[str, Any], picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    cases = measured["cases"]
    left.bar([c["name"] for c in cases], [1 / c["step_s"] for c in cases], color="#0072b2", width=0.55)
    left.plot([c["name"] for c in cases], [1 / c["predicted_s"] for c in cases], "D", color="#d55e00")
    left.annotate("◆ predicted", (0.03, 0.92), xycoords="axes fraction", color="#d55e00")
    left.set_ylabel("steps a second")
    left.set_title(f"one replica on four workers at {measured['rate']}", loc="left", fontsize=10)
    for colour, network in zip(COLOURS, measured["networks"], strict=False):
        times = {int(k): v for k, v in network["seconds"].items()}
        gains = [times[1] / times[k] for k in sorted(times)]
        right.plot(sorted(times), gains, "o-", color=colour, lw=2)
        where = (max(times), gains[-1])
        right.annotate(network["parameters"], where, (8, -3), textcoords="offset points", color=colour)
    right.axhline(1, color="#bbbbbb", lw=0.8)
    right.axhline(2, color="#bbbbbb", lw=0.8, ls=":")
    right.annotate("two cores", (1, 2), (0, 3), textcoords="offset points", color="#767676", fontsize=8)
    right.set_xticks([1, 2, 4])
    right.set_xlim(0.8, 4.9)
    right.set_ylim(0, 2.3)
    right.set_xlabel("workers that share every layer")
    right.set_title("speed-up by parameters, fully connected", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, picture)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(json.loads(RESULTS.read_text())["measured"], sys.argv[1])
