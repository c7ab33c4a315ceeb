"""Handing the joint state to a peer that asked for it, and taking it over from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from thinwire.exchange.signals import Asked, Caught
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.protocol import messages

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker


class ReplicaTransfer:
    """The requests a worker has, what it gives, and what it is given."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
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
        worker = self._worker
        # A replica that replaces the joint model changes with each step until its group begins the generation
        held_back = worker.replica_replaces_joint
        now = {peer: asked for peer, asked in self.asked.items() if not held_back or asked <= worker.generation}
        if not now:
            return
        joint = worker.joint
        with joint.lock:
            if joint.landed != adopted:
                return
            tree = self._tree()
        model = tree["joint"]["state"][:1]
        digest = worker.replica.parameters.digest(*model)
        for peer, generation in now.items():
            worker.exchange.donate(peer, tree, generation)
            worker.event("handed_over", worker=worker.plan.worker, peer=peer, landed=adopted, digest=digest)
            del self.asked[peer]

    def take(self, caught: Caught, over: list[tuple[Fragment, Snapshot | None]], *, newcomer: bool) -> None:
        """Takes the joint state over: a newcomer starts from it, a worker that fell behind keeps its own steps.

        `over` are the rounds this worker had under way that are in that state: what it contributed counts as arrived.
        """
        worker, tree = self._worker, caught.tree
        strategy, x = worker.strategy, worker.replica.vector
        with torch.no_grad():
            if strategy.replicated:
                worker.replica.load_shared(tree["replica"])
            elif caught.old_model is None or newcomer:
                x.copy_(tree["joint"]["state"][0])
                worker.open_state()
                worker.replica.buffers.load(tree["buffers"], tree["counts"])
                worker.replica.load_schedule(tree["schedule"])
            elif worker.ahead:
                worker.ahead.land(Fragment(0, worker.joint.size), tree["joint"]["state"][0], worker.meter.steps)
            elif strategy.timing != "async":  # else its own next exchange brings it and the joint model together
                base = caught.old_model
                for fragment, snapshot in over:
                    if snapshot is not None:
                        fragment.of(base).copy_(snapshot.take())
                worker.state.adopt(Fragment(0, worker.joint.size), x, base, tree["joint"]["state"][0])
        generation, number = tree["went"]
        worker.publisher.catch_up(int(tree["published"]), (int(generation), int(number)))
        worker.publisher.best = tree.get("best", worker.publisher.best)
        worker.say(messages.Caught, published=int(tree["published"]))
        worker.event(
            "rejoined",
            worker=worker.plan.worker,
            attempt=worker.plan.attempt,
            generation=worker.generation,
            landed=int(tree["joint"]["landed"]),
            digest=worker.replica.parameters.digest(),
        )

    def _tree(self) -> dict[str, Any]:
        worker = self._worker
        if worker.alone and not worker.publisher.concluded:
            worker.give_to_joint(worker.replica.vector.detach().cpu())
        worker.nonfinite.restore_buffers()
        tree: dict[str, Any] = {
            "joint": worker.joint.tree(),
            "buffers": worker.replica.buffers.vector(),
            "counts": worker.replica.buffers.counts(),
            "schedule": worker.replica.schedule(),
            "published": worker.publisher.number,
            "best": worker.publisher.best,
            "went": list(worker.publisher.went),
        }
        if worker.strategy.replicated:
            tree["replica"] = worker.replica.shared()
        return tree
