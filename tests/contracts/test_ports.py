"""Ports of the exchange and of the worker: narrow, typed, and all that a worker's stepping thread calls."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch

from thinwire.checkpoint import decode, encode
from thinwire.exchange import ports
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.placement import GroupReplica
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.strategies import MPCA
from thinwire.transport.memory import Room
from thinwire.worker import ports as own

OWN = [kind for kind in vars(own).values() if isinstance(kind, type) and kind.__module__ == own.__name__]
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


@pytest.mark.parametrize("module", [ports, own], ids=lambda module: module.__name__)
def test_no_port_takes_or_gives_any(module: ModuleType) -> None:
    names = {node.id for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Name)}
    assert "Any" not in names
    assert {"Note", "Tree"} <= names


@pytest.mark.parametrize("port", OWN, ids=lambda port: port.__name__)
def test_a_port_of_the_worker_has_fewer_than_ten_methods(port: type) -> None:
    assert len(members_of(port)) < 10


def test_a_replica_has_all_that_a_worker_calls_of_it() -> None:
    """A group's replica is a `TorchReplica` with more."""
    methods = {name for kind in own.Replica.__mro__ for name, value in vars(kind).items() if inspect.isfunction(value)}
    called = {name for name in methods if not name.startswith("_")}
    assert {"gradient", "evaluate", "load_shared"} <= called
    assert issubclass(GroupReplica, TorchReplica)
    replica = TorchReplica(torch.nn.Linear(2, 2), TrainSpec(loss="mse", optimizer=torch.optim.SGD))
    assert not {name for name in called if not callable(getattr(replica, name, None))}


def test_only_what_runs_a_worker_imports_it() -> None:
    importing = {path.name for path in WORKER.glob("*.py") if "thinwire.worker.worker" in path.read_text()}
    assert importing == set(), "a part of the worker is given values, functions or a port"


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
