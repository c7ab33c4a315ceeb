"""More servers, less time in transfer: SINGA's Fig. 10 (Wang et al. 2015), from what `thinwire bench table` measured.

    thinwire bench table --save benchmarks/results
    python benchmarks/figures/servers.py docs/images/servers.svg

Needs matplotlib. The figure on ParameterTable's card is made by it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from saving import save

RESULTS = Path(__file__).parents[1] / "results" / "table.json"
COLOURS = {2: "#009e73", 3: "#0072b2", 4: "#d55e00"}
GREY = "#767676"
BYTES_PER_S = 125e6


def limit(size_bytes: float, workers: int, servers: int) -> float:
    """Seconds that the busiest node's link needs for what it sends: its vector to servers elsewhere, and replies."""
    share = 1 / servers
    return size_bytes * ((1 - share) + share * (workers - 1)) / BYTES_PER_S


def draw(measured: dict[str, Any], picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for workers, colour in COLOURS.items():
        cases = [case for case in measured["cases"] if case["workers"] == workers]
        servers = [case["servers"] for case in cases]
        middle = [statistics.median(case["seconds"]) for case in cases]
        bounds = [limit(4 * measured["size"], workers, count) for count in servers]
        axes.plot(servers, middle, "o-", color=colour, lw=2)
        axes.plot(servers, bounds, ":", color=colour, lw=1.2)
        axes.annotate(f"{workers} workers", (servers[-1], middle[-1]), (8, 0), textcoords="offset points", color=colour)
    axes.annotate("dotted: what the busiest link needs", (0.98, 0.93), xycoords="axes fraction", ha="right", color=GREY)
    axes.set_xticks(range(1, max(COLOURS) + 1))
    axes.set_xlim(0.8, max(COLOURS) + 0.9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("servers, each with a share of the joint model")
    axes.set_ylabel("seconds of an exchange")
    axes.set_title(f"{measured['size'] / 1e6:.0f} million parameters at {measured['rate']}, encrypted", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, picture)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(json.loads(RESULTS.read_text())["measured"], sys.argv[1])
