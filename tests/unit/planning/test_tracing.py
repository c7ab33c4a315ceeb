"""What a plan and a placement can read of a network, and what they say of what they cannot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.models import ZOO
from thinwire.models.layers import FeatureLayer
from thinwire.models.sequences import PeepholeLSTM, Recurrent
from thinwire.placement import Crew, Pipeline, Planned, TensorParallel, Whole, refuse_unreadable
from thinwire.placement.build import build, switched
from thinwire.planning import Graph, graph_of, plan, profiled
from thinwire.planning.graph import graph_on
from thinwire.planning.planner import choices


def kinds(graph: Graph) -> dict[str, str]:
    return {layer.name: layer.kind for layer in graph.layers}


def placed(network: nn.Module, graph: Graph, inputs: int = 1) -> nn.Module:
    """The network as one member of a group of one has it, with every layer shared out that can be."""
    ways = TensorParallel(group_size=1).ways(graph, 4)
    return build(graph, ways, Crew(0, 1), torch.Tensor.detach, switched(network, inputs)).module


class Masked(nn.Module):
    """Optional arguments, keyword-only ones, and any others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0, **more: Any) -> Tensor:
        found: Tensor = self.inner(x) * scale
        return found if mask is None else found * mask


class Several(nn.Module):
    """As many inputs as are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, *columns: Tensor) -> Tensor:
        return sum((self.inner(x) for x in columns), torch.zeros(4))


class Inside(nn.Module):
    """A module with an optional argument, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = Masked(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(x, scale=3.0))
        return found


@pytest.mark.parametrize(
    ("network", "inputs"),
    [
        (Masked(), [(6,)]),
        (Masked(), [(6,), (4,)]),
        (Several(), [(6,)]),
        (Several(), [(6,), (6,), (6,)]),
        (Inside(), [(6,)]),
    ],
)
def test_arguments_that_no_column_goes_to_have_their_defaults(
    network: nn.Module, inputs: list[tuple[int, ...]]
) -> None:
    rows = [torch.randn(4, *shape) for shape in inputs]
    graph = graph_on(network, [x.to("meta") for x in rows])
    assert graph.parameters == sum(p.numel() for p in network.parameters())
    torch.testing.assert_close(placed(network, graph, len(rows))(*rows), network(*rows))


def test_inputs_that_the_network_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Masked takes 1 to 2 inputs \(x, mask\), and is given 3.*inputs="):
        graph_on(Masked(), [torch.empty(2, 6, device="meta")] * 3)

    class Named(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x * mask

    with pytest.raises(ConfigError, match=r"takes 'mask' by keyword only.*give it a default"):
        graph_of(Named(), (6,))


@pytest.mark.parametrize("name", ["char_rnn", "char_lstm", "char_lstm_peephole"])
def test_the_language_models_are_placed_as_they_are(name: str) -> None:
    network = ZOO[name]()
    graph = graph_of(network, (7,), torch.int64)
    assert graph.parameters == sum(p.numel() for p in network.parameters())
    x = torch.randint(0, 256, (4, 7))
    torch.testing.assert_close(placed(network, graph)(x), network(x))
    assert plan(graph, 2, 64).step_s > 0


@pytest.mark.parametrize("kind", ["lstm", "peephole"])
def test_sequences_with_their_lengths_are_placed_as_they_are(kind: Any) -> None:
    network = Recurrent(3, 5, kind=kind)
    x, lengths = torch.randn(4, 6, 3), torch.tensor([6, 1, 4, 2])
    graph = graph_on(network, [x.to("meta"), lengths.to("meta")])
    torch.testing.assert_close(placed(network, graph, 2)(x, lengths), network(x, lengths))
    assert (network(x, lengths)[1, 1:] == 0).all()
    assert (network(x, lengths)[0] != 0).any(1).all()


class Doubled(FeatureLayer):
    """A layer with a gradient by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def compute_feature(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * self.weight

    def compute_gradient(self, gradient: Tensor, inputs: Any, feature: Tensor) -> Any:
        return [gradient * self.weight], {"weight": (gradient * inputs[0]).sum(0)}


class Normed(nn.Module):
    """Layers of torch's own that take or give several values: attention, states, a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.register_buffer("places", torch.randn(32, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent, self.norm = nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(8)
        self.dropout, self.out = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embedding(x)
        x = x + self.places[: x.shape[1]]  # type: ignore[index]
        x, seen = self.attention(x, x, x, need_weights=True)
        found, (state, _) = self.recurrent(x)
        return {"scores": self.out(self.dropout(self.norm(found[:, -1]))), "state": state[0], "seen": seen}


class Gated(nn.Module):
    """Halves of one layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.inner(x).chunk(2, 1)
        found = value * torch.sigmoid(gate)
        return self.out(found), found


class Tied(nn.Module):
    """One matrix in two layers, and one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(torch.relu(self.body(self.embedding(x).mean(1)))))
        return found


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 4), Doubled(), nn.Linear(4, 2)), torch.randn(4, 6)),
        (Normed, torch.randint(0, 20, (4, 5))),
        (Gated, torch.randn(4, 6)),
        (Tied, torch.randint(0, 20, (4, 5))),
    ],
    ids=["by hand", "several values", "halves", "tied"],
)
def test_a_placed_network_gives_what_it_gives_alone(make: Callable[[], nn.Module], rows: Tensor) -> None:
    network = make().eval()
    graph = graph_on(network, [rows.to("meta")])
    assert graph.parameters == sum(p.numel() for p in network.parameters()), "each is counted once"
    torch.testing.assert_close(placed(network, graph).eval()(rows), network(rows))
    whole = {part.layer.name: part.placement for part in plan(graph, 2, 4).placed}
    assert set(whole) == {layer.name for layer in graph.layers}
    timed = profiled(graph, network, [rows], 2, repeats=1)
    assert sum(layer.seconds or 0.0 for layer in timed.layers) > 0


