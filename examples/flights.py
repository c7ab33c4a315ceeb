"""From a SQL join to an AUC: which flights come more than a quarter of an hour late, known the day before.

python examples/flights.py FOLDER      # of the Parquet tables flights, weather and planes of nycflights13
python examples/flights.py FOLDER 3    # with three epochs instead of one

Writes the joined rows to flights-joined/, which recipes/flights.toml trains on too, and the model to flights-model/.
"""

import shutil
import sys
import time

from pyspark.ml.evaluation import BinaryClassificationEvaluator

import thinwire as tw
from thinwire.cluster.sessions import start_session
from thinwire.spark import TorchEstimator, TorchModel

if shutil.which("java") is None or len(sys.argv) < 2:
    sys.exit(print("name the folder of the tables; and there must be Java here, which Spark needs"))

spark = start_session(None, 2)
for name in ("flights", "weather", "planes"):
    spark.read.parquet(f"{sys.argv[1]}/{name}.parquet").createOrReplaceTempView(name)
joined = spark.sql("""
    SELECT carrier, origin, dest, month, hour, dayofweek(make_date(2013, month, day)) AS weekday,
           planes.manufacturer, planes.engine, 2013 - planes.year AS age, planes.seats,
           distance, temp, humid, wind_speed, precip, pressure, visib,
           CAST(arr_delay > 15 AS INT) AS late,
           pmod(xxhash64(month, day, carrier, flight, origin), 5) = 0 AS held
    FROM flights JOIN weather USING (month, day, hour, origin)
         LEFT JOIN (SELECT tailnum, year, manufacturer, engine, seats FROM planes) planes USING (tailnum)
    WHERE arr_delay IS NOT NULL
""")
joined.write.mode("overwrite").parquet("flights-joined")
rows = spark.read.parquet("flights-joined")

began = time.monotonic()
net = TorchEstimator(
    "deepfm",
    transform=tw.TableEncoder(
        categorical=["carrier", "origin", "dest", "month", "hour", "weekday", "manufacturer", "engine"],
        numeric=["age", "seats", "distance", "temp", "humid", "wind_speed", "precip", "pressure", "visib"],
        min_count=20,
        flag_nulls=True,
    ),
    label_col="late",
    validation_indicator_col="held",
    loss="bce_with_logits",
    metrics=["auc", "average_precision"],
    stop=tw.EarlyStopping(metric="val_auc"),
    optimizer="adam",
    learning_rate=0.002,
    num_workers=2,
    epochs=int(sys.argv[2]) if len(sys.argv) > 2 else 1,
    batch_size=512,
    progress=False,
)
fitted = net.fit(rows)
seconds = time.monotonic() - began
fitted.write().overwrite().save("flights-model")

predicted = TorchModel.load("flights-model").transform(rows.where("held"))
auc = BinaryClassificationEvaluator(labelCol="late").evaluate(predicted)
print(f"AUC {fitted.summary['val_auc']:.4f} as the workers have it, {auc:.4f} by Spark ML, after {seconds:.0f} s")
spark.stop()
