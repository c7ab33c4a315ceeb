"""Small networks of every sort that can be placed, and rows for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.models import ZOO
from thinwire.models.sequences import PeepholeLSTM
from thinwire.planning import Share

CLASSES = 5


class Rows(NamedTuple):
    """A batch, as replicas take it."""

    inputs: tuple[Tensor, ...]
    label: Tensor
    weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.label)


def connected() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, CLASSES))


def convolutional() -> nn.Module:
    """Channels that cannot be shared out evenly, a pooling layer and a flattening between them and what follows."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 7, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(7 * 9, 33), nn.Tanh(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, CLASSES),
    )  # fmt: skip


class Branching(nn.Module):
    """Sums of branches, a parameter of its own, and a look at a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.shift = nn.Parameter(torch.randn(16))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = x + self.b(x)
        y = torch.relu(self.c(x)) + self.shift
        return self.out((x + y).view(x.size(0), -1))


class Sequence(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], layers: int) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(20, 9), kind(9, 11, layers, batch_first=True)
        self.out = nn.Linear(11, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.recurrent(self.embedding(x))
        last: Tensor = self.out(found[:, -1])
        return last


class LastState(nn.Module):
    """Reads a recurrent layer's last state instead of its outputs, and has two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.LSTM(4, 6, bidirectional=True, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.recurrent(x)
        last: Tensor = self.out(state[-1])
        return last


class Optional(nn.Module):
    """Optional arguments, a loop over time inside a layer, halves of a layer's output, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.inner, self.out = PeepholeLSTM(4, 6), nn.Linear(6, 16), nn.Linear(8, CLASSES)
        self.register_buffer("places", torch.randn(12, 4), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 0.5) -> Tensor:
        found: Tensor = self.cells(x + self.places[: x.shape[1]], mask)  # type: ignore[index]
        value, gate = self.inner(found[:, -1]).chunk(2, 1)
        last: Tensor = self.out(value * torch.sigmoid(gate)) * scale
        return last


class Tied(nn.Module):
    """One matrix in two layers, one layer twice, attention, and a layer with a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.out = nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        found: Tensor = self.out(self.normed(self.body(torch.tanh(self.body(x.mean(1))))))
        return found


def recurrent() -> nn.Module:
    return Sequence(nn.RNN, 2)


def lstm() -> nn.Module:
    return Sequence(nn.LSTM, 2)


def gru() -> nn.Module:
    return Sequence(nn.GRU, 1)


class Peepholes(nn.Module):
    """A masked layer of units that see each other's outputs, which cannot be shared out evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = PeepholeLSTM(4, 7), nn.Linear(7, CLASSES)
        nn.init.normal_(self.cells.peepholes)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[:, :, 0] > -0.5).to(x.dtype)
        last: Tensor = self.out(self.cells(torch.tanh(x), mask)[:, -1])
        return last


class Normalised(nn.Module):
    """A layer of someone's own: outputs over their norm, which takes all of them, and a mean of them all."""

    as_one_layer = True
    _share: Share | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.inner = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.rand(1) + 0.5)
        self.register_buffer("weights", torch.rand(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        square = y.square().sum(1, keepdim=True)
        every = y * self.weights
        if self._share is not None:
            square, every = self._share.total(square), self._share.gather(every, 1)
        return self.scale * y / (1 + square).sqrt() + every.mean(1, keepdim=True)

    def partition(self, start: int, stop: int) -> dict[str, tuple[int, list[tuple[int, int]]]]:
        return {name: (0, [(start, stop)]) for name in ("inner.weight", "inner.bias", "weights")}

    def after_partition(self, share: Share) -> None:
        assert share.units == self.outputs
        assert share.stop - share.start == len(self.inner.weight)
        self._share = share


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), Normalised(16, 10), nn.ReLU(), Normalised(10, 9), nn.Linear(9, CLASSES))


class NextCharacter(nn.Module):
    """A language model of the zoo, of which the last prediction counts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = ZOO[name]()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)[:, :, -1]
        return found


ZOO_OF_SEQUENCES = ("char_rnn", "char_lstm", "char_lstm_peephole")


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "connected": (connected, lambda n: torch.randn(n, 12)),
    "convolutional": (convolutional, lambda n: torch.randn(n, 3, 10, 10)),
    "branching": (Branching, lambda n: torch.randn(n, 12)),
    "recurrent": (recurrent, lambda n: torch.randint(0, 20, (n, 6))),
    "lstm": (lstm, lambda n: torch.randint(0, 20, (n, 6))),
    "gru": (gru, lambda n: torch.randint(0, 20, (n, 6))),
    "last state": (LastState, lambda n: torch.randn(n, 5, 4)),
    "optional": (Optional, lambda n: torch.randn(n, 5, 4)),
    "tied": (Tied, lambda n: torch.randint(0, CLASSES, (n, 6))),
    "peepholes": (Peepholes, lambda n: torch.randn(n, 5, 4)),
    "own": (own, lambda n: torch.randn(n, 12)),
}
for each in ZOO_OF_SEQUENCES:
    NETWORKS[each] = (functools.partial(NextCharacter, each), lambda n: torch.randint(0, 256, (n, 6)))


def rows_for(name: str, count: int, *, weighted: bool = False) -> Rows:
    torch.manual_seed(0)
    inputs, label = NETWORKS[name][1](count), torch.randint(0, CLASSES, (count,))
    return Rows((inputs,), label, torch.rand(count) + 0.5 if weighted else None)


def cut(rows: Rows, start: int, stop: int) -> Rows:
    weight: Any = None if rows.weight is None else rows.weight[start:stop]
    return Rows(tuple(x[start:stop] for x in rows.inputs), rows.label[start:stop], weight)
