"""A parameter table in this process, for loops of one's own: threads that train, or code that tries out handlers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError, TimedOutError, nearest
from thinwire.exchange.joint import JointState
from thinwire.exchange.table.plan import Layout
from thinwire.exchange.table.server import Book, Held, Server, Update
from thinwire.parameters import FlatParameters, Fragment
from thinwire.rules.table import last_complete
from thinwire.strategies import ParameterTable

MOST_KEPT = 4
"""Versions of a parameter: fewer updates than between two checkpoints lie between any two parameters."""


class Table:
    """Parameters by name on a server that all workers of this process share; the server of `ParameterTable` itself.

    Args:
        model: whose trainable parameters are put in; it is not changed.
        workers: how many send updates.
        strategy: consistency or handlers, groups, and the optimizer that applies gradients.
    """

    def __init__(self, model: nn.Module, *, workers: int = 1, strategy: ParameterTable | None = None) -> None:
        if workers < 1:
            raise ConfigError(f"workers = {workers} is too small; use a whole number of 1 or more")
        self.workers, asked = workers, strategy or ParameterTable()
        self._flat = flat = FlatParameters(copy.deepcopy(model).cpu())
        laid: Any = asked.laid_out(flat, lambda factory: factory(flat.tensors))
        self._joint = JointState(laid, flat.vector, workers)
        self.names = flat.names
        pieces = [Fragment(a, a + p.numel()) for a, p in zip(flat.offsets, flat.tensors, strict=True)]
        layout = Layout((0, self._joint.size), 1, asked.tuple_size, fragments=tuple(pieces))
        self._server = Server(self._joint, layout, self._log)
        self._server.books = {key: Book() for key in range(len(pieces))}
        self._every, self._kept = asked.log_period(workers), {key: dict[int, Any]() for key in range(len(pieces))}
        self._whole: dict[int, Any] = {}
        """The newest checkpoint of all parameters together."""
        self.changed = threading.Condition(threading.RLock())
        self._here = set(range(workers))
        self._group_of = asked.group_of
        self._count()

    def delegate(self, worker: int) -> Delegate:
        """A worker's end of the table."""
        if not 0 <= worker < self.workers:
            raise ConfigError(f"worker {worker} is not of this table; use a number from 0 to {self.workers - 1}")
        return Delegate(self, worker)

    def leave(self, worker: int) -> None:
        """A worker sends no more updates: nobody waits for them."""
        with self.changed:
            self._here.discard(worker)
            self._count()
            self.changed.notify_all()

    def checkpoint(self) -> None:
        """Keeps all parameters as they are now, whatever their versions."""
        with self.changed:
            self._whole = {key: self._server.tree(key) for key in self._server.books}

    def restore(self) -> int:
        """Goes back to the newest checkpoint that all parameters have; returns its version, the oldest of theirs."""
        with self.changed:
            found = last_complete([{(0, version) for version in kept} for kept in self._kept.values()])
            trees = {} if found is None else {key: kept[found[1]] for key, kept in self._kept.items()}
            if self._whole and (found is None or _version(self._whole) >= found[1]):
                trees = self._whole
            if not trees:
                raise ConfigError("the table has no checkpoint of all parameters; call checkpoint() before restore()")
            for key, tree in trees.items():
                self._server.put(key, tree)
            self.changed.notify_all()
            return _version(trees)

    # -- for delegates ----------------------------------------------------------------------------------------------

    def tuple(self, name: str) -> Held:
        """A parameter with its book."""
        if name not in self.names:
            raise ConfigError(f"{name!r} is no trainable parameter of the model. {nearest(name, self.names)}")
        key = self.names.index(name)
        return Held(self._server, key, self._server.books[key])

    def shaped(self, name: str, values: Tensor) -> Tensor:
        """Numbers in the shape of a parameter."""
        return values.view(self._flat.tensors[self.names.index(name)].shape)

    def take(self, name: str, update: Update) -> None:
        """An update has come."""
        with self.changed:
            found = self.tuple(name)
            if update.worker in found.book.pending:
                raise ConfigError(
                    f"worker {update.worker} sent an update of {name!r}, and its last one waits for other workers; "
                    "call get and collect in between"
                )
            self._server.update(found.key, update)
            self.changed.notify_all()

    def may_read(self, name: str, worker: int) -> bool:
        """Algorithm 4: the worker's own update is applied, and the handlers let it read."""
        found = self.tuple(name)
        return worker not in found.book.pending and self._server.handlers.handle_get(found, worker)

    def put(self, name: str, value: Tensor) -> None:
        with self.changed:
            self._server.handlers.handle_put(self.tuple(name), value.detach().reshape(-1))
            self.changed.notify_all()

    def _count(self) -> None:
        groups: dict[int, set[int]] = {}
        for worker in sorted(self._here):
            groups.setdefault(self._group_of(worker), set()).add(worker)
        self._server.wants(groups)

    def _log(self, key: int, book: Book, *, always: bool = False) -> None:
        held = Held(self._server, key, book)
        if always or self._server.handlers.checkpoint_now(held, self._every):
            self._kept[key][book.version] = self._server.tree(key, book)
            for version in sorted(self._kept[key])[:-MOST_KEPT]:
                del self._kept[key][version]


