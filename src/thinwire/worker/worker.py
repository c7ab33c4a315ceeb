"""One worker's loop: steps, and between two steps whatever the exchange has brought.

Stepping waits for an exchange only under a barrier strategy. Everything else, replies, new members, requests for the
joint state, evaluations, is taken up between two steps, in the order in which the exchange thread saw it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import TimedOutError
from thinwire.exchange import signals
from thinwire.exchange.buffer_pool import BufferPool
from thinwire.exchange.joint import JointState
from thinwire.exchange.snapshot import Snapshot, snapshot_of
from thinwire.parameters import Fragment
from thinwire.protocol import messages
from thinwire.protocol.forms import Body
from thinwire.protocol.observation import ReplicaEntered
from thinwire.strategies import Share, Strategy
from thinwire.worker.ahead import Ahead
from thinwire.worker.gradient_stream import Served, average_gradient
from thinwire.worker.guard import Guard
from thinwire.worker.landing import take_over
from thinwire.worker.nonfinite import NonFinite
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batches
from thinwire.worker.publisher import Publisher
from thinwire.worker.replica_state import ReplicaState
from thinwire.worker.round_trigger import Pace
from thinwire.worker.search import Search
from thinwire.worker.shares import Shares
from thinwire.worker.state_check import fits
from thinwire.worker.state_transfer import ReplicaTransfer
from thinwire.worker.step_statistics import StepStatistics
from thinwire.worker.tuner import Tuner

REPORT_S = 0.25
MOST_AHEAD = 8
"""Steps that a replica may be ahead of what its gradients land on, divided by the fragments that take turns."""
LAGS = 0.8
"""Of another's rows: a worker that has done fewer is behind, not merely unlucky with a processor."""


