"""The tuples that one worker hosts, and what becomes of an update. No sockets in here.

A contribution waits until its group is whole (SINGA, Algorithm 3), is merged by the strategy's own rule, and makes the
tuple's next version; everyone whose contribution is in it gets the reply. Each worker numbers its updates, so that one
that is sent again, because its reply may have been lost with a connection, counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.exchange.joint import JointState, slice_state, write_state
from thinwire.exchange.table.plan import Layout
from thinwire.parameters import Fragment
from thinwire.strategies import Served, Taken

Stamp = tuple[int, int]
"""An attempt, and the number of an update of it."""


class Update(NamedTuple):
    """One worker's contribution to a tuple; with a weight of 0 it only says that there is none."""

    worker: int
    stamp: Stamp
    weight: float
    values: Tensor
    rates: tuple[float, ...] = ()
    """The sender's learning rates, by the optimizer's groups; none where servers have their own."""
    absent: frozenset[int] = frozenset()
    """Parameters, by number, that the sender has no gradient of."""


class Reply(NamedTuple):
    """What a worker is sent back."""

    worker: int
    attempt: int
    key: int
    number: int
    version: int
    values: Tensor | None
    """None where the update was merged before, and what came of it is lost."""


@dataclass
class Book:
    """What is known of one tuple beside its values."""

    version: int = 0
    behind: dict[int, int] = field(default_factory=dict)
    """By parameter, how many versions it took no step in, if any: nobody had a gradient of it."""
    merged: dict[int, Stamp] = field(default_factory=dict)
    """Each worker's last update that is in the values."""
    replies: dict[int, Tensor] = field(default_factory=dict)
    """What was last sent to each, until its next update shows that it came."""
    pending: dict[int, Update] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    """Updates of each worker that are in the values; one that came later began with the slowest."""
    held: list[Reply] = field(default_factory=list)
    """Replies to workers that are too far ahead of the slowest."""


