"""A set of as many deformed images as are asked for: made where they are needed, the same each time, and not stored."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.data import Deformed, open_source
from thinwire.data.columns import dense
from thinwire.errors import ConfigError, DataError

DIGITS = 1797


def images(source: Any, rows: Any) -> torch.Tensor:
    found: torch.Tensor = source.transform({"pixels": np.asarray(rows), "label": np.zeros(len(rows))})["pixels"]
    return found


def test_a_million_rows_take_sixteen_bytes_each() -> None:
    source = open_source("digits?rows=1000000")
    size = rows = 0
    for batch in source.batches():
        size, rows = size + batch.nbytes, rows + batch.num_rows
    assert rows == source.num_rows == 1_000_000
    assert size <= 16.1e6
    assert len(pickle.dumps(source.transform)) < 600_000  # the images that it deforms


def test_the_first_rows_are_the_images_and_the_others_are_deformed_copies_with_their_labels() -> None:
    plain, source = open_source("digits"), Deformed("digits", rows=4 * DIGITS)
    (table,) = plain.batches()
    base = torch.from_numpy(dense(table.column("pixels")).copy())
    assert torch.equal(images(source, range(DIGITS)), base)
    labels = np.concatenate([dense(batch.column("label")) for batch in source.batches()])
    assert np.array_equal(labels, np.tile(dense(table.column("label")), 4))
    copies = images(source, range(DIGITS, 2 * DIGITS))
    apart = (copies - base).flatten(1).norm(dim=1)
    others = (copies - base.roll(1, 0)).flatten(1).norm(dim=1)
    assert (apart > 0.01).all()
    assert apart.mean() < 0.6 * others.mean()
    assert (copies >= 0).all()
    assert (copies <= 1).all()


def test_a_row_is_the_same_image_whatever_it_is_asked_with() -> None:
    source = Deformed("digits", rows=100_000)
    together = images(source, [5000, 99_999, 1800])
    assert torch.allclose(together[1], images(pickle.loads(pickle.dumps(source)), [99_999])[0])
    assert not torch.allclose(images(source, [5000]), images(source, [5000 + DIGITS]))
    assert not torch.allclose(images(source, [5000]), images(Deformed("digits", rows=100_000, seed=1), [5000]))


def test_nothing_is_deformed_where_all_limits_are_zero() -> None:
    source = Deformed("digits", rows=3 * DIGITS, degrees=0, scale=0, shift=0, bend=0)
    assert torch.allclose(images(source, [7 + DIGITS]), images(source, [7]), atol=1e-5)


def test_a_network_trains_on_deformed_images() -> None:
    result = tw.fit(
        "cnn8",
        "digits?rows=6000",
        inputs=["pixels"],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        strategy=tw.SparkNet(period=5),
        cluster=tw.Simulated(workers=2, step_s=0.01),
        epochs=2,
        batch_size=32,
        validation="digits",
        progress=False,
    )
    assert result.summary["rows"] == 12_000
    assert result.summary["val_accuracy"] >= 0.9


def test_what_cannot_be_deformed_is_refused() -> None:
    with pytest.raises(DataError, match=r"asks for 'many' rows. Only \?split=train.*\?rows=1000000"):
        open_source("digits?rows=many")
    with pytest.raises(ConfigError, match=r"deformed.rows = 0 is too small"):
        Deformed("digits", rows=0)
    with pytest.raises(ConfigError, match=r"deformed.scale = 1.5 turns images inside out"):
        Deformed("digits", rows=5, scale=1.5)
    flat = {"pixels": np.zeros((4, 64), np.float32), "label": np.zeros(4)}
    with pytest.raises(DataError, match=r"'pixels' has the shape \(64,\) a row; reshape them"):
        list(Deformed(flat, rows=9).batches())
    pair = np.zeros((4, 1, 8, 9), np.float32), np.zeros(4)
    with pytest.raises(DataError, match=r"the validation images have the shape \(1, 8, 9\)"):
        Deformed("digits", rows=9).with_validation(open_source(dict(zip(("pixels", "label"), pair, strict=True))))
    with pytest.raises(DataError, match=r"no column 'pixels' to be made from; its source has features, label"):
        list(Deformed((np.zeros((4, 64), np.float32), np.zeros(4)), rows=9).batches())
