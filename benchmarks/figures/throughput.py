"""Rows a second by workers and group size, from plans: SINGA's Fig. 8, computed and not run.

    python benchmarks/figures/throughput.py benchmarks/results/throughput.json docs/images/throughput.svg

AlexNet at a gigabit, a group's step of 256 rows, groups without a barrier among them. A step costs what `thinwire plan`
says, and every worker's part of the parameters to the table and back, with nothing hidden behind anything. The rate of
a worker is SINGA's: Caffe on one of its machines did 9 rows a second (180 are its highest, 20 times Caffe's).
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from saving import save

from thinwire.models import alexnet
from thinwire.planning import Machine, graph_of, plan
from thinwire.rules.placement import Wire

WORKERS, GROUPS, ROWS, ALONE = (4, 8, 16, 24, 32, 48), (1, 2, 4, 8, 16), 256, 9.0
COLOURS = ("#767676", "#009e73", "#0072b2", "#cc79a7", "#d55e00")


def compute() -> dict[str, Any]:
    with torch.device("meta"):
        network = alexnet()
    graph = graph_of(network, (3, 227, 227))
    parameters = sum(p.numel() for p in network.parameters())
    flops = plan(graph, 1, ROWS).compute_s * Machine().flops_per_s
    machine = Machine(flops_per_s=flops / ROWS * ALONE, wire=Wire())
    found = []
    for group in GROUPS:
        step_s = plan(graph, group, ROWS, machine).step_s
        table_s = 2 * 4 * parameters / group / machine.wire.bytes_per_s
        rows_s = {w: w // group * ROWS / (step_s + table_s) for w in WORKERS if w % group == 0}
        found.append({"group": group, "step_s": step_s, "table_s": table_s, "rows_per_s": rows_s})
    return {"date": datetime.date.today().isoformat(), "network": "alexnet", "groups": found}


def draw(found: dict[str, Any], picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for one, colour in zip(found["groups"], COLOURS, strict=True):
        values = {int(w): v for w, v in one["rows_per_s"].items()}
        axes.plot(list(values), list(values.values()), "o-", color=colour, label=f"groups of {one['group']}")
    axes.plot(WORKERS, [ALONE * w for w in WORKERS], color="#bbbbbb", lw=0.8, label="linear")
    axes.set(xlabel="workers", ylabel="rows a second", title="AlexNet at a gigabit, by plan (SINGA Fig. 8)")
    axes.legend(fontsize=8)
    save(figure, picture)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    computed = compute()
    Path(sys.argv[1]).write_text(json.dumps(computed, indent=1) + "\n")
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
