"""Seconds per exchange of a whole vector: our mesh, and torch.distributed's gloo beside it in the same processes."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bench.seats import Place, join, leave, wait_for
from thinwire.engine.joint import JointState
from thinwire.engine.signals import Formed, Landed
from thinwire.exchange.peer import MeshPeer
from thinwire.strategies import SparkNet


def exchange_seconds(
    place: Place, *, size: int, codec: str, blocks: int, block: int, gloo: bool, interface: str
) -> dict[str, Any]:
    """Times `blocks` blocks of `block` exchanges each, ours and gloo's in turn.

    An exchange of ours is from handing over a snapshot to having the merged reply: contribution, scatter, sum, gather
    and merge of a SparkNet round of the whole vector. Gloo's is one all_reduce.
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
        ours += [_exchange(peer, snapshot) for _ in range(block)]
        if gloo:
            dist.barrier()
            theirs += [_reduce(values) for _ in range(block)]
    assert joint.model is not None
    mean = (place.workers + 1) / 2
    right = bool(torch.all((joint.model - mean).abs() < 0.05))
    leave(peer)
    return {"ours": ours, "theirs": theirs, "right": right, "bytes": peer.bytes_sent}


def _exchange(peer: MeshPeer, snapshot: Tensor) -> float:
    began = time.perf_counter()
    round, fragment = peer.claim()
    peer.launch(round, fragment, snapshot, 1.0, {})
    wait_for(peer, Landed)
    return time.perf_counter() - began


def _reduce(values: Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(values)
    took = time.perf_counter() - began
    values.div_(dist.get_world_size())
    return took
