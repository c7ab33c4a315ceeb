"""The papers' networks: published sizes, sequences of any length, texts that are sampled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.models import ZOO
from thinwire.models.sequences import (
    IGNORED,
    CharacterModel,
    PeepholeLSTM,
    Recurrent,
    masked_cross_entropy,
    padded,
    sample,
)


@pytest.mark.parametrize(
    ("name", "count", "shape"),
    [
        ("resnet20", 269_722, (3, 32, 32)),  # He et al. 2015, Table 6: 0.27 M
        ("resnet110", 1_727_962, (3, 32, 32)),  # 1.7 M
        ("lenet", 431_080, (1, 28, 28)),
        ("three_convolutions", 120_298, (3, 32, 32)),
        ("fully_connected", 1_863_690, (1, 28, 28)),
    ],
)
def test_a_network_has_as_many_parameters_as_it_should(name: str, count: int, shape: tuple[int, ...]) -> None:
    network = ZOO[name]()
    assert sum(p.numel() for p in network.parameters()) == count
    assert network(torch.randn(2, *shape)).shape == (2, 10)


def test_resnet_110_has_as_many_layers() -> None:
    network = ZOO["resnet110"]()
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in network.modules()) == 110


@pytest.mark.parametrize("kind", ["rnn", "lstm", "peephole"])
def test_padding_changes_nothing_and_comes_out_as_zero(kind: str) -> None:
    torch.manual_seed(0)
    net = Recurrent(3, 5, 2, kind=kind)  # type: ignore[arg-type]
    long, short = torch.randn(1, 7, 3), torch.randn(1, 4, 3)
    both = torch.cat([long, torch.cat([short, torch.full((1, 3, 3), 9.0)], 1)])
    out = net(both, torch.tensor([7, 4]))
    assert torch.allclose(out[:1], net(long), atol=1e-6)
    assert torch.allclose(out[1:, :4], net(short), atol=1e-6)
    assert not out[1, 4:].any()


def test_without_peepholes_the_layer_is_an_lstm() -> None:
    torch.manual_seed(0)
    mine, theirs = PeepholeLSTM(3, 4), nn.LSTM(3, 4, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(mine.input.weight)
        theirs.weight_hh_l0.copy_(mine.recurrent.weight)
        theirs.bias_ih_l0.copy_(mine.input.bias)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 6, 3)
    assert torch.allclose(mine(x), theirs(x)[0], atol=1e-6)
    with torch.no_grad():
        mine.peepholes.fill_(0.5)
    assert not torch.allclose(mine(x), theirs(x)[0], atol=1e-3)


def test_the_loss_leaves_padding_out() -> None:
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([1])]
    labels, lengths = padded(sequences)
    assert labels.tolist() == [[1, 2, 3], [1, IGNORED, IGNORED]]
    assert lengths.tolist() == [3, 1]
    scores = torch.zeros(2, 4, 3)
    assert masked_cross_entropy(scores, labels).tolist() == pytest.approx([torch.tensor(4.0).log().item()] * 2)


def test_a_text_is_sampled_from_what_was_learnt() -> None:
    torch.manual_seed(0)
    model = CharacterModel(hidden=32, layers=1)
    text = torch.tensor([list(b"abcd" * 8)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(text[:, :-1]), text[:, 1:]).backward()
        optimizer.step()
    assert sample(model, "ab", 10) == "abcdabcdabcd"
    assert sample(model, "ab", 5, seed=3) == sample(model, "ab", 5, seed=3)
