"""SQL in, a table out: a query's rows train a network, its predictions are written back as a table, with a picture.

python examples/sql_to_table.py                      # writes predictions/ and, with matplotlib, rings.png
"""

import math
import random
import shutil
import sys

from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from torch import nn

from thinwire.cluster.sessions import start_session
from thinwire.spark import TorchEstimator

if shutil.which("java") is None:
    sys.exit(print("there is no Java here, which Spark needs"))

spark = start_session(None, 2)
random.seed(0)
rows = []
for number in range(3000):
    ring, angle = number % 3, random.uniform(0, 2 * math.pi)
    radius = random.gauss(1 + ring, 0.2)
    rows.append((number, radius * math.cos(angle), radius * math.sin(angle), ring))
spark.createDataFrame(rows, "id int, x double, y double, ring int").createOrReplaceTempView("points")


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


net = TorchEstimator(
    model=make_net,
    input_cols=["features"],
    label_col="ring",
    num_workers=2,
    epochs=12,
    batch_size=32,
    optimizer="adam",
    learning_rate=0.01,
    progress=False,
)
pipeline = Pipeline(stages=[VectorAssembler(inputCols=["x", "y"], outputCol="features"), net])
fitted = pipeline.fit(spark.sql("SELECT x, y, ring FROM points WHERE id < 2000"))

predicted = fitted.transform(spark.sql("SELECT * FROM points WHERE id >= 2000"))
predicted.select("id", "x", "y", "ring", "prediction").write.mode("overwrite").parquet("predictions")
spark.read.parquet("predictions").createOrReplaceTempView("predictions")
answer = spark.sql("SELECT avg(CAST(prediction = ring AS DOUBLE)) AS share, count(*) AS rows FROM predictions").first()
print(f"predictions/ has {answer.rows} rows, {answer.share:.2f} of them right")

shown = spark.sql("SELECT x, y, prediction, ring FROM predictions").collect()
spark.stop()
try:
    import matplotlib
except ImportError:
    sys.exit(print("no picture: it needs matplotlib (pip install matplotlib)"))
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
for ring, colour in enumerate(("#0072b2", "#d55e00", "#009e73")):
    mine = [row for row in shown if int(row.prediction) == ring]
    axes.plot([r.x for r in mine], [r.y for r in mine], "o", color=colour, markersize=3, label=f"ring {ring}")
wrong = [row for row in shown if int(row.prediction) != row.ring]
axes.plot([r.x for r in wrong], [r.y for r in wrong], "x", color="black", label=f"{len(wrong)} wrong")
axes.set_aspect("equal")
axes.legend(loc="upper right")
figure.savefig("rings.png", dpi=130)
print("wrote rings.png")
