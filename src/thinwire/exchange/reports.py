"""What one worker tells the coordinator, and how it knows that the coordinator is there."""

from __future__ import annotations

from thinwire.errors import DivergedError
from thinwire.exchange.identity import Identity
from thinwire.exchange.notes import Note
from thinwire.exchange.signals import Broken, CutOffError
from thinwire.protocol.clock import Queue, Time
from thinwire.protocol.forms import Body, header_of
from thinwire.protocol.messages import COORDINATOR, Beat, Happened, Join, Message
from thinwire.transport.ports import Link

BEAT_S, REJOIN_S = 0.5, 3.0
MOST_FLAWS = 256


class CountingLink:
    """A link that counts the bytes of payload to and from other workers."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.bytes_sent = self.bytes_received = 0

    def send(self, peer: int, body: Body, payload: memoryview | None = None) -> None:
        self.bytes_sent += 0 if payload is None else payload.nbytes
        self._link.send(peer, header_of(body), payload)

    def receive(self, timeout_s: float) -> list[Message]:
        found = self._link.receive(timeout_s)
        for message in found:
            if message.sender != COORDINATOR and message.payload is not None:
                self.bytes_received += message.payload.nbytes
        return found


class Reports:
    """A worker's own reports: that it joins, lives and how far it is, and what is not finite."""

    def __init__(
        self,
        link: Link,
        seat: Identity,
        *,
        signals: Queue,
        time: Time,
        silence_s: float = 30.0,
        stop_on_nonfinite: bool = False,
    ) -> None:
        self._link, self._identity, self._signals, self._time = link, seat, signals, time
        self._silence_s, self._stop_on_nonfinite, self._flaws = silence_s, stop_on_nonfinite, 0
        self._last_beat = self._heard = self._joined_at = time.now()
        self.counted = CountingLink(link)
        self._aside_bytes = 0
        self._progress: Note = {}

    # -- for the stepping thread ------------------------------------------------------------------------------------

    def progress(self, values: Note) -> None:
        """What the next heartbeat says."""
        self._progress = values

    def sent_aside(self, size_bytes: int) -> None:
        """What this worker has sent beside the exchange, in all."""
        self._aside_bytes = size_bytes

    # -- for the exchange thread ------------------------------------------------------------------------------------

    def note(self) -> Note:
        """What this worker says beside a part that contributes nothing."""
        note = self._progress.get("note", {})
        return dict(note) if isinstance(note, dict) else {}

    def report(self, body: Body, payload: memoryview | None = None) -> None:
        """Tells the coordinator something."""
        self._link.send(COORDINATOR, header_of(body), payload)

    def join(self) -> None:
        """Asks for a seat."""
        self.report(Join(attempt=self._identity.attempt, address=self._link.address, **self._identity.hello))

    def may_rejoin(self) -> bool:
        """Whether it is time to ask for a seat again, now that the last one was given up; counts as having asked."""
        if self._time.now() - self._joined_at <= REJOIN_S:
            return False
        self._joined_at = self._time.now()
        return True

    def beat(self, landed: int, waiting: dict[str, list[int]], refused: int, *, sure: bool) -> None:
        """Says how far this worker is; surely, where no later beat would make up for a lost one."""
        self._last_beat = self._time.now()
        beat = Beat(
            attempt=self._identity.attempt,
            landed=landed,
            progress=self._progress,
            sent_bytes=self.counted.bytes_sent + self._aside_bytes,
            received_bytes=self.counted.bytes_received,
            waiting=waiting,
            refused=refused + getattr(self._link, "refused", 0),
            sure=sure,
        )
        self.report(beat)

    @property
    def until_beat_s(self) -> float:
        """The time until the next heartbeat; below zero once it is late."""
        return self._last_beat + BEAT_S - self._time.now()

    def is_due(self, now: float) -> bool:
        """Whether it is time for a heartbeat."""
        return now - self._last_beat >= BEAT_S

    def heard(self) -> None:
        """The coordinator has said something."""
        self._heard = self._time.now()

    def check_silence(self, now: float) -> None:
        """Raises where the coordinator has said nothing for too long.

        Raises:
            CutOffError: The coordinator can no longer be heard.
        """
        if now - self._heard > self._silence_s:
            raise CutOffError(
                f"worker {self._identity.worker} has heard nothing from the coordinator for {self._silence_s:.0f} s; "
                "it has probably ended, so this worker ends too"
            )

    def tell_not_finite(self, worker: int, round: str, what: str, values: int) -> None:
        """Tells the run that what a worker gave is not finite; only the first times, because it may go on and on."""
        self._flaws += 1
        if self._stop_on_nonfinite:
            text = f"{values} values of the {what} of worker {worker} in round {round} are not finite"
            self._signals.put(Broken(DivergedError(text)))
        elif self._flaws <= MOST_FLAWS:
            fields = {"worker": worker, "what": what, "values": values, "round": round, "by": self._identity.worker}
            self.report(Happened(attempt=self._identity.attempt, kind="non_finite", fields=fields))
