"""Elephas in `bench comparison`: the same rows, network and pace, in an interpreter with Elephas and without torch.

`python -m thinwire_lab.bench.elephas` makes a Spark testbed and starts itself on its first node. Options come on stdin,
and the last line of output is the result.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from typing import Any

from thinwire_lab.sparkbed import SparkBed

DRIVES = "THINWIRE_MASTER"


def main() -> None:
    """On the machine: builds the network. On its first node: trains."""
    order = sys.stdin.readline()
    if DRIVES in os.environ:
        print(json.dumps(drive(json.loads(order))), flush=True)
        return
    asked = json.loads(order)
    with SparkBed(asked["workers"], asked["race"]["rate"]) as bed:
        argv = [sys.executable, "-m", "thinwire_lab.bench.elephas"]
        process = bed.drive(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        out, _ = process.communicate(order)
    print(out.splitlines()[-1])


def drive(order: dict[str, Any]) -> dict[str, Any]:
    """Rounds of one epoch, each a Spark job whose weights the driver averages; measures the loss after each."""
    np, keras = importlib.import_module("numpy"), importlib.import_module("keras")
    spark_model = importlib.import_module("elephas.spark_model").SparkModel
    sql = importlib.import_module("pyspark.sql")
    race, workers = order["race"], int(order["workers"])
    with np.load(race["rows"]) as saved:
        x, y, held_x, held_y = (saved[name] for name in ("x", "y", "held_x", "held_y"))
    keras.utils.set_random_seed(race["seed"])
    dense = keras.layers.Dense
    layers = [dense(race["width"], activation="relu"), dense(race["width"], activation="relu"), dense(10)]
    model = keras.Sequential([keras.Input((race["inputs"],)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(race["lr"], momentum=race["momentum"]), loss=loss)
    spark = sql.SparkSession.builder.master(os.environ[DRIVES]).getOrCreate()
    context = spark.sparkContext
    rdd = context.parallelize(list(zip(x, y, strict=True)), workers).cache()
    rdd.mapPartitions(_ready).collect()
    elephas = spark_model(model, mode="synchronous", num_workers=None)
    per_epoch = math.ceil(len(y) / workers / race["batch"])
    history: list[dict[str, float]] = []
    began, watching = time.perf_counter(), 0.0
    # Elephas averages once an epoch, whatever its length
    for epoch in range(1, max(1, race["steps"] // per_epoch) + 1):
        elephas.fit(rdd, epochs=1, batch_size=race["batch"], verbose=0, callbacks=[pacer(race["step_s"])])
        paused = time.perf_counter()
        found = float(elephas.master_network.evaluate(held_x, held_y, verbose=0))
        watching += time.perf_counter() - paused
        seconds = time.perf_counter() - began - watching
        history.append({"steps": epoch * per_epoch, "seconds": seconds, "val_loss": found})
    return {"method": "elephas", "history": history, "seconds": history[-1]["seconds"], "steps": history[-1]["steps"]}


def _ready(rows: Any) -> Any:
    """Makes an executor's process import its modules before the clock starts."""
    importlib.import_module("elephas.worker")
    yield sum(1 for _ in rows)


def pacer(step_s: float) -> Any:
    """A callback that extends each step to its nominal time."""
    keras = importlib.import_module("keras")

    class Pacer(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(max(0.0, step_s - (time.perf_counter() - self.began)))

    return Pacer()


if __name__ == "__main__":
    main()
