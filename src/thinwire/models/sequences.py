"""Recurrent networks over sequences of different lengths, and a language model of characters to sample from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

IGNORED = -100
"""The label of what is only padding; torch's own."""


class PeepholeLSTM(nn.Module):
    """An LSTM layer of four gates that also see the cell (Gers and Schmidhuber 2000).

    ::

        i = σ(W_i x + U_i h + p_i · c)       f = σ(W_f x + U_f h + p_f · c)
        c' = f · c + i · tanh(W_c x + U_c h) o = σ(W_o x + U_o h + p_o · c')    h' = o · tanh(c')

    Args:
        inputs: numbers of each step's input.
        hidden: units.
    """

    as_one_layer: ClassVar[bool] = True
    """A plan and a placement call it and do not look into it; how it is shared out, it says itself."""
    _gather: Callable[[Tensor, int], Tensor] | None = None
    """Where a group has shared out the units: what brings the other workers'."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        self.peepholes = nn.Parameter(torch.zeros(3, hidden))
        nn.init.orthogonal_(self.recurrent.weight)
        with torch.no_grad():
            self.input.bias[hidden : 2 * hidden].fill_(1.0)  # so that it remembers at first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (N, T, hidden) of inputs (N, T, inputs); where the mask (N, T) is 0 the state stays as it was."""
        added = self.input(x)
        seen = x.new_zeros(x.shape[0], self.hidden)
        hidden = cell = x.new_zeros(x.shape[0], self.peepholes.shape[1])
        into, keep, out = self.peepholes
        found: list[Tensor] = []
        for step in range(x.shape[1]):
            if found:  # a step needs all units' outputs of the step before
                seen = hidden if self._gather is None else self._gather(hidden, 1)
            gates = added[:, step] + self.recurrent(seen)
            i, f, new, o = gates.chunk(4, 1)
            fresh = torch.sigmoid(f + keep * cell) * cell + torch.sigmoid(i + into * cell) * torch.tanh(new)
            shown = torch.sigmoid(o + out * fresh) * torch.tanh(fresh)
            if mask is not None:
                real = mask[:, step, None]
                fresh, shown = torch.where(real > 0, fresh, cell), torch.where(real > 0, shown, hidden)
            hidden, cell = shown, fresh
            found.append(hidden)
        return torch.stack(found, 1)

    def partition(self, start: int, stop: int) -> dict[str, tuple[int, list[tuple[int, int]]]]:
        """The share of each tensor that belongs to some of the units: their rows of all four gates."""
        gates = [(gate * self.hidden + start, gate * self.hidden + stop) for gate in range(4)]
        return {
            "input.weight": (0, gates),
            "input.bias": (0, gates),
            "recurrent.weight": (0, gates),
            "peepholes": (1, [(start, stop)]),
        }

    def after_partition(self, share: Any) -> None:
        """Has the other workers' outputs brought at each step; `share` is a `thinwire.planning.Share`."""
        self._gather = share.gather

    def gathered(self, shape: tuple[int, ...]) -> tuple[float, int]:
        """For an output of a shape: floats of a row that all workers are brought while it is computed, and gathers."""
        return float((shape[1] - 1) * self.hidden), shape[1] - 1


class Recurrent(nn.Module):
    """Several recurrent layers over padded sequences.

    Args:
        inputs: numbers of each step's input.
        hidden: units of every layer.
        layers: how many.
        kind: "rnn", "lstm", or "peephole".
        dropout: between layers.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        layers: int = 2,
        *,
        kind: Literal["rnn", "lstm", "peephole"] = "lstm",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        if kind == "peephole":
            sizes = [inputs, *[hidden] * (layers - 1)]
            self.layers = nn.ModuleList(PeepholeLSTM(size, hidden) for size in sizes)
        else:
            made = nn.LSTM if kind == "lstm" else nn.RNN
            between = dropout if layers > 1 else 0.0
            self.layers = nn.ModuleList([made(inputs, hidden, layers, batch_first=True, dropout=between)])

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Outputs (N, T, hidden) of padded inputs (N, T, inputs); beyond a sequence's length they are zero."""
        mask = None
        if lengths is not None:
            mask = (torch.ones_like(x[:, :, 0], dtype=torch.long).cumsum(1) <= lengths[:, None]).to(x.dtype)
        for number, layer in enumerate(self.layers):
            if self.kind == "peephole":
                x = layer(x, mask)
                if number + 1 < len(self.layers):
                    x = F.dropout(x, self.dropout, self.training)
            else:  # what comes after a sequence's end cannot reach what comes before it
                x = layer(x)[0]
        return x if mask is None else x * mask[:, :, None]


class CharacterModel(nn.Module):
    """Predicts each next character; called with characters (N, T), it gives scores (N, vocabulary, T).

    Args:
        vocabulary: how many characters there are; 256 takes any bytes.
        hidden: units of every layer.
        layers: how many.
        kind: as in `Recurrent`.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        hidden: int = 256,
        layers: int = 2,
        *,
        kind: Literal["rnn", "lstm", "peephole"] = "lstm",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.body = Recurrent(64, hidden, layers, kind=kind)
        self.scores = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor, lengths: Tensor | None = None) -> Tensor:
        found: Tensor = self.scores(self.body(self.embedding(characters.long()), lengths))
        return found.transpose(1, 2)


def masked_cross_entropy(scores: Tensor, label: Tensor) -> Tensor:
    """One mean a row over those steps whose label is not `IGNORED`; as `loss=` of `fit`."""
    each = F.cross_entropy(scores, label, reduction="none", ignore_index=IGNORED)
    return each.sum(1) / (label != IGNORED).sum(1).clamp_min(1)


def padded(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences of different lengths as one tensor (N, longest), filled with `IGNORED`; and their lengths."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=IGNORED), lengths


@torch.no_grad()
def sample(
    model: nn.Module, prompt: str, length: int, *, temperature: float = 0.8, window: int = 64, seed: int = 0
) -> str:
    """A text that goes on from a prompt, character by character.

    Args:
        model: a trained `CharacterModel` of bytes.
        prompt: how the text begins; at least one character.
        length: characters to add.
        temperature: below 1 keeps to what is likely, above 1 dares more.
        window: how many characters the model looks back on.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    found = list(prompt.encode("utf-8"))
    for _ in range(length):
        scores = model(torch.tensor([found[-window:]]))[0, :, -1] / max(temperature, 1e-6)
        found.append(int(torch.multinomial(torch.softmax(scores, 0), 1, generator=generator)))
    return bytes(found).decode("utf-8", "replace")


def char_rnn() -> nn.Module:
    """Two layers of 256 simple recurrent units over bytes."""
    return CharacterModel(kind="rnn")


def char_lstm() -> nn.Module:
    """Two layers of 256 LSTM units over bytes."""
    return CharacterModel()


def char_lstm_peephole() -> nn.Module:
    """Two layers of 128 LSTM units with peepholes over bytes."""
    return CharacterModel(hidden=128, kind="peephole")
