"""An optimizer and its learning-rate schedule, with the settings that they were asked for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from thinwire.replicas.algorithms import Memory
from thinwire.replicas.schedules import Asked, begun, go_on, plain, position, resume
from thinwire.replicas.spec import TrainSpec


class Learning:
    """What of a replica learns how to step, and how it moves on."""

    def __init__(self, optimizer: torch.optim.Optimizer, spec: TrainSpec, memory: Memory) -> None:
        self.optimizer, self._every, self._memory = optimizer, spec.scheduler_every, memory
        kinds = (bool, int, float, str)
        self._asked_for = [{k: v for k, v in g.items() if isinstance(v, kinds)} for g in optimizer.param_groups]
        """The optimizer's plain settings as they were asked for, group by group."""
        self._first = {parameter: _copied(kept) for parameter, kept in optimizer.state.items()}
        """What some optimizers keep of a parameter before its first step."""
        self.scheduler = spec.scheduler(optimizer) if spec.scheduler else None
        self._plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    @property
    def rates(self) -> list[float]:
        """The learning rates of now, by the optimizer's groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _end(self, what: str) -> None:
        if self.scheduler is not None and self._every == what and not self._plateau:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a server's may have stepped instead
            self.scheduler.step()

    def end_step(self) -> None:
        """Moves a per-step scheduler on."""
        self._end("step")

    def end_epoch(self) -> None:
        """Moves a per-epoch scheduler on; one that watches a metric waits for `end_evaluation`."""
        self._end("epoch")

    def end_evaluation(self, metrics: dict[str, float]) -> None:
        """Moves a scheduler on that watches a metric."""
        if self.scheduler is not None and self._plateau and "val_loss" in metrics:
            self.scheduler.step(metrics["val_loss"])

    def begin_anew(self) -> None:
        """Forgets what was learnt, as a replica does that starts from the joint model."""
        self.optimizer.state.clear()
        self.optimizer.state.update({parameter: _copied(kept) for parameter, kept in self._first.items()})
        for name in [name for name, value in self._memory.items() if isinstance(value, Tensor)]:
            del self._memory[name]

    def tree(self) -> dict[str, Any]:
        """The optimizer's and the scheduler's state; a copy, since theirs goes on changing in place."""
        scheduler = None if self.scheduler is None else plain(self.scheduler.state_dict())
        asked_for = self._asked_for
        return copy.deepcopy({"optimizer": self.optimizer.state_dict(), "scheduler": scheduler, "asked_for": asked_for})

    def load(self, tree: dict[str, Any]) -> None:
        """Goes on with a saved state, but with the settings that were changed since: a smaller learning rate, say."""
        first = begun(self.optimizer)
        self.optimizer.load_state_dict(tree["optimizer"])
        for group, now, then in zip(self.optimizer.param_groups, self._asked_for, tree["asked_for"], strict=True):
            group.update({k: v for k, v in now.items() if k != "lr" and v != then.get(k)})
        rates = {"then": _rates(tree["asked_for"]), "now": _rates(self._asked_for)}
        resume(self.scheduler, self.optimizer, tree["scheduler"], first=first, **rates)

    def schedule(self) -> dict[str, Any]:
        """Where the learning rate's schedule is, for a replica that joins late."""
        return position(self.scheduler, self.optimizer, _rates(self._asked_for))

    def load_schedule(self, tree: dict[str, Any]) -> None:
        """Goes on at another replica's learning rate; without a schedule it is the same anyway."""
        go_on(self.scheduler, self.optimizer, tree, _rates(self._asked_for))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _rates(settings: list[dict[str, Any]]) -> Asked:
    return [group.get("lr") for group in settings]
