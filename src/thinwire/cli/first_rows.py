"""The first rows of a recipe's data, for commands that build a model or plan it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.data import open_source
from thinwire.data.columns import dense
from thinwire.models import imported
from thinwire.recipe import Recipe

DIGITS = "digits"
"""The data of a recipe that names none."""


def first_rows(recipe: Recipe, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The first rows of a recipe's data, as the model would get them: these columns, or all but label and weight."""
    data = recipe.data
    source = open_source(data.source or DIGITS)
    batch = next(iter(source.batches())).slice(0, 2)
    if names is None:
        names = [name for name in source.schema.names if name not in (data.label, data.weight)]
    values: dict[str, Any] = {name: torch.from_numpy(dense(batch.column(name)).copy()) for name in names}
    own = None if data.transform is None else imported("data.transform", data.transform)
    for transform in (source.transform, own):
        values = values if transform is None else transform(values)
    return {name: values[name] for name in names}
