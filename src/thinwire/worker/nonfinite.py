"""What a worker does about NaN and infinity.

A step whose loss or gradient is not finite is left out. A replica whose parameters are not finite starts again from the
joint model. The run ends where this goes on at every worker. The exchange checks what other workers send.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.ports import PublicationsPort
from thinwire.exchange.signals import Averaged
from thinwire.exchange.snapshot import Snapshot
from thinwire.replicas.flaws import Flaw, forget_not_finite
from thinwire.rules.divergence import PER_DROP
from thinwire.rules.finite import count_not_finite, is_finite
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Wait
from thinwire.worker.reports import Reports

ANEW_AFTER = 3
"""Steps left out in a row, after which the replica starts from the joint model although it is finite."""
KEEP_EVERY = 16
"""Steps between copies of the buffers, which are restored from the last one."""
FIRST, EVERY_S = 8, 0.25
"""Flaws that are reported one by one, and the least time between reports of further ones."""


@final
class NonFinite:
    """What one worker leaves out, and how it starts again.

    Args:
        has_rows: whether this worker takes steps of its own.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        rounds: OpenRounds,
        exchange: PublicationsPort,
        means: dict[str, Averaged],
        reports: Reports,
        wait: Wait,
        has_rows: bool,
    ) -> None:
        self._plan, self._local, self._generation, self._rounds = plan, local, generation, rounds
        self._exchange, self._means, self._reports, self._wait = exchange, means, reports, wait
        self._replica, self._meter, self._has_rows = local.replica, local.meter, has_rows
        self.score = 0
        """How often steps were left out lately; see `thinwire.rules.divergence`."""
        self._row = 0
        self._anew = False
        self._count = self._times = 0
        self._told_at = 0.0
        self._untold: dict[str, object] | None = None
        self._buffers: tuple[Tensor, list[int]] | None = None
        self._left_out: set[int] = set()

    @property
    def now_fails(self) -> bool:
        """Whether the last few steps were left out, or this worker has no rows to take steps with."""
        return self._row >= ANEW_AFTER or not self._has_rows

    # -- steps ------------------------------------------------------------------------------------------------------

    def takes(self, loss: float) -> bool:
        """Whether a step is to be taken whose loss and gradient were just computed; the same on all of a group."""
        replica, flaw = self._replica, self._replica.flaw(loss)
        drops, anew = replica.agree(flaw is not None, self._anew)
        if not drops and not anew:
            self.score, self._row = max(0, self.score - 1), 0
            if self._meter.steps % KEEP_EVERY == 0:
                self._keep_buffers()
            return True
        if flaw is not None:
            self._drop(flaw)
        self.score += PER_DROP
        self._row += 1
        self.restore_buffers()
        bad = not replica.is_finite
        (anew,) = replica.agree(bad or self._row % ANEW_AFTER == 0 or self._anew)
        if anew:
            self.start_anew(str(flaw or "a worker of its group computed values that are not finite"))
        return False

    def _drop(self, flaw: Flaw) -> None:
        if self._plan.on_nonfinite == "stop":
            raise DivergedError(str(flaw))
        self.tell(flaw.what, flaw.values, step=flaw.step)

    def left_out(self, round: int, values: int, *, told: bool) -> None:
        """A contribution of this worker was left out, either here or where contributions are summed."""
        if round in self._left_out:  # its step was left out, or another part of it was reported
            return
        self.without(round)
        step = self._meter.steps
        if self._plan.on_nonfinite == "stop":
            raise DivergedError(f"what this worker had for round {round} was not finite after step {step}")
        if not told:
            self.tell("contribution", values, step=step, round=f"train:{round}")
        self.score += PER_DROP
        self._row += 1
        if self._plan.group_size > 1:
            self._anew = True  # at the group's next step, together
        elif not self._replica.is_finite:
            self.start_anew("its contribution was not finite")

    def without(self, round: int) -> None:
        """This worker contributes nothing to a round, since its step was left out."""
        self._left_out = {r for r in self._left_out if r > round - 64} | {round}

    # -- starting again ---------------------------------------------------------------------------------------------

    def start_anew(self, why: str) -> None:
        """The replica takes the joint model, as a newcomer does, and its optimizer forgets; all of a group together."""
        self._anew = False
        bad = not self._replica.is_finite
        if bad and self._plan.on_nonfinite == "stop":
            raise DivergedError(why)
        if self._generation.alone or self._local.strategy.replicated or self._local.joint.model is None:
            if bad:
                raise DivergedError(f"{why}, and there is no other replica to start again from")
            return
        if self._local.strategy.subject == "gradients" and not bad:  # servers step
            return
        if bad:
            self.tell("parameters", count_not_finite(self._replica.vector.detach()), step=self._meter.steps)
        if self._local.strategy.timing == "async":
            self._fetch()
        else:
            self._take_joint()
        self._replica.begin_anew()
        self._local.open()
        self._local.weigh_anew()

    def _take_joint(self) -> None:
        """From the joint model here; rounds under way land on it as on a replica that gave them nothing."""
        with self._local.joint.lock:
            model = self._local.restart()
            self._rounds.rebase(lambda fragment: Snapshot.of(fragment.of(model).clone()))

    def _fetch(self) -> None:
        """From the servers."""
        self._count += 1
        key = f"joint:anew-{self._count}"
        self._exchange.view(key)
        self._wait(lambda: key in self._means or self._generation.alone, "the joint model", self._plan.deadlines.join_s)
        found = self._means.pop(key, None)
        model = self._local.joint.model if found is None else found.mean
        assert model is not None
        refuse(model, "the joint model")
        with torch.no_grad():
            self._replica.vector.copy_(model)

    # -- buffers ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """At the start of a run."""
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        buffers = self._replica.buffers
        if buffers.size:
            vector = buffers.vector()
            if not buffers.count_not_finite(vector):
                self._buffers = vector, buffers.counts()

    def restore_buffers(self) -> None:
        """Takes out of buffers what the step just computed has left there: running statistics above all."""
        buffers = self._replica.buffers
        values = buffers.count_not_finite() if buffers.size else 0
        if values and self._buffers is not None:
            self.tell("buffers", values, step=self._meter.steps)
            buffers.load(*self._buffers)

    # -- what is handed on ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before anything of this worker is saved or handed back: all of it is finite after this."""
        owed = self._replica.owed_flaw()
        if owed is not None:
            self._drop(owed)
            self.score, self._row = self.score + PER_DROP, self._row + 1
        self.restore_buffers()
        if not self._replica.is_finite:
            self.start_anew(str(owed or f"the parameters were not finite any more after step {self._meter.steps}"))
        if values := forget_not_finite(self._replica.optimizer):
            self.tell("optimizer state", values, step=self._meter.steps)

    # -- telling ----------------------------------------------------------------------------------------------------

    def tell(self, what: str, values: int, **where: object) -> None:
        """Puts a flaw into the run's log; where there are many, several at once."""
        self._count, self._times = self._count + 1, self._times + 1
        self._untold = {"worker": self._plan.worker, "what": what, "values": values, **where}
        now = self._meter.now()
        if self._count <= FIRST or now - self._told_at > EVERY_S:
            self._told_at = now
            self.flush()

    def flush(self) -> None:
        """Reports what was not reported yet."""
        if self._untold is not None:
            self._reports.event("non_finite", **self._untold, times=self._times)
            self._untold, self._times = None, 0


def refuse(model: Tensor, what: str) -> None:
    """Raises where a model is not finite."""
    if not is_finite(model):
        values = count_not_finite(model)
        raise DivergedError(f"{what} is not finite any more: {values} of {model.numel()} values")
