"""Networks for tables: categories as embeddings, numbers beside them, one output unless more are asked for.

Each takes the columns that a `TableEncoder` makes, the categorical ones first, and is told what they are by the
encoder's `shape`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError, nearest
from thinwire.values import number, truth, whole

Widths = Mapping[str, int]
MOST_INDICES = 2**31
MOST_LAYERS = 1000
"""Of a tower, or blocks of a residual network."""


class Columns(nn.Module):
    """Embeddings of categorical columns, and numeric columns side by side.

    Args:
        sizes: by categorical column, how many indices it has.
        numbers: by numeric column, its width.
        width: numbers of an embedding.
        sparse: whether embeddings have sparse gradients.
    """

    def __init__(self, sizes: Widths, numbers: Widths, width: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.num_numbers = sum(numbers.values())
        self._given = (*sizes, *numbers)
        self.tables = nn.ModuleList(nn.Embedding(size, width, sparse=sparse) for size in sizes.values())
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=1 / math.sqrt(width))

    def forward(self, *columns: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Embeddings (rows × columns × width) and numbers (rows × width); None of either where there is no column."""
        if len(columns) != len(self._given):
            raise ConfigError(
                f"the network is given {len(columns)} columns and was made for {len(self._given)} "
                f"({', '.join(self._given)}); give those, categorical ones first"
            )
        count = len(self.tables)
        found = [table(column.long()) for table, column in zip(self.tables, columns[:count], strict=True)]
        numbers = [column.float().reshape(len(column), -1) for column in columns[count:]]
        return torch.stack(found, 1) if found else None, torch.cat(numbers, 1) if numbers else None


class ResidualMLP(nn.Module):
    """Embeddings and numbers through blocks of two layers, each added to what it is given (Gorishniy et al. 2021)."""

    def __init__(self, columns: Columns, inputs: int, hidden: int, *, blocks: int, dropout: float, outputs: int):
        super().__init__()
        self.columns = columns
        self.first = nn.Linear(inputs, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden),
                nn.Linear(hidden, 2 * hidden),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(2 * hidden, hidden),
                nn.Dropout(dropout),
            )
            for _ in range(blocks)
        )
        self.last = nn.Sequential(nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, *columns: Tensor) -> Tensor:
        rows = self.first(_flat(*self.columns(*columns)))
        for block in self.blocks:
            rows = rows + block(rows)
        found: Tensor = self.last(rows)
        return found


class DeepFM(nn.Module):
    """A linear part, products of all pairs of embeddings, and an MLP over them, added (Guo et al. 2017)."""

    def __init__(self, columns: Columns, linear: Columns, deep: nn.Module, *, outputs: int) -> None:
        super().__init__()
        self.columns, self.linear, self.deep = columns, linear, deep
        self.numbers = nn.Linear(columns.num_numbers, outputs) if columns.num_numbers else None
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, *columns: Tensor) -> Tensor:
        embedded, numbers = self.columns(*columns)
        found: Tensor = self.deep(_flat(embedded, numbers)) + self.bias
        if embedded is not None:
            pairs = (embedded.sum(1).square() - embedded.square().sum(1)).sum(1, keepdim=True) / 2
            found = found + pairs + self.linear(*columns)[0].sum(1)
        return found if self.numbers is None else found + self.numbers(numbers)


class DLRM(nn.Module):
    """Numbers through an MLP to one more embedding, products of all pairs, an MLP over these (Naumov et al. 2019)."""

    def __init__(self, columns: Columns, bottom: nn.Module | None, top: nn.Module) -> None:
        super().__init__()
        self.columns, self.bottom, self.top = columns, bottom, top
        count = len(columns.tables) + (bottom is not None)
        self._pairs = tuple(zip(*itertools.combinations(range(count), 2), strict=True)) or ((), ())

    def forward(self, *columns: Tensor) -> Tensor:
        embedded, numbers = self.columns(*columns)
        parts = [] if embedded is None else [embedded]
        beside = []
        if self.bottom is not None:
            beside = [self.bottom(numbers)]
            parts = [beside[0].unsqueeze(1), *parts]
        vectors = torch.cat(parts, 1)
        products = vectors @ vectors.transpose(1, 2)
        left, right = self._pairs
        found: Tensor = self.top(torch.cat([*beside, products[:, list(left), list(right)]], 1))
        return found