class Worker:
    """Runs one worker from joining to the end of the run."""

    publishes: type[Publisher] = Publisher

    def __init__(
        self,
        plan: WorkerPlan,
        replica: Any,
        batches: Batches,
        exchange: Any,
        joint: JointState,
        save_part: Callable[[str, str, object], Any] | None,
    ) -> None:
        self.plan, self.replica, self.batches = plan, replica, batches
        self.exchange, self.joint, self.strategy = exchange, joint, joint.strategy
        self.time = exchange.time
        self.meter = StepStatistics(self.time.now)
        self.state = ReplicaState(self.strategy, replica.vector)
        self.members: tuple[int, ...] = ()
        self.lead, self.generation, self.total_rows = False, 0, 0
        self.totals: dict[int, int] = {}
        self._rows_at_round: dict[int, int] = {}
        self.averaged: dict[str, signals.Averaged] = {}
        self.concludes = self.model_arrived = False
        """Whether the coordinator has said that all rows are done; and that the driver has the model."""
        self.publisher = self.publishes(self, save_part)
        self.gradients = self.strategy.subject == "gradients"
        self.served = Served(self) if self.gradients and self.strategy.timing == "async" else None
        optimizer = None if self.gradients else self.strategy.joint_optimizer
        self.ahead = None if optimizer is None else Ahead(replica, joint, optimizer.rule)
        searches = self.gradients and not self.served and replica.searches
        self.search = Search(self) if searches else None
        self._barrier, self._async = self.strategy.timing == "barrier", self.strategy.timing == "async"
        self._shifts = type(self.strategy).before_step is not Strategy.before_step
        """Whether the replica moves before its gradient is computed: what it contributes is what the last step left."""
        self._snapshots: dict[int, tuple[Fragment, Snapshot | None]] = {}
        self.spares = BufferPool(self.strategy.in_flight + 1)
        self.mean_gradient: Tensor | None = None
        self.mean_is_empty = False
        self.mean_absent: frozenset[int] = frozenset()
        """Parameters, by number, of which no worker has a gradient in that mean: they take no step."""
        self.averages = -1
        """The round whose mean the step under way waits for."""
        self.shares = Shares()
        self.pace = Pace(self.meter, self.time.now)
        self._needs_state = self._stopping = False
        self._reported, self._patient_until, self._rounds_in_all = 0.0, 0.0, 0
        self._tuner, self.guard = Tuner(self), Guard(self)
        self.nonfinite = NonFinite(self)
        self.landed = self.adopted = joint.landed
        self._handover = ReplicaTransfer(self)
        exchange.expects(functools.partial(fits, replica=replica, replicated=self.strategy.replicated))
        self._stepped = self.loaded = self._finished = False

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with: the replica is the joint model then."""
        return len(self.members) < 2

    @property
    def replica_replaces_joint(self) -> bool:
        """Whether the replica is the joint model, or becomes it with a generation that this worker has yet to begin."""
        return self.alone

    @property
    def needs_state(self) -> bool:
        """Whether the joint state is still on its way to this worker."""
        return self._needs_state

    @property
    def _new(self) -> bool:
        return not (self.loaded or self._stepped)

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains until the shard's epochs are done or the run is stopped, then sees the run to its end."""
        self.exchange.start(self.replica.parameters.digest())
        self._begin()
        self._train()
        self._finish()

    def _begin(self) -> None:
        self.wait(
            lambda: bool(self.members) and not self._needs_state, "a generation to form", self.plan.deadlines.join_s
        )
        if not self.loaded:
            self.pace.start(self.meter.steps)
            self.weigh_anew()
        self.guard.begin()
        self.nonfinite.begin()

    def _train(self) -> None:
        if self._goes_on():
            self._consider_round()
        epochs = self.plan.epochs if self.plan.beyond is None else None
        for batch in self.batches.training(self.meter.position, epochs):
            if not self.exchange.quiet:
                self._take_signals(0.0)
            if not self._goes_on():
                break
            self._step(batch)

    def _goes_on(self) -> bool:
        limit = self.plan.steps
        goes_on = not self._stopping and (limit is None or self.meter.steps < limit)
        return goes_on and (self.plan.beyond is None or not self._rests())

    def _rests(self) -> bool:
        """Whether its epochs are done and it stops there: some are missing, or none of the others lags far behind.

        Rows are compared as they were at the last round: the others' notes of it are as old as its own.
        """
        plan = self.plan
        if plan.epochs is None or self.meter.position[0] < plan.epochs:
            return False
        if len(self.members) < (plan.beyond or 0):
            return True
        mine = self._rows_at_round.get(plan.worker, 0)
        return all(self._rows_at_round.get(other, 0) >= LAGS * mine for other in self.members)

    def _step(self, batch: Any) -> None:
        if self.search:
            self.search.catch_up()
        begun = self.meter.begin_step()
        self._stepped = True
        together = not self.alone
        x = self.replica.vector
        cycle, setting = self.joint.cycle(), self.joint.setting()  # the exchange may land a round meanwhile
        if together:
            if not self._barrier:
                self._consider_round()
            if self._shifts:
                self._take_snapshots()
            with torch.no_grad():
                self.state.before_step(x, cycle, setting)
        if together and self.served:
            self.served.begin(self._weight_of(batch))
        loss = self.replica.gradient(batch)
        if math.isfinite(loss) and self.meter.samples_gradient(batch.position):
            self.meter.sampled_gradient(self.replica.gradient_norm())
        if together:
            with torch.no_grad():
                term = self.state.gradient_term(x, cycle, setting)
                if term is not None:
                    self.replica.parameters.add_to_gradients(term)
                self._take_snapshots()
        takes = self.nonfinite.takes(loss)
        if together and self.served:
            self.served.end(takes=takes)
        elif together and self.search:
            self.search.step(self._weight_of(batch), takes=takes)
        elif together and self.gradients:
            average_gradient(self, self._weight_of(batch), takes=takes)
        elif takes and self.search:
            self.search.step_alone()
        elif takes and together and self.ahead:
            self.replica.clip()
            self.ahead.add(self._weight_of(batch))
            self.replica.take_step()
        elif takes:
            self.replica.update()
        else:
            self.replica.advance()
        self.adopted = max(self.adopted, self.landed)
        if math.isfinite(loss):
            self.pace.step(loss)
        if not self._barrier and self._waits(self.exchange.next_round):  # who waits for every reply knows a step's time
            self.replica.finish()
        self._book(begun, batch, loss)
        if self.ahead and together:
            self._stay_near()
        self.guard.step()
        if self.alone or self._waits(self.exchange.next_round):
            self._consider_round()
        if self.search and not self._needs_state:  # asked in the middle of its step; publications of it are taken up
            self._hand_over()

    def _waits(self, round: int) -> bool:
        return self._barrier or self.joint.cuts.at(round).setting.wait

    def _weight_of(self, batch: Any) -> float:
        return float(self.replica.weight_of(batch))

    def _book(self, begun: float, batch: Any, loss: float) -> None:
        epoch, number = batch.position
        ended = number + 1 >= self.batches.batches_per_epoch
        now = self.meter.end_step(begun, batch.num_rows, loss, (epoch + 1, 0) if ended else (epoch, number + 1))
        if ended:
            self._end_epoch(epoch)
        if now - self._reported > REPORT_S:
            self._report(now)

    def _end_epoch(self, epoch: int) -> None:
        norm = self.meter.epoch_gradient_norm
        rows, loss = self.meter.end_epoch()
        self.replica.end_epoch()
        self.say(messages.Epoch, epoch=epoch, rows=rows, loss=loss, gradient_norm=norm)

    def _report(self, now: float) -> None:
        self._reported = now
        if self.members:  # until then the last word of its predecessor stands
            more = {"note": self._account(), "first_loss": self.pace.first_loss, "score": self.nonfinite.score}
            self.exchange.progress(self.meter.report() | more)

    def say(self, kind: Callable[..., Body], /, **fields: Any) -> None:
        """Tells the coordinator something."""
        self.exchange.report(kind(attempt=self.plan.attempt, **fields))

    def event(self, kind: str, /, **fields: Any) -> None:
        """Puts an event into the run's log."""
        self.say(messages.Happened, kind=kind, fields=fields)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _consider_round(self) -> None:
        if self.alone:
            self.publisher.publish_deferred()  # announced when there were others
            self.publisher.publish_alone()
            return
        if self.gradients:
            self.publisher.publish_deferred()
            return
        behind = self.exchange.next_round >= self.adopted + self.strategy.in_flight
        if behind and self._barrier and not self._needs_state:  # by a round that it joined with nothing to give yet
            until = lambda: self.alone or self.landed >= self.exchange.next_round  # noqa: E731
            self.wait(until, "a round that began without it", self.plan.deadlines.round_s)
            behind = self.alone
        if self._needs_state or behind or not self._goes_on():
            return
        if self.strategy.due(self.pace.progress(self.exchange.next_round, self.lead)):
            self._launch(self.replica.vector)

    def _launch(self, values: Tensor) -> None:
        if self._async and not self.shares.has_any(self.meter.steps):
            return  # servers want nothing from a replica that has just started from their model
        round, fragment = self.exchange.claim()
        share = Share(round, *self.shares.take(fragment, self.meter.steps, self.rows_done), self.lead)
        worked = share.steps > 0 and not self.guard.alone
        began = self.time.now()
        more: dict[str, Any] = {}
        if self.ahead and worked:
            values, more = self.ahead.sum, self.ahead.note(fragment, self.meter.steps)
            worked = bool(more)
        snapshot = snapshot_of(fragment.of(values).detach(), self.spares) if worked else None
        waits = self._waits(round)
        if snapshot is not None and (waits or self.ahead):
            snapshot.settle()
        if snapshot is not None and self.ahead:
            self.ahead.sent(fragment)
        self.meter.handled(self.time.now() - began, fragment.size / self.joint.size)
        self.send_off(round, fragment, snapshot, self.strategy.weight(share) if worked else 0.0, **more)
        self.pace.launched()
        if waits:
            self.await_round(round)
            self.pace.go_on()

    def send_off(
        self,
        round: int,
        fragment: Fragment,
        snapshot: Snapshot | None,
        weight: float,
        *,
        announces: bool = True,
        **more: Any,
    ) -> None:
        self._snapshots[round] = (fragment, snapshot)
        self.meter.flies(len(self._snapshots))
        note = self._account() | more | self.guard.note()
        if announces:
            note |= self.publisher.note(round)
        if self.lead:
            note |= self._tuner.note(round)
        self.exchange.launch(round, fragment, snapshot, weight, note)

    def open_state(self) -> None:
        """The replica's parameters are the joint model's: what is kept beside them starts from there."""
        self.state.open(self.replica.vector)
        if self.ahead:
            self.ahead.open()

    def give_to_joint(self, model: Tensor) -> None:
        """This replica's parameters, in `model`, are the joint model; its optimizer's state is the joint one's."""
        self.joint.set_model(model)
        if self.ahead:
            self.joint.set_kept(self.ahead.kept(), self.meter.steps)

    def _stay_near(self) -> None:
        """Waits where a round takes so many steps that its gradients would be of another model by the time it lands."""
        assert self.ahead is not None
        most = max(2, MOST_AHEAD // self.joint.cuts.newest.count)
        if self._snapshots and self.meter.steps - self.pace.steps >= most:
            self.await_round(max(self._snapshots))

    def weigh_anew(self) -> None:
        """The replica is the joint model now: what was done up to here has no weight in what it contributes next."""
        self.shares.start(self.meter.steps, self.rows_done)

    def rebase(self, base: Callable[[Fragment], Snapshot]) -> None:
        """Rounds under way land as if they had been launched with other values."""
        self._snapshots = {r: (f, None if s is None else base(f)) for r, (f, s) in self._snapshots.items()}

    def _take_snapshots(self) -> None:
        """Makes the copies that the exchange thread has not come to: the vector is about to change."""
        for snapshot in (snapshot for _, snapshot in self._snapshots.values() if snapshot is not None):
            snapshot.settle()

    def _account(self) -> dict[str, Any]:
        return {"rows": self.rows_done}

    @property
    def rows_done(self) -> int:
        return self.meter.rows

    def await_round(self, round: int) -> None:
        began = self.time.now()
        self.wait(lambda: round not in self._snapshots, f"round {round}", self.plan.deadlines.round_s)
        self.meter.waited(self.time.now() - began)

    # -- signals ----------------------------------------------------------------------------------------------------

    def wait(self, until: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = self.time.now() + timeout_s
        while not until():
            self._take_signals(0.1)
            if self.time.now() - self._reported > REPORT_S:
                self._report(self.time.now())
            if self.time.now() > max(deadline, self._patient_until):
                raise TimedOutError(
                    f"worker {self.plan.worker} waited {timeout_s:.0f} s for {what} with workers "
                    f"{list(self.members)}; look for a worker that hangs, or raise the deadline"
                )

    def _take_signals(self, timeout_s: float) -> None:
        for signal in self.exchange.signals(timeout_s):
            self._take(signal)
        if not self._needs_state:
            self._hand_over()

    def _hand_over(self) -> None:
        if not (self.search and self.search.under_way):
            self._handover.give(self.adopted)

    def _take(self, signal: signals.Signal) -> None:
        if isinstance(signal, signals.Landed):
            self._land(signal)
        elif isinstance(signal, signals.LeftOut):
            self.nonfinite.left_out(signal.round, signal.values, told=signal.told)
        elif isinstance(signal, signals.Formed):
            self._form(signal)
        elif isinstance(signal, signals.Published | signals.Missed):
            self.publisher.hear(signal)
        elif isinstance(signal, signals.Noted):
            self._note(signal)
        elif isinstance(signal, signals.Averaged):
            self.averaged[signal.key] = signal
            self.publisher.resume()
        elif isinstance(signal, signals.Caught):
            self._catch_up(signal)
        elif isinstance(signal, signals.Asked):
            self._handover.ask(signal)
        elif isinstance(signal, signals.Told):
            self._hear(signal.body)
        elif isinstance(signal, signals.Broken):
            raise signal.error

    def _land(self, landed: signals.Landed) -> None:
        fragment, snapshot = self._snapshots.pop(landed.round, (landed.fragment, None))
        self.meter.flies(len(self._snapshots))
        self.landed = landed.round + 1
        base = snapshot.take() if landed.snapshot is None and snapshot is not None else landed.snapshot
        self._tuner.see(landed)
        self.guard.see(landed)
        if not self.guard.alone and landed.round >= max(self.guard.since, self.nonfinite.since):
            take_over(self, landed, fragment, snapshot, base)
        self._rows_at_round = {worker: int(note.get("rows", 0)) for worker, note in landed.notes.items()}
        for worker, note in landed.notes.items():
            self.totals[worker] = max(self.totals.get(worker, 0), int(note.get("rows", 0)))
        mid_step = self.mean_gradient is not None or bool(self.search and self.search.under_way)
        if not mid_step:
            self.adopted = self.landed
        self.publisher.see(landed, mid_step=mid_step)

    def _form(self, formed: signals.Formed) -> None:
        was_alone = self.alone and bool(self.members)
        self.members, self.lead, self.generation = formed.members, formed.lead, formed.generation
        self._tuner.first = -1
        if self.alone:
            self.guard.leave()
        self._needs_state, self.total_rows = formed.needs_state, formed.total_rows
        self.publisher.announced.lead(self.lead)
        for worker, rows in formed.totals.items():
            self.totals[worker] = max(self.totals.get(worker, 0), rows)
        model = None
        if formed.restart or (was_alone and not self.alone):
            model = self.replica.vector.detach().to("cpu", copy=True)
            self.weigh_anew()
            if not self._async and not self.publisher.concluded:
                self.give_to_joint(model)
                if self.ahead:
                    self.ahead.begin()
        if was_alone and not self.alone and self._async:  # what it did alone is no part of what strategies look at
            self.state.open(self.replica.vector)
            self.pace.start(self.meter.steps)
        if formed.position is not None and not self._stepped:
            self.loaded = False
            self.meter.position = formed.position
            self.meter.steps = self.replica.steps = formed.steps
            self.meter.rows = formed.totals.get(self.plan.worker, 0)
            self.pace.first_loss = formed.first_loss
        self.exchange.put(formed.generation, model)
        self.joint.observe(ReplicaEntered(self.generation, self.alone))
        self._report(self.time.now())
        if self._finished:  # whoever gave this worker up, and took it back, has forgotten that
            self.say(messages.Finished)
        self.publisher.resume()

    def _note(self, noted: signals.Noted) -> None:
        """Another worker says how far it is; whoever is done itself still decides what to publish."""
        self.totals[noted.worker] = max(self.totals.get(noted.worker, 0), int(noted.note.get("rows", 0)))
        if self.lead and self._finished and not self.concludes:
            self.exchange.announce(self._account() | self.publisher.note(-1))

    def _catch_up(self, caught: signals.Caught) -> None:
        landed = int(caught.tree["joint"]["landed"])
        over = [self._snapshots.pop(r) for r in sorted(self._snapshots) if r < landed]
        self._needs_state, self.landed, self.adopted = False, landed, landed
        self._handover.take(caught, over, newcomer=self._new)
        if self._new:
            self.weigh_anew()
        if self.search:
            self.search.supersede(caught.tree["replica"])

    def _hear(self, body: Body) -> None:
        if isinstance(body, messages.Verdict):
            self.publisher.judged(body)
            self._stopping |= bool(body.stop)
        elif isinstance(body, messages.Stop):
            self.publisher.asked_to_stop = body.why
        elif isinstance(body, messages.Leave):
            raise signals.LeftError(body.why, body.done)
        elif isinstance(body, messages.Wait):  # an earlier attempt holds this place, and is needed there
            self._patient_until = self.time.now() + self.plan.deadlines.join_s
        elif isinstance(body, messages.Conclude):
            self._rounds_in_all, self.concludes = body.landed, True
        elif isinstance(body, messages.Done):
            self.model_arrived = True

    def stop(self) -> None:
        """Makes this worker's next step its last."""
        self._stopping = True

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.guard.leave()
        self.nonfinite.settle()
        self.wait(lambda: not self._snapshots, "its last rounds", self.plan.deadlines.round_s)
        self._contribute_the_rest()
        self._account_for()
        if self.search:
            self.search.only_follows = True
        self.exchange.follow(math.inf)
        self._finished = True
        self.say(messages.Finished)
        self._await_others(self.plan.deadlines.finish_s if self.batches.num_rows else math.inf)
        self.publisher.conclude()
        self._account_for()
        self.say(messages.Bye)

    def _await_others(self, patience_s: float) -> None:
        self.wait(self._concludes, "the other workers to finish", patience_s)

    def _concludes(self) -> bool:
        """Whether all are done, and their last rounds, which may be slower than the word of it, have landed here."""
        there = self._async or self.alone or self.landed >= self._rounds_in_all
        return self.concludes and there and not self._needs_state

    def _contribute_the_rest(self) -> None:
        """Steps made since the last round would be lost: each fragment gets one more, unless rounds never pause."""
        if self.ahead:
            self._send_sums()
        paused = (self._async or self._barrier) and not self.gradients
        if paused and not self.alone and self.meter.steps > self.pace.steps:
            for _ in range(self.joint.cuts.newest.count):
                self._launch(self.replica.vector)
            self.wait(lambda: not self._snapshots, "its last exchange", self.plan.deadlines.round_s)

    def _send_sums(self) -> None:
        """Gradients that were not sent yet are in no joint model: each fragment gets another round."""
        for _ in range(self.joint.cuts.newest.count):
            self.wait(
                lambda: not self._snapshots and not self._needs_state, "its last rounds", self.plan.deadlines.round_s
            )
            if self.alone or not self.ahead or not self.ahead.has_any:
                return
            self._launch(self.replica.vector)
        self.wait(lambda: not self._snapshots, "its last exchange", self.plan.deadlines.round_s)

    def _account_for(self) -> None:
        self.nonfinite.flush()
        self._report(self.time.now())
        self.exchange.flush()
