"""A column of row weights looked at while its rows are dealt out."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from thinwire.data.columns import dense, is_tensor, stored_array
from thinwire.errors import DataError

SHOWN = 3
"""Wrong weights in a message."""


@final
class Weights:
    """Counts weights that are negative or not finite, over all batches of a column.

    Args:
        column: its name.
        of: what rows it is of, for messages.
    """

    def __init__(self, column: str, of: str = "") -> None:
        self._column, self._of = column, of
        self._rows = self._count = 0
        self._examples: list[str] = []
        self._positive = False

    def look_at(self, batch: Any) -> None:
        """Looks at one record batch, which has no nulls and decimals as doubles."""
        stored = stored_array(batch.column(self._column))
        if not is_tensor(stored.type) or (values := dense(stored)).ndim != 1:
            return  # the trial of a row, or a loader, refuses it
        wrong = ~((values >= 0) & np.isfinite(values))
        self._positive = self._positive or bool((values > 0).any())
        self._count += int(np.count_nonzero(wrong))
        for row in np.flatnonzero(wrong)[: SHOWN - len(self._examples)]:
            self._examples.append(f"{values[row].item()} in row {self._rows + int(row)}")
        self._rows += len(values)

    def refuse(self, *, all_rows: bool) -> None:
        """Refuses weights that are none.

        Args:
            all_rows: whether these are the weights of all rows, so that one of them must be above 0.

        Raises:
            DataError: With values, rows and count.
        """
        if self._count:
            values = "1 value that is" if self._count == 1 else f"{self._count} values that are"
            raise DataError(
                f"column {self._column!r}{self._of} has {values} no weight, of {self._rows} rows: "
                f"{', '.join(self._examples)}. A weight is a finite number of 0 or more. Leave those rows out, or give "
                "them a weight of 0."
            )
        if all_rows and self._rows and not self._positive:
            raise DataError(
                f"column {self._column!r}{self._of} is 0 in all of {self._rows} rows, so that no row counts; give "
                "weights above 0, or leave weight out"
            )
