"""The coordinator: membership, evaluations, checkpoints and the end of a run. No parameter passes through it."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from thinwire import events
from thinwire.coordinator import failures
from thinwire.coordinator.absences import Absences
from thinwire.coordinator.checkpoints import CheckpointCommits
from thinwire.coordinator.ending import Ending
from thinwire.coordinator.evaluations import Evaluations
from thinwire.coordinator.membership import Decision, JointModelLost, Lost, Membership, Stalled
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.coordinator.ports import Commit, Exit, Workforce
from thinwire.coordinator.rate_limit import RateLimit
from thinwire.coordinator.rows import Rows
from thinwire.coordinator.statistics import Ledger
from thinwire.coordinator.stopping import TRAIN_LOSS, Verdict
from thinwire.errors import DataError
from thinwire.protocol import messages as headers
from thinwire.protocol.clock import REAL, Time
from thinwire.protocol.handshake import check_hello
from thinwire.protocol.messages import ANY_ATTEMPT, Header, Message, is_understood
from thinwire.protocol.observation import Observer, unobserved
from thinwire.rules.divergence import has_diverged
from thinwire.transport.ports import Hub

TURN_S = 0.25
"""How often it looks around when nothing comes: each time takes a processor from somebody's step."""
MOST_LOGGED = 8
FAREWELL_S = 0.8
"""A worker's last word may be heard after its end is seen, when the run is ending."""
LAST_COMMIT_S = 5.0
"""How long a run that has diverged waits for the checkpoint that it is to be gone on with from."""
BEFORE_A_SEAT = ("join", "fetch")
"""What a worker may say without one."""
_log = logging.getLogger("thinwire.coordinator")


