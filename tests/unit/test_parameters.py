from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from thinwire.errors import ConfigError
from thinwire.parameters import ALIGN, GRAIN, Buffers, FlatParameters, fragments


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


@given(some.integers(0, 20_000), some.integers(1, 70))
def test_fragments_cover_every_element_once_in_order(size: int, count: int) -> None:
    pieces = fragments(size, count)
    assert len(pieces) == count
    assert pieces[0].start == 0
    assert pieces[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    assert all(p.size >= 0 for p in pieces)
    assert all(p.start % GRAIN == 0 or p.start == size for p in pieces)


@given(some.integers(1, 200_000), some.integers(1, 64))
def test_fragments_are_nearly_equal(size: int, count: int) -> None:
    sizes = [p.size for p in fragments(size, count)]
    assert max(sizes) - min(sizes) <= 2 * GRAIN or size < count * GRAIN


def test_fragments_need_a_count() -> None:
    with pytest.raises(ConfigError, match="fragments = 0"):
        fragments(10, 0)


def test_the_module_views_the_flat_vector() -> None:
    module = small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    flat = FlatParameters(module)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(offset % ALIGN == 0 for offset in flat.offsets)
    flat.vector.zero_()
    assert all(not p.any() for p in module.parameters())
    with torch.no_grad():
        module[0].bias.fill_(3.0)
    assert int((flat.vector == 3.0).sum()) == 7
    assert flat.names == tuple(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_an_optimizer_does_to_views_what_it_does_to_parameters(make: Any) -> None:
    plain, viewed = small(), small()
    flat = FlatParameters(viewed)
    first, second = make(plain.parameters()), make(viewed.parameters())
    for seed in range(5):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
        for module, optimizer in ((plain, first), (viewed, second)):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
    for own, (name, view) in zip(plain.parameters(), flat.named(flat.vector).items(), strict=True):
        assert torch.equal(own, view), name


def test_parameters_that_need_no_gradient_stay_out() -> None:
    module = small()
    module[0].weight.requires_grad_(False)
    before = module[0].weight.data_ptr()
    flat = FlatParameters(module)
    assert "0.weight" not in flat.names
    assert module[0].weight.data_ptr() == before


def test_tied_parameters_are_held_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    flat = FlatParameters(module)
    assert flat.size == 16
    assert module[1].weight is module[0].weight


def test_gradients_are_gathered_scattered_and_added_to() -> None:
    module = small()
    flat = FlatParameters(module)
    module(torch.randn(4, 5)).sum().backward()
    module[3].bias.grad = None
    gathered = torch.full((flat.size,), 9.0)
    flat.gather_gradients(gathered)
    named = flat.named(gathered)
    assert torch.equal(named["0.weight"], module[0].weight.grad)
    assert not named["3.bias"].any()
    flat.add_to_gradients(torch.ones(flat.size))
    assert torch.equal(module[0].weight.grad, named["0.weight"] + 1)
    assert module[3].bias.grad is None
    flat.scatter_gradients(torch.full((flat.size,), 2.0))
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in module.parameters())


def test_a_scattered_gradient_does_not_follow_the_vector_it_came_from() -> None:
    module = small()
    flat = FlatParameters(module)
    gradient = torch.ones(flat.size)
    flat.scatter_gradients(gradient)
    gradient.zero_()
    assert module[0].weight.grad.all()


def test_gathering_leaves_the_padding_between_parameters_as_it_was() -> None:
    """The padding travels too, in the scale of every quantised block it is in: who gathers gives a zeroed vector."""
    module = nn.Linear(3, 3)
    flat = FlatParameters(module)
    module(torch.randn(2, 3)).sum().backward()
    padding = torch.ones(flat.size, dtype=torch.bool)
    for view in flat.views(padding):
        view.fill_(False)
    assert int(padding.sum()) == 32 - 12
    gathered = torch.zeros(flat.size)
    flat.gather_gradients(gathered)
    assert not gathered[padding].any()
    assert torch.equal(gathered[~padding], torch.cat([module.weight.grad.view(-1), module.bias.grad]))


def test_equal_replicas_have_equal_digests_and_others_do_not() -> None:
    first, second = FlatParameters(small()), FlatParameters(small())
    assert first.digest() == second.digest()
    second.vector[3] += 1e-6
    assert first.digest() != second.digest()
    renamed = FlatParameters(nn.ModuleDict({"other": small()}))
    assert renamed.digest() != first.digest()


def test_models_that_cannot_be_laid_out_are_refused_by_parameter() -> None:
    with pytest.raises(ConfigError, match="no parameter that can be trained"):
        FlatParameters(nn.ReLU())
    with pytest.raises(ConfigError, match=r"'weight'.*float64"):
        FlatParameters(nn.Linear(2, 2).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older torch says that lazy modules are new
        lazy = nn.LazyLinear(3)
    with pytest.raises(ConfigError, match="lazy"):
        FlatParameters(lazy)


def test_buffers_are_a_vector_of_the_floating_ones_and_a_list_of_counters() -> None:
    module = small()
    module(torch.randn(8, 5))
    buffers = Buffers(module)
    assert buffers.size == 14
    assert buffers.counts() == [1]
    assert torch.equal(buffers.vector(), torch.cat([module[1].running_mean, module[1].running_var]))


def test_joint_buffers_are_written_into_the_module_with_its_own_types() -> None:
    first, second = small(), small()
    for module, scale in ((first, 1.0), (second, 5.0)):
        module(scale * torch.randn(8, 5, generator=torch.Generator().manual_seed(1)))
    second(torch.randn(8, 5))
    mine, theirs = Buffers(first), Buffers(second)
    mean = (mine.vector() + theirs.vector()) / 2
    most = [max(pair) for pair in zip(mine.counts(), theirs.counts(), strict=True)]
    expected = (first[1].running_var + second[1].running_var) / 2
    mine.load(mean, most)
    assert torch.allclose(first[1].running_var, expected)
    assert first[1].num_batches_tracked.dtype == torch.int64
    assert int(first[1].num_batches_tracked) == 2


def test_named_buffers_leave_the_module_alone() -> None:
    module = small()
    before = copy.deepcopy(module.state_dict())
    found = Buffers(module).named(torch.full((14,), 3.0), [9])
    assert sorted(found) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert found["1.running_mean"].shape == (7,)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_buffers_that_are_not_saved_or_are_constants_stay_local() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    buffers = Buffers(module)
    assert buffers.size == 0
    assert buffers.counts() == []
    assert buffers.vector().numel() == 0
