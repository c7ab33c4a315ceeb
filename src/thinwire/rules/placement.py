"""What a placement costs: the closed forms of the papers, and the bytes and seconds of one layer and one border.

A group of M workers trains one replica on b rows a step. A layer's activations lie in one of three ways on the group:
by rows (each worker has all features of b/M rows), by features (each has its share of the features of all rows), or
full (each has everything). A layer is placed

    data     parameters whole on each worker        rows → rows          gradients are summed over the group
    column   a share of the outputs on each         full → features      the gradient of the input is summed
    row      a share of the inputs on each          features → rows      the output is summed
    local    without parameters, on what is there   rows or features as they are

and a border between two layers costs what it takes to bring activations from one way to the other, and their gradients
back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Way = Literal["rows", "features", "full"]
FLOAT: Final = 4


class Wire(NamedTuple):
    """A link as collectives see it."""

    latency_s: float = 1e-4
    bytes_per_s: float = 125e6
    duplex: bool = True
    """Whether sending leaves receiving its full rate."""

    def seconds(self, sent_bytes: float, messages: float) -> float:
        """Time for what one worker sends, and receives as much of, in so many messages one after the other.

        >>> Wire(0.001, 1e6).seconds(500_000, 2), Wire(0.001, 1e6, duplex=False).seconds(500_000, 2)
        (0.502, 1.002)
        """
        return self.latency_s * messages + sent_bytes / self.bytes_per_s * (1 if self.duplex else 2)


class Cost(NamedTuple):
    """What one worker sends in a step, and in how many messages one after the other."""

    sent_bytes: float
    messages: float


NOTHING: Final = Cost(0.0, 0.0)


def data_parallel_floats(parameters: float, workers: int) -> float:
    """C_d, the floats through a switch when each of N workers fetches all parameters and sends all gradients.

    C_d = 2 P N

    >>> data_parallel_floats(60e6, 4)
    480000000.0

    SINGA (Wang et al. 2015) eq. 4.
    """
    return 2 * parameters * workers


def model_parallel_floats(features: float, workers: int, batch: int) -> float:
    """C_m, the floats through a switch when every layer's features go to all workers, and their gradients back.

    C_m = 2 D N B

    >>> model_parallel_floats(1e6, 4, 256)
    2048000000.0

    SINGA eq. 5.
    """
    return 2 * features * workers * batch


def hybrid_floats(parameters: float, features: float, workers: int, batch: int, group: float) -> float:
    """C_h: data parallel between groups of M workers, model parallel within each.

    C_h = 2 P N / M + 2 D B M

    >>> hybrid_floats(60e6, 1e6, 16, 256, 2)
    1984000000.0

    SINGA eq. 8. Its smallest value over M is 4√(P N D B), where the paper writes the bound 2√(P D B).
    """
    return 2 * parameters * workers / group + 2 * features * batch * group


def best_group(parameters: float, features: float, workers: int, batch: int) -> float:
    """The group size for which C_h is smallest.

    M = √(P N / D B)

    >>> best_group(60e6, 1e6, 16, 15)
    8.0

    SINGA §4.3.
    """
    return math.sqrt(parameters * workers / (features * batch))


def backpropagation_messages(processes: int, layers: int, examples: int) -> float:
    """Messages of an epoch when a network's neurons are dealt out to p processes, one of which is the master.

    2 (p − 1)  +  m (L − 2) (p log₂ p  +  2 (p − 1))

    Input and labels go out once. Then, for each of m examples and each hidden layer, outputs go from all to all over a
    hypercube, and errors from the master to all and back.

    >>> backpropagation_messages(4, 3, 1), backpropagation_messages(1, 3, 1)
    (20.0, 0.0)

    Shrivastava et al. (2017), whose cost analysis is T = t_lat · messages + t_data · units.
    """
    if processes == 1:
        return 0.0
    forward, backward = processes * math.log2(processes), 2 * (processes - 1)
    return 2 * (processes - 1) + examples * (layers - 2) * (forward + backward)


class Traffic(NamedTuple):
    """What all processes together send: messages, and units of data."""

    messages: float
    units: float

    def seconds(self, latency_s: float, unit_s: float) -> float:
        """Time on a network that carries one message at a time.

        T = t_lat · messages + t_data · units

        >>> Traffic(20.0, 1000.0).seconds(0.001, 1e-6)
        0.021

        Shrivastava et al. (2017), the equation of their cost analysis.
        """
        return latency_s * self.messages + unit_s * self.units

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(self.messages + other.messages, self.units + other.units)


def hypercube_broadcast(processes: int, units: float) -> Traffic:
    """All-to-all broadcast over a hypercube: p processes exchange what they have, of so many units in all.

    p log₂ p messages;  (p − 1) · units, since every process comes to have what the others had

    In step i, of log₂ p, partners swap all that they have by then: 2^(i−1) parts of p.

    >>> hypercube_broadcast(4, 100.0)
    Traffic(messages=8.0, units=300.0)

    Shrivastava et al. (2017); Grama et al., *Introduction to Parallel Computing*, §4.2.
    """
    return Traffic(processes * math.log2(processes), (processes - 1) * units)


def direct_broadcast(processes: int, units: float) -> Traffic:
    """The same as thinwire does it: each process sends its part straight to each other, all links at once.

    p (p − 1) messages, of which p − 1 leave a process;  (p − 1) · units

    >>> direct_broadcast(4, 100.0)
    Traffic(messages=12.0, units=300.0)
    """
    return Traffic(float(processes * (processes - 1)), (processes - 1) * units)


def backpropagation_traffic(processes: int, neurons: Sequence[int], examples: int) -> dict[str, Traffic]:
    """An epoch's traffic by its terms, when the neurons of each layer are dealt out to p processes.

    Args:
        processes: p, one of which is the master.
        neurons: of every layer, the input's first and the output's last.
        examples: m.

    "data" is the input, whole to each slave, and each slave's part of the labels. For every example and hidden layer,
    "forward" is an all-to-all broadcast of the outputs; "backward" is the error of the layer after it, whole from the
    master to each slave, and each slave's part of the layer's own error back.

    >>> each = backpropagation_traffic(4, [10, 8, 4], 1)
    >>> each["data"], each["forward"], each["backward"]
    (Traffic(messages=6.0, units=33.0), Traffic(messages=8.0, units=24.0), Traffic(messages=6.0, units=18.0))
    >>> sum(t.messages for t in each.values()) == backpropagation_messages(4, 3, 1)
    True
    >>> sum(t.messages for t in backpropagation_traffic(1, [10, 8, 4], 1).values())  # one process sends nothing
    0.0

    Shrivastava et al. (2017): messages as in their analysis, units from its description of what is sent.
    """
    nothing, others = Traffic(0.0, 0.0), processes - 1
    if processes == 1:
        return {"data": nothing, "forward": nothing, "backward": nothing}
    data = Traffic(2.0 * others, examples * others * (neurons[0] + neurons[-1] / processes))
    forward = backward = nothing
    for layer in range(1, len(neurons) - 1):
        once = hypercube_broadcast(processes, neurons[layer])
        forward += Traffic(examples * once.messages, examples * once.units)
        errors = others * (neurons[layer + 1] + neurons[layer] / processes)
        backward += Traffic(examples * 2.0 * others, examples * errors)
    return {"data": data, "forward": forward, "backward": backward}


def summed_gradients(parameters: float, group: int) -> Cost:
    """Gradients that all workers of a group sum, in a ring: 2 P (M − 1) / M floats each.

    >>> summed_gradients(1000, 4)
    Cost(sent_bytes=6000.0, messages=6)
    """
    return Cost(2 * FLOAT * parameters * (group - 1) / group, 2 * (group - 1) if parameters else 0)


def summed_output(features: float, rows: int, group: int) -> Cost:
    """Outputs that are partial sums, brought to rows by a reduce-scatter, and their gradients by an all-gather.

    >>> summed_output(100, 8, 4)
    Cost(sent_bytes=4800.0, messages=6)
    """
    return Cost(2 * FLOAT * features * rows * (group - 1) / group, 2 * (group - 1))


def redistributed(source: Way, target: Way, features: float, rows: int, group: int) -> Cost:
    """Activations of all rows from one way to another, and their gradients back.

    >>> redistributed("rows", "rows", 100, 8, 4), redistributed("rows", "full", 100, 8, 4).sent_bytes
    (Cost(sent_bytes=0.0, messages=0.0), 4800.0)
    >>> redistributed("rows", "features", 100, 8, 4).sent_bytes  # a worker keeps what is its own either way
    1200.0

    To full it is an all-gather there and a reduce-scatter back; between rows and features an all-to-all each way.
    """
    if source == target or source == "full":
        return NOTHING
    share = (group - 1) / group
    if target != "full":
        share /= group
    return Cost(2 * FLOAT * features * rows * share, 2 * (group - 1))
