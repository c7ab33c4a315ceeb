"""What becomes of numbers that are not finite: a step with such a loss or gradient is not taken, a replica with such
parameters starts again from the joint model, and a run in which that goes on at every worker ends.

What others send is checked by the exchange, where it is summed and where it is merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.snapshot import Snapshot
from thinwire.replicas.flaws import Flaw, forget_not_finite
from thinwire.rules.divergence import PER_DROP
from thinwire.rules.finite import count_not_finite, is_finite

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker

ANEW_AFTER = 3
"""Steps in a row that are not taken, after which the replica starts from the joint model though it is finite."""
KEEP_EVERY = 16
"""Steps after which a copy of buffers is kept, to go back to."""
FIRST, EVERY_S = 8, 0.25
"""So many are told one by one, further ones together at this distance."""


class NonFinite:
    """One worker's part in it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.score = 0
        """How badly it goes here, for `has_diverged`."""
        self.since = 0
        """Rounds before this one are in what the replica started again from: their replies are not for it."""
        self._row = 0
        self._anew = False
        self._count = self._times = 0
        self._told_at = 0.0
        self._untold: dict[str, Any] | None = None
        self._buffers: tuple[Tensor, list[int]] | None = None
        self._rounds: set[int] = set()

    @property
    def now_fails(self) -> bool:
        """Whether the last few steps were not taken; who has no rows takes none."""
        return self._row >= ANEW_AFTER or not self._worker.batches.num_rows

    # -- steps ------------------------------------------------------------------------------------------------------

    def takes(self, loss: float) -> bool:
        """Whether a step is to be taken whose loss and gradient were just computed; the same on all of a group."""
        replica, flaw = self._worker.replica, self._worker.replica.flaw(loss)
        drops, anew = replica.agree(flaw is not None, self._anew)
        if not drops and not anew:
            self.score, self._row = max(0, self.score - 1), 0
            if self._worker.meter.steps % KEEP_EVERY == 0:
                self._keep_buffers()
            return True
        if flaw is not None:
            self._drop(flaw)
        self.score += PER_DROP
        self._row += 1
        self.restore_buffers(step=self._worker.meter.steps + 1)
        bad = not replica.is_finite
        (anew,) = replica.agree(bad or self._row % ANEW_AFTER == 0 or self._anew)
        if anew:
            self.start_anew(str(flaw or "a worker of its group computed values that are not finite"))
        return False

    def _drop(self, flaw: Flaw) -> None:
        if self._worker.plan.on_nonfinite == "stop":
            raise DivergedError(str(flaw))
        self.tell(flaw.what, flaw.values, step=flaw.step)

    def left_out(self, round: int, values: int, *, told: bool) -> None:
        """A contribution of this worker's was not counted, where it leaves this worker or where it was summed."""
        if round in self._rounds:  # known: its step was not taken, or another part of it was told of
            return
        self.without(round)
        step = self._worker.meter.steps
        if self._worker.plan.on_nonfinite == "stop":
            raise DivergedError(f"what this worker had for round {round} was not finite after step {step}")
        if not told:
            self.tell("contribution", values, step=step, round=f"train:{round}")
        self.score += PER_DROP
        self._row += 1
        if self._worker.plan.group_size > 1:
            self._anew = True  # at the group's next step, together
        elif not self._worker.replica.is_finite:
            self.start_anew("its contribution was not finite")

    def without(self, round: int) -> None:
        """A round that this worker gives nothing to, since its step was not taken."""
        self._rounds = {r for r in self._rounds if r > round - 64} | {round}

    # -- starting again ---------------------------------------------------------------------------------------------

    def start_anew(self, why: str) -> None:
        """The replica takes the joint model, as a newcomer does, and its optimizer forgets; all of a group together."""
        worker = self._worker
        self._anew = False
        bad = not worker.replica.is_finite
        if bad and worker.plan.on_nonfinite == "stop":
            raise DivergedError(why)
        if worker.alone or worker.strategy.replicated or worker.joint.model is None:
            if bad:
                raise DivergedError(f"{why}, and there is no other replica to start again from")
            return
        if worker.gradients and not bad:  # servers step
            return
        if bad:
            self.tell("parameters", count_not_finite(worker.replica.vector.detach()), step=worker.meter.steps)
        if worker.strategy.timing == "async":
            self._fetch()
        else:
            self._take_joint()
        worker.replica.begin_anew()
        worker.open_state()
        worker.weigh_anew()

    def _take_joint(self) -> None:
        """From the joint model here; rounds under way land on it as on a replica that gave them nothing."""
        worker = self._worker
        with worker.joint.lock, torch.no_grad():
            model = worker.joint.model
            assert model is not None
            worker.replica.vector.copy_(model)
            self.since = worker.joint.landed
            worker.rebase(lambda fragment: Snapshot.of(fragment.of(model).clone()))

    def _fetch(self) -> None:
        """From the servers."""
        worker = self._worker
        self._count += 1
        key = f"joint:anew-{self._count}"
        worker.exchange.view(key)
        worker.wait(lambda: key in worker.averaged or worker.alone, "the joint model", worker.plan.deadlines.join_s)
        found = worker.averaged.pop(key, None)
        model = worker.joint.model if found is None else found.mean
        assert model is not None
        refuse(model, "the joint model")
        with torch.no_grad():
            worker.replica.vector.copy_(model)

    # -- buffers ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """At the start of a run."""
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        buffers = self._worker.replica.buffers
        if buffers.size:
            vector = buffers.vector()
            if not buffers.count_not_finite(vector):
                self._buffers = vector, buffers.counts()

    def restore_buffers(self, step: int | None = None) -> None:
        """What a step, the last one unless said, has left in buffers goes: running statistics above all."""
        buffers = self._worker.replica.buffers
        values = buffers.count_not_finite() if buffers.size else 0
        if values and self._buffers is not None:
            self.tell("buffers", values, step=self._worker.meter.steps if step is None else step)
            buffers.load(*self._buffers)

    # -- what is handed on ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before anything of this worker is saved or handed back: all of it is finite after this."""
        worker = self._worker
        owed = worker.replica.owed_flaw()
        if owed is not None:
            self._drop(owed)
            self.score, self._row = self.score + PER_DROP, self._row + 1
        self.restore_buffers()
        if not worker.replica.is_finite:
            self.start_anew(str(owed or f"the parameters were not finite any more after step {worker.meter.steps}"))
        if values := forget_not_finite(worker.replica.optimizer):
            self.tell("optimizer state", values, step=worker.meter.steps)

    # -- telling ----------------------------------------------------------------------------------------------------

    def tell(self, what: str, values: int, **where: Any) -> None:
        """Puts it into the run's log; where there is much of it, several at once."""
        self._count, self._times = self._count + 1, self._times + 1
        self._untold = {"worker": self._worker.plan.worker, "what": what, "values": values, **where}
        now = self._worker.time.now()
        if self._count <= FIRST or now - self._told_at > EVERY_S:
            self._told_at = now
            self.flush()

    def flush(self) -> None:
        """Tells what was not told yet."""
        if self._untold is not None:
            self._worker.event("non_finite", **self._untold, times=self._times)
            self._untold, self._times = None, 0


def refuse(model: Tensor, what: str) -> None:
    """Raises where a model is not finite."""
    if not is_finite(model):
        values = count_not_finite(model)
        raise DivergedError(f"{what} is not finite any more: {values} of {model.numel()} values")