class TwoTower(nn.Module):
    """The product of what two MLPs make of a query's columns and of an item's (Covington et al. 2016).

    `embed` gives one tower's vectors by themselves, for an index of nearest neighbours.
    """

    def __init__(self, towers: Mapping[str, nn.Module], order: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(towers)
        self._order = {name: tuple(places) for name, places in order.items()}
        self.bias = nn.Parameter(torch.zeros(1))

    def embed(self, tower: str, *columns: Tensor) -> Tensor:
        """The vectors of "query" or "item" of that tower's columns."""
        found: Tensor = self.towers[tower](*columns)
        return found

    def forward(self, *columns: Tensor) -> Tensor:
        query, item = (self.embed(name, *(columns[at] for at in self._order[name])) for name in ("query", "item"))
        return (query * item).sum(1, keepdim=True) + self.bias


class _Tower(nn.Module):
    def __init__(self, columns: Columns, layers: nn.Module) -> None:
        super().__init__()
        self.columns, self.layers = columns, layers

    def forward(self, *columns: Tensor) -> Tensor:
        found: Tensor = self.layers(_flat(*self.columns(*columns)))
        return found


# -- by name ----------------------------------------------------------------------------------------------------------


def residual_mlp(
    sizes: Widths | None = None,
    numbers: Widths | None = None,
    *,
    width: int = 16,
    hidden: int = 128,
    blocks: int = 3,
    dropout: float = 0.1,
    outputs: int = 1,
    sparse: bool = False,
) -> nn.Module:
    """A residual MLP over embeddings and numbers.

    Args:
        sizes: by categorical column, how many indices it has.
        numbers: by numeric column, its width.
        width: numbers of an embedding.
        hidden: units of a block's way past it.
        blocks: how many follow each other.
        dropout: share of units left out in training.
        outputs: numbers that come out: one logit, a class each, or a quantile each.
        sparse: whether embeddings have sparse gradients.
    """
    sizes, numbers = _checked("residual_mlp", sizes, numbers)
    _whole(width=width, hidden=hidden, blocks=blocks, outputs=outputs)
    columns = Columns(sizes, numbers, whole(1)("width", width), sparse=truth("sparse", sparse))
    return ResidualMLP(
        columns,
        len(sizes) * width + columns.num_numbers,
        hidden,
        blocks=blocks,
        dropout=number(least=0, most=0.99)("dropout", dropout),
        outputs=outputs,
    )


def deepfm(
    sizes: Widths | None = None,
    numbers: Widths | None = None,
    *,
    width: int = 16,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    outputs: int = 1,
    sparse: bool = False,
) -> nn.Module:
    """A factorisation machine and an MLP over the same embeddings.

    Args:
        sizes: by categorical column, how many indices it has.
        numbers: by numeric column, its width.
        width: numbers of an embedding.
        hidden: units of the MLP's layers.
        dropout: share of units left out in training.
        outputs: numbers that come out.
        sparse: whether embeddings have sparse gradients.
    """
    sizes, numbers = _checked("deepfm", sizes, numbers)
    _whole(width=width, outputs=outputs)
    columns = Columns(sizes, numbers, width, sparse=truth("sparse", sparse))
    linear = Columns(sizes, numbers, outputs, sparse=sparse)
    for table in linear.tables:
        assert isinstance(table, nn.Embedding)
        nn.init.zeros_(table.weight)
    share = number(least=0, most=0.99)("dropout", dropout)
    deep = _layers(len(sizes) * width + columns.num_numbers, (*_hidden(hidden), outputs), share)
    return DeepFM(columns, linear, deep, outputs=outputs)


def dlrm(
    sizes: Widths | None = None,
    numbers: Widths | None = None,
    *,
    width: int = 16,
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (128, 64),
    outputs: int = 1,
    sparse: bool = False,
) -> nn.Module:
    """Products of all pairs of embeddings, with the numbers as one more of them, through an MLP.

    Args:
        sizes: by categorical column, how many indices it has.
        numbers: by numeric column, its width.
        width: numbers of an embedding.
        bottom: units of the layers that numbers go through.
        top: units of the layers that products go through.
        outputs: numbers that come out.
        sparse: whether embeddings have sparse gradients.
    """
    sizes, numbers = _checked("dlrm", sizes, numbers)
    _whole(width=width, outputs=outputs)
    columns = Columns(sizes, numbers, width, sparse=truth("sparse", sparse))
    below = _layers(columns.num_numbers, (*_hidden(bottom), width), 0.0) if columns.num_numbers else None
    count = len(sizes) + (below is not None)
    if count < 2:
        raise ConfigError(f"dlrm multiplies pairs of columns, and has {count} of them; use residual_mlp for so few")
    inputs = count * (count - 1) // 2 + (width if below is not None else 0)
    return DLRM(columns, below, _layers(inputs, (*_hidden(top), outputs), 0.0))


def two_tower(
    sizes: Widths | None = None,
    numbers: Widths | None = None,
    *,
    query: Sequence[str] = (),
    width: int = 16,
    hidden: Sequence[int] = (64,),
    outputs: int = 32,
    sparse: bool = False,
) -> nn.Module:
    """Two MLPs, of a query's columns and of the others, an item's; the product of their vectors is the logit.

    Args:
        sizes: by categorical column, how many indices it has.
        numbers: by numeric column, its width.
        query: the columns of the query: of a user, say.
        width: numbers of an embedding.
        hidden: units of each tower's layers.
        outputs: numbers of a tower's vector.
        sparse: whether embeddings have sparse gradients.
    """
    sizes, numbers = _checked("two_tower", sizes, numbers)
    _whole(width=width, outputs=outputs)
    every = (*sizes, *numbers)
    asked = (query,) if isinstance(query, str) else tuple(query)
    for name in asked:
        if name not in every:
            raise ConfigError(f"two_tower.query has {name!r}, which is no column. {nearest(str(name), every)}")
    if not asked or len(set(asked)) == len(every):
        raise ConfigError(
            f"two_tower.query = {list(asked)} leaves one tower without columns; name those of the query, and leave "
            f"some of {list(every)} to the item"
        )
    names = {"query": [n for n in every if n in asked], "item": [n for n in every if n not in asked]}
    towers: dict[str, nn.Module] = {}
    for tower, own in names.items():
        mine = [{n: w for n, w in widths.items() if n in own} for widths in (sizes, numbers)]
        columns = Columns(mine[0], mine[1], width, sparse=truth("sparse", sparse))
        towers[tower] = _Tower(
            columns, _layers(len(mine[0]) * width + columns.num_numbers, (*_hidden(hidden), outputs), 0.0)
        )
    return TwoTower(towers, {tower: [every.index(name) for name in own] for tower, own in names.items()})


def _checked(name: str, sizes: Widths | None, numbers: Widths | None) -> tuple[dict[str, int], dict[str, int]]:
    given = {"sizes": sizes or {}, "numbers": numbers or {}}
    for key, widths in given.items():
        if not isinstance(widths, Mapping):
            raise ConfigError(f"{name}.{key} = {widths!r} is not possible; use a number for each column by its name")
        for column, width in widths.items():
            whole(1, MOST_INDICES)(f"{name}.{key}.{column}", width)
    if not given["sizes"] and not given["numbers"]:
        raise ConfigError(
            f"{name} needs to know the columns of the table; give transform=tw.TableEncoder(categorical=[…], "
            f"numeric=[…]), or make the network from an encoder: lambda: {name}(**encoder.shape)"
        )
    return dict(given["sizes"]), dict(given["numbers"])


def _whole(**given: int) -> None:
    for key, value in given.items():
        whole(1, MOST_LAYERS if key == "blocks" else 1 << 20)(key, value)


def _hidden(given: Sequence[int]) -> tuple[int, ...]:
    units = (given,) if isinstance(given, int) else tuple(given)
    whole(0, MOST_LAYERS)("the number of layers in hidden", len(units))
    return tuple(int(whole(1, 1 << 20)("hidden", each)) for each in units)


def _layers(inputs: int, units: Sequence[int], dropout: float) -> nn.Module:
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(itertools.pairwise((inputs, *units))):
        if place:
            layers += [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)


def _flat(embedded: Tensor | None, numbers: Tensor | None) -> Tensor:
    return torch.cat([part.flatten(1) for part in (embedded, numbers) if part is not None], 1)
