"""What short tasks do on an executor: visit the boxes of their machine. Each job runs one of these on every machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from thinwire.exchange.spark.box import GoneError, boxes, folder, visit
from thinwire.exchange.spark.link import SparkWire

MAIL = "name string, header string, frames binary"
PART = "slice int, weight double, data binary, who string"


def carry_mail(
    wire: SparkWire, job: str, bags: dict[str, Any], frames: list[Any], batches: Iterator[Any]
) -> Iterator[Any]:
    """Brings letters, and fetches what the boxes hold: a row for each box."""
    import pyarrow as pa

    for _ in batches:
        pass
    with _alone(wire, job) as first:
        if not first:
            return
        for name in boxes(wire.run):
            bag = bags.get(name, {"letters": [], "ack": 0})
            wanted = sorted({letter[3] for letter in bag["letters"] if letter[3] is not None})
            order = {index: place for place, index in enumerate(wanted)}
            letters = [[n, who, header, None if f is None else order[f]] for n, who, header, f in bag["letters"]]
            brought = [getattr(frames[index], "value", frames[index]) for index in wanted]
            asked = {"t": "post", "letters": letters, "ack": bag["ack"]}
            try:
                found = visit(wire.run, wire.token, name, asked, brought)
            except GoneError:
                found = {"gone": True}, []
            if found is None:
                continue
            header, fetched = found
            header["sizes"] = [len(frame) for frame in fetched]
            row = {"name": [name], "header": [json.dumps(header)], "frames": [b"".join(fetched)]}
            yield pa.RecordBatch.from_pydict(row, schema=_schema(MAIL))


def read_parts(
    wire: SparkWire,
    job: str,
    key: str,
    generation: int,
    names: list[str],
    size: int,
    slices: int,
    batches: Iterator[Any],
) -> Iterator[Any]:
    """Reads this machine's contributions to a round and adds them up: a row for each slice."""
    import pyarrow as pa

    for _ in batches:
        pass
    total, weight, who = None, 0.0, []
    for name in boxes(wire.run):
        if name not in names:
            continue
        found = None
        with contextlib.suppress(GoneError):
            found = visit(wire.run, wire.token, name, {"t": "read", "r": key, "g": generation, "job": job}, [])
        if found is None or found[0]["w"] is None:
            continue
        if found[1] and len(found[1][0]) != 4 * size:
            raise ValueError(f"agent {name} offers {len(found[1][0])} bytes for round {key}, which is of {4 * size}")
        who.append(name)
        if found[1]:
            values = np.frombuffer(found[1][0], np.float32)
            weight += float(found[0]["w"])
            if total is None:
                total = values * np.float32(found[0]["w"])
            else:
                total += values * np.float32(found[0]["w"])
    if not who:
        return
    borders = [size * i // slices for i in range(slices + 1)]
    for index in range(slices):
        part = b"" if total is None else total[borders[index] : borders[index + 1]].tobytes()
        row = {"slice": [index], "weight": [weight], "data": [part], "who": [json.dumps(who)]}
        yield pa.RecordBatch.from_pydict(row, schema=_schema(PART))


def sum_parts(batches: Iterator[Any]) -> Iterator[Any]:
    """Adds up the rows of each slice."""
    import pyarrow as pa

    sums: dict[int, Any] = {}
    weights: dict[int, float] = {}
    who: dict[int, list[str]] = {}
    for batch in batches:
        for place in range(batch.num_rows):
            index = batch.column(0)[place].as_py()
            data = np.frombuffer(batch.column(2)[place].as_buffer(), np.float32)
            weights[index] = weights.get(index, 0.0) + batch.column(1)[place].as_py()
            who.setdefault(index, []).extend(json.loads(batch.column(3)[place].as_py()))
            if index not in sums or not len(sums[index]):
                sums[index] = data.copy()
            elif len(data):
                sums[index] += data
    for index, data in sums.items():
        mean = data / np.float32(weights[index]) if weights[index] > 0 else data
        row = {"slice": [index], "weight": [weights[index]], "data": [mean.tobytes()], "who": [json.dumps(who[index])]}
        yield pa.RecordBatch.from_pydict(row, schema=_schema(PART))


@contextlib.contextmanager
def _alone(wire: SparkWire, job: str) -> Iterator[bool]:
    """Whether this task is the first of its job on this machine: one visit to a box is enough."""
    if not list(boxes(wire.run)):
        yield False
        return
    path = os.path.join(folder(wire.run), f"{job}.visit")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _schema(text: str) -> Any:
    import pyarrow as pa

    kinds = {"int": pa.int32(), "double": pa.float64(), "binary": pa.binary(), "string": pa.string()}
    return pa.schema([(name, kinds[kind]) for name, kind in (part.split() for part in text.split(", "))])
