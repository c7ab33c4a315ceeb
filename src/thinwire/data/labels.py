"""Checks of a label column while its rows are dealt out, before training starts."""

from __future__ import annotations

from typing import Any

from thinwire.data.columns import RaggedError, dense, is_tensor, stored_array
from thinwire.errors import DataError
from thinwire.replicas.labels import WrongLabels


def look_at(batch: Any, column: str, wrong: WrongLabels) -> None:
    """Counts the wrong labels of a record batch without nulls, whose decimals are doubles."""
    if wrong.labels.kind == "any":
        return
    array = batch.column(column)
    stored = stored_array(array)
    if not is_tensor(stored.type) and wrong.labels.kind == "numbers":
        return  # the loader refuses it
    if not is_tensor(stored.type):
        raise DataError(
            f"column {column!r} holds {array.type}; {wrong.labels.loss} takes whole numbers from 0, one a class. Index "
            "the labels (StringIndexer, pandas.factorize), or give a transform that does."
        )
    try:
        wrong.add(dense(stored))
    except RaggedError:  # the worker refuses it, and names the rows that differ
        return
