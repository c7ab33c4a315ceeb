"""The exchange's ports: narrow, typed, and all that a worker's stepping thread calls."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

from thinwire.checkpoint import decode, encode
from thinwire.exchange import ports
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.strategies import MPCA
from thinwire.transport.memory import Room

WORKER = Path(__file__).parents[2] / "src" / "thinwire" / "worker"
NARROW = (ports.RoundsPort, ports.PublicationsPort, ports.StatePort, ports.ReportsPort)


def members_of(port: type) -> set[str]:
    bases = [base for base in port.__mro__ if base.__module__ == ports.__name__]
    names = [name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))]
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("port", NARROW, ids=lambda port: port.__name__)
def test_a_port_has_fewer_than_ten_methods_and_no_name_of_another_port(port: type) -> None:
    assert 0 < len(members_of(port)) < 10
    for other in NARROW:
        assert other is port or not members_of(port) & members_of(other)


def test_no_port_takes_or_gives_any() -> None:
    names = {node.id for node in ast.walk(ast.parse(inspect.getsource(ports))) if isinstance(node, ast.Name)}
    assert "Any" not in names
    assert {"Note", "Tree", "Signal"} <= names


def test_all_that_a_worker_calls_of_its_exchange_is_on_a_port() -> None:
    called = set()
    for path in WORKER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name in ("exchange", "_exchange"):
                    called.add(node.attr)
    offered = set().union(*(members_of(port) for port in NARROW))
    assert {"claim", "launch", "donate", "report"} <= called, "the calls were found"
    assert called <= offered
    joint, trees = JointState(MPCA(), torch.zeros(4), 1), TreeCodec(encode, decode)
    peer = Peer(Room().link(0, 0), Identity(0, 0, {}), joint, trees=trees, codec_name="float32")
    assert all(hasattr(peer, name) for name in offered)
