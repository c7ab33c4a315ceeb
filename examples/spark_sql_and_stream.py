"""SQL in, SQL out; and a model that goes on learning from a stream.

The first model is trained on a query's result. Then files arrive in a folder, and every micro-batch continues training
from the model so far.
"""

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


def estimator(model) -> TorchEstimator:
    return TorchEstimator(
        model=model,
        input_cols=["pixels"],
        label_col="label",
        strategy="sparknet",
        num_workers=2,
        epochs=3,
        batch_size=16,
        learning_rate=0.1,
        progress=False,
    )


# SQL in: any query is training data. SQL out: predictions are a table.
trained = [estimator(mlp).fit(spark.sql("SELECT pixels, label FROM digits WHERE id < 600"))]
trained[0].transform(spark.table("digits").filter("id >= 600")).createOrReplaceTempView("predicted")
QUESTION = "SELECT avg(CASE WHEN prediction = label THEN 1.0 ELSE 0.0 END) AS share FROM predicted"
print(f"after the query: {spark.sql(QUESTION).first().share:.2f} of the others right")

# A stream: each micro-batch is a DataFrame, and the network so far is where the next fit starts.
with tempfile.TemporaryDirectory() as folder:
    for start in (600, 900):
        part = spark.table("digits").filter(f"id >= {start} AND id < {start + 300}")
        part.coalesce(1).write.mode("append").parquet(f"{folder}/in")

    def learn(batch, number: int) -> None:
        if not batch.isEmpty():
            trained.append(estimator(trained[-1].module).fit(batch))
            summary = trained[-1].summary
            print(f"micro-batch {number}: {summary['rows']} rows, loss {summary['train_loss']:.3f}")

    stream = spark.readStream.schema(spark.table("digits").schema).option("maxFilesPerTrigger", 1)
    query = stream.parquet(f"{folder}/in").writeStream.foreachBatch(learn).trigger(availableNow=True)
    query.option("checkpointLocation", f"{folder}/state").start().awaitTermination()

trained[-1].transform(spark.table("digits").filter("id >= 1200")).createOrReplaceTempView("predicted")
print(f"after the stream: {spark.sql(QUESTION).first().share:.2f} of the rest right")
spark.stop()