class Coordinator:
    """Runs on the driver, in the thread that called fit; `run` returns when the workers have said good-bye."""

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
        time: Time = REAL,
        observe: Observer = unobserved,
    ) -> None:
        self._hub, self._workforce, self._policy, self._time = hub, workforce, policy, time
        self._emit_to, self._meta, self._serve = emit, meta, serve
        self.membership = Membership(policy.workers, policy.deadlines, policy.helpers, policy.group_size, observe)
        self.outcome, self._before_s = Outcome(), 0.0
        self._evaluations = Evaluations(Verdict(policy.stop, policy.until), policy.compute)
        if resumed:
            self._evaluations.law.load(resumed["verdict"])
            self.outcome.history = list(resumed["history"])
            self._before_s = float(self.outcome.history[-1].get("seconds", 0.0)) if self.outcome.history else 0.0
            self.outcome.train_loss = resumed.get("train_loss")
        self._saves = CheckpointCommits(policy.group_size, commit, time.now)
        self._finished: set[int] = set()
        self._left: set[int] = set()
        self.ledger = Ledger(self._emit)
        self._ending = Ending(policy.group_size)
        self._absent = Absences(policy.workers, policy.deadlines.rejoin_s)
        self._rows = Rows(policy.workers)
        self._allowance = RateLimit()
        self._gone: set[tuple[int, int]] = set()
        self._parting: dict[Exit, float] = {}
        self._pending_stop: str | None = None
        self._started = self._time.now()
        self._trained_from: float | None = None
        self._trained_to: float | None = None

    def run(self, on_turn: Callable[[], None] = lambda: None) -> Outcome:
        """Serves until the run has ended; raises what ended it early."""
        while not self._over():
            ended = self._workforce.exits()  # before its last words are read, not after
            for message in self._hub.receive(0.02 if self.membership.changing else TURN_S):
                self._handle(message)
            for worker, attempt in self._hub.broken():
                if worker not in self._left:
                    self.membership.suspect(worker, attempt, self._time.now())
            self._parting = dict.fromkeys(ended, self._time.now()) | self._parting
            for gone, since in list(self._parting.items()):
                if self._ending.since is None or self._time.now() - since > FAREWELL_S:
                    self._exited(gone)
            self._act(self.membership.tick(self._time.now()))
            self._tick()
            on_turn()
        self.settle(self._policy.deadlines.conclude_s)
        for worker, attempt in self.membership.standing.items():
            self._hub.send(worker, attempt, {"t": "leave", "why": "the run is over", "done": True})
        return self._summed()

    def interrupt(self, reason: str = "interrupted") -> None:
        """Asks the run to save a checkpoint and stop at its next round."""
        if not self._over():
            self.outcome.interrupted = True
            self._ask_to_stop(reason)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        now, header, worker = self._time.now(), message.header, message.sender
        if not is_understood(header):
            self._refuse(worker, header)
            return
        seat = self.membership.seats.get(worker)
        if header["t"] not in BEFORE_A_SEAT and (seat is None or seat.attempt != header.get("a")):
            if header["t"] == "beat":  # a fenced or forgotten worker: it must not go on as if nothing had been
                answer = self.membership.answer(worker, header["a"], revives=self._workforce.revives)
                self._hub.send(worker, header["a"], answer)
            return
        if seat is not None and header["t"] not in BEFORE_A_SEAT:  # a heartbeat may wait behind what it sends
            seat.last_seen, seat.suspect_since = now, None
            if message.payload is not None:
                self._hub.send(worker, seat.attempt, {"t": "pong"})
        if not self._allowance.takes(worker, header["t"], now=now):
            self._refuse(worker, header)
            return
        getattr(self, f"_on_{header['t']}")(worker, header, message.payload, now)

    def _refuse(self, worker: int, header: Header) -> None:
        """Counts what a worker must not say; the first times it is logged."""
        self.outcome.refused += 1
        if self.outcome.refused <= MOST_LOGGED:
            _log.warning("the coordinator refused %s of worker %s", reprlib.repr(header), worker)

    def _on_join(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        if not 0 <= worker < self._policy.workers + self._policy.helpers:
            self._refuse(worker, header)
            return
        check_hello(worker, header)
        if (worker, header["a"]) in self._gone:
            return  # its process ended while this was on the way
        back, ending = self.membership.attempts.get(worker) == header["a"], self._ending.since is not None
        others = self.membership.working - {worker}
        if ending and (worker in self.membership.unseen or (self._ending.closed and others)):
            self._gone.add((worker, int(header["a"])))
            self._hub.send(worker, int(header["a"]), {"t": "leave", "why": "the run is ending", "done": True})
            return
        self._act(self.membership.join(header, worker, now))
        seat = self.membership.seats.get(worker)
        if seat is not None and seat.attempt == header["a"]:
            self._ending.late |= {worker} if ending and not back else set()
            for verdict in self._evaluations.verdicts:
                if back or verdict["stop"]:  # judged while it had no seat; that the run is to end all must know
                    self._hub.send(worker, seat.attempt, dict(verdict))
            self._finished.discard(worker)
            self._evaluations.excused.pop(worker, None)
            if header.get("rows") == 0 and worker < self._policy.workers:
                _log.warning("worker %s on %s has no rows to train on; use fewer workers", worker, seat.host)
            self._rows.heard(worker, header, self.membership.rows)
            again = self._absent.since.pop(worker, None) is not None
            self.ledger.joined(seat, self.membership.rows[worker], again=again)

    def _on_fetch(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        """A worker that has yet to join wants a piece of its rows."""
        if self._serve is not None and 0 <= worker < self._policy.workers:
            try:
                data, count = self._serve(worker, str(header["name"]), int(header["i"]))
            except DataError:  # there is no such file
                self._refuse(worker, header)
                return
            answer = {"t": "piece", "name": header["name"], "i": header["i"], "n": count}
            self._hub.send(worker, header["a"], answer, memoryview(data))

    def _on_beat(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self.membership.beat(header, worker, now)
        self._hub.send(worker, int(header["a"]), {"t": "pong"})
        seat = self.membership.seats[worker]
        self.ledger.beat(worker, seat.attempt, header, now)

    def _on_prepared(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self._act(self.membership.prepared(header, worker, now))

    def _on_evaluated(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self._evaluations.hear(worker, header)
        for verdict in self._evaluations.told(int(header["p"])):  # to a newcomer: the others have done this one
            self._hub.send(worker, int(header["a"]), verdict)

    def _on_caught(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        """Publications up to this one were made before the worker had the joint state: it has no part in them."""
        self._evaluations.excused[worker] = int(header["published"])
        self.membership.caught(worker)

    def _on_saved(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self._saves.hear(worker, header)

    def _on_finished(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self._finished.add(worker)

    def _on_epoch(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self.outcome.train_loss = self.ledger.epoch(worker, header)
        until, rows = self._policy.until, self.membership.rows
        if until is not None and until.metric == TRAIN_LOSS:
            loss = self.ledger.train_loss(w for w in self.membership.working if rows.get(w))
            if loss is not None and until.reached({TRAIN_LOSS: loss}):
                self.ask_to_stop(f"target reached: {until}")

    def _on_event(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        kind = headers.TOLD.get(str(header["kind"]))
        if kind is events.NonFinite:
            whose = self.membership.seats.get(int(header["fields"]["worker"]))
            header["fields"]["host"] = "" if whose is None else whose.host
        if kind is not None:
            self._emit(self.outcome.heed(kind(**header["fields"])))

    def _on_failed(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        if header.get("kind") == "DivergedError":
            self._save_no_more()
        event, error = failures.failure(self.membership.seats[worker], header, self.outcome)
        self._emit(event)
        raise error

    def _on_result(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        if payload is None or header["part"] >= self._policy.group_size:
            self._refuse(worker, header)
        elif self._ending.harvest.take(header, payload):
            self.outcome.results = self._ending.harvest.results
            self._broadcast({"t": "done"})

    def _on_agreed(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self._ending.agreed.add(worker)

    def _on_apart(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        """A worker has lost its group, also where nobody else has noticed."""
        self.membership.come_together(worker, int(header["n"]), now)

    def _on_bye(self, worker: int, header: Header, payload: memoryview | None, now: float) -> None:
        self._left.add(worker)
        self._hub.send(worker, header["a"], {"t": "pong"})  # it waits until it was heard

    # -- decisions --------------------------------------------------------------------------------------------------

    def _act(self, decisions: Iterable[Decision]) -> None:
        committed = None
        for decision in decisions:
            if isinstance(decision, Lost):
                self._lose(decision)
                continue
            if isinstance(decision, Stalled):
                self.ledger.stalled(decision, {w: seat.host for w, seat in self.membership.seats.items()})
                continue
            if isinstance(decision, JointModelLost):
                if not self.outcome.results:
                    raise failures.bereft()
                continue
            self._hub.send(decision.worker, decision.attempt, decision.header)
            if decision.header["t"] == "commit":
                committed = decision.header
        if committed is not None:
            members = self.membership
            self._trained_from = self._trained_from or self._time.now()
            self._emit(
                events.GenerationFormed(
                    generation=members.generation,
                    members=members.members,
                    reference=members.reference,
                    landed=members.landed,
                )
            )
            self.outcome.generations += 1
            if self._pending_stop:  # a new first worker may not have heard of it
                self._ask_to_stop(self._pending_stop)
            if self._ending.since is not None:
                self._conclude()

    def _lose(self, lost: Lost) -> None:
        if lost.worker in self._left:
            return
        if not self._workforce.revives:
            self._gone.add((lost.worker, lost.attempt))
        self.outcome.workers_lost += 1
        self._absent.since[lost.worker] = self._time.now()
        if self._ending.since is not None and lost.worker in self._finished:
            self._absent.done.add(lost.worker)
        self._finished.discard(lost.worker)
        self._ending.agreed.discard(lost.worker)
        last = self.ledger.lose(lost.worker)
        self._emit(
            events.WorkerLost(
                worker=lost.worker,
                attempt=lost.attempt,
                host=lost.host,
                reason=lost.reason,
                steps=int(last.get("progress", {}).get("steps", 0)),
            )
        )
        if self._ending.closed or not self._workforce.replace(lost.worker, lost.attempt + 1):
            self._absent.never.add(lost.worker)
            if lost.worker < self._policy.workers and lost.worker not in self._absent.done:
                self.outcome.unreplaced.add(lost.worker)
            alive = len(self.membership.working)
            if alive < self._policy.min_workers and not self._ending.closed:
                raise failures.too_few(self._policy, lost, alive)

    def _exited(self, gone: Exit) -> None:
        del self._parting[gone]
        known = (gone.worker, gone.attempt) in self._gone
        self._gone.add((gone.worker, gone.attempt))
        if known or gone.worker in self._left:
            return
        now, seat = self._time.now(), self.membership.seats.get(gone.worker)
        attempt = seat.attempt if seat is not None and gone.attempt == ANY_ATTEMPT else gone.attempt
        decisions: list[Decision] = self.membership.lose(gone.worker, attempt, gone.reason, now)
        if not decisions and gone.worker not in self.membership.seats:
            decisions = [Lost(gone.worker, gone.attempt, f"{gone.reason} before it joined")]
        self._act(decisions)

    def _save_no_more(self) -> None:
        """The run has diverged: what is whole by now is committed, so that the error names it, and nothing later is."""
        self.settle(LAST_COMMIT_S)
        self._saves.stop()

    def _check_progress(self, *, over: bool) -> None:
        """Ends a run in which no worker gets on."""
        told = [self.ledger.last.get(w, {}).get("progress") or {} for w in self.membership.working]
        if has_diverged(told, over=over):
            self._save_no_more()
            raise failures.keeps_failing(self.membership.seats, self.outcome)

    def _tick(self) -> None:
        now, members, ended = self._time.now(), self.membership, bool(self._left or self.outcome.results)
        self._judge()
        self.settle()
        self._check_progress(over=False)
        self._dismiss(self._ending.in_vain(members.present, members.working) - self._left)
        if self._ending.since is None:
            stopping = self.outcome.stopped_early or self._pending_stop is not None
            done = {worker for worker in self._finished if worker < self._policy.workers}
            makes_room, missed = self._workforce.revives and not stopping, self._absent.missed - self._absent.never
            if makes_room:
                self._act(members.make_room(done, missed, now))
            alive, more = members.working, makes_room and members.room_for(done, missed, now)
            if alive and alive <= self._finished and members.settled and not more and not self._absent.awaited(now):
                self._check_progress(over=True)
                self._trained_to = now
                self._ending.since = now
                self._dismiss(members.present - alive)
                self._conclude()
        elif now - self._ending.since > self._policy.deadlines.conclude_s:
            slow = set(members.seats) - self._left
            if not self.outcome.results:
                raise failures.too_slow(self._policy, sorted(slow))
            self._dismiss(slow)
        if not members.working and not members.formed:
            if now - self._started > self._policy.deadlines.start_s:
                raise failures.nobody_came(self._policy)
        elif (not members.working or members.waits) and not (ended or self._absent.awaited(now)):
            raise failures.nobody_left(self._policy, members.present)

    def _conclude(self) -> None:
        """All rows are done, and so many rounds landed with whoever launched them: all are to have them."""
        lane_of, landed = self.membership.groups.lane_of, dict[int, int]()
        for seat in self.membership.seats.values():
            landed[lane_of(seat.worker)] = max(seat.landed, landed.get(lane_of(seat.worker), 0))
        for seat in self.membership.seats.values():
            header = {"t": "conclude", "landed": landed[lane_of(seat.worker)]}
            self._hub.send(seat.worker, seat.attempt, header)

    def _dismiss(self, workers: set[int]) -> None:
        """The run ends without these, whose group is not whole."""
        for worker in workers:
            seat = self.membership.seats.pop(worker)
            if worker not in self._finished | self._absent.done:
                self._absent.since.setdefault(worker, self._time.now())
            self._gone.add((worker, seat.attempt))
            self._hub.send(worker, seat.attempt, {"t": "leave", "why": "the run is ending", "done": True})

    def _judge(self) -> None:
        """Evaluations whose reports are all in come to a verdict, which every worker hears."""
        alive = set(self.membership.members) & set(self.membership.seats)
        done = {w: int(p.get("rows", 0)) for w, p in self.membership.remembered.items()}
        for judged in self._evaluations.ready(
            alive, done, self.membership.total_rows, self.outcome.train_loss, self._rows.held
        ):
            seconds = self._time.now() - (self._trained_from or self._started)
            self.outcome.history.append(judged.row | {"seconds": round(seconds + self._before_s, 3)})
            self._emit(self.outcome.heed(judged.event))
            if judged.stop is not None:
                self.outcome.stopped_early = True
                self.outcome.reason = self.outcome.reason or judged.stop
            self._broadcast(judged.verdict())

    def settle(self, patience_s: float = 0.0) -> None:
        """Has checkpoints that are whole committed, and hears what became of earlier ones; waits for them so long."""
        needed = set(self.membership.members) & set(self.membership.seats)
        for _ in range(2 if patience_s else 1):  # who waits also sees to what became whole behind the others
            self._saves.begin(needed, self._state)
            for event in self._saves.ended(patience_s):
                self._emit(self.outcome.heed(event))

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the workers' parts."""
        kept = {"verdict": self._evaluations.law.state(), "history": list(self.outcome.history)}
        return kept | self._meta() | {"train_loss": self.outcome.train_loss}

    def _ask_to_stop(self, reason: str) -> None:
        self._pending_stop = reason
        self.outcome.reason = self.outcome.reason or reason
        if self.membership.members:
            first = self.membership.seats.get(self.membership.members[0])
            if first is not None:
                self._hub.send(first.worker, first.attempt, {"t": "stop", "why": reason, "save": True})

    def ask_to_stop(self, reason: str) -> None:
        """Ends the run early, as a callback may want."""
        if self._pending_stop is None:
            self.outcome.stopped_early = True
            self._ask_to_stop(reason)

    def _broadcast(self, header: Header) -> None:
        for seat in self.membership.seats.values():
            self._hub.send(seat.worker, seat.attempt, dict(header))

    def _over(self) -> bool:
        return bool(self._left or self.outcome.results) and set(self.membership.seats) <= self._left

    def progress(self) -> dict[int, Header]:
        """The last heartbeat of every worker."""
        return self.ledger.last

    def _summed(self) -> Outcome:
        out = self.outcome
        self.ledger.sum_up(out, self.membership.total_rows)
        out.best_evaluation, out.best_metrics = self._evaluations.law.best_at, self._evaluations.law.best_metrics
        out.refused += int(getattr(self._hub, "refused", 0))
        if self._trained_from is not None:
            out.train_s = (self._trained_to or self._time.now()) - self._trained_from
        missed = (set(self.membership.unseen) | self._absent.missed) - self._absent.done
        out.lack(missed - self._absent.never)  # those are counted already
        return out

    def _emit(self, event: events.Event) -> None:
        if self._emit_to(event) is True:
            self.ask_to_stop("a callback asked for it")
