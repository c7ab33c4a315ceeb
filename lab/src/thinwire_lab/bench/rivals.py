"""The driver program of `bench comparison`: runs every method on one Spark cluster, and prints one line of JSON for
each.

Runs on the first node of a Spark testbed as `python -m thinwire_lab.bench.rivals`, with options on stdin.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from typing import Any

import pyarrow as pa

import thinwire as tw
from thinwire.cluster.sessions import start_session
from thinwire.rules.period import balanced_period
from thinwire_lab.bench.race import Race, train_torch

TORCH = {"ddp": "ddp", "ddp half": "half", "ddp powersgd": "powersgd", "post-local sgd": "local", "one machine": "one"}
"""torch's own methods, with their names in `train_torch`."""


def strategies(race: Race) -> dict[str, tw.Strategy]:
    """The papers' methods with the periods that they advise for the ratio, and thinwire's with their defaults."""
    period = balanced_period(race.ratio, 1.0)
    return {
        "synchronous": tw.Synchronous(),
        "sparknet": tw.SparkNet(period=period),
        "easgd": tw.EASGD(period=max(1, math.ceil(race.ratio))),
        "mpca": tw.MPCA(),
        "relay": tw.Relay(),
        "auto": tw.Auto(),
    }


def main() -> None:
    """Runs the methods that stdin names."""
    order = json.loads(sys.stdin.readline())
    race, workers = Race(**order["race"]), int(order["workers"])
    os.environ["THINWIRE_BENCH"] = "1"
    spark = start_session(os.environ["THINWIRE_MASTER"], workers)
    try:
        for method, seed in order["turns"]:
            began = time.monotonic()
            run = _torch if method in TORCH else _thinwire
            try:
                found = run(spark, method, dataclasses.replace(race, seed=seed), workers)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[-500:]}"}
            found |= {"method": method, "seed": seed, "wall_s": time.monotonic() - began}
            print(json.dumps(found), flush=True)
    finally:
        spark.stop()


def _torch(spark: Any, method: str, race: Race, workers: int) -> dict[str, Any]:
    from pyspark.ml.torch.distributor import TorchDistributor

    kind = TORCH[method]
    count = 1 if kind == "one" else workers
    distributor = TorchDistributor(num_processes=count, local_mode=False, use_gpu=False)
    found: Any = distributor.run(_in_torchrun, dataclasses.asdict(race), kind)
    return dict(found)


def _in_torchrun(race: dict[str, Any], kind: str) -> dict[str, Any]:
    return train_torch(Race(**race), kind)


def _thinwire(spark: Any, method: str, race: Race, workers: int) -> dict[str, Any]:
    frames = []
    for x, y in race.load():
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), race.inputs)
        frames.append(spark.createDataFrame(pa.table({"pixels": pixels, "label": y.numpy()})))
    result = tw.fit(
        race.model,
        frames[0],
        inputs=["pixels"],
        optimizer=race.optimizer,
        strategy=strategies(race)[method],
        cluster=tw.Spark(workers=workers),
        steps=race.steps,
        batch_size=race.batch,
        validation=frames[1],
        evaluate_every=race.every,
        seed=race.seed,
        progress=False,
    )
    kept = ("busy", "evaluated_s", "bytes_sent", "rounds", "choice", "complete", "val_loss")
    told = {key: result.summary[key] for key in kept}
    return {"history": result.history, "seconds": result.summary["train_seconds"], "steps": race.steps, **told}


if __name__ == "__main__":
    main()
