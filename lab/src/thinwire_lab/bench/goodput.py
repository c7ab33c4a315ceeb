"""Seconds of an exchange of a whole vector: thinwire's mesh, and torch.distributed's gloo in the same processes."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Peer
from thinwire.exchange.signals import Averaged, Formed, Landed
from thinwire.strategies import SparkNet
from thinwire_lab.bench.worker_process import Place, join, leave, wait_for


def exchange_seconds(
    place: Place, *, size: int, codec: str, blocks: int, block: int, gloo: bool, interface: str
) -> dict[str, Any]:
    """Times `blocks` blocks of `block` exchanges each, alternating between thinwire and gloo.

    With gloo, an exchange is the same operation as its all_reduce: the mean of a vector over the workers. Without gloo,
    it is a SparkNet round of the whole vector from snapshot to merged reply, with contribution and merge.
    """
    joint = JointState(SparkNet(period=1), torch.zeros(size), place.workers)
    peer = join(place, joint, codec)
    peer.start("equal")
    wait_for(peer, Formed)
    snapshot = torch.full((size,), float(place.worker + 1))
    if gloo:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        meeting = f"tcp://{place.first}:{place.port}"
        dist.init_process_group("gloo", init_method=meeting, rank=place.worker, world_size=place.workers)
    ours: list[float] = []
    theirs: list[float] = []
    values = torch.randn(size)
    _exchange(peer, snapshot)  # connections, first allocations
    if gloo:
        dist.all_reduce(values)
    for _ in range(blocks):
        if gloo:
            dist.barrier()
        ours += [_mean(peer, snapshot) if gloo else _exchange(peer, snapshot) for _ in range(block)]
        if gloo:
            dist.barrier()
            theirs += [_reduce(values) for _ in range(block)]
    assert joint.model is not None
    mean = (place.workers + 1) / 2
    right = bool(torch.all((joint.model - mean).abs() < 0.05))
    leave(peer)
    return {"ours": ours, "theirs": theirs, "right": right, "bytes": peer.bytes_sent}


_numbers = itertools.count()
"""Numbers of means; equal in both processes, which request the same means."""


def _exchange(peer: Peer, snapshot: Tensor) -> float:
    began = time.perf_counter()
    round, fragment = peer.claim()
    peer.launch(round, fragment, snapshot, 1.0, {})
    wait_for(peer, Landed)
    return time.perf_counter() - began


def _mean(peer: Peer, values: Tensor) -> float:
    began = time.perf_counter()
    peer.average(f"mean:{next(_numbers)}", values, 1.0, {})
    wait_for(peer, Averaged)
    return time.perf_counter() - began


def _reduce(values: Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(values)
    took = time.perf_counter() - began
    values.div_(dist.get_world_size())
    return took