class Server:
    """Tuples of the joint state; their values live in the joint state itself, which has room for all."""

    def __init__(self, joint: JointState, layout: Layout, log: Callable[..., None]) -> None:
        assert isinstance(joint.strategy, Served)
        self.joint, self._layout, self._strategy, self.log = joint, layout, joint.strategy, log
        self.handlers = joint.strategy.handlers
        self._setting = joint.cuts.newest.setting
        self.books: dict[int, Book] = {}
        self.wanted: dict[int, set[int]] = {}
        """By group, the workers whose contributions are waited for."""
        self._lock = threading.Lock()

    def wants(self, groups: Mapping[int, set[int]]) -> list[Reply]:
        """Sets whose contributions are waited for; what now waits for nobody is merged."""
        self.wanted = {group: set(workers) for group, workers in groups.items()}
        return [reply for key in list(self.books) for reply in self._apply(key)]

    def update(self, key: int, update: Update) -> list[Reply]:
        """Takes a contribution in; returns whom to answer."""
        book = self.books[key]
        if (known := self._known(key, book, update)) is not None:
            return [known]
        book.pending[update.worker] = update
        return self._apply(key)

    def pass_over(self, key: int, update: Update) -> None:
        """Takes an update for one that was merged before: nobody knows whether it was."""
        book = self.books[key]
        with self._lock:
            book.merged[update.worker] = max(book.merged.get(update.worker, (-1, -1)), update.stamp)

    def update_without_locks(self, key: int, update: Update) -> list[Reply]:
        """Merges one contribution at once, while other threads may do the same: only the books are kept in order."""
        book = self.books[key]
        with self._lock:
            if (known := self._known(key, book, update)) is not None:
                return [known]
            book.merged[update.worker] = update.stamp
            version = book.version
        if update.weight:
            reply = self.joint.merge(self._layout.fragments[key], update.values, version, self._setting)
        else:
            reply = self._unchanged(key)
        with self._lock:
            book.version += 1
            book.replies[update.worker] = reply
            self.log(key, book)
            return [_reply(update, key, book, reply)]

    def _known(self, key: int, book: Book, update: Update) -> Reply | None:
        """What was answered to an update that has come before."""
        if update.stamp > book.merged.get(update.worker, (-1, -1)):
            return None
        values = book.replies.get(update.worker)
        if values is None and self._strategy.subject == "gradients":
            values = self.now(key).clone()
        return _reply(update, key, book, values)

    def _apply(self, key: int) -> list[Reply]:
        book = self.books[key]
        counted = self._counted()
        slowest = min((clock for worker, clock in book.clocks.items() if worker in counted), default=0)
        for worker in counted:
            book.clocks.setdefault(worker, slowest)
        view = Held(self, key, book)
        self.handlers.handle_update(view)
        return self._let_go(view, view.replies)

    def apply(self, key: int, book: Book, workers: list[int]) -> list[Reply]:
        """Merges what these workers have sent as one, and makes the next version; returns whom to answer."""
        updates = [book.pending.pop(worker) for worker in workers]
        with self.joint.lock:
            reply = self._merge(key, book, updates)
        book.version += 1
        for update in updates:
            book.merged[update.worker] = update.stamp
            book.replies[update.worker] = reply
            book.clocks[update.worker] = book.clocks.get(update.worker, 0) + 1
        self.log(key, book)
        return [_reply(update, key, book, reply) for update in updates]

    def given(self, key: int, book: Book, workers: list[int]) -> list[Update]:
        """What these workers have sent and has something in it, corrected for what has changed since."""
        now, correct = self.now(key), self._strategy.correct
        sent = [book.pending[worker] for worker in workers if book.pending[worker].weight]
        return [u._replace(values=correct(u.values, now, book.replies.get(u.worker))) for u in sent]

    def _merge(self, key: int, book: Book, updates: list[Update]) -> Tensor:
        fragment, rates = self._layout.fragments[key], updates[-1].rates
        given = [update for update in updates if update.weight]
        if not given:
            self._passed_over(fragment, book, None)
            return self._unchanged(key)
        now, correct = self.now(key), self._strategy.correct
        corrected = [u._replace(values=correct(u.values, now, book.replies.get(u.worker))) for u in given]
        mean, absent = _mean(corrected), frozenset.intersection(*(u.absent for u in given))
        if self._strategy.subject == "gradients":
            taken = Taken(
                fragment,
                rows=1.0,
                steps=1,
                before=book.version,
                groups=tuple({"lr": rate} for rate in rates),
                absent=absent,
                behind=book.behind,
            )
            reply = self.joint.optimize(mean, taken)
        else:
            reply = self.joint.merge(fragment, mean, book.version, self._setting)
        self._passed_over(fragment, book, absent)
        return reply

    def _passed_over(self, fragment: Fragment, book: Book, absent: Collection[int] | None) -> None:
        """Notes the parameters of a tuple that take no step in its next version; None for all of them."""
        if absent is None or absent:
            for number in self._strategy.parameters_in(fragment):
                if absent is None or number in absent:
                    book.behind[number] = book.behind.get(number, 0) + 1

    def _unchanged(self, key: int) -> Tensor:
        """The reply to workers none of which gave anything."""
        now = self.now(key)
        return now.clone() if self._strategy.subject == "gradients" else torch.zeros_like(now)

    def now(self, key: int) -> Tensor:
        """A tuple's parameters."""
        assert self.joint.model is not None
        return self._layout.fragments[key].of(self.joint.model)

    def _let_go(self, view: Held, replies: list[Reply]) -> list[Reply]:
        """Holds back replies to workers that may not read yet, until the handlers let them go."""
        waiting, view.book.held = [*view.book.held, *replies], []
        freed: list[Reply] = []
        for reply in waiting:
            (freed if self.handlers.handle_get(view, reply.worker) else view.book.held).append(reply)
        return freed

    def _counted(self) -> set[int]:
        return {worker for workers in self.wanted.values() for worker in workers}

    # -- moving -----------------------------------------------------------------------------------------------------

    def tree(self, key: int, book: Book | None = None) -> dict[str, Any]:
        """A tuple with its book; a copy."""
        book = book or self.books[key]
        with self.joint.lock:
            state = slice_state(self.joint.state, self._layout.fragments[key], self.joint.size)
            values = [v.clone() if isinstance(v, Tensor) else v for v in state]
        merged = {str(worker): list(stamp) for worker, stamp in book.merged.items()}
        behind = {str(number): versions for number, versions in book.behind.items()}
        return {"state": values, "version": book.version, "merged": merged, "behind": behind}

    def put(self, key: int, tree: Mapping[str, Any]) -> None:
        """Takes a tuple over."""
        self.write(key, tree["state"])
        merged = {int(worker): (int(stamp[0]), int(stamp[1])) for worker, stamp in tree["merged"].items()}
        behind = {int(number): int(versions) for number, versions in tree.get("behind", {}).items()}
        self.books[key] = Book(int(tree["version"]), behind, merged)

    def write(self, key: int, values: list[Any]) -> None:
        """Writes a tuple's values into the joint state."""
        fragment, joint = self._layout.fragments[key], self.joint
        if len(values) != len(joint.state) or any(
            isinstance(v, Tensor) and v.shape != (fragment.size,) for v in values
        ):
            raise ValueError(f"tuple {key} is of {fragment.size} elements")
        with joint.lock:
            joint.state = write_state(joint.state, fragment, joint.size, type(joint.state)(*values))

    def forget(self, worker: int) -> None:
        """Drops what was only kept for a worker that is gone."""
        for book in self.books.values():
            for kept in (book.replies, book.pending, book.clocks):
                kept.pop(worker, None)


