"""Handing the joint state to a peer that asked for it, and taking it over from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from thinwire.exchange.ports import StatePort, Tree
from thinwire.exchange.signals import Asked, Caught
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.protocol import messages
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.publisher import Publisher
from thinwire.worker.reports import Reports


@final
class StateTransfer:
    """Requests of peers, the joint state that they are given, and the joint state that this worker is given.

    Args:
        replaces_joint: whether the replica is the joint model, or is about to become it.
    """

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        publisher: Publisher,
        *,
        exchange: StatePort,
        reports: Reports,
        replaces_joint: Callable[[], bool],
    ) -> None:
        self._local, self._generation, self._publisher = local, generation, publisher
        self._exchange, self._reports, self._replaces_joint = exchange, reports, replaces_joint
        self.asked: dict[int, int] = {}
        """By peer, the generation in which it asked."""

    def ask(self, asked: Asked) -> None:
        """Notes a request, once."""
        self.asked[asked.peer] = asked.generation

    def give(self, adopted: int) -> None:
        """Answers requests once this worker has adopted all rounds that are in the joint state.

        Joint state, buffers and publications must be of one round, or the peer would miss a publication whose round is
        merged here but still waits to be taken up.
        """
        # A replica that replaces the joint model changes with each step until its group begins the generation
        held_back, number = self._replaces_joint(), self._generation.number
        now = {peer: asked for peer, asked in self.asked.items() if not held_back or asked <= number}
        if not now:
            return
        joint = self._local.joint
        with joint.lock:
            if joint.landed != adopted:
                return
            tree: dict[str, Any] = self._tree()
        model = tree["joint"]["state"][:1]
        digest = self._local.replica.parameters.digest(*model)
        for peer, generation in now.items():
            self._exchange.donate(peer, tree, generation)
            self._reports.event("handed_over", worker=self._reports.worker, peer=peer, landed=adopted, digest=digest)
            del self.asked[peer]

    def take(self, caught: Caught, over: list[tuple[Fragment, Snapshot | None]], *, newcomer: bool) -> None:
        """Takes the joint state over: a newcomer starts from it, a worker that fell behind keeps its own steps.

        `over` are the rounds this worker had under way that are in that state: what it contributed counts as arrived.
        """
        local, tree = self._local, caught.tree
        replica, strategy, whole = local.replica, local.strategy, Fragment(0, local.joint.size)
        state = tree["joint"]["state"]  # the joint model first, but nothing under a strategy whose replicas are equal
        with torch.no_grad():
            if strategy.replicated:
                replica.load_shared(tree["replica"])
            elif caught.old_model is None or newcomer:
                replica.vector.copy_(state[0])
                local.open()
                replica.buffers.load(tree["buffers"], tree["counts"])
                replica.load_schedule(tree["schedule"])
            elif local.ahead:
                local.ahead.land(whole, state[0], local.meter.steps)
            elif strategy.timing != "async":  # else its own next exchange brings it and the joint model together
                base = caught.old_model
                for fragment, snapshot in over:
                    if snapshot is not None:
                        fragment.of(base).copy_(snapshot.take())
                local.state.adopt(whole, replica.vector, base, state[0])
        published, (generation, number) = int(tree["published"]), tree["went"]
        best = tree.get("best", self._publisher.evaluator.best)
        self._publisher.catch_up(published, (int(generation), int(number)), best)
        self._reports.say(messages.Caught, published=published)
        self._reports.event(
            "rejoined",
            worker=self._reports.worker,
            attempt=self._reports.attempt,
            generation=self._generation.number,
            landed=int(tree["joint"]["landed"]),
            digest=replica.parameters.digest(),
        )

    def _tree(self) -> Tree:
        local, publisher, replica = self._local, self._publisher, self._local.replica
        if self._generation.alone and not publisher.concluded:
            local.become_joint(replica.vector.detach().cpu())
        tree: Tree = {
            "joint": local.joint.tree(),
            "buffers": replica.buffers.vector(),
            "counts": replica.buffers.counts(),
            "schedule": replica.schedule(),
            "published": publisher.number,
            "best": publisher.evaluator.best,
            "went": list(publisher.went),
        }
        if local.strategy.replicated:
            tree["replica"] = replica.shared()
        return tree
