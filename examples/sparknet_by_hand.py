"""SparkNet's Listings 1 to 3 as they were meant: LeNet out of layer constructors, trained over an RDD by hand.

    python examples/sparknet_by_hand.py [FOLDER OF MNIST]

Without a folder it trains on the built-in digits. `thinwire.fit(…, strategy=tw.SparkNet())` does the same and survives
lost executors; this is for those who want to see, or change, how it works.
"""

from __future__ import annotations

import collections
import functools
import operator
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from pyspark.sql import SparkSession

from thinwire.caffe.solver import Settings
from thinwire.caffe.sparknet import (
    Activation,
    ActivationLayer,
    ConvLayer,
    LinearLayer,
    Net,
    NetParams,
    Pool,
    PoolLayer,
    RDDLayer,
    SoftmaxWithLoss,
    WeightCollection,
    kept,
)
from thinwire.data import open_source
from thinwire.data.columns import dense

WORKERS, BATCH, PERIOD = 2, 64, 50
Row = tuple[np.ndarray[Any, Any], int]


def lenet(side: int, kernel: int) -> Any:
    """The paper's Listing 2; digits of 8 × 8 take smaller kernels than MNIST's."""
    return NetParams(
        RDDLayer("data", shape=[BATCH, 1, side, side]),
        RDDLayer("label", shape=[BATCH, 1]),
        ConvLayer("conv1", ["data"], kernel=(kernel, kernel), num_filters=20, pad=(1, 1) if side < 28 else (0, 0)),
        PoolLayer("pool1", ["conv1"], pool=Pool.MAX, kernel=(2, 2), stride=(2, 2)),
        ConvLayer("conv2", ["pool1"], kernel=(kernel, kernel), num_filters=50),
        PoolLayer("pool2", ["conv2"], pool=Pool.MAX, kernel=(2, 2), stride=(2, 2)),
        LinearLayer("ip1", ["pool2"], num_outputs=500),
        ActivationLayer("relu1", ["ip1"], activation=Activation.RELU),
        LinearLayer("ip2", ["relu1"], num_outputs=10),
        SoftmaxWithLoss("loss", ["ip2", "label"]),
    )


def one_round(
    side: int, kernel: int, rate: float, weights: Any, partition: int, rows: Iterable[Row]
) -> Iterator[WeightCollection]:
    """What each partition does: take the weights, train on its own rows, give the weights back."""

    def made() -> Net:
        torch.set_num_threads(1)  # there is a process for each core
        net = Net(lenet(side, kernel), Settings(base_lr=rate, momentum=0.9, weight_decay=5e-4))
        net.set_training_data(rows)
        return net

    net = kept(("lenet", side, rate, partition), made)
    collections.deque(rows, maxlen=0)  # a process that leaves rows unread is not used again
    net.set_weights(weights.value, fresh=True)  # it may have missed rounds: Spark says which process trains what
    net.train(PERIOD)
    yield net.get_weights()


def rows_of(name: str) -> list[Row]:
    """A set's images, from 0 to 1, and labels."""
    source = open_source(name)
    found: list[Row] = []
    for batch in source.batches():
        columns: dict[str, Any] = {n: dense(batch.column(n)) for n in source.schema.names}
        images = np.asarray(columns["pixels"], np.float32)
        images = images / max(1.0, float(images.max()))
        side = round(images[0].size ** 0.5)
        found += zip(images.reshape(-1, 1, side, side), columns["label"].tolist(), strict=True)
    return found


def main() -> float:
    """Trains; returns the accuracy on rows that were not trained on."""
    if len(sys.argv) > 1:
        training, testing = rows_of(f"mnist:{sys.argv[1]}"), rows_of(f"mnist:{sys.argv[1]}?split=test")
        side, kernel, rounds = 28, 5, 20
    else:
        rows = rows_of("digits")
        training, testing, side, kernel, rounds = rows[:1500], rows[1500:], 8, 3, 10
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(f"local[{WORKERS}]").getOrCreate()
    try:
        data = spark.sparkContext.parallelize(training, 8 * WORKERS).repartition(WORKERS).cache()
        judge = Net(lenet(side, kernel))
        judge.set_validation_data(testing)
        weights = judge.get_weights()
        for number in range(1, rounds + 1):
            shared = spark.sparkContext.broadcast(weights)
            rate = 0.02 if 3 * number <= 2 * rounds else 0.004
            work = functools.partial(one_round, side, kernel, rate, shared)
            weights = data.mapPartitionsWithIndex(work).reduce(operator.add) / WORKERS
            if number % 5 == 0:
                judge.set_weights(weights)
                accuracy = judge.test(-(-len(testing) // BATCH))
                print(f"round {number:2d}: accuracy {accuracy:.4f}")
        return accuracy
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
