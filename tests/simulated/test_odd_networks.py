"""Networks that are unlike most: trained as plain torch trains them, or refused before a worker starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError

RANDOM = np.random.default_rng(0)
ROWS, STEPS = 120, 4
X = RANDOM.standard_normal((ROWS, 4)).astype("f4")
Y = RANDOM.integers(0, 3, ROWS)
LAYERED = {"placement": tw.Planned(group_size=2), "workers": 4}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fitted(model: Any, log: list[events.Event] | None = None, workers: int = 3, **arguments: Any) -> nn.Module:
    given: dict[str, Any] = {
        "strategy": tw.Synchronous(),
        "cluster": tw.Simulated(workers=workers, step_s=0.01),
        "batch_size": ROWS,
        "steps": STEPS,
        "optimizer": momentum,
        "progress": False,
        "callbacks": [] if log is None else [log.append],
    }
    return tw.fit(model, {"x": X, "label": Y}, **(given | arguments)).model


def plain(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    module = model()
    optimizer = momentum(module.parameters())
    for _step in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(module(torch.from_numpy(X.copy())), torch.from_numpy(Y)).backward()
        optimizer.step()
    return module


def equal(model: Callable[[], nn.Module], given: nn.Module | None = None, **arguments: Any) -> None:
    found, wanted = fitted(given or model, **arguments).state_dict(), plain(model).state_dict()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3, msg=name)


def refused(model: Any, told: str, **arguments: Any) -> None:
    log: list[events.Event] = []
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        fitted(model, log, **arguments)
    assert not log, "refused before anything runs"


class Linear(nn.Module):
    """A layer; what differs is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Twice(nn.Module):
    """A layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = self.one
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.other(torch.tanh(self.one(x)))))
        return found


class Listed(nn.Module):
    """Parameters that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(4, 3), torch.zeros(3)])
        self.named = nn.ParameterDict({"scale": torch.ones(3)})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (x @ self.listed[0] + self.listed[1]) * self.named["scale"]
        return found


class Replaced(Linear):
    """A buffer that a forward pass puts another tensor in place of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x)


class Growing(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return super().forward(x)


class Writing(Linear):
    """It writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Hooked(Linear):
    """The gradient of its weight goes through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient / 2)


class HookedAfter(Linear):
    def __init__(self) -> None:
        super().__init__()

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        self.layer.weight.register_post_accumulate_grad_hook(halve)


class Outer(nn.Module):
    """A module of modules, one of which has a hook on what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Linear()
        self.inner.register_full_backward_hook(lambda module, gradients, outputs: (gradients[0] / 2,))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(torch.tanh(self.first(x)))
        return found


class Clamped(Linear):
    """A forward pass keeps its weights small."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class Renewed(Linear):
    """Its first pass makes another parameter."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scaled"):
            self.layer.weight = nn.Parameter(self.layer.weight.detach() * 2)
            self.scaled = True
        return super().forward(x)


class Sharing(nn.Module):
    """Two tensors in one place in memory."""

    def __init__(self, other: str) -> None:
        super().__init__()
        values = torch.randn(4, 3)
        self.first = nn.Parameter(values)
        if other == "parameter":
            self.other = nn.Parameter(values[1:2])
        elif other == "buffer":
            self.register_buffer("other", values[1:2])
        else:
            self.other = values[1:2]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first + self.other


