"""Contrastive divergence, energy models, auto-encoders, layers by hand, and optimizers that search along directions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.models.boltzmann import DBM, DBN, RBM, EnergyModel, free_energy_gap, reconstruction_error
from thinwire.models.codes import AutoEncoder, coding_error
from thinwire.models.layers import FeatureLayer
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.objectives import Objective


def _all_states(size: int) -> Tensor:
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=size)))


def test_the_free_energy_of_a_machine_is_what_summing_over_hidden_states_gives() -> None:
    torch.manual_seed(0)
    machine = RBM(4, 3)
    nn.init.normal_(machine.weight)
    nn.init.normal_(machine.visible_bias)
    nn.init.normal_(machine.hidden_bias)
    rows, hidden = _all_states(4), _all_states(3)
    energy = (
        -(rows @ machine.weight.t() @ hidden.t())
        - (rows @ machine.visible_bias)[:, None]
        - hidden @ machine.hidden_bias
    )
    wanted = -torch.logsumexp(-energy, 1)
    assert machine(rows).energy.tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_with_many_gibbs_steps_the_gradient_is_that_of_the_likelihood() -> None:
    torch.manual_seed(0)
    machine = RBM(4, 3)
    with torch.no_grad():
        machine.weight.normal_(0, 0.5)
    rows = torch.tensor([[1.0, 0, 1, 0]]).repeat(20000, 1)
    found = machine.contrast([rows], stage=0, k=30, chain=None)
    (found.positive - found.negative).backward()  # type: ignore[no-untyped-call]
    estimated = machine.weight.grad
    machine.zero_grad()
    states = _all_states(4)
    likelihood = machine(rows[:1]).energy.mean() + torch.logsumexp(-machine(states).energy, 0)
    likelihood.backward()  # type: ignore[no-untyped-call]
    assert machine.weight.grad is not None
    assert estimated is not None
    assert (estimated - machine.weight.grad).abs().max() < 0.02


@pytest.mark.parametrize(
    "machine",
    [
        RBM(6, 4),
        RBM(6, 4, gaussian=True),
        DBM(6, 5, 4),
        DBN((6, 5, 4)),
        DBM(6, 4),
        DBM(6, 5, 4, 3),
        DBM((6, 5, 4, 3, 2), pretrain=True),
    ],
)
def test_every_energy_model_contrasts_and_sees(machine: EnergyModel) -> None:
    rows = torch.rand(8, 2, 3)
    for stage in range(machine.stages):
        found = machine.contrast([rows], stage=stage, k=2, chain=None)
        again = machine.contrast([rows], stage=stage, k=1, chain=found.chain)
        assert again.chain.shape == found.chain.shape
        machine.zero_grad()
        (found.positive - found.negative).backward()  # type: ignore[no-untyped-call]
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in machine.parameters())
    seen = machine(rows)
    assert reconstruction_error(seen).shape == free_energy_gap(seen).shape == (8,)


def _deep(*sizes: int, spread: float = 1.0, **given: Any) -> DBM:
    torch.manual_seed(1)
    machine = DBM(*sizes, **given)
    with torch.no_grad():
        for parameter in machine.parameters():
            parameter.normal_(0, spread)
    return machine


@pytest.mark.parametrize("sizes", [(3, 2), (3, 2, 2), (3, 2, 2, 2), (2, 2, 2, 2, 2)])
def test_samples_of_a_deep_machine_are_distributed_as_its_energy_says(sizes: tuple[int, ...]) -> None:
    machine = _deep(*sizes)
    states = _all_states(sum(sizes))
    layers = torch.split(states, list(sizes), 1)
    by_hand = -sum(
        (low[:, None, :] * weight[None] * high[:, :, None]).sum((1, 2))
        for weight, low, high in zip(machine.weights, layers[:-1], layers[1:], strict=True)
    ) - sum((layer * bias).sum(1) for layer, bias in zip(layers, machine.biases, strict=True))
    energy = machine.energy(*layers)
    torch.testing.assert_close(energy, by_hand)
    likely = torch.softmax(-energy, 0) @ states
    begin = [torch.zeros(20_000, size) for size in sizes]
    made = torch.cat(machine.gibbs(begin, 60), 1)
    assert (made.mean(0) - likely).abs().max() < 0.02


def test_a_machine_of_one_hidden_layer_follows_the_likelihood_s_gradient() -> None:
    machine = _deep(4, 3, spread=0.5)
    rows = torch.tensor([[1.0, 0, 1, 0]])
    found = machine.contrast([rows.repeat(20_000, 1)], stage=0, k=30, chain=None)
    (found.positive - found.negative).backward()  # type: ignore[no-untyped-call]
    estimated = [p.grad.clone() for p in machine.parameters() if p.grad is not None]
    machine.zero_grad()
    hidden = _all_states(3)

    def free(row: Tensor) -> Tensor:
        return -torch.logsumexp(-machine.energy(row.expand(8, -1), hidden), 0)

    every = torch.stack([free(row) for row in _all_states(4)])
    (free(rows[0]) + torch.logsumexp(-every, 0)).backward()  # type: ignore[no-untyped-call]
    for one, parameter in zip(estimated, machine.parameters(), strict=True):
        assert parameter.grad is not None
        assert (one - parameter.grad).abs().max() < 0.02


def test_pretraining_learns_layers_one_by_one_and_then_all_together() -> None:
    machine = _deep(6, 5, 4, 3, spread=0.1, pretrain=True)
    assert machine.stages == 4
    spec = TrainSpec(
        loss=reconstruction_error,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        algorithm=tw.ContrastiveDivergence(stage_steps=2, persistent=True),
    )
    replica = TorchReplica(machine, spec)
    batch = SimpleNamespace(inputs=(torch.rand(8, 6),), label=None, weight=None)
    moved = []
    for _ in range(8):
        before = [weight.detach().clone() for weight in machine.weights]
        replica.gradient(batch)
        replica.update()
        moved.append([not torch.equal(a, b) for a, b in zip(before, machine.weights, strict=True)])
    each = [[number == stage for number in range(3)] for stage in range(3)]
    assert moved == [row for row in (*each, [True] * 3) for _ in range(2)]


def test_a_deep_machine_of_three_layers_learns_digits_layer_by_layer_and_then_as_one() -> None:
    result = tw.fit(
        lambda: DBM(64, 48, 32, 16, pretrain=True),
        "digits",
        inputs=["pixels"],
        algorithm=tw.ContrastiveDivergence(k=2, persistent=True, stage_steps=100),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 if step < 300 else 0.1),
        scheduler_every="step",
        strategy=tw.SparkNet(period=10),
        cluster=tw.Simulated(workers=2, step_s=0.01),
        steps=400,
        batch_size=20,
        validation=0.1,
        progress=False,
    )
    gaps = [row["val_free_energy_gap"] for row in result.history]
    alone = max(number for number, row in enumerate(result.history) if row["steps"] <= 300)
    assert gaps[0] > -0.2
    assert gaps[-1] < gaps[alone] < -0.4
    assert result.history[-1]["val_loss"] < result.history[alone]["val_loss"] < result.history[0]["val_loss"]
    assert isinstance(result.model, DBM)
    assert result.model.network(10)(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_machine_without_hidden_units_is_refused() -> None:
    for sizes in ((64,), (64, 0)):
        with pytest.raises(ConfigError, match=r"is no machine: give the numbers of a row and the units"):
            DBM(*sizes)
    batch = SimpleNamespace(inputs=(torch.rand(2, 3),), label=None, weight=None)
    with pytest.raises(ConfigError, match="has 4 stages; say how long"):
        tw.ContrastiveDivergence().loss(DBM(3, 2, 2, 2, pretrain=True), batch, Objective("mse"), {"steps": 0})


def test_a_stage_moves_only_its_own_machine() -> None:
    net = DBN((6, 5, 4))
    spec = TrainSpec(
        loss=reconstruction_error,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        algorithm=tw.ContrastiveDivergence(stage_steps=2),
    )
    replica = TorchReplica(net, spec)
    batch = SimpleNamespace(inputs=(torch.rand(8, 6),), label=None, weight=None)
    moved = []
    for _ in range(4):
        before = [m.weight.detach().clone() for m in net.machines]
        replica.gradient(batch)
        replica.update()
        moved.append([not torch.equal(a, m.weight) for a, m in zip(before, net.machines, strict=True)])
    assert moved == [[True, False], [True, False], [False, True], [False, True]]


def test_a_condition_shifts_what_a_machine_expects() -> None:
    machine = RBM(3, 2, condition=1)
    assert machine.visible_shift is not None
    with torch.no_grad():
        machine.visible_shift.weight.fill_(50.0)
    rows = torch.rand(4, 3)
    assert machine(rows, torch.ones(4)).again.min() > 0.99
    with pytest.raises(ConfigError, match="takes two inputs"):
        machine(rows)


def test_persistent_chains_go_on_and_are_part_of_the_state() -> None:
    spec = TrainSpec(
        loss=reconstruction_error,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        algorithm=tw.ContrastiveDivergence(persistent=True),
    )
    one, two = TorchReplica(RBM(6, 4), spec), TorchReplica(RBM(6, 4), spec)
    batches = [SimpleNamespace(inputs=(torch.rand(8, 6),), label=None, weight=None) for _ in range(4)]
    for batch in batches[:2]:
        one.gradient(batch)
        one.update()
    two.load(one.tree())
    state = torch.get_rng_state()
    for replica in (one, two):
        torch.set_rng_state(state)
        for batch in batches[2:]:
            replica.gradient(batch)
            replica.update()
    assert torch.equal(one.vector, two.vector)


@pytest.mark.processes  # what forks workers starts before the data is read
def test_algorithms_refuse_what_they_cannot_do() -> None:
    algorithm = tw.ContrastiveDivergence()
    batch = SimpleNamespace(inputs=(torch.rand(2, 3),), label=None, weight=None)
    with pytest.raises(ConfigError, match="Linear has no energy to contrast"):
        algorithm.loss(nn.Linear(3, 2), batch, Objective("mse"), {"steps": 0})
    with pytest.raises(ConfigError, match="has 2 stages; say how long"):
        algorithm.loss(DBN((3, 2, 2)), batch, Objective("mse"), {"steps": 0})
    with pytest.raises(ConfigError, match="k = 0 is too small"):
        tw.ContrastiveDivergence(k=0)
    with pytest.raises(ConfigError, match="a placement spreads back-propagation"):
        tw.fit(
            "rbm", "digits", algorithm=algorithm, placement=tw.TensorParallel(group_size=2), cluster=tw.Local(workers=2)
        )
    with pytest.raises(ConfigError, match=r"algorithm\.name = 'cd' is not known"):
        tw.fit("rbm", "digits", algorithm="cd", cluster=tw.Local(workers=1))


@pytest.mark.parametrize(
    "strategy",
    [
        tw.Relay(),
        tw.EASGD(period=5),
        *(pytest.param(each, marks=pytest.mark.long) for each in (tw.SparkNet(period=10), tw.MPCA())),
    ],
)
def test_a_machine_learns_under_any_strategy(strategy: tw.Strategy) -> None:
    result = tw.fit(
        "rbm", "digits", inputs=["pixels"], algorithm=tw.ContrastiveDivergence(), strategy=strategy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), epochs=16, batch_size=20, validation=0.1,
        evaluate_every=80, cluster=tw.Local(workers=2, processes=False), progress=False,
    )  # fmt: skip
    first, last = result.history[0], result.history[-1]
    assert last["val_loss"] < 0.8 * first["val_loss"]
    assert last["val_free_energy_gap"] < first["val_free_energy_gap"] - 1


def test_an_auto_encoder_asks_for_sparse_codes_and_hides_numbers_in_training_only() -> None:
    torch.manual_seed(0)
    rows = torch.rand(64, 6)
    sparse = AutoEncoder(6, 4, sparsity=0.05, sparsity_weight=1.0)
    optimizer = torch.optim.Adam(sparse.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        coding_error(sparse(rows)).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert sparse(rows).code.mean() < 0.15
    noisy = AutoEncoder(6, 4, noise=0.5, tied=False)
    assert not torch.equal(noisy(rows).code, noisy(rows).code)
    noisy.eval()
    assert torch.equal(noisy(rows).code, noisy(rows).code)


class Affine(FeatureLayer):
    """A linear layer with its gradient by hand."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def compute_feature(self, *inputs: Tensor) -> Tensor:
        return inputs[0] @ self.weight.t() + self.bias

    def compute_gradient(
        self, gradient: Tensor, inputs: Sequence[Tensor], feature: Tensor
    ) -> tuple[Sequence[Tensor | None], Mapping[str, Tensor]]:
        return [gradient @ self.weight], {"weight": gradient.t() @ inputs[0], "bias": gradient.sum(0)}


