"""A worker's replica, with everything that the worker keeps beside it."""

from __future__ import annotations

import enum
from typing import final

import torch
from torch import Tensor

from thinwire.exchange.joint import JointState
from thinwire.worker.ahead import Ahead
from thinwire.worker.ports import Replica
from thinwire.worker.replica_state import ReplicaState
from thinwire.worker.shares import Shares
from thinwire.worker.step_statistics import StepStatistics


class Origin(enum.Enum):
    """Where a replica's values come from."""

    NEW = "It has nothing that a joint state would not replace."
    CHECKPOINT = "It goes on from this worker's own part of a checkpoint."
    STEPS = "It has taken steps of its own."


@final
class LocalModel:
    """The replica, the strategy's state beside it, and what of its steps was not contributed yet."""

    def __init__(self, replica: Replica, joint: JointState, meter: StepStatistics, *, in_group: bool) -> None:
        self.replica, self.joint, self.strategy, self.meter = replica, joint, joint.strategy, meter
        self.state = ReplicaState(self.strategy, replica.vector)
        self.shares = Shares()
        optimizer = None if self.strategy.subject == "gradients" else self.strategy.joint_optimizer
        self.ahead = None if optimizer is None else Ahead(replica, joint, optimizer.rule)
        self.in_group = in_group
        """Whether the replica is part of one that spans a group."""
        self.origin = Origin.NEW
        self.since = 0
        """Rounds before this one are in what the replica started again from: their replies are not for it."""

    def waits(self, round: int) -> bool:
        """Whether stepping waits for a round's reply."""
        return self.strategy.timing == "barrier" or (not self.in_group and self.joint.cuts.at(round).setting.wait)

    def open(self) -> None:
        """The parameters are the joint model's: what is kept beside them starts from there."""
        self.state.open(self.replica.vector)
        if self.ahead:
            self.ahead.open()

    def weigh_anew(self) -> None:
        """The replica is the joint model now: what was done up to here has no weight in what it contributes next."""
        self.shares.start(self.meter.steps, self.meter.rows_done)

    def copy_joint(self) -> Tensor:
        """Writes the joint model's values into the parameters."""
        model = self.joint.model
        assert model is not None
        with torch.no_grad():
            self.replica.vector.copy_(model)
        return model

    def restart(self) -> Tensor:
        """Starts again from the joint model; the caller holds the joint state's lock, and opens what is kept beside."""
        self.since = max(self.since, self.joint.landed)
        return self.copy_joint()

    def become_joint(self, model: Tensor) -> None:
        """The parameters, in `model`, are the joint model; the optimizer's state is the joint one's."""
        self.joint.set_model(model)
        if self.ahead:
            self.joint.set_kept(self.ahead.kept(), self.meter.steps)

    def vector_on_host(self) -> Tensor:
        """A copy of the parameters."""
        return self.replica.vector.detach().to("cpu", copy=True)
