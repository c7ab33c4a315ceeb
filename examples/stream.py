"""A model that goes on learning from a stream: every micro-batch continues from the model so far."""

import shutil
import sys
import tempfile

from thinwire.cluster.sessions import start_session
from thinwire.data import open_source
from thinwire.models import mlp
from thinwire.spark import TorchEstimator

if shutil.which("java") is None:
    sys.exit(print("there is no Java here, which Spark needs"))

spark = start_session(None, 2)
table = next(iter(open_source("digits").batches()))
pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
rows = [(number, pixels[number], labels[number]) for number in range(table.num_rows)]
spark.createDataFrame(rows, "id int, pixels array<float>, label int").createOrReplaceTempView("digits")
trained = []


def learn(batch, number: int) -> None:
    """A micro-batch is a DataFrame, and the network so far is where the next fit starts."""
    if batch.isEmpty():
        return
    net = TorchEstimator(
        model=trained[-1].module if trained else mlp,
        input_cols=["pixels"],
        label_col="label",
        strategy="sparknet",
        num_workers=2,
        epochs=3,
        batch_size=16,
        learning_rate=0.1,
        progress=False,
    )
    trained.append(net.fit(batch))
    seen = trained[-1].transform(spark.table("digits").filter("id >= 1200"))
    right = seen.selectExpr("avg(CAST(prediction = label AS DOUBLE)) AS share").first().share
    print(f"micro-batch {number}: {trained[-1].summary['rows']} rows, {right:.2f} of the rows held back are right")


with tempfile.TemporaryDirectory() as folder:
    for start in (0, 400, 800):
        part = spark.table("digits").filter(f"id >= {start} AND id < {start + 400}")
        part.coalesce(1).write.mode("append").parquet(f"{folder}/in")
    stream = spark.readStream.schema(spark.table("digits").schema).option("maxFilesPerTrigger", 1)
    query = stream.parquet(f"{folder}/in").writeStream.foreachBatch(learn).trigger(availableNow=True)
    query.option("checkpointLocation", f"{folder}/state").start().awaitTermination()
spark.stop()
