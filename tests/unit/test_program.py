"""A network as a document of operations: what can be written as one, and what it computes."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load, save
from torch import nn

from thinwire.errors import CheckpointError, DataError
from thinwire.models import ZOO
from thinwire.models.program import ROWS, Program, Unexportable, exported


def rows_of(*shape: int, high: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if high:
        return torch.randint(0, high, (ROWS, *shape), generator=generator)
    return torch.randn(ROWS, *shape, generator=generator)


def loaded(data: bytes, module: nn.Module) -> Program:
    """The program in another process: with weights as they are stored."""
    program = Program.read(data)
    weights = load(save({name: value.contiguous().clone() for name, value in module.state_dict().items()}))
    program.check_weights(weights)
    program.load_state_dict(weights, assign=True)
    return program


def document(data: bytes) -> Any:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size])


def packed(document: Any, beside: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + beside


def same(data: bytes, module: nn.Module, *examples: torch.Tensor) -> None:
    """The program gives the network's numbers for many rows, for few, and for one."""
    program, network = loaded(data, module), copy.deepcopy(module).eval()
    for count in (1, 2, 5, 40):
        given = [torch.cat([x] * 6)[:count] for x in examples]
        with torch.no_grad():
            torch.testing.assert_close(program(*given), network(*given), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0).mean(1))


class Causal(nn.Module):
    """Attention as it is written today, with a mask that is made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.mix(x) * torch.ones(24)).chunk(3, dim=-1)
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True) * self.scale).amax(1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cells: Any = kind(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Two(nn.Module):
    """Two inputs, one of them a number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Embedding(9, 3)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return torch.where(kind[:, None] > 3, self.left(x), self.right(kind)).squeeze(-1)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).exp().clamp(max=5.0) / x.shape[-1]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.GELU(), nn.Conv1d(8, 8, 3, groups=8),
            nn.BatchNorm1d(8), nn.SiLU(), nn.InstanceNorm1d(8), nn.AdaptiveAvgPool1d(3), nn.Flatten(),
            nn.LayerNorm(24), nn.Dropout(0.5), nn.Linear(24, 2), nn.LogSoftmax(1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


NETWORKS: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (rows_of(4),)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)), (rows_of(4),)),
    "attention": (Attention, (rows_of(10, high=50),)),
    "causal": (Causal, (rows_of(6, 8),)),
    "lstm": (lambda: Recurrent(nn.LSTM), (rows_of(5, 6),)),
    "gru": (lambda: Recurrent(nn.GRU), (rows_of(5, 6),)),
    "two inputs": (Two, (rows_of(4), rows_of(high=9))),
    "regression": (Regression, (rows_of(4),)),
    "norms": (Norms, (rows_of(3, 12),)),
    "upsampled": (
        lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.ConvTranspose2d(2, 3, 2), nn.MaxPool2d(3), nn.Flatten()),
        (rows_of(2, 5, 5),),
    ),
    "cnn8": (ZOO["cnn8"], (rows_of(1, 8, 8),)),
    "lenet": (ZOO["lenet"], (rows_of(1, 28, 28),)),
    "resnet20": (ZOO["resnet20"], (rows_of(3, 32, 32),)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_computes_what_the_network_computes(name: str) -> None:
    torch.manual_seed(1)
    made, examples = NETWORKS[name]
    module = made()
    with torch.no_grad():
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.25)  # statistics that are not as they began
    same(exported(module, examples), module, *examples)


def test_the_document_holds_no_weights() -> None:
    data = exported(nn.Linear(100, 100), [rows_of(100)])
    assert len(data) < 2000
    assert document(data)["constants"] == []


def test_a_program_has_the_network_s_names_and_can_be_trained() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    program = loaded(exported(module, [rows_of(4)]), module)
    assert list(program.state_dict()) == list(module.state_dict())
    assert {name for name, _ in program.named_parameters()} == {name for name, _ in module.named_parameters()}
    before = program.state_dict()["0.weight"].clone()
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    F.cross_entropy(program(rows_of(4)), torch.arange(ROWS) % 3).backward()
    optimizer.step()
    assert not torch.equal(before, program.state_dict()["0.weight"])