class Held:
    """A tuple as handlers see it; see `thinwire.strategies.TableTuple`."""

    def __init__(self, server: Server, key: int, book: Book) -> None:
        self._server, self.key, self.book = server, key, book
        self.replies: list[Reply] = []
        """To the senders of what was applied through this."""

    @property
    def version(self) -> int:
        return self.book.version

    @property
    def wanted(self) -> dict[int, set[int]]:
        return {group: set(workers) for group, workers in self._server.wanted.items()}

    @property
    def heard(self) -> dict[int, set[int]]:
        return {group: workers & self.book.pending.keys() for group, workers in self._server.wanted.items()}

    @property
    def clocks(self) -> dict[int, int]:
        return dict(self.book.clocks)

    def get(self) -> Tensor:
        with self._server.joint.lock:
            return self._server.now(self.key).clone()

    def put(self, value: Tensor) -> None:
        now = self._server.now(self.key)
        if value.shape != now.shape:
            raise ValueError(f"tuple {self.key} is of {now.numel()} elements, and the value of {tuple(value.shape)}")
        with self._server.joint.lock:
            now.copy_(value)

    def collect(self, groups: Collection[int]) -> Tensor | None:
        given = self._server.given(self.key, self.book, self._senders(groups))
        return _mean(given).clone() if given else None

    def update(self, groups: Collection[int]) -> None:
        if workers := self._senders(groups):
            self.replies += self._server.apply(self.key, self.book, workers)

    def checkpoint(self) -> None:
        self._server.log(self.key, self.book, always=True)

    def _senders(self, groups: Collection[int]) -> list[int]:
        heard = self.heard
        return sorted(worker for group in groups for worker in heard.get(group, ()))


def _reply(update: Update, key: int, book: Book, values: Tensor | None) -> Reply:
    return Reply(update.worker, *update.stamp[:1], key, update.stamp[1], book.version, values)


def _mean(updates: list[Update]) -> Tensor:
    """The contributions' weighted mean, in the order of the workers' numbers."""
    if len(updates) == 1:
        return updates[0].values
    total = sum(u.weight for u in updates)
    mean = torch.zeros_like(updates[0].values)
    for update in updates:
        mean.add_(update.values, alpha=update.weight / total)
    return mean