def test_a_layer_with_its_gradient_by_hand_learns_as_torchs_own() -> None:
    torch.manual_seed(0)
    mine, theirs = Affine(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(7, 5, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    mine(x).square().sum().backward()
    theirs(y).square().sum().backward()
    for a, b in ((mine.weight.grad, theirs.weight.grad), (mine.bias.grad, theirs.bias.grad), (x.grad, y.grad)):
        assert a is not None
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def _valley(optimizer: Any, parameter: nn.Parameter, steps: int) -> float:
    """Rosenbrock's function after some steps."""

    def closure() -> float:
        optimizer.zero_grad()
        x, y = parameter
        loss = (1 - x) ** 2 + 100 * (y - x * x) ** 2
        loss.backward()
        return float(loss.detach())

    for _ in range(steps):
        optimizer.step(closure)
    return closure()


def test_conjugate_gradients_find_their_way_through_a_bent_valley() -> None:
    parameter = nn.Parameter(torch.tensor([-1.2, 1.0]))
    assert _valley(tw.ConjugateGradient([parameter], lr=1e-3), parameter, 100) < 1e-3
    plain = nn.Parameter(torch.tensor([-1.2, 1.0]))
    assert _valley(torch.optim.SGD([plain], lr=1e-3), plain, 800) > 0.05


def test_conjugate_gradients_begin_anew_where_an_exchange_moved_the_parameters() -> None:
    parameter = nn.Parameter(torch.tensor([-1.2, 1.0]))
    optimizer = tw.ConjugateGradient([parameter], lr=1e-3)
    _valley(optimizer, parameter, 3)
    with torch.no_grad():
        parameter.add_(0.1)
    fresh = nn.Parameter(parameter.detach().clone())
    _valley(optimizer, parameter, 1)
    other = tw.ConjugateGradient([fresh], lr=1e-3)
    _valley(other, fresh, 1)
    assert torch.equal(parameter, fresh)


@pytest.mark.parametrize("optimizer", ["conjugate_gradient", "lbfgs"])
def test_searching_optimizers_train_with_an_exchange_and_resume(optimizer: str, tmp_path: Any) -> None:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": optimizer if optimizer == "conjugate_gradient" else _lbfgs,
        "strategy": tw.SparkNet(period=2),
        "batch_size": 256,
        "validation": 0.1,
        "cluster": tw.Local(workers=2, processes=False),
        "progress": False,
    }
    result = tw.fit("mlp", "digits", epochs=6, out=str(tmp_path), **settings)
    assert result.summary["val_accuracy"] > 0.85
    more = tw.fit("mlp", "digits", epochs=8, resume=str(tmp_path), **settings)
    assert more.summary["steps"] > result.summary["steps"]
    with pytest.raises(ConfigError, match="a strategy that exchanges parameters"):
        tw.fit("mlp", "digits", epochs=1, **settings | {"strategy": tw.ParameterTable(), "optimizer": optimizer})


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
