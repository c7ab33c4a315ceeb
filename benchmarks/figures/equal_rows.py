"""Relay's loss after equal rows against plain SGD's, seed by seed, in virtual time: what `bench comparison` trains.

    python benchmarks/figures/equal_rows.py fashion-mnist:DIR --ratio 30 --seeds 1:6 --knobs '{"momentum": 0.3}'

The wire has no latency to speak of. Appends to a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from typing import Any

import torch

import thinwire as tw
from thinwire_lab.bench.comparison import RACES, WORKERS, race
from thinwire_lab.bench.race import Race, plain_loss, prepare

LAST_STEPS = 50
"""Whose evaluations count."""


def relay_loss(chosen: Race, knobs: dict[str, Any]) -> float:
    """The mean over the last evaluations of a simulated run."""
    unpaced = dataclasses.replace(chosen, step_s=0.0)
    (x, y), (held_x, held_y) = chosen.load()
    result = tw.fit(
        unpaced.model,
        {"pixels": x.numpy(), "label": y.numpy()},
        inputs=["pixels"],
        optimizer=unpaced.optimizer,
        strategy=tw.Relay(**knobs),
        cluster=tw.Simulated(workers=WORKERS, step_s=chosen.step_s, link=chosen.rate),
        steps=chosen.steps,
        batch_size=chosen.batch,
        validation={"pixels": held_x.numpy(), "label": held_y.numpy()},
        evaluate_every=chosen.every,
        seed=chosen.seed,
        progress=False,
    )
    late = [row for row in result.history if row["steps"] > chosen.steps - LAST_STEPS]
    return statistics.mean(float(row["val_loss"]) for row in late if row["val_loss"] is not None)


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--ratio", type=float, default=30)
    parser.add_argument("--seeds", default="1:6")
    parser.add_argument("--knobs", type=json.loads, default={})
    parser.add_argument("--out", default="benchmarks/results/equal_rows.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = next(shape for shape in reversed(RACES) if shape[0] == given.ratio)
    with tempfile.TemporaryDirectory() as folder, open(given.out, "a") as file:
        rows = f"{folder}/rows.npz"
        inputs = prepare(given.data, rows)
        for seed in range(*map(int, given.seeds.split(":"))):
            chosen = race(*shape, inputs, rows=rows, seed=seed)
            plain, mine = plain_loss(chosen, WORKERS), relay_loss(chosen, given.knobs)
            told = {"ratio": given.ratio, "knobs": given.knobs, "seed": seed, "plain": plain, "relay": mine}
            print(json.dumps(told), file=file, flush=True)
            print(json.dumps(told | {"above": round(mine / plain - 1, 4)}), flush=True)


if __name__ == "__main__":
    main()
