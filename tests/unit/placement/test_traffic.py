"""What a group sends, counted at each member, beside the plan and the cost analysis of Shrivastava et al. (2017)."""

from __future__ import annotations

import functools
import itertools
import sys

import cloudpickle
import pytest
import torch
from torch import nn

from thinwire.placement import Crew, TensorParallel, part_of
from thinwire.planning import graph_of, pure
from thinwire.replicas import TrainSpec
from thinwire.rules.placement import FLOAT, backpropagation_traffic, direct_broadcast, hypercube_broadcast

from . import networks
from .group import together

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(networks)

NEURONS, ROWS = (12, 16, 32, 8), 4


def network() -> nn.Module:
    """Columns of weight matrices only, as the paper partitions them."""
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(NEURONS)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def sent(crew: Crew) -> tuple[int, int]:
    """Bytes and messages of one member in a step, beside what members tell each other of their rows."""
    rows = networks.Rows((torch.randn(ROWS, NEURONS[0]),), torch.randint(0, NEURONS[-1], (ROWS,)))
    spec = TrainSpec(loss="cross_entropy", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0, device="cpu")
    part = part_of(TensorParallel(group_size=crew.size), network, spec, crew.part, crew=crew,
                   examples=list(rows.inputs), rows=ROWS)  # fmt: skip
    part.meet(rows)
    before = crew.sent_bytes, crew.sent_messages
    part.gradient(rows)
    return crew.sent_bytes - before[0], crew.sent_messages - before[1]


@pytest.mark.parametrize("processes", [2, 4])
def test_what_is_counted_on_the_wire_is_what_the_plan_says_and_less_than_the_papers_analysis(processes: int) -> None:
    members = together(processes, functools.partial(sent))
    units = sum(size for size, _ in members) / FLOAT
    examples = processes * ROWS
    plan = pure(graph_of(network(), (NEURONS[0],)), "all model parallel", processes, examples)
    assert units == pytest.approx(processes * plan.sent_bytes / FLOAT)
    terms = backpropagation_traffic(processes, NEURONS, examples)
    assert units <= sum(term.units for term in terms.values())
    # a step moves the rows of all members at once: its messages do not grow with examples, those of the analysis do
    moves = 1 + 2 * 2 + 2  # the input there; of two borders outputs there and errors back; the output there and back
    assert sum(count for _, count in members) == moves * direct_broadcast(processes, 1).messages
    assert sum(term.messages for term in terms.values()) > moves * hypercube_broadcast(processes, 1).messages


def test_a_hypercube_needs_fewer_messages_than_all_to_all_and_moves_as_many_units() -> None:
    for processes in (4, 8, 16):
        one, other = hypercube_broadcast(processes, 100), direct_broadcast(processes, 100)
        assert one.messages < other.messages
        assert one.units == other.units
