"""A torch optimizer as a pure function: the same numbers as the optimizer itself, whole or in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.parameters import FlatParameters, Fragment
from thinwire.rules.optimizer import FlatOptimizer, Span, draws, hidden_by
from thinwire.strategies import Taken

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}
SIZE, STEPS = 40, 8


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pieces", [1, 4])
def test_it_takes_the_steps_that_the_optimizer_takes(name: str, pieces: int) -> None:
    factory = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(SIZE, generator=generator)
    plain = nn.Parameter(start.clone())
    optimizer = factory([plain])
    rule = FlatOptimizer(factory)
    models = list(start.chunk(pieces))
    states = [[torch.zeros_like(m) for _ in rule.names] for m in models]
    for steps in range(STEPS):
        gradient = torch.randn(SIZE, generator=generator)
        rate = 0.05 / (1 + steps)
        plain.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for index, part in enumerate(gradient.chunk(pieces)):
            models[index], states[index] = rule.step(models[index], states[index], part, steps, moving={"lr": rate})
        assert torch.allclose(torch.cat(models), plain, rtol=1e-6, atol=1e-7)


def test_its_arguments_stay_as_they_were() -> None:
    factory = OPTIMIZERS["momentum"]
    model, state, gradient = torch.ones(5), [torch.ones(5)], torch.ones(5)
    FlatOptimizer(factory).step(model, state, gradient, 3)
    assert all(torch.equal(v, torch.ones(5)) for v in (model, *state, gradient))


@pytest.mark.parametrize(("name", "keeps"), [("NAdam", "mu_product"), ("ASGD", "eta")])
def test_one_that_keeps_other_numbers_is_refused(name: str, keeps: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} keeps '{keeps}'"):
        _ = FlatOptimizer(lambda p: getattr(torch.optim, name)(p)).names


def flat(*sizes: int) -> FlatParameters:
    return FlatParameters(nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes]))


def test_spans_are_as_long_as_groups_absences_and_counts_let_them_be() -> None:
    parameters = flat(16, 16, 16, 16)
    first, second, third, last = parameters.tensors

    def factory(_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [first, second]}, {"params": [last], "lr": 0.2}], lr=0.1)

    rule = FlatOptimizer(factory, factory(None), parameters)
    assert third is parameters.tensors[2], "which the optimizer does not hold"
    assert rule.spans(Fragment(0, 64)) == [Span(Fragment(0, 32), 0, 0), Span(Fragment(48, 64), 1, 0)]
    assert rule.spans(Fragment(8, 50)) == [Span(Fragment(8, 32), 0, 0), Span(Fragment(48, 50), 1, 0)]
    assert rule.spans(Fragment(0, 64), {1, 3}) == [Span(Fragment(0, 16), 0, 0)]
    assert rule.spans(Fragment(0, 32), (), {1: 2}) == [Span(Fragment(0, 16), 0, 0), Span(Fragment(16, 32), 0, 2)]


def test_a_span_takes_the_settings_of_its_group() -> None:
    parameters = flat(16, 16)

    def factory(held: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": held[:1], "momentum": 0.9}, {"params": held[1:]}], lr=0.5)

    rule = FlatOptimizer(factory, factory(list(parameters.tensors)), parameters)
    assert rule.names == ("momentum_buffer",)
    ones, buffer = torch.ones(2), torch.full((2,), 4.0)
    model, (moved,) = rule.step(ones, [buffer], ones, 1, group=0)
    assert torch.allclose(torch.stack([model, moved]), torch.tensor([[1 - 0.5 * 4.6] * 2, [4.6] * 2]))
    model, (kept,) = rule.step(ones, [buffer], ones, 1, group=1, moving={"lr": 0.25})
    assert (model.tolist(), kept.tolist()) == ([0.75] * 2, [4.0] * 2)


def _normalised() -> Any:
    class Normalised(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            held = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for parameter in held:
                parameter.grad = parameter.grad / norm
            return super().step(closure)

    return Normalised


@pytest.mark.parametrize(
    ("factory", "elementwise", "tensorwise"),
    [
        *((factory, True, True) for factory in OPTIMIZERS.values()),
        (lambda p: torch.optim.NAdam(p), True, True),
        (lambda p: torch.optim.Adafactor(p), False, True),
        (lambda p: _normalised()(p, lr=0.1), False, False),
    ],
)
def test_what_an_optimizer_looks_at_together_is_known(factory: Any, elementwise: bool, tensorwise: bool) -> None:
    rule = FlatOptimizer(factory)
    assert (rule.is_elementwise, rule.is_tensorwise) == (elementwise, tensorwise)


def test_an_optimizer_of_matrices_steps_no_number_alone() -> None:
    assert not FlatOptimizer(
        lambda p: torch.optim.Muon(p, lr=0.1), torch.optim.Muon([_matrix()], lr=0.1)
    ).is_elementwise


def test_a_rule_makes_the_optimizer_that_it_is_of() -> None:
    (group,) = FlatOptimizer(OPTIMIZERS["momentum"])([_matrix()]).param_groups
    assert group["nesterov"]


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("name", "magnitudes"),
    [
        ("sgd", {}),
        ("momentum", {}),
        ("adam", {"exp_avg_sq": 2}),
        ("amsgrad", {"exp_avg_sq": 2, "max_exp_avg_sq": 2}),
        ("rmsprop", {"square_avg": 2}),
    ],
)
def test_magnitudes_of_gradients_are_told_from_what_has_a_sign(name: str, magnitudes: dict[str, float]) -> None:
    found = FlatOptimizer(OPTIMIZERS[name]).magnitudes
    assert found == pytest.approx(magnitudes)


def test_step_sizes_that_gradients_do_not_scale_are_no_magnitudes() -> None:
    assert FlatOptimizer(lambda p: torch.optim.Rprop(p)).magnitudes == {}


def test_one_that_cannot_step_by_itself_keeps_no_magnitudes_and_says_why_it_cannot_step_in_pieces() -> None:
    rule = FlatOptimizer(lambda p: torch.optim.LBFGS(p))
    assert rule.magnitudes == {}
    assert "LBFGS steps the numbers of a tensor together" in rule.why_not_in_pieces
    assert "keeps 'mu_product'" in FlatOptimizer(lambda p: torch.optim.NAdam(p)).why_not_in_pieces
    assert FlatOptimizer(OPTIMIZERS["adam"]).why_not_in_pieces == ""


def test_rates_by_parameter_are_no_rule_for_pieces() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    factory.on_workers_only = True  # type: ignore[attr-defined]
    assert "rates differ by parameter" in FlatOptimizer(factory).why_not_in_pieces


def test_several_steps_by_one_gradient_are_those_of_the_optimizer() -> None:
    parameters, factory = flat(16, 16), OPTIMIZERS["adamw"]
    rule = FlatOptimizer(factory, factory(list(parameters.tensors)), parameters)
    gradient = torch.linspace(-1, 1, 32)
    state = [parameters.vector.detach().clone(), *(torch.zeros(32) for _ in rule.names)]
    taken = Taken(Fragment(0, 32), rows=1.0, steps=3, before=0)
    found = rule.advance(state[0], state[1:], gradient, taken)
    optimizer = factory(list(parameters.tensors))
    for _ in range(3):
        parameters.scatter_gradients(gradient)
        optimizer.step()
    assert torch.equal(found[0], parameters.vector)
    half = rule.advance(
        state[0][8:24], [v[8:24] for v in state[1:]], gradient[8:24], replace(taken, fragment=Fragment(8, 24))
    )
    assert all(torch.equal(whole[8:24], part) for whole, part in zip(found, half, strict=True))


def test_parameters_without_a_gradient_stay_and_begin_later() -> None:
    parameters, factory = flat(16, 16), OPTIMIZERS["adam"]
    rule = FlatOptimizer(factory, factory(list(parameters.tensors)), parameters)
    state = [torch.zeros(32) for _ in rule.names]
    taken = Taken(Fragment(0, 32), rows=1.0, steps=2, before=0, absent=frozenset({1}))
    first = rule.advance(torch.ones(32), state, torch.ones(32), taken)
    assert torch.equal(first[0][16:], torch.ones(16))
    assert not torch.equal(first[0][:16], torch.ones(16))
    later = rule.advance(
        first[0], first[1:], torch.ones(32), replace(taken, before=2, absent=frozenset(), behind={1: 2})
    )
    assert torch.equal(later[0][16:], first[0][:16]), "as if these had been its first two steps"


def test_noise_makes_steps_shorter_where_they_are_divided_by_a_magnitude() -> None:
    moved = {}
    for name in ("adam", "sgd"):
        rule = FlatOptimizer(OPTIMIZERS[name])
        for noise in (1.0, 4.0):
            taken = Taken(Fragment(0, 8), rows=1.0, steps=1, before=0, noise=noise)
            moved[name, noise] = float(
                rule.advance(torch.zeros(8), [torch.zeros(8) for _ in rule.names], torch.ones(8), taken)[0][0]
            )
    assert moved["adam", 4.0] == pytest.approx(moved["adam", 1.0] / 2)
    assert moved["sgd", 4.0] == moved["sgd", 1.0]


def test_a_state_of_its_own_is_what_the_optimizer_would_have_made() -> None:
    factory = OPTIMIZERS["adam"]
    parameter = nn.Parameter(torch.ones(3, 2))
    rule = FlatOptimizer(factory, factory([parameter]), flat(6))
    found = rule.state_for(parameter, 0, 7)
    assert found["step"] == 7
    assert found["exp_avg"].shape == (3, 2)
    assert not found["exp_avg_sq"].any()


def test_where_a_parameter_begins_and_whose_it_is() -> None:
    parameters = flat(16, 32)
    rule = FlatOptimizer(OPTIMIZERS["sgd"], OPTIMIZERS["sgd"](list(parameters.tensors)), parameters)
    assert [rule.begins(number, Fragment(8, 24)) for number in (0, 1, 2)] == [False, True, False]
    assert rule.group_of(1) == 0


class Counting(torch.optim.SGD):
    """Keeps what it steps by outside of its state, in several forms."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps, self.sizes, self.seen = 0, torch.zeros(2), {"steps": [0]}

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Listing(Counting):
    """The same, in a mapping of lists alone."""

    def step(self, closure: Any = None) -> Any:
        self.seen["steps"].append(1)
        return torch.optim.SGD.step(self, closure)


class Wrapping(torch.optim.SGD):
    """Steps by another optimizer."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.inner = {"adam": torch.optim.Adam(parameters)}


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("not today")


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Counting, "keeps 'steps' outside its state"),
        (Listing, "keeps 'seen' outside its state"),
        (Wrapping, "'inner', inside it"),
        (Failing, ""),
        (OPTIMIZERS["adam"], ""),
    ],
    ids=lambda each: getattr(each, "__name__", "")[:8],
)
def test_what_an_optimizer_steps_by_outside_of_its_state_is_found(made: Any, why: str) -> None:
    found = hidden_by(FlatOptimizer(made))
    assert why in found
    assert bool(found) == bool(why)
    if why:
        assert found in FlatOptimizer(made).why_not_in_pieces


def test_an_optimizer_that_draws_random_numbers_is_told_from_one_that_does_not() -> None:
    assert draws(FlatOptimizer(lambda p: Noisy(p, lr=0.1)))
    assert not draws(FlatOptimizer(OPTIMIZERS["sgd"]))
