"""What a table's encoder decides for the rest of a run: which columns are read, and what network there is for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.cluster.frames import is_frame, training_rows
from thinwire.data.tables import TableEncoder
from thinwire.errors import ConfigError
from thinwire.models import OF_TABLES, ZooModel
from thinwire.run.arguments import checked

Transform = Callable[[dict[str, Any]], dict[str, Any]]


class OfTable(NamedTuple):
    """A network, the transform before it, and its inputs, as a run goes on with them."""

    model: Any
    transform: Transform | None
    inputs: tuple[str, ...] | None


def of_table(
    model: Any, transform: Any, data: Any, *, inputs: Sequence[str] | None, besides: Mapping[str, Any], validation: Any
) -> OfTable:
    """An encoder fitted on the training rows, and a network of the zoo told of its columns; all else as it is.

    Args:
        model: as `fit` takes it.
        transform: as `fit` takes it.
        data: the rows to train on.
        inputs: columns given to the model, if they are said.
        besides: columns that no encoder may change, by the argument that names each.
        validation: as `fit` takes it; rows that a column holds back are not looked at.
    """
    transform = checked({"transform": transform})["transform"]
    named = ZooModel(model) if isinstance(model, str) and model in OF_TABLES else model
    if isinstance(model, Mapping):
        named = checked({"model": model})["model"]
    of_zoo = isinstance(named, ZooModel) and named.needs_columns
    if not isinstance(transform, TableEncoder):
        if of_zoo:
            raise ConfigError(
                f"model {named.name!r} needs to know the columns of the table, and transform is "
                f"{'not given' if transform is None else 'no TableEncoder'}; give transform=tw.TableEncoder("
                "categorical=[…], numeric=[…])"
            )
        return OfTable(named, transform, None if inputs is None else tuple(inputs))
    chosen = _inputs(transform, inputs, besides, exactly=named.name if of_zoo else None)
    if not transform.fitted:
        held = is_frame(data) and isinstance(validation, str)
        transform = transform.fit(training_rows(data, validation) if held else data)
    return OfTable(named.of_columns(transform.shape) if of_zoo else named, transform, chosen)


def _inputs(
    encoder: TableEncoder, inputs: Sequence[str] | None, besides: Mapping[str, Any], *, exactly: str | None
) -> tuple[str, ...]:
    for key, name in besides.items():
        if name in encoder.columns:
            raise ConfigError(
                f"{key} = {name!r} is a column of the TableEncoder, which would change it; leave it out of the encoder"
            )
    chosen = encoder.columns if inputs is None else tuple(inputs)
    unused = [name for name in encoder.columns if name not in chosen]
    if unused:
        raise ConfigError(
            f"the TableEncoder has column {unused[0]!r}, which is not among inputs = {list(chosen)}; name it there, or "
            "leave it out of the encoder"
        )
    if exactly is None:
        return chosen
    beside = [name for name in chosen if name not in encoder.columns]
    if beside:
        raise ConfigError(
            f"model {exactly!r} takes the columns of the TableEncoder, and input {beside[0]!r} is none of them; name "
            "it as categorical or as numeric, or leave it out"
        )
    return encoder.columns