class Halves(nn.Module):
    """Two parameters in one stretch of memory, of which no number is of both."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 6)
        self.even, self.odd = nn.Parameter(values[:, ::2]), nn.Parameter(values[:, 1::2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.even + torch.tanh(x) @ self.odd


class Repeated(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", [Twice, Replaced, Writing, Hooked, HookedAfter, Outer, Clamped, Halves, Listed])
def test_whole_replicas_train_an_odd_network_as_plain_torch_does(kind: Any) -> None:
    equal(kind)


@pytest.mark.parametrize("kind", [Twice, Writing, Halves, Listed])
def test_placed_replicas_train_an_odd_network_as_plain_torch_does(kind: Any) -> None:
    equal(kind, **LAYERED)


def test_a_layer_under_two_names_is_trained_on_after_an_evaluation() -> None:
    equal(Twice, workers=1, validation={"x": X[:30], "label": Y[:30]}, evaluate_every=1)


def test_a_layer_under_two_names_is_itself_again_after_a_call_under_other_values() -> None:
    from thinwire.replicas.calls import called_under

    module = Twice()
    mine = dict(module.named_parameters())
    with torch.no_grad():
        found = called_under(module, {name: torch.zeros_like(p) for name, p in mine.items()}, (torch.ones(2, 4),))
    assert not found.any()
    assert all(now is mine[name] for name, now in module.named_parameters())


def test_an_instance_that_keeps_a_tensor_which_it_computed_is_copied() -> None:
    torch.manual_seed(0)
    equal(normed, given=normed())


def test_a_function_that_gives_threads_one_module_is_refused() -> None:
    made = Linear()
    refused(lambda: made, "returns the same Linear each time, and 3 workers.*give the model itself")


def test_trying_a_row_leaves_a_module_that_a_function_returns_as_it_was() -> None:
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(ConfigError, match="scheduler fails"):
        fitted(lambda: made, workers=1, scheduler=lambda optimizer: 1 / 0)
    with pytest.raises(ConfigError, match=r"metrics\.wrong fails"):
        fitted(lambda: made, workers=1, validation=0.1, metrics={"wrong": lambda output, label: output.nothing})
    assert not made.training
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize("other", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("instance", [False, True], ids=["factory", "instance"])
def test_parameters_that_share_memory_are_refused(other: str, instance: bool) -> None:
    model = Sharing(other) if instance else lambda: Sharing(other)
    refused(model, f"{other} 'other' shares memory with parameter 'first'.*memory of its own")


def test_a_parameter_whose_numbers_are_one_in_memory_is_refused() -> None:
    refused(Repeated, r"parameter 'shift' of the shape \(3,\) repeats its numbers in memory")


@pytest.mark.parametrize("kind", [torch.float64, torch.complex64])
def test_a_parameter_of_a_type_that_workers_do_not_train_is_refused(kind: torch.dtype) -> None:
    refused(lambda: Linear().to(kind), rf"parameter 'layer.weight' is {kind}; trainable parameters are float32")


def test_a_lazy_parameter_is_refused() -> None:
    refused(lambda: nn.Sequential(nn.LazyLinear(3)), "parameter '0.weight' is lazy.* run one batch")


def test_a_narrow_parameter_is_refused_under_a_placement() -> None:
    refused(lambda: Linear().bfloat16(), "parameter 'layer.weight' is torch.bfloat16, and a placement", **LAYERED)


@pytest.mark.parametrize("kind", [Hooked, HookedAfter])
def test_a_hook_on_a_gradient_that_copies_lack_is_refused(kind: Any) -> None:
    refused(kind(), "parameter 'layer.weight' of Hooked.* has a hook on its gradient.*give a function")
    refused(kind, "has a hook on its gradient, and a placement gives.*tw.Whole", **LAYERED)


def test_a_hook_on_a_module_that_a_placement_looks_into_is_refused() -> None:
    refused(Outer, "Linear has a hook, and a placement calls the layers inside it", **LAYERED)


def test_a_buffer_whose_shape_changes_is_refused() -> None:
    refused(Growing, r"buffer 'seen' has the shape \(\d,\) after a forward pass, and had \(0,\)")


def test_a_network_that_replaces_its_parameter_is_refused() -> None:
    refused(Renewed, "a forward pass of Renewed makes parameter 'layer.weight', or replaces it")


@pytest.mark.parametrize(
    "where",
    [
        {"strategy": tw.ParameterTable(consistency="strict")},
        {"strategy": tw.Relay(sends="gradients"), "optimizer": "adam"},
        {"strategy": tw.Relay(), "optimizer": "adam"},
        LAYERED,
    ],
    ids=["table", "Relay with gradients", "Relay with Adam", "placement"],
)
def test_a_network_that_changes_weights_which_others_step_is_refused(where: dict[str, Any]) -> None:
    refused(Clamped, "a forward pass of Clamped changes the values of parameter 'layer.weight'", **where)


@pytest.mark.parametrize("where", [{}, LAYERED, {"strategy": tw.ParameterTable(consistency="strict")}])
def test_a_network_without_parameters_is_refused(where: dict[str, Any]) -> None:
    refused(lambda: nn.Sequential(nn.Flatten()), "the model Sequential has no parameter that can be trained", **where)