def test_what_two_layers_share_is_not_shared_out() -> None:
    """Each worker would change its own copy, and they would no longer be one."""
    with torch.device("meta"):
        unheld = Tied()
    for given in (Tied(), unheld):
        found = kinds(graph_of(given, (5,), torch.int64))
        assert {found[name] for name in ("embedding", "out", "body")} == {"rows"}


def test_halves_are_taken_of_whole_rows() -> None:
    graph = graph_of(Gated(), (6,))
    (inner,) = [layer for layer in graph.layers if layer.name == "inner"]
    assert "column" not in choices(inner, 2)


def test_a_layer_that_is_more_than_its_class_says_is_not_shared_out() -> None:
    hooked = nn.Sequential(nn.Linear(6, 6))
    hooked[0].register_forward_hook(lambda module, given, found: found / found.sum())
    assert kinds(graph_of(hooked, (6,)))["0"] == "rows"
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))
    graph = graph_of(normed, (6,))
    assert kinds(graph)["0"] == "rows"
    x = torch.randn(4, 6)
    torch.testing.assert_close(placed(normed, graph)(x), normed(x))


class Noted(nn.Module):
    """Constants made on the way, and a buffer that its state does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("hidden", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.hidden + torch.arange(6.0)


def test_reading_a_network_leaves_it_as_it_was() -> None:
    network = Noted()
    before, held = dict(vars(network)), list(network.state_dict())
    for _ in range(2):
        graph, off = graph_of(network, (6,)), switched(network)
    assert vars(network) == before
    parts = build(graph, TensorParallel(group_size=1).ways(graph, 4), Crew(0, 1), torch.Tensor.detach, off)
    names = {portion.name for portion, _ in (*parts.shares, *parts.copies)}
    assert names == set(held), "a state that is loaded again has nothing else in it"


# -- what is refused ----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for row in x:
            x = x + row
        return x


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        noise = self.draw()
        found: Tensor = self.inner(x) + noise
        return found


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        size = sum(p.square().sum() for p in self.parameters())
        found: Tensor = self.inner(x) + size
        return found


class Around(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), body)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (Branches(), "if x.sum() > 0:"),
        (Loops(), "for row in x:"),
        (Draws(lambda: torch.randn(6)), "found: Tensor = self.inner(x) + noise"),
        (Draws(random.random), "found: Tensor = self.inner(x) + noise"),
        (Draws(lambda: float(np.random.rand())), "found: Tensor = self.inner(x) + noise"),
        (Penalised(), "found: Tensor = self.inner(x) + size"),
    ],
    ids=["branch", "loop", "torch", "python", "numpy", "parameters"],
)
def test_what_cannot_be_read_is_refused_with_its_module_and_line(body: nn.Module, line: str) -> None:
    kind = type(body).__name__
    for network, where in ((Around(body), f"body.1 ({kind}) at {__file__}:"), (body, f"{kind} at {__file__}:")):
        with pytest.raises(ConfigError) as refused:
            refuse_unreadable(Planned(group_size=2), network, 0, 1)
        for part in (where, f"`{line}`", "as_one_layer = True", "placement=tw.Whole()"):
            assert part in str(refused.value)
    refuse_unreadable(Whole(), Around(body), 0, 1)


def test_a_module_that_says_so_is_placed_as_one_layer() -> None:
    class Opaque(Branches):
        as_one_layer = True

    network = Around(Opaque())
    graph = graph_of(network, (6,))
    assert kinds(graph)["body.1"] == "rows"
    x = torch.randn(4, 6)
    torch.testing.assert_close(placed(network, graph)(x), network(x))


def test_a_network_that_does_something_else_in_evaluation_is_refused_by_name() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(0.5 if self.training else 1.0)

    with pytest.raises(ConfigError, match=r"_tensor_constant0 in Scaled depends on the mode"):
        refuse_unreadable(Planned(group_size=2), Scaled(), 0, 1)


def test_a_pipeline_wants_one_value_at_its_end() -> None:
    with pytest.raises(ConfigError, match=r"Gated gives several values.*Planned"):
        refuse_unreadable(Pipeline(group_size=2), Gated, 0, 1)
    refuse_unreadable(Planned(group_size=2), Gated, 0, 1)


def test_looking_at_a_network_draws_nothing_from_the_program_s_generators() -> None:
    torch.manual_seed(1)
    refuse_unreadable(Planned(group_size=2), lambda: Around(PeepholeLSTM(6, 4)), 5, 1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
