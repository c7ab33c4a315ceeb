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
    """A deep Boltzmann machine of any depth (Salakhutdinov and Hinton 2009), binary throughout.

    ::

        E(h_0 … h_L) = − Σ_l a_l·h_l − Σ_l h_l·W_l·h_{l−1}          h_0 the rows

    Rows' hidden units are found by mean-field steps; made-up rows go on from chain to chain.

    Args:
        visible: numbers of a row; or all sizes in one sequence, as of a DBN.
        hidden: units of every hidden layer, one or more.
        steps: mean-field steps.
        pretrain: whether layers are learnt one after the other first, as machines of their own: a stage for each, and
            one for all together. `ContrastiveDivergence(stage_steps=…)` says how long each is learnt.
    """

    def __init__(self, visible: int | Sequence[int], *hidden: int, steps: int = 10, pretrain: bool = False) -> None:
        super().__init__()
        sizes = (visible, *hidden) if isinstance(visible, int) else (*visible, *hidden)
        if len(sizes) < 2 or any(size < 1 for size in sizes):
            raise ConfigError(
                f"DBM{sizes} is no machine: give the numbers of a row and the units of one hidden layer or more, as in "
                "DBM(64, 64, 32)"
            )
        self.steps, self.sizes = steps, tuple(sizes)
        self.weights = nn.ParameterList(torch.randn(high, low) * 0.01 for low, high in itertools.pairwise(self.sizes))
        self.biases = nn.ParameterList(torch.zeros(size) for size in self.sizes)
        self.stages = len(self.weights) + 1 if pretrain and len(self.weights) > 1 else 1

    def _drive(self, layer: int, units: Sequence[Tensor]) -> Tensor:
        """What a layer is driven by, from the layers below and above it."""
        found: Tensor = self.biases[layer].expand(len(units[0]), -1)
        if layer:
            found = found + F.linear(units[layer - 1], self.weights[layer - 1])
        if layer + 1 < len(self.sizes):
            found = found + F.linear(units[layer + 1], self.weights[layer].t())
        return found

    def _upward(self, rows: Tensor, top: int) -> list[Tensor]:
        """Rows and the hidden layers up to one, each from the layer below as if the layer above said the same."""
        units = [rows]
        for layer in range(1, top + 1):
            twice = 2.0 if layer + 1 < len(self.sizes) else 1.0
            units.append(torch.sigmoid(twice * F.linear(units[-1], self.weights[layer - 1]) + self.biases[layer]))
        return units

    @torch.no_grad()
    def mean_field(self, rows: Tensor) -> list[Tensor]:
        """How likely the units of all hidden layers are on, given rows."""
        units = self._upward(rows, len(self.weights))
        for _ in range(self.steps):
            for layer in range(1, len(self.sizes)):
                units[layer] = torch.sigmoid(self._drive(layer, units))
        return units[1:]

    def energy(self, rows: Tensor, *hidden: Tensor) -> Tensor:
        """Of rows with their hidden units, layer by layer."""
        units = (rows, *hidden)
        found = sum((each @ bias for each, bias in zip(units, self.biases, strict=True)), rows.new_zeros(len(rows)))
        for weight, (low, high) in zip(self.weights, itertools.pairwise(units), strict=True):
            found = found + (F.linear(low, weight) * high).sum(1)
        return -found

    @torch.no_grad()
    def gibbs(self, units: Sequence[Tensor], k: int) -> list[Tensor]:
        """All layers after k steps: the odd ones given the even ones, and then the even ones given those."""
        made, count = list(units), len(self.sizes)
        for _ in range(k):
            for layer in (*range(1, count, 2), *range(2, count, 2), 0):
                made[layer] = torch.bernoulli(torch.sigmoid(self._drive(layer, made)))
        return made

    def contrast(self, inputs: Sequence[Tensor], *, stage: int, k: int, chain: Tensor | None) -> Contrast:
        rows = _flat(inputs[0])
        if stage + 1 < self.stages:
            return self._alone(rows, stage, k, chain)
        hidden = self.mean_field(rows)
        even = [size if number % 2 == 0 else 0 for number, size in enumerate(self.sizes)]
        if chain is None:
            units = [torch.bernoulli(each.clamp(0, 1)) for each in (rows, *hidden)]
        else:
            pieces = iter(torch.split(chain, [size for size in even if size], 1))
            units = [
                next(pieces) if kept else chain.new_zeros(len(chain), size)
                for kept, size in zip(even, self.sizes, strict=True)
            ]
        made = self.gibbs(units, k)
        with torch.no_grad():
            error = (rows - self._again(hidden[0])).square().mean()
        return Contrast(self.energy(rows, *hidden).mean(), self.energy(*made).mean(), torch.cat(made[::2], 1), error)

    def _alone(self, rows: Tensor, stage: int, k: int, chain: Tensor | None) -> Contrast:
        """One layer learnt as a machine of its own, before all are learnt together.

        In the whole machine an inner layer is driven from below and from above. Alone, it counts what comes from its
        one side twice: upwards in all layers but the last, downwards in all but the first.
        """
        weight, low_bias, high_bias = self.weights[stage], self.biases[stage], self.biases[stage + 1]
        up = 2.0 if stage + 1 < len(self.weights) else 1.0
        down = 2.0 if stage else 1.0
        with torch.no_grad():
            low = self._upward(rows, stage)[-1]
            high = torch.sigmoid(up * F.linear(low, weight) + high_bias)
            made = low if chain is None else chain
            for _ in range(k):
                above = torch.bernoulli(torch.sigmoid(up * F.linear(made, weight) + high_bias))
                likely = torch.sigmoid(down * F.linear(above, weight.t()) + low_bias)
                made = torch.bernoulli(likely) if k > 1 else likely
            made_high = torch.sigmoid(up * F.linear(made, weight) + high_bias)
            error = (low - torch.sigmoid(down * F.linear(high, weight.t()) + low_bias)).square().mean()

        def energy(one: Tensor, other: Tensor) -> Tensor:
            found: Tensor = one @ low_bias + other @ high_bias + (F.linear(one, weight) * other).sum(1)
            return -found.mean()

        return Contrast(energy(low, high), energy(made, made_high), made, error)

    def _again(self, first: Tensor) -> Tensor:
        found: Tensor = torch.sigmoid(F.linear(first, self.weights[0].t()) + self.biases[0])
        return found

    def forward(self, *inputs: Tensor) -> Seen:
        rows = _flat(inputs[0])
        hidden, other = self.mean_field(rows), _shuffled(rows)
        return Seen(rows, self._again(hidden[0]), self._bound(rows, hidden), self._bound(other, self.mean_field(other)))

    def _bound(self, rows: Tensor, hidden: Sequence[Tensor]) -> Tensor:
        """The variational free energy: what mean field makes of it."""
        return self.energy(rows, *hidden) - sum((_entropy(units) for units in hidden), rows.new_zeros(()))

    def network(self, classes: int) -> nn.Sequential:
        """A feed-forward network that begins with these weights, and a new layer of classes."""
        layers: list[nn.Module] = [nn.Flatten()]
        for number, weight in enumerate(self.weights):
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            twice = 2.0 if number + 1 < len(self.weights) else 1.0
            with torch.no_grad():
                layer.weight.copy_(twice * weight)
                layer.bias.copy_(self.biases[number + 1])
            layers += [layer, nn.Sigmoid()]
        return nn.Sequential(*layers, nn.Linear(self.sizes[-1], classes))


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
