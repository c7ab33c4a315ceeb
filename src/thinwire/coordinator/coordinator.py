"""The coordinator: membership, evaluations, checkpoints and the end of a run. No parameter passes through it."""

from __future__ import annotations

import functools
import logging
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from thinwire import events
from thinwire.coordinator import failures
from thinwire.coordinator.attendance import Attendance
from thinwire.coordinator.ending import Ending
from thinwire.coordinator.membership import Decision, JointModelLost, Lost, Membership, Stalled
from thinwire.coordinator.model_chunks import ShownModels
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.coordinator.ports import Commit, Send, Workforce
from thinwire.coordinator.publications import Publications
from thinwire.coordinator.rate_limit import RateLimit
from thinwire.coordinator.records import Records
from thinwire.coordinator.slots import Slots
from thinwire.coordinator.stopping import TRAIN_LOSS
from thinwire.coordinator.training_time import TrainingTime
from thinwire.errors import DataError, ProtocolError
from thinwire.protocol import messages
from thinwire.protocol.clock import REAL, Time
from thinwire.protocol.forms import Body, Header, header_of
from thinwire.protocol.messages import TO_COORDINATOR, Leave, Message, Pong
from thinwire.protocol.observation import Observer, unobserved
from thinwire.rules.divergence import has_diverged
from thinwire.transport.ports import Hub

TURN_S = 0.25
"""Longest wait for messages between two rounds of checks; each round takes processor time from a training step."""
MOST_LOGGED = 8
_log = logging.getLogger("thinwire.coordinator")


