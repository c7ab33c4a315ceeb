"""Handing the joint state to a peer that asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.engine.worker import Worker


class Handover:
    """The requests a worker has, and what it gives."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asked: list[int] = []

    def ask(self, peer: int) -> None:
        """Notes a request."""
        self._asked.append(peer)

    def give(self, adopted: int) -> None:
        """Answers requests once this worker has adopted all rounds that are in the joint state.

        Joint state, buffers and publications must be of one round, or the peer would miss a publication whose round is
        merged here but still waits to be taken up.
        """
        if not self._asked:
            return
        joint = self._worker.joint
        with joint.lock:
            if joint.landed != adopted:
                return
            tree = self._tree()
        worker, model = self._worker, tree["joint"]["state"][:1]
        digest = worker.replica.parameters.digest(*model)
        for peer in self._asked:
            worker.exchange.donate(peer, tree)
            worker.event("handed_over", worker=worker.plan.worker, peer=peer, landed=adopted, digest=digest)
        self._asked = []

    def _tree(self) -> dict[str, Any]:
        worker = self._worker
        if worker.alone:
            worker.joint.set_model(worker.replica.vector.detach().cpu())
        tree: dict[str, Any] = {
            "joint": worker.joint.tree(),
            "buffers": worker.replica.buffers.vector(),
            "counts": worker.replica.buffers.counts(),
            "published": worker.publisher.number,
            "best": worker.publisher.best,
        }
        if worker.strategy.subject == "gradients":
            tree["replica"] = worker.replica.shared()
        return tree
