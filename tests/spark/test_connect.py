"""Spark Connect: no JVM in this process, no RDDs, no SparkContext. In a process of its own, as its mode is global."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("grpc", reason="Spark Connect needs grpcio: pip install 'pyspark[connect]'")

SCRIPT = """
import json, sys
from pyspark.sql import SparkSession
import thinwire as tw
from thinwire.data import open_source
from thinwire.models import mlp
from thinwire.spark import TorchEstimator

spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
table = next(iter(open_source("digits").batches()))
pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
frame = spark.createDataFrame(list(zip(pixels, labels)), "pixels array<float>, label int")
fitted = TorchEstimator(
    model=mlp, input_cols=["pixels"], label_col="label", num_workers=2, epochs=2, batch_size=16, learning_rate=0.2,
    strategy=tw.SparkNet(period=10), validation=0.2, progress=False,
).fit(frame)
found = fitted.transform(frame.limit(20))
print(json.dumps({
    "remote": type(spark).__module__, "rows": fitted.summary["rows"], "columns": found.columns,
    "predicted": found.filter("prediction is not null").count(), "evaluated": len(fitted.history),
}))
spark.stop()
"""


@pytest.mark.timeout(1200)
def test_fit_and_transform_over_connect() -> None:
    """apache/spark#40607, dmlc/xgboost#9780."""
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("SPARK_REMOTE", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=1100, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "connect" in found["remote"]
    assert found["rows"] == 2 * (1797 - 360)
    assert found["columns"] == ["pixels", "label", "rawPrediction", "probability", "prediction"]
    assert found["predicted"] == 20
    assert found["evaluated"] > 0
