"""The first rows of a recipe's data, for commands that build a model or plan it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.data import open_source
from thinwire.data.columns import dense, is_tensor
from thinwire.data.tokens import Tokenize
from thinwire.recipe import Recipe
from thinwire.run.arguments import checked

DIGITS = "digits"
"""The data of a recipe that names none."""


def first_rows(recipe: Recipe, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The first rows of a recipe's data, as the model would get them: these columns, or all but label and weight."""
    data = recipe.data
    source = open_source(data.source or DIGITS)
    batch = next(iter(source.batches())).slice(0, 2)
    if names is None:
        names = [name for name in source.schema.names if name not in (data.label, data.weight)]
    own = checked({"transform": data.transform}, {"transform": "data.transform"})["transform"]
    read = own.reads(names) if isinstance(own, Tokenize) else names
    names = own.given(names) if isinstance(own, Tokenize) else names
    values: dict[str, Any] = {name: _values(batch.column(name)) for name in read}
    for transform in (source.transform, own):
        values = values if transform is None else transform(values)
    return {name: values[name] for name in names}


def _values(array: Any) -> Any:
    return torch.from_numpy(dense(array).copy()) if is_tensor(array.type) else array.to_numpy(zero_copy_only=False)
