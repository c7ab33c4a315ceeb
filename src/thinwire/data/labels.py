"""A label column looked at while its rows are dealt out, so that nobody trains on what is no class."""

from __future__ import annotations

from typing import Any

from thinwire.data.columns import RaggedError, dense, is_tensor, stored_array
from thinwire.errors import DataError
from thinwire.replicas.labels import WrongLabels


def look_at(batch: Any, column: str, wrong: WrongLabels) -> None:
    """Counts the wrong labels of one record batch, which has no nulls and decimals as doubles."""
    if wrong.labels.kind == "any":
        return
    array = batch.column(column)
    stored = stored_array(array)
    if not is_tensor(stored.type) and wrong.labels.kind == "numbers":
        return  # a loader refuses it
    if not is_tensor(stored.type):
        raise DataError(
            f"column {column!r} holds {array.type}; {wrong.labels.loss} takes whole numbers from 0, one a class. Index "
            "the labels (StringIndexer, pandas.factorize), or give a transform that does."
        )
    try:
        wrong.add(dense(stored))
    except RaggedError:  # a worker refuses it, and says which rows differ
        return