def test_a_program_is_copied_pickled_and_exported_again() -> None:
    module = Causal()
    program = loaded(exported(module, [rows_of(6, 8)]), module)
    x = rows_of(6, 8)
    for again in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert torch.equal(again(x), program(x))
    same(exported(program, [x]), program, x)


def test_tied_parameters_and_those_that_nothing_uses_are_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(7, 7)
            self.outer.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x))

    module = Tied()
    same(exported(module, [rows_of(4)]), module, rows_of(4))
    assert list(loaded(exported(module, [rows_of(4)]), module).state_dict()) == list(module.state_dict())


def test_a_transform_of_tensor_operations_becomes_a_part_of_the_program() -> None:
    module, x, y = nn.Linear(5, 2), rows_of(4).double() * 100, rows_of(high=9)

    def scaled(columns: dict[str, Any]) -> dict[str, Any]:
        columns["x"] = torch.cat([columns["x"] / 100, columns["y"][:, None]], dim=1)
        return columns

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = module

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    network = Network()
    program = loaded(exported(network, [x, y], names=["x", "y"], transform=scaled), network)
    assert program.takes_columns
    given = scaled({"x": x, "y": y})
    torch.testing.assert_close(program(x, y), network(given["x"].float(), given["y"]))


def test_a_transform_that_makes_arrays_is_no_part_of_one() -> None:
    def numbers(columns: dict[str, Any]) -> dict[str, Any]:
        return {"x": columns["x"].numpy() * 2}

    with pytest.raises(Unexportable):
        exported(nn.Linear(4, 2), [rows_of(4)], names=["x"], transform=numbers)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=True)


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"a": x, "b": x + 1}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class OfOneSize(nn.Module):
    """Takes batches of one size only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(ROWS, 4)


class Chosen(nn.Module):
    """How much it gives depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0]


class Decomposed(nn.Module):
    """An operation that is none of a program's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x.reshape(-1, 2, 2))


class Summed(nn.Module):
    """Its output has no dimension of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


WITHOUT = (Branching, Random, Dropping, Several, Counting, OfOneSize, Chosen, Decomposed, Summed)


@pytest.mark.parametrize("kind", WITHOUT, ids=lambda kind: kind.__name__)
def test_what_no_program_can_say_is_told_and_nothing_is_written(kind: type[nn.Module]) -> None:
    with pytest.raises(Unexportable) as said:
        exported(kind(), [rows_of(4)])
    assert 10 < len(str(said.value)) < 600


def test_columns_of_another_form_are_refused_with_both_forms() -> None:
    module = nn.Linear(4, 2)
    program = loaded(exported(module, [rows_of(4)]), module)
    with pytest.raises(DataError, match=r"float32 in the shape \(5,\) a row; it takes float32 in the shape \(4,\)"):
        program(torch.zeros(3, 5))
    with pytest.raises(DataError, match="takes 1 columns and was given 2"):
        program(torch.zeros(3, 4), torch.zeros(3, 4))
    torch.testing.assert_close(program(torch.ones(3, 4, dtype=torch.int64)), program(torch.ones(3, 4)))


def test_weights_of_another_network_are_refused_by_name() -> None:
    module = nn.Linear(4, 2)
    program = Program.read(exported(module, [rows_of(4)]))
    for wrong, told in (
        (nn.Linear(5, 2), r"'weight'.*\(2, 5\).*\(2, 4\)"),
        (nn.Linear(4, 2, bias=False), "'bias' the weights hold nothing"),
        (nn.Linear(4, 2).double(), "float64"),
        (nn.Sequential(module), "'0.bias'"),
    ):
        with pytest.raises(CheckpointError, match=told):
            program.check_weights(wrong.state_dict())
