"""The loop of `thinwire.strategies.base` over K replicas in plain Python: no threads, no wire, no clock.

For trying a strategy out, and for tests that must give the same numbers each time. The mesh is a weighted mean, packed
as the strategy's setting says, and a round of an overlapping strategy lands one step after it was launched. Workers of
an asynchronous strategy each count for themselves, and meet the joint model one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.exchange.joint import JointState, slice_state, write_state
from thinwire.parameters import Fragment
from thinwire.rules.compression import codec
from thinwire.strategies import Progress, Served, Share, Strategy

STEP_S = 0.1
"""How long a step takes, for strategies that look at the clock."""


class Task(NamedTuple):
    """Least squares: every worker has rows of its own, so none can solve it alone.

    Products are computed in double precision and rounded: in single precision their last bits depend on the processor,
    and a strategy of two bits makes much of that in sixty steps.
    """

    inputs: list[Tensor]
    labels: list[Tensor]
    solution: Tensor

    @classmethod
    def make(cls, workers: int, *, size: int = 20, rows: int = 12, seed: int = 0) -> Task:
        generator = torch.Generator().manual_seed(seed)
        solution = torch.randn(size, generator=generator, dtype=torch.float64).float()
        inputs = [torch.randn(rows, size, generator=generator, dtype=torch.float64).float() for _ in range(workers)]
        return cls(inputs, [(a.double() @ solution.double()).float() for a in inputs], solution)

    def loss(self, x: Tensor) -> float:
        """Mean squared error over all workers' rows."""
        errors = [a.double() @ x.double() - b for a, b in zip(self.inputs, self.labels, strict=True)]
        return float(torch.cat(errors).square().mean())

    def own_loss(self, worker: int, x: Tensor) -> float:
        """Mean squared error over one worker's rows."""
        return float((self.inputs[worker].double() @ x.double() - self.labels[worker]).square().mean())

    def gradient(self, worker: int, x: Tensor) -> Tensor:
        """The gradient of one worker's own rows."""
        a, b = self.inputs[worker], self.labels[worker]
        wide = a.double()
        return (wide.T @ (wide @ x.double() - b) * (2.0 / len(b))).float()