def _version(trees: dict[int, Any]) -> int:
    return min(int(tree["version"]) for tree in trees.values())


class Delegate:
    """What one worker asks of a table: SINGA's five operations. Keys are the names of parameters.

    Only `collect` waits. A worker asks for a parameter with `get` as soon as it has sent the update, and collects it
    right before it is needed: meanwhile it computes.
    """

    def __init__(self, table: Table, worker: int) -> None:
        self._table, self.worker = table, worker
        self._number = 0
        self._asked: set[str] = set()

    def get(self, key: str) -> None:
        """Asks for a parameter, and does not wait."""
        self._table.tuple(key)
        self._asked.add(key)

    def collect(self, key: str, timeout_s: float | None = None) -> Tensor:
        """A parameter that was asked for, once this worker may read it.

        Raises:
            ConfigError: It was not asked for.
            TimedOutError: It could not be read within the time.
        """
        if key not in self._asked:
            raise ConfigError(f"{key!r} was not asked for by worker {self.worker}; call get({key!r}) before collect")
        with self._table.changed:
            if not self._table.changed.wait_for(lambda: self._table.may_read(key, self.worker), timeout_s):
                raise TimedOutError(
                    f"worker {self.worker} waited {timeout_s:g} s for {key!r}: updates of other workers are missing; "
                    "have them send theirs, or leave()"
                )
            self._asked.discard(key)
            return self._table.shaped(key, self._table.tuple(key).get())

    def put(self, key: str, value: Tensor) -> None:
        """Writes a parameter, from outside of training; all workers see it."""
        self._table.put(key, value)

    def update(self, key: str, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Sends a gradient, and does not wait.

        Args:
            key: of which parameter.
            gradient: None where there is none this time: the others wait for no more.
            weight: how much it counts in a mean, such as the rows it is of.
        """
        self._number += 1
        given = torch.zeros(0) if gradient is None else gradient.detach().float().reshape(-1).clone()
        held = self._table.tuple(key)
        if gradient is not None and given.numel() != held.get().numel():
            raise ConfigError(
                f"the gradient of {key!r} has the shape {tuple(gradient.shape)}, which is not the parameter's; give "
                "one of its shape"
            )
        self._table.take(key, Update(self.worker, (0, self._number), 0.0 if gradient is None else weight, given))

    def checkpoint(self, key: str | None = None) -> None:
        """Keeps a parameter as it is now, or all of them; `Table.restore` goes back to what all have."""
        if key is None:
            self._table.checkpoint()
            return
        with self._table.changed:
            self._table.tuple(key).checkpoint()

    def step(self, gradients: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        """One step in SINGA's order: collects every parameter, computes, updates, and asks for the next step's."""
        for name in self._table.names:
            self.get(name)
        found = gradients({name: self.collect(name) for name in self._table.names})
        for name in reversed(self._table.names):  # the gradients of the last layers are there first
            self.update(name, found.get(name))
            self.get(name)

    def attach(self, module: nn.Module, weight: float = 1.0) -> None:
        """Has a module train with the table: nothing but forward and backward is left to call.

        Each layer collects its own parameters right before its own forward pass, so that the exchange of the last
        layers hides behind the computing of the first. Each gradient is sent as soon as backward has made it, and the
        parameter is asked for at once.

        Args:
            module: of the same parameters as the table's; they are overwritten.
            weight: how much this worker's gradients count in a mean.
        """
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if set(named) != set(self._table.names):
            apart = sorted(set(named) ^ set(self._table.names))
            raise ConfigError(
                f"{type(module).__name__} has not the table's parameters: {apart[0]!r} is in one of them only; attach "
                "a module like the one that the table was made of"
            )
        for prefix, layer in module.named_modules():
            own = [f"{prefix}.{name}" if prefix else name for name, _ in layer.named_parameters(recurse=False)]
            own = [name for name in own if name in named]
            if own:
                layer.register_forward_pre_hook(lambda *_, own=own: self._fill(own, named))
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda made, name=name: self._send(name, made, weight)
            )
            self.get(name)

    def _fill(self, names: list[str], named: dict[str, nn.Parameter]) -> None:
        for name in names:
            if name in self._asked:
                value = self.collect(name)
                with torch.no_grad():
                    named[name].copy_(value)

    def _send(self, name: str, parameter: Tensor, weight: float) -> None:
        self.update(name, parameter.grad, weight)
        parameter.grad = None
        self.get(name)
