"""The first rows of a recipe's data, for commands that build a model or plan its placement."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from thinwire.data import Shard, open_source, write_shard
from thinwire.data.sources import plain
from thinwire.data.tokens import Tokenize
from thinwire.recipe import Recipe

DIGITS = "digits"
"""The data of a recipe that names no data."""


def first_rows(
    recipe: Recipe, names: Sequence[str] | None, transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> dict[str, torch.Tensor]:
    """The first rows of a recipe's data as the model gets them: the named columns, or all but label and weight."""
    data = recipe.data
    source = plain(open_source(data.source or DIGITS))
    batch = next(iter(source.batches())).slice(0, 2)
    if names is None:
        names = [name for name in source.schema.names if name not in (data.label, data.weight)]
    if isinstance(transform, Tokenize):
        names = transform.given(names)
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        path = os.path.join(folder, "rows")
        write_shard(path, [batch], source.schema, nullable=True)
        values: dict[str, Any] = Shard.open(path).take(np.arange(batch.num_rows))
    for each in (source.transform, transform):
        values = values if each is None else each(values)
    return {name: torch.as_tensor(values[name]) for name in names}
