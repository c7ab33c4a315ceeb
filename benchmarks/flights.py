"""The flights of examples/flights.py by others: TorchDistributor with DDP and the same network, and xgboost.spark.

python benchmarks/flights.py flights-joined torch|xgboost     # prints AUC of the held rows, seconds, lines of code
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from typing import Any

CATEGORICAL = ["carrier", "origin", "dest", "month", "hour", "weekday", "manufacturer", "engine"]
NUMERIC = ["age", "seats", "distance", "temp", "humid", "wind_speed", "precip", "pressure", "visib"]


def ddp(path: str) -> float:
    """Runs in each process: everything that an encoder, a loader and an evaluation do is written by hand."""
    import numpy as np
    import pandas as pd
    import torch
    import torch.distributed as dist
    from sklearn.metrics import roc_auc_score
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.models import ZOO

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    frame = pd.read_parquet(path)
    train, held = frame[~frame["held"]], frame[frame["held"]]
    sizes, inputs = {}, {"train": [], "held": []}
    for name in CATEGORICAL:
        counts = train[name].value_counts()
        index = {word: place + 2 for place, word in enumerate(counts[counts >= 20].index)}
        sizes[name] = len(index) + 2
        for part, rows in (("train", train), ("held", held)):
            codes = rows[name].map(index).fillna(1).where(rows[name].notna(), 0)
            inputs[part].append(torch.tensor(codes.to_numpy(np.int64)))
    for name in NUMERIC:
        mean, deviation = train[name].mean(), train[name].std()
        for part, rows in (("train", train), ("held", held)):
            values = ((rows[name].fillna(mean) - mean) / deviation).to_numpy(np.float32)
            inputs[part].append(torch.tensor(np.stack([values, rows[name].isna().to_numpy(np.float32)], 1)))
    late = torch.tensor(train["late"].to_numpy(np.float32))
    net = DistributedDataParallel(ZOO["deepfm"](sizes, dict.fromkeys(NUMERIC, 2)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.002)
    mine = torch.randperm(len(train))[dist.get_rank() :: dist.get_world_size()]
    for rows in mine[: len(train) // dist.get_world_size()].split(512):
        output = net(*(column[rows] for column in inputs["train"]))[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, late[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        score = net.module.eval()(*inputs["held"])[:, 0]
    return float(roc_auc_score(held["late"], score.numpy()))


def by_distributor(spark: Any, path: str) -> float:
    from pyspark.ml.torch.distributor import TorchDistributor

    found = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(ddp, path)
    return float(found)


def by_xgboost(spark: Any, path: str) -> float:
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.feature import StringIndexer
    from xgboost.spark import SparkXGBClassifier

    rows = spark.read.parquet(path)
    text = ["carrier", "origin", "dest", "manufacturer", "engine"]
    index = [f"{name}_index" for name in text]
    numbers = ["month", "hour", "weekday", *NUMERIC]
    for name in numbers:
        rows = rows.withColumn(name, rows[name].cast("double"))
    stages = [
        StringIndexer(inputCols=text, outputCols=index, handleInvalid="keep"),
        SparkXGBClassifier(features_col=[*index, *numbers], label_col="late", num_workers=2, random_state=0),
    ]
    fitted = Pipeline(stages=stages).fit(rows.where("NOT held"))
    return float(BinaryClassificationEvaluator(labelCol="late").evaluate(fitted.transform(rows.where("held"))))


if __name__ == "__main__":
    from thinwire.cluster.sessions import start_session

    folder, which = sys.argv[1:]
    functions = {"torch": (by_distributor, ddp), "xgboost": (by_xgboost,)}[which]
    session = start_session(None, 2)
    began = time.monotonic()
    auc = functions[0](session, folder)
    lines = sum(len([line for line in inspect.getsource(each).splitlines() if line.strip()]) for each in functions)
    print(json.dumps({"by": which, "auc": round(auc, 4), "seconds": round(time.monotonic() - began), "lines": lines}))
    session.stop()
