"""Energy-based networks: restricted Boltzmann machines, deep belief networks and deep Boltzmann machines.

All of them know how to contrast what they are shown with what they make up themselves, which is what
`ContrastiveDivergence` learns from. Called as modules they give a `Seen`, from which errors are measured.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from thinwire.errors import ConfigError


class Seen(NamedTuple):
    """What a machine makes of rows.

    Attributes:
        rows: the rows, flat.
        again: the same rows as it makes them from their hidden units.
        energy: the free energy of each row.
        shuffled: the free energy of rows whose numbers were exchanged between rows: each number as likely as before,
            but none that goes with another.
    """

    rows: Tensor
    again: Tensor
    energy: Tensor
    shuffled: Tensor


class Contrast(NamedTuple):
    """One estimate of the gradient: its difference of energies, the chain to go on from, and the error to report."""

    positive: Tensor
    negative: Tensor
    chain: Tensor
    error: Tensor


class EnergyModel(nn.Module, ABC):
    """A network with an energy."""

    stages = 1
    """Layers that are learnt one after the other."""

    @abstractmethod
    def contrast(self, inputs: Sequence[Tensor], *, stage: int, k: int, chain: Tensor | None) -> Contrast:
        """Mean energies of the rows given and of rows made up, whose difference has the gradient to follow.

        Args:
            inputs: a batch's inputs.
            stage: which layer is to learn.
            k: steps of Gibbs sampling.
            chain: made-up rows to go on from; None begins at the rows given.
        """

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Seen:
        """What it makes of rows."""


def reconstruction_error(seen: Seen, label: Any = None) -> Tensor:
    """The mean squared error of each row made again; as `loss=` of `fit`."""
    return (seen.rows - seen.again).square().mean(1)


def free_energy_gap(seen: Seen, label: Any = None) -> Tensor:
    """The free energy of rows less that of shuffled ones: it falls while a machine learns; as a metric of `fit`."""
    return seen.energy - seen.shuffled


class RBM(EnergyModel):
    """A restricted Boltzmann machine (Smolensky 1986; Hinton 2002) with binary hidden units.

    ::

        F(v) = −a·v − Σ_j softplus(b_j + v·W_j)                     binary v
        F(v) = ‖v − a‖² / 2 − Σ_j softplus(b_j + v·W_j)             Gaussian v, of unit variance

    Args:
        visible: numbers of a row.
        hidden: hidden units.
        gaussian: whether rows are real numbers, of about zero mean and unit variance, instead of 0 to 1.
        condition: numbers of a second input that shifts all biases (a conditional RBM, Taylor et al. 2006).
    """

    def __init__(self, visible: int, hidden: int, *, gaussian: bool = False, condition: int = 0) -> None:
        super().__init__()
        self.gaussian = gaussian
        self.weight = nn.Parameter(torch.randn(hidden, visible) * 0.01)
        self.visible_bias = nn.Parameter(torch.zeros(visible))
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.visible_shift = nn.Linear(condition, visible, bias=False) if condition else None
        self.hidden_shift = nn.Linear(condition, hidden, bias=False) if condition else None

    def biases(self, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Biases of visible and hidden units, under a condition where there is one."""
        if self.visible_shift is None or self.hidden_shift is None:
            return self.visible_bias, self.hidden_bias
        if not given:
            raise ConfigError("a conditional machine takes two inputs: rows, and what they depend on")
        past = given[0].reshape(len(given[0]), -1).float()
        return self.visible_bias + self.visible_shift(past), self.hidden_bias + self.hidden_shift(past)

    def hidden(self, rows: Tensor, bias: Tensor) -> Tensor:
        """How likely each hidden unit is on."""
        return torch.sigmoid(F.linear(rows, self.weight) + bias)

    def visible(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """How likely each visible unit is on, or its mean."""
        found = F.linear(hidden, self.weight.t()) + bias
        return found if self.gaussian else torch.sigmoid(found)

    def free_energy(self, rows: Tensor, visible_bias: Tensor, hidden_bias: Tensor) -> Tensor:
        hidden = F.softplus(F.linear(rows, self.weight) + hidden_bias).sum(1)
        if self.gaussian:
            return (rows - visible_bias).square().sum(1) / 2 - hidden
        return -(rows * visible_bias).sum(1) - hidden

    @torch.no_grad()
    def gibbs(self, rows: Tensor, visible_bias: Tensor, hidden_bias: Tensor, k: int) -> Tensor:
        """Rows after k steps back and forth; a single step ends in probabilities or means, as Hinton (2010) advises."""
        for _ in range(k):
            hidden = torch.bernoulli(self.hidden(rows, hidden_bias))
            rows = self.visible(hidden, visible_bias)
            if k > 1:
                rows = rows + torch.randn_like(rows) if self.gaussian else torch.bernoulli(rows)
        return rows

    def contrast(self, inputs: Sequence[Tensor], *, stage: int, k: int, chain: Tensor | None) -> Contrast:
        rows, given = _flat(inputs[0]), inputs[1:]
        visible_bias, hidden_bias = self.biases(given)
        begin = rows if chain is None or (given and len(chain) != len(rows)) else chain
        made = self.gibbs(begin, visible_bias, hidden_bias, k)
        with torch.no_grad():
            again = self.visible(self.hidden(rows, hidden_bias), visible_bias)
            error = (rows - again).square().mean()
        positive = self.free_energy(rows, visible_bias, hidden_bias).mean()
        negative = self.free_energy(made, visible_bias, hidden_bias).mean()
        return Contrast(positive, negative, made, error)

    def forward(self, *inputs: Tensor) -> Seen:
        rows = _flat(inputs[0])
        visible_bias, hidden_bias = self.biases(inputs[1:])
        again = self.visible(self.hidden(rows, hidden_bias), visible_bias)
        energy = self.free_energy(rows, visible_bias, hidden_bias)
        return Seen(rows, again, energy, self.free_energy(_shuffled(rows), visible_bias, hidden_bias))


class DBN(EnergyModel):
    """A deep belief network (Hinton et al. 2006): machines on top of each other, each learnt when those below are done.

    Args:
        sizes: numbers of a row, and units of every hidden layer.
        gaussian: whether rows are real numbers.
    """

    def __init__(self, sizes: Sequence[int], *, gaussian: bool = False) -> None:
        super().__init__()
        self.machines = nn.ModuleList(
            RBM(low, high, gaussian=gaussian and not number)
            for number, (low, high) in enumerate(itertools.pairwise(sizes))
        )
        self.stages = len(self.machines)

    def machine(self, stage: int) -> RBM:
        found = self.machines[stage]
        assert isinstance(found, RBM)
        return found

    @torch.no_grad()
    def below(self, rows: Tensor, stage: int) -> Tensor:
        """What the machine of a stage sees of rows."""
        for number in range(stage):
            made = self.machine(number)
            rows = made.hidden(rows, made.hidden_bias)
        return rows

    def contrast(self, inputs: Sequence[Tensor], *, stage: int, k: int, chain: Tensor | None) -> Contrast:
        rows = self.below(_flat(inputs[0]), stage)
        return self.machine(stage).contrast([rows], stage=0, k=k, chain=chain)

    def forward(self, *inputs: Tensor) -> Seen:
        """Rows made again from the topmost units, down through all machines; energies are the topmost machine's."""
        rows = _flat(inputs[0])
        top = self.machine(self.stages - 1)
        seen: Seen = top(self.below(rows, self.stages - 1))
        again = seen.again
        for number in reversed(range(self.stages - 1)):
            made = self.machine(number)
            again = made.visible(again, made.visible_bias)
        return Seen(rows, again, seen.energy, seen.shuffled)

    def network(self, classes: int) -> nn.Sequential:
        """A feed-forward network that begins with these machines' weights, and a new layer of classes (DBN-DNN)."""
        layers: list[nn.Module] = [nn.Flatten()]
        for number in range(self.stages):
            made = self.machine(number)
            layer = nn.Linear(made.weight.shape[1], made.weight.shape[0])
            with torch.no_grad():
                layer.weight.copy_(made.weight)
                layer.bias.copy_(made.hidden_bias)
            layers += [layer, nn.Sigmoid()]
        return nn.Sequential(*layers, nn.Linear(self.machine(self.stages - 1).weight.shape[0], classes))


class DBM(EnergyModel):
    """A deep Boltzmann machine of two hidden layers (Salakhutdinov and Hinton 2009), binary throughout.

    Rows' hidden units are found by mean-field steps; made-up rows go on from chain to chain.

    Args:
        visible: numbers of a row.
        first: units of the first hidden layer.
        second: units of the second.
        steps: mean-field steps.
    """

    def __init__(self, visible: int, first: int, second: int, *, steps: int = 10) -> None:
        super().__init__()
        self.steps = steps
        self.lower = nn.Parameter(torch.randn(first, visible) * 0.01)
        self.upper = nn.Parameter(torch.randn(second, first) * 0.01)
        self.visible_bias = nn.Parameter(torch.zeros(visible))
        self.first_bias = nn.Parameter(torch.zeros(first))
        self.second_bias = nn.Parameter(torch.zeros(second))

    @torch.no_grad()
    def mean_field(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """How likely both layers' units are on, given rows."""
        from_below = F.linear(rows, self.lower)
        first = torch.sigmoid(2 * from_below + self.first_bias)  # as if the layer above said the same
        second = torch.sigmoid(F.linear(first, self.upper) + self.second_bias)
        for _ in range(self.steps):
            first = torch.sigmoid(from_below + F.linear(second, self.upper.t()) + self.first_bias)
            second = torch.sigmoid(F.linear(first, self.upper) + self.second_bias)
        return first, second

    def energy(self, rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return -(
            rows @ self.visible_bias
            + first @ self.first_bias
            + second @ self.second_bias
            + (F.linear(rows, self.lower) * first).sum(1)
            + (F.linear(first, self.upper) * second).sum(1)
        )

    @torch.no_grad()
    def gibbs(self, rows: Tensor, second: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        first = rows.new_zeros(len(rows), self.lower.shape[0])
        for _ in range(k):
            drive = F.linear(rows, self.lower) + F.linear(second, self.upper.t()) + self.first_bias
            first = torch.bernoulli(torch.sigmoid(drive))
            second = torch.bernoulli(torch.sigmoid(F.linear(first, self.upper) + self.second_bias))
            rows = torch.bernoulli(torch.sigmoid(F.linear(first, self.lower.t()) + self.visible_bias))
        return rows, first, second

    def contrast(self, inputs: Sequence[Tensor], *, stage: int, k: int, chain: Tensor | None) -> Contrast:
        rows = _flat(inputs[0])
        first, second = self.mean_field(rows)
        size = rows.shape[1]
        begin = torch.cat([torch.bernoulli(rows.clamp(0, 1)), torch.bernoulli(second)], 1) if chain is None else chain
        made, made_first, made_second = self.gibbs(begin[:, :size], begin[:, size:], k)
        with torch.no_grad():
            again = torch.sigmoid(F.linear(first, self.lower.t()) + self.visible_bias)
            error = (rows - again).square().mean()
        positive = self.energy(rows, first, second).mean()
        negative = self.energy(made, made_first, made_second).mean()
        return Contrast(positive, negative, torch.cat([made, made_second], 1), error)

    def forward(self, *inputs: Tensor) -> Seen:
        rows = _flat(inputs[0])
        first, second = self.mean_field(rows)
        again = torch.sigmoid(F.linear(first, self.lower.t()) + self.visible_bias)
        other = _shuffled(rows)
        return Seen(rows, again, self._bound(rows, first, second), self._bound(other, *self.mean_field(other)))

    def _bound(self, rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The variational free energy: what mean field makes of it."""
        return self.energy(rows, first, second) - sum(
            (_entropy(units) for units in (first, second)), rows.new_zeros(())
        )


def _entropy(units: Tensor) -> Tensor:
    return -(torch.xlogy(units, units) + torch.xlogy(1 - units, 1 - units)).sum(1)


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(1).float()


def _shuffled(rows: Tensor) -> Tensor:
    """Rows whose numbers come from other rows: column by column, moved on by different amounts."""
    places = torch.arange(len(rows), device=rows.device)[:, None]
    moved = (places + 1 + torch.arange(rows.shape[1], device=rows.device)[None, :]) % max(1, len(rows))
    return rows.gather(0, moved)


def rbm() -> nn.Module:
    """64 visible and 64 hidden units, for digits of 8 × 8."""
    return RBM(64, 64)


def gaussian_rbm() -> nn.Module:
    """64 real and 64 hidden units, for digits of 8 × 8."""
    return RBM(64, 64, gaussian=True)


def crbm() -> nn.Module:
    """64 visible and 64 hidden units under a condition of one number."""
    return RBM(64, 64, condition=1)


def dbn() -> nn.Module:
    """Three layers of hidden units, for digits of 8 × 8."""
    return DBN((64, 64, 64, 32))


def dbm() -> nn.Module:
    """Two layers of hidden units, for digits of 8 × 8."""
    return DBM(64, 64, 32)


def dbn_classifier() -> nn.Module:
    """The feed-forward network of `dbn`, for ten classes, from a random start."""
    return DBN((64, 64, 64, 32)).network(10)
