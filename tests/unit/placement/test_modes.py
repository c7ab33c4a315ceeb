"""What a network does in training only is not done in evaluation, however it is placed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.placement import Crew, TensorParallel
from thinwire.placement.build import build, switched
from thinwire.planning import graph_of


class Functional(nn.Module):
    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.inner, self.fixed = nn.Linear(16, 16), fixed

    def forward(self, x: Tensor) -> Tensor:
        training = True if self.fixed else self.training
        return nn.functional.dropout(self.inner(x), p=0.9, training=training)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found if self.training else found.softmax(1)


def placed(network: nn.Module) -> nn.Module:
    graph = graph_of(network, (16,))
    ways = TensorParallel(group_size=1).ways(graph, 4)
    return build(graph, ways, Crew(0, 1), torch.Tensor.detach, switched(network)).module


def test_functional_dropout_is_off_in_evaluation() -> None:
    module, x = placed(Functional()), torch.randn(4, 16)
    assert (module.train()(x) == 0).any()
    assert not (module.eval()(x) == 0).any()


def test_dropout_that_is_always_on_stays_on() -> None:
    module = placed(Functional(fixed=True))
    assert (module.eval()(torch.randn(4, 16)) == 0).any()


def test_another_network_in_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in evaluation.*nn\.Dropout"):
        switched(Branching())
