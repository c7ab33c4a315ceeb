"""One worker's stepping thread: what it is made of, what signals of the exchange do, and how it sees a run to its end.

Stepping waits for an exchange only under a barrier strategy. Everything else, replies, new members, requests for the
joint state, evaluations, is taken up between two steps, in the order in which the exchange thread saw it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast, final

from thinwire.exchange import signals
from thinwire.exchange.joint import JointState
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Exchange
from thinwire.protocol import messages
from thinwire.protocol.forms import Body
from thinwire.worker.checkpoint_writer import CheckpointWriter, SavePart
from thinwire.worker.comparison import Comparison
from thinwire.worker.conclusion import Conclusion
from thinwire.worker.evaluator import Evaluator
from thinwire.worker.formation import Formation
from thinwire.worker.generation import Generation
from thinwire.worker.group_loop import GroupLoop
from thinwire.worker.group_publications import GroupPublications
from thinwire.worker.group_rendezvous import GroupRendezvous
from thinwire.worker.inbox import Inbox
from thinwire.worker.joint_buffers import JointBuffers
from thinwire.worker.landing import Landing
from thinwire.worker.life import Life, LifeEvent
from thinwire.worker.limits import concludes, goes_on
from thinwire.worker.local_model import LocalModel, Origin
from thinwire.worker.local_steps import LocalSteps
from thinwire.worker.mean_gradient import MeanGradient
from thinwire.worker.nonfinite import NonFinite
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batches, Loop, PartOfReplica, Rendezvous, Replica, Synchronizer
from thinwire.worker.publication_schedule import PublicationSchedule
from thinwire.worker.publisher import Publisher
from thinwire.worker.reports import Reports
from thinwire.worker.resume import WorkerCheckpoint
from thinwire.worker.round_trigger import RoundTrigger
from thinwire.worker.search import Search
from thinwire.worker.served_gradients import ServedGradients
from thinwire.worker.state_check import fits
from thinwire.worker.state_transfer import StateTransfer
from thinwire.worker.step_statistics import StepStatistics
from thinwire.worker.stepper import Stepper
from thinwire.worker.tuner import Tuner
from thinwire.worker.whole_loop import WholeLoop, WholeRendezvous


@final
class Worker:
    """Runs one worker from joining to the end of the run.

    Args:
        plan: what it is to do.
        replica: the replica, or its part of one that spans a group.
        batches: its rows.
        exchange: the exchange thread.
        joint: the joint state, which the exchange thread merges rounds into.
        save_part: writes a part of a checkpoint; None where nothing is saved.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        replica: Replica,
        batches: Batches,
        exchange: Exchange,
        joint: JointState,
        save_part: SavePart | None,
    ) -> None:
        self.plan, self.replica, self.batches, self._exchange, self._joint = plan, replica, batches, exchange, joint
        self.meter = StepStatistics(exchange.time.now)
        self._strategy, self._in_group = joint.strategy, plan.group_size > 1
        self.life, self.generation = Life(), Generation()
        self.local = LocalModel(replica, joint, self.meter, in_group=self._in_group)
        self.trigger = RoundTrigger(self.meter)
        self._means: dict[str, signals.Averaged] = {}
        """One-off means that have come, by key."""
        self._reports = Reports(exchange, plan.worker, plan.attempt, self._progress)
        self.inbox = Inbox(exchange, self.generation, self._reports, take=self._take, after=self._hand_over)
        self.rounds = OpenRounds(
            exchange,
            self.meter,
            self.inbox.wait,
            note=self._round_note,
            round_s=plan.deadlines.round_s,
            in_flight=self._strategy.in_flight,
            landed=joint.landed,
        )
        self._checkpoint = WorkerCheckpoint(
            self.local, self.generation, rounds=self.rounds, trigger=self.trigger, exchange=exchange
        )
        is_async = self._strategy.timing == "async"
        self._goes_on = functools.partial(goes_on, plan, self.meter, self.generation, self.life)
        self._concludes = functools.partial(
            concludes, self.life, self.generation, self.rounds, counts_rounds=not is_async
        )
        self._build_checks()
        self._build_publishing(save_part)
        self._build_steps()
        self._build_loop()
        exchange.expects(functools.partial(fits, replica=replica, replicated=self._strategy.replicated))

    # -- what it is made of -----------------------------------------------------------------------------------------

    def _build_checks(self) -> None:
        """What looks at replica, joint model and link."""
        plan, local, generation, reports = self.plan, self.local, self.generation, self._reports
        self._nonfinite = NonFinite(
            plan,
            local,
            generation,
            rounds=self.rounds,
            exchange=self._exchange,
            means=self._means,
            reports=reports,
            wait=self.inbox.wait,
            has_rows=bool(self.batches.num_rows),
        )
        self._comparison = Comparison(plan, local, generation, reports=reports, batches=self.batches)
        self._tuner = Tuner(
            plan,
            local,
            generation,
            exchange=self._exchange,
            reports=reports,
            verdict=lambda: self._comparison.verdict,
            batches_per_epoch=self.batches.batches_per_epoch,
        )

    def _build_publishing(self, save_part: SavePart | None) -> None:
        plan, local, generation, exchange = self.plan, self.local, self.generation, self._exchange
        wait, reports, nonfinite = self.inbox.wait, self._reports, self._nonfinite
        writer = CheckpointWriter(save_part, reports, self.meter, exchange.time, fails=lambda: nonfinite.now_fails)
        self.publisher = Publisher(
            plan,
            local,
            generation,
            schedule=PublicationSchedule(plan, self.meter, generation, writer),
            evaluator=Evaluator(plan, local, generation, batches=self.batches, reports=reports, encode=exchange.encode),
            buffers=JointBuffers(
                self.replica.buffers,
                generation,
                exchange=exchange,
                means=self._means,
                restore=nonfinite.restore_buffers,
                has_rows=bool(self.batches.num_rows),
            ),
            writer=writer,
            prepare_save=self._prepare_save,
            stop=self.life.stop,
            wait=wait,
        )
        self._formation = Formation(
            local,
            generation,
            self.life,
            exchange=exchange,
            trigger=self.trigger,
            tuner=self._tuner,
            comparison=self._comparison,
            publisher=self.publisher,
            reports=reports,
        )
        self._transfer = StateTransfer(
            local,
            generation,
            self.publisher,
            exchange=exchange,
            reports=reports,
            replaces_joint=lambda: self._rendezvous.replaces_joint,
        )
        self._conclusion = Conclusion(
            plan,
            local,
            generation,
            publisher=self.publisher,
            exchange=exchange,
            means=self._means,
            batches=self.batches,
            reports=reports,
            prepare_save=self._prepare_save,
            model_arrived=lambda: self.life.model_arrived,
            wait=wait,
        )

    def _build_steps(self) -> None:
        """How a step is taken, which depends on what workers exchange."""
        strategy, worked = self._strategy, (self.local, self.generation, self.rounds)
        weigh = lambda batch: self._loop.weigh(batch)  # noqa: E731
        self._search = self._steps = None
        synchronizer: Synchronizer
        if strategy.subject != "gradients":
            synchronizer = self._steps = LocalSteps(
                *worked,
                trigger=self.trigger,
                goes_on=self._goes_on,
                gives=lambda: not self._comparison.learns_alone,
                weigh=weigh,
            )
        elif strategy.timing == "async":
            synchronizer = ServedGradients(
                *worked,
                exchange=self._exchange,
                trigger=self.trigger,
                leave_out=self._nonfinite.without,
                weigh=weigh,
                together=self._in_group,
            )
        elif self.replica.searches:
            synchronizer = self._search = Search(
                *worked,
                worker=self.plan.worker,
                wait=self.inbox.wait,
                round_s=self.plan.deadlines.round_s,
                weigh=weigh,
                publish=self.publisher.publish_deferred,
            )
        else:
            synchronizer = MeanGradient(*worked, weigh)
        self._synchronizer = synchronizer
        self._landing = Landing(
            *worked, synchronizer=synchronizer, tuner=self._tuner, comparison=self._comparison, publisher=self.publisher
        )
        self._stepper = Stepper(
            self.local,
            self.generation,
            synchronizer=synchronizer,
            rounds=self.rounds,
            trigger=self.trigger,
            nonfinite=self._nonfinite,
            comparison=self._comparison,
            reports=self._reports,
            consider_round=lambda: self._loop.consider_round(),
            # peers that asked in the middle of a search are answered once its publications are taken up
            after=self._hand_over if self._search is not None else lambda: None,
            batches_per_epoch=self.batches.batches_per_epoch,
        )

    def _build_loop(self) -> None:
        """How batches are gone through: by this worker itself, or in step with its group."""
        plan, local, generation = self.plan, self.local, self.generation
        self._rendezvous: Rendezvous
        self._loop: Loop
        if self._in_group:
            self._build_group_loop(cast(PartOfReplica, self.replica))
            return
        self._rendezvous = WholeRendezvous(
            local, generation, self.inbox, join_s=plan.deadlines.join_s, form=self._formation.form
        )
        self._loop = WholeLoop(
            plan,
            local,
            generation,
            batches=self.batches,
            exchange=self._exchange,
            synchronizer=self._synchronizer,
            publisher=self.publisher,
            inbox=self.inbox,
            stepper=self._stepper,
            concludes=self._concludes,
            goes_on=self._goes_on,
        )

    def _build_group_loop(self, replica: PartOfReplica) -> None:
        plan, local, generation = self.plan, self.local, self.generation
        barrier = self._strategy.timing == "barrier"
        publications = GroupPublications(self.publisher, self._reports, alone=lambda: generation.alone, barrier=barrier)
        self._rendezvous = rendezvous = GroupRendezvous(
            plan,
            local,
            generation,
            replica=replica,
            batches=self.batches,
            exchange=self._exchange,
            rounds=self.rounds,
            inbox=self.inbox,
            reports=self._reports,
            publications=publications,
            form=self._formation.form,
            abandon=self._synchronizer.drop,
        )
        self._loop = GroupLoop(
            plan,
            local,
            generation,
            replica=replica,
            batches=self.batches,
            exchange=self._exchange,
            rounds=self.rounds,
            steps=self._steps,
            inbox=self.inbox,
            stepper=self._stepper,
            reports=self._reports,
            nonfinite=self._nonfinite,
            publisher=self.publisher,
            publications=publications,
            rendezvous=rendezvous,
            transfer=self._transfer,
            life=self.life,
            goes_on=self._goes_on,
            concludes=self._concludes,
            land=self._landing.land,
        )

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains until the shard's epochs are done or the run is stopped, then sees the run to its end."""
        self._exchange.start(self.replica.parameters.digest())
        while True:
            try:
                self._train()
                self._finish()
                return
            except signals.GroupBrokenError as broken:
                self._loop.dissolve()
                self._rendezvous.part_ways(broken)
                self.life.move(LifeEvent.BREAK)

    def _train(self) -> None:
        resumed = self._rendezvous.begin()
        if not resumed:
            self.trigger.start(self.meter.steps)
        if not self._in_group:
            if not resumed:
                self.local.weigh_anew()
            self._comparison.begin()
            self._nonfinite.begin()
        self.life.move(LifeEvent.SYNC)
        self._loop.train()
        self.life.move(LifeEvent.DRAIN)

    def _finish(self) -> None:
        self._comparison.leave()
        self._nonfinite.settle()
        self.rounds.wait_for_all("its last rounds")
        self._synchronizer.finish()
        self._flush()
        self._exchange.follow(math.inf)
        self.life.move(LifeEvent.FINISH)
        self._reports.say(messages.Finished)
        self._loop.await_others(self.plan.deadlines.finish_s if self.batches.num_rows else math.inf)
        self.life.move(LifeEvent.CONCLUDE)
        self._loop.clear_publications()
        self._conclusion.conclude()
        self._flush()
        self.life.move(LifeEvent.LEAVE)
        self._reports.say(messages.Bye)

    def resume(self, joint: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Goes on from a checkpoint: its joint part, and this worker's own where it has one; before `run`."""
        self._checkpoint.load(self.publisher, joint, own)

    def _prepare_save(self) -> dict[str, Any]:
        self._comparison.leave()  # what the replica learnt alone is no part of a checkpoint
        self._nonfinite.settle()
        return self._checkpoint.tree(self.publisher)

    # -- what it says -----------------------------------------------------------------------------------------------

    def _round_note(self, round: int, more: Note, announces: bool) -> Note:
        """What this worker says beside a contribution."""
        note = {"rows": self.meter.rows_done} | more | self._comparison.note()
        if announces:
            note |= self._loop.announcement(round)
        if self.generation.lead:
            note |= self._tuner.note(round)
        return note

    def _progress(self) -> Note | None:
        """What the next heartbeat says; until a generation has formed, the last word of the predecessor stands."""
        self._exchange.sent_aside(self._rendezvous.sent_bytes)
        if not self.generation.members:
            return None
        note = {"rows": self.meter.rows_done}
        return self.meter.report() | {
            "note": note,
            "first_loss": self.trigger.first_loss,
            "score": self._nonfinite.score,
        }

    def _flush(self) -> None:
        self._nonfinite.flush()
        self._reports.report()
        self._exchange.flush()

    # -- signals ----------------------------------------------------------------------------------------------------

    def _take(self, signal: signals.Signal) -> None:
        if isinstance(signal, signals.Landed):
            if not self._loop.holds(signal):
                self._landing.land(signal)
        elif isinstance(signal, signals.LeftOut):
            self._nonfinite.left_out(signal.round, signal.values, told=signal.told)
        elif isinstance(signal, signals.Formed):
            self._rendezvous.take(signal)
        elif isinstance(signal, signals.Published | signals.Missed):
            self.publisher.hear(signal)
        elif isinstance(signal, signals.Noted):
            self._note(signal)
        elif isinstance(signal, signals.Averaged):
            self._means[signal.key] = signal
            self.publisher.resume()
        elif isinstance(signal, signals.Caught):
            self._catch_up(signal)
        elif isinstance(signal, signals.Asked):
            self._transfer.ask(signal)
        elif isinstance(signal, signals.Told):
            self._hear(signal.body)
        elif isinstance(signal, signals.Broken):
            raise signal.error

    def _hand_over(self) -> None:
        """Gives peers the joint state that they have asked for, unless a step is under way that is not in it."""
        searching = self._search is not None and self._search.mid_step
        if not self.generation.needs_state and not searching and self._loop.may_hand_over:
            self._transfer.give(self.rounds.adopted)

    def _note(self, noted: signals.Noted) -> None:
        """Another worker says how far it is; a first worker whose rows are done still decides what to publish."""
        self.generation.hear(noted.worker, int(noted.note.get("rows", 0)))
        if self.generation.lead and self.life.finished and self.life.num_rounds is None:
            self._exchange.announce({"rows": self.meter.rows_done} | self._loop.announcement(-1))

    def _catch_up(self, caught: signals.Caught) -> None:
        """Takes over the joint state of a peer."""
        over = self.rounds.overtake(int(caught.tree["joint"]["landed"]))
        self.generation.needs_state = False
        newcomer = self.local.origin is Origin.NEW or self._rendezvous.again
        self._transfer.take(caught, over, newcomer=newcomer)
        if newcomer:
            self.local.weigh_anew()
        if self._search is not None:
            self._search.supersede(caught.tree["replica"])
        self._rendezvous.catch_up()

    def _hear(self, body: Body) -> None:
        """Does what the coordinator says."""
        if isinstance(body, messages.Verdict):
            self.publisher.evaluator.judge(body)
            self.life.stopping |= bool(body.stop)
        elif isinstance(body, messages.Stop):
            self.publisher.schedule.stop_reason = body.why
        elif isinstance(body, messages.Leave):
            raise signals.LeftError(body.why, body.done)
        elif isinstance(body, messages.Wait):  # an earlier attempt holds this place, and is needed there
            self.inbox.patient_until = self.meter.now() + self.plan.deadlines.join_s
        elif isinstance(body, messages.Conclude):
            self.life.num_rounds = body.landed
        elif isinstance(body, messages.Done):
            self.life.model_arrived = True
        elif isinstance(body, messages.Stand):
            self._rendezvous.lose_member()