class Coordinator:
    """Runs on the driver, in the thread that called fit. `run` returns when all workers have said good-bye."""

    def __init__(
        self,
        hub: Hub,
        workforce: Workforce,
        policy: Policy,
        *,
        emit: Callable[[events.Event], Any],
        commit: Commit | None = None,
        meta: Callable[[], dict[str, Any]] = dict,
        resumed: dict[str, Any] | None = None,
        serve: Callable[[int, str, int], tuple[bytes, int]] | None = None,
        show: Callable[[int, Any], bool] | None = None,
        time: Time = REAL,
        observe: Observer = unobserved,
    ) -> None:
        self._hub, self._workforce, self._policy, self._time = hub, workforce, policy, time
        self._emit_to, self._serve = emit, serve
        self._send: Send = functools.partial(_send, hub)
        self._shown = ShownModels(policy.group_size, show)
        self.membership = Membership(policy.workers, policy.deadlines, policy.helpers, policy.group_size, observe)
        self.outcome, self.records = Outcome(), Records(self._emit)
        self._slots = Slots(self.membership)
        self._ending = Ending(self.membership, policy.group_size, self._send)
        outward: dict[str, Any] = {"clock": time.now, "send": self._send, "emit": self._emit}
        self.publications = Publications(self.membership, policy, self.outcome, commit=commit, meta=meta, **outward)
        if resumed:
            self.publications.load(resumed)
        self._attendance = Attendance(
            self.membership, workforce, policy, self.outcome, self._ending, self.records, **outward
        )
        before = float((resumed or {}).get("train_s", 0.0))
        parts = (self.membership, self.records, self._attendance, self._ending, time.now)
        self.training_time = TrainingTime(policy, *parts, before=before)
        self._limit = RateLimit()
        self._pending_stop: str | None = None
        self._started = self._time.now()

    def run(self, on_turn: Callable[[], None] = lambda: None) -> Outcome:
        """Serves the workers until the run has ended; raises the error that ended it early."""
        while not self._ending.over(self._attendance.left):
            ended = self._workforce.exits()  # read before the messages, so that a last message is never missed
            for message in self._hub.receive(0.02 if self.membership.agreement.changing else TURN_S):
                self._handle(message)
            for worker, attempt in self._hub.broken():
                if worker not in self._attendance.left:
                    self.membership.suspect(worker, attempt, self._time.now())
            self._act(self._attendance.ended(ended))
            self._act(self.membership.tick(self._time.now()))
            self._tick()
            on_turn()
        self.publications.settle(self._policy.deadlines.conclude_s)
        for worker, attempt in self.membership.roster.standing.items():
            self._send(worker, attempt, Leave(why="the run is over", done=True))
        return self._summed()

    def interrupt(self, reason: str = "interrupted") -> None:
        """Asks the run to save a checkpoint and stop at the next round."""
        if not self._ending.over(self._attendance.left):
            self.outcome.interrupted = True
            self._ask_to_stop(reason)

    def note(self, event: events.Event) -> None:
        """Logs an event that does not come from a worker."""
        self._emit(self.outcome.record(event))

    # -- messages ---------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        now, worker = self._time.now(), message.sender
        try:
            body = TO_COORDINATOR.decode(message.header)
        except ProtocolError:
            self._refuse(worker, message.header)
            return
        if isinstance(body, messages.Join):
            self._on_join(worker, body, now)
        elif isinstance(body, messages.Fetch):
            self._on_fetch(worker, body)
        else:
            self._from_seat(worker, body, message, now)

    def _from_seat(self, worker: int, body: Any, message: Message, now: float) -> None:
        """Handles a message that only a worker with a seat may send."""
        seat = self.membership.seats.get(worker)
        if seat is None or seat.attempt != body.attempt:
            if isinstance(body, messages.Beat):  # an attempt without a seat must not go on
                answer = self.membership.answer(worker, body.attempt, revives=self._workforce.revives)
                self._send(worker, body.attempt, answer)
            return
        seat.last_seen, seat.suspect_since = now, None
        if message.payload is not None:  # its heartbeats may be queued behind this payload
            self._send(worker, seat.attempt, Pong())
        if not self._limit.takes(worker, body.tag, now=now):
            self._refuse(worker, message.header)
            return
        match body:
            case messages.Beat():
                self.membership.beat(body, worker, now)
                self._send(worker, body.attempt, Pong())
                self.records.beat(worker, seat.attempt, body, now)
            case messages.Prepared():
                self._act(self.membership.prepared(body, worker, now))
            case messages.Apart():  # even where no other member has noticed that the group is broken
                self.membership.come_together(worker, body.meeting, now)
            case messages.Evaluated():
                self.publications.on_evaluated(worker, body)
            case messages.Caught():
                self.publications.on_caught(worker, body)
            case messages.Saved():
                self.publications.on_saved(worker, body)
            case messages.Finished():
                self._attendance.finished.add(worker)
            case messages.Agreed():
                self._ending.agreed(worker)
            case messages.Bye():
                self._attendance.left.add(worker)
                self._send(worker, body.attempt, Pong())  # the worker waits for this answer
            case messages.Epoch():
                self._on_epoch(worker, body)
            case messages.Happened():
                self._on_event(body)
            case messages.Failed():
                if body.kind == "DivergedError":
                    self.publications.stop()
                event, error = failures.failure(seat, body, self.outcome)
                self._emit(event)
                raise error
            case messages.Shown():
                asks_to_stop = self._shown.hear(body, message.payload)
                if asks_to_stop is None:
                    self._refuse(worker, header_of(body))
                elif asks_to_stop:
                    self._ask_to_stop("a callback asked for it", early=True)
            case messages.Result():
                self._on_result(worker, body, message.payload)

    def _refuse(self, worker: int, header: Header) -> None:
        """Counts a message that the worker must not send, and logs the first few."""
        self.outcome.refused += 1
        if self.outcome.refused <= MOST_LOGGED:
            _log.warning("the coordinator refused %s of worker %s", reprlib.repr(header), worker)

    def _on_join(self, worker: int, join: messages.Join, now: float) -> None:
        if not 0 <= worker < self._policy.workers + self._policy.helpers:
            self._refuse(worker, header_of(join))
            return
        back = self.membership.roster.attempts.get(worker) == join.attempt
        if not self._attendance.admits(worker, join):
            return
        self._act(self.membership.join(join, worker, now))
        seat = self.membership.seats.get(worker)
        if seat is not None and seat.attempt == join.attempt:
            self.publications.welcome(worker, seat.attempt, back=back)
            self._attendance.seated(worker, join, back=back)

    def _on_fetch(self, worker: int, fetch: messages.Fetch) -> None:
        """Answers a worker that has yet to join with a piece of its rows."""
        if self._serve is not None and 0 <= worker < self._policy.workers:
            try:
                data, count = self._serve(worker, fetch.name, fetch.index)
            except DataError:  # there is no such file
                self._refuse(worker, header_of(fetch))
                return
            piece = messages.Piece(name=fetch.name, index=fetch.index, count=count)
            self._hub.send(worker, fetch.attempt, header_of(piece), memoryview(data))

    def _on_epoch(self, worker: int, epoch: messages.Epoch) -> None:
        self.outcome.train_loss = self.records.on_epoch(worker, epoch)
        until, rows = self._policy.until, self.membership.roster.rows
        if until is not None and until.metric == TRAIN_LOSS:
            loss = self.records.train_loss(w for w in self.membership.working if rows.get(w))
            if loss is not None and until.reached({TRAIN_LOSS: loss}):
                self._ask_to_stop(f"target reached: {until}", early=True)

    def _on_event(self, happened: messages.Happened) -> None:
        if happened.type is None:
            return
        fields = dict(happened.fields)
        if happened.type is events.NonFinite:
            whose = self.membership.seats.get(int(fields["worker"]))
            fields["host"] = "" if whose is None else whose.host
        self._emit(self.outcome.record(happened.type(**fields)))

    def _on_result(self, worker: int, result: messages.Result, payload: memoryview | None) -> None:
        if payload is None or result.part >= self._policy.group_size or not self._ending.begun:
            self._refuse(worker, header_of(result))
        elif self._ending.take(result, payload):
            self.outcome.results = self._ending.chunks.results
            for seat in self.membership.seats.values():
                self._send(seat.worker, seat.attempt, messages.Done())

    # -- decisions --------------------------------------------------------------------------------------------------

    def _act(self, decisions: Iterable[Decision]) -> None:
        committed = False
        for decision in decisions:
            if isinstance(decision, Lost):
                self._attendance.lose(decision)
            elif isinstance(decision, Stalled):
                self.records.stalled(decision, {w: seat.host for w, seat in self.membership.seats.items()})
            elif isinstance(decision, JointModelLost):
                if not self.outcome.results:
                    raise failures.joint_model_lost()
            else:
                self._send(decision.worker, decision.attempt, decision.body)
                committed = committed or isinstance(decision.body, messages.Commit)
        if not committed:
            return
        members = self.membership
        self._ending.formed(self._time.now())
        self._emit(
            events.GenerationFormed(
                generation=members.agreement.generation,
                members=members.agreement.members,
                reference=members.reference,
                landed=members.landed,
            )
        )
        self.outcome.generations += 1
        if self._pending_stop:  # a new first worker may not know of the stop
            self._ask_to_stop(self._pending_stop)
        if self._ending.begun:
            self._ending.conclude()

    def _tick(self) -> None:
        self.publications.judge(self._ending.trained_from or self._started, self._attendance.rows.held)
        self.publications.settle()
        self._check_progress(over=False)
        self._attendance.dismiss(self._ending.not_awaited() - self._attendance.left)
        if self._ending.since is None:
            self._look_for_the_end()
        elif self._time.now() - self._ending.since > self._policy.deadlines.conclude_s:
            slow = set(self.membership.seats) - self._attendance.left
            if not self.outcome.results:
                raise failures.too_slow(self._policy, sorted(slow))
            self._attendance.dismiss(slow)
        self._attendance.check(self._started)

    def _look_for_the_end(self) -> None:
        """Begins the end once all workers present have done their rows and no other worker is awaited."""
        now, members, attendance = self._time.now(), self.membership, self._attendance
        stopping = self.outcome.stopped_early or self._pending_stop is not None
        done = {worker for worker in attendance.finished if worker < self._policy.workers}
        makes_room = self._workforce.revives and not stopping
        missed = members.roster.missing - members.roster.unreplaced
        if makes_room:
            self._act(self._slots.make_room(done, missed, now))
        alive, more = members.working, makes_room and self._slots.room_for(done, missed, now)
        if not stopping and (over := self.training_time.over()) is not None:
            self._ask_to_stop(over.reason, early=over.early)
        if (
            alive
            and alive <= attendance.finished
            and members.agreement.settled
            and not more
            and not attendance.awaited()
        ):
            self._check_progress(over=True)
            self._ending.begin(now)
            attendance.dismiss(members.roster.present - alive)
            self._ending.conclude()

    def _check_progress(self, *, over: bool) -> None:
        """Ends a run in which every worker keeps skipping steps."""
        if has_diverged([self.records.progress_of(w) for w in self.membership.working], over=over):
            self.publications.stop()
            raise failures.keeps_failing(self.membership.seats, self.outcome)

    def _ask_to_stop(self, reason: str, *, early: bool = False) -> None:
        """Asks the first worker to end the run at its next round; `early` says that the run has reached its goal."""
        if early and self._pending_stop is not None:
            return
        self.outcome.stopped_early |= early
        self._pending_stop = reason
        self.outcome.reason = self.outcome.reason or reason
        if self.membership.agreement.members:
            first = self.membership.seats.get(self.membership.agreement.members[0])
            if first is not None:
                self._send(first.worker, first.attempt, messages.Stop(why=reason, save=True))

    def _summed(self) -> Outcome:
        out = self.outcome
        roster, ending = self.membership.roster, self._ending
        self.records.sum_up(out, roster.total_rows)
        out.best_evaluation, out.best_metrics = self.publications.best
        out.refused += int(getattr(self._hub, "refused", 0))
        if ending.trained_from is not None:
            out.train_s = (ending.since or self._time.now()) - ending.trained_from
        missed = set(roster.unseen) | roster.missing
        # Workers without a replacement are counted already.
        out.note_missing(missed - self._attendance.done - roster.unreplaced)
        return out

    def _emit(self, event: events.Event) -> None:
        if self._emit_to(event) is True:
            self._ask_to_stop("a callback asked for it", early=True)


def _send(hub: Hub, worker: int, attempt: int, body: Body) -> None:
    hub.send(worker, attempt, header_of(body))