class Loop:
    """K replicas taking steps in turn under one strategy.

    Args:
        strategy: under which they do.
        task: what they learn.
        lr: of their plain gradient descent.
        own_losses: whether a strategy that looks at training losses is told of each worker's own rows, as the engine
            tells it, or of all rows: the rows of one worker alone can be learnt to the last digit in these tasks, after
            which such a strategy would never exchange again.
    """

    def __init__(self, strategy: Strategy, task: Task, *, lr: float = 0.05, own_losses: bool = False) -> None:
        self._own_losses = own_losses
        self.strategy, self.task, self.lr = strategy, task, lr
        self.workers, self.size = len(task.inputs), task.solution.numel()
        start = torch.zeros(self.size)
        self.x = [start.clone() for _ in range(self.workers)]
        self.joint = JointState(strategy, start, self.workers)
        self.state: list[Any] = [strategy.open(start)[1] for _ in range(self.workers)]
        self.steps = 0
        self._since = [0] * self.workers
        self._loss = [0.0] * self.workers
        self._first_loss: list[float | None] = [None] * self.workers
        self._meeting: dict[int, tuple[Fragment, Tensor]] = {}
        self._residuals = [torch.zeros(self.size) for _ in range(self.workers + 1)]
        self._flying: list[tuple[int, Fragment, list[Tensor], list[float]]] = []

    @property
    def model(self) -> Tensor:
        """The joint model."""
        return self.x[0] if self.joint.model is None else self.joint.model

    def step(self) -> None:
        """Every worker takes one step; rounds land and launch as the strategy wants."""
        self.steps += 1
        gradients, shared = [], 0.0 if self._own_losses else self.task.loss(self.x[0])
        for worker, x in enumerate(self.x):
            self.strategy.before_step(self.state[worker], x, self.joint.cycle())
            self._loss[worker] += self.task.own_loss(worker, x) if self._own_losses else shared
            gradient = self.task.gradient(worker, x)
            term = self.strategy.gradient_term(self.state[worker], x, self.joint.cycle())
            gradients.append(gradient if term is None else gradient + term)
        if isinstance(self.strategy, Served) and self.strategy.subject == "gradients":
            self._serve(self.strategy, gradients)
            return
        if self.strategy.subject == "gradients":
            gradients = self._mean_gradient(gradients)
        for x, gradient in zip(self.x, gradients, strict=True):
            x.sub_(gradient, alpha=self.lr)
        if self.strategy.timing == "async":
            self._meet()
        elif self.strategy.subject == "parameters":
            if self._flying:
                self._land()
            self._launch()

    def _mean_gradient(self, gradients: list[Tensor]) -> list[Tensor]:
        round, whole = self.joint.landed, Fragment(0, self.size)
        sent = [self.strategy.contribute(self.joint.state, g) for g in gradients]
        weights = [self.strategy.weight(Share(round, 1, len(self.task.labels[w]), w == 0)) for w in range(self.workers)]
        reply = self.joint.land(round, whole, self._mean(round, whole, sent, weights))
        return [reply] * self.workers

    def _serve(self, strategy: Served, gradients: list[Tensor]) -> None:
        """The optimizer is at the server; under strict consistency it takes one step for all workers."""
        round, whole, setting = self.joint.landed, Fragment(0, self.size), self.joint.cuts.newest.setting
        weights = [float(len(labels)) for labels in self.task.labels]
        if strategy.strict:
            mean = self._mean(round, whole, gradients, weights)
            replies = [self.joint.merge(whole, mean, round, setting)] * self.workers
        else:
            replies = [self.joint.merge(whole, g, round * self.workers + w, setting) for w, g in enumerate(gradients)]
        for x, reply in zip(self.x, replies, strict=True):
            x.copy_(reply)
        self.joint.landed = round + 1

    def _launch(self) -> None:
        round, since = self.joint.landed + len(self._flying), self.steps - self._since[0]
        if not self.strategy.due(self._progress(0, round)) or len(self._flying) >= self.strategy.in_flight:
            return
        fragment = self.joint.fragment(round)
        snapshots = [fragment.of(x).clone() for x in self.x]
        shares = [Share(round, since, len(self.task.labels[w]), w == 0) for w in range(self.workers)]
        for worker in range(self.workers):
            self._launched(worker)
        self._flying.append((round, fragment, snapshots, [self.strategy.weight(s) for s in shares]))
        if self.strategy.timing == "barrier":
            self._land()

    def _progress(self, worker: int, round: int) -> Progress:
        since, first = self.steps - self._since[worker], self._first_loss[worker]
        return Progress(round, self.steps, since, since * STEP_S, self._loss[worker], worker == 0, first)

    def _launched(self, worker: int) -> None:
        self._first_loss[worker] = self._loss[worker] if self._first_loss[worker] is None else self._first_loss[worker]
        self._since[worker], self._loss[worker] = self.steps, 0.0

    def _land(self) -> None:
        round, fragment, snapshots, weights = self._flying.pop(0)
        sent = [c for s in snapshots if (c := self.joint.contribution(fragment, s)) is not None]
        reply = self.joint.land(round, fragment, self._mean(round, fragment, sent, weights))
        for worker in range(self.workers):
            self._adopt(worker, fragment, snapshots[worker], reply)

    def _meet(self) -> None:
        """Each worker alone, as with a table; the first one's meetings are counted."""
        meeting, self._meeting = self._meeting, {}
        round = self.joint.landed
        cut = self.joint.cuts.at(round)
        for worker, (fragment, snapshot) in meeting.items():
            sent = self.strategy.contribute(self.joint.state, snapshot)
            reply = self.joint.merge(fragment, sent, cut.cycle(round), cut.setting)
            self._adopt(worker, fragment, snapshot, reply)
        self.joint.landed = round + (0 in meeting)
        for worker, x in enumerate(self.x):
            if self.strategy.due(self._progress(worker, self.joint.landed)):
                fragment = self.joint.fragment(self.joint.landed)
                self._meeting[worker] = fragment, fragment.of(x).clone()
                self._launched(worker)

    def _adopt(self, worker: int, fragment: Fragment, snapshot: Tensor, reply: Tensor) -> None:
        x, piece = self.x[worker], slice_state(self.state[worker], fragment, self.size)
        value, adopted = self.strategy.adopt(piece, fragment.of(x), snapshot, reply)
        fragment.of(x).copy_(value)
        self.state[worker] = write_state(self.state[worker], fragment, self.size, adopted)

    def _mean(self, round: int, fragment: Fragment, sent: list[Tensor], weights: list[float]) -> Tensor:
        """The weighted mean as the mesh would give it: packed on the way there and on the way back."""
        chosen = codec(self.joint.cuts.at(round).setting.codec or "float32")
        total = torch.zeros(fragment.size)
        for values, weight, residual in zip(sent, weights, self._residuals, strict=False):
            packed = chosen.encode_feedback(values, fragment.of(residual))
            chosen.accumulate(packed, weight / sum(weights), total)
        packed = chosen.encode_feedback(total, fragment.of(self._residuals[-1]))
        return chosen.decode(packed, fragment.size)
