"""Trains on a Spark DataFrame and predicts with the model: what `make demo` runs.

Without Java there is no Spark; then the same network is trained by two processes of this machine.
"""

import shutil
import sys

import torch
from torch import nn

import thinwire as tw
from thinwire.cli.tables import summary_table
from thinwire.data import open_source
from thinwire.models import cnn8


def net() -> nn.Module:
    """Arrays of 64 numbers, as Spark holds them, for a network that wants 8×8 pictures."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), cnn8())


def momentum_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


SETTINGS = {"epochs": 15, "batch_size": 32, "validation": 0.2}


def on_spark() -> None:
    from thinwire.cluster.sessions import start_session
    from thinwire.spark import TorchEstimator

    print("starting Spark in this process", file=sys.stderr)
    spark = start_session(None, 2)
    table = next(iter(open_source("digits").batches()))
    pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
    frame = spark.createDataFrame(list(zip(pixels, labels, strict=True)), "pixels array<float>, label int")
    estimator = TorchEstimator(
        model=net,
        input_cols=["pixels"],
        label_col="label",
        strategy=tw.Relay(),
        num_workers=2,
        optimizer=momentum_sgd,
        **SETTINGS,
    )
    model = estimator.fit(frame)
    summary_table(model.summary)
    right = model.transform(frame).filter("prediction = label").count()
    print(f"{right} of {frame.count()} digits are predicted right")
    spark.stop()


def on_this_machine() -> None:
    print("there is no Java here, which Spark needs: two processes of this machine train instead", file=sys.stderr)
    result = tw.fit(cnn8, "digits", inputs=["pixels"], optimizer=momentum_sgd, cluster=tw.Local(workers=2), **SETTINGS)
    summary_table(result.summary)


if __name__ == "__main__":
    on_spark() if shutil.which("java") else on_this_machine()
