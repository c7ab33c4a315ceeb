"""A run's events folded into what a page shows: short series, a table of workers, marks in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from thinwire.dashboard.series import Mark, Series

TICK_S = 1.0
MOST_MARKS, MOST_DEATHS = 200, 1000
MOST_ROWS, MOST_METRICS = 4096, 256
"""Workers, and fragments; metrics: a log that names more was made to harm."""
LONGEST, MOST_ENTRIES, MOST_LEVELS = 400, 1024, 4
"""Characters of a text, entries of a table or list, and tables within tables, of what every open page is sent."""
RARE = ("lost", "failed", "reborn", "resumed", "hurts", "ended")
LANE_POINTS, MOST_COUNT = 360, 1 << 63
FOLDED = 8
"""Newest lines among which one that is repeated is looked for."""
FRESH = 0.2
"""Weight of the newest round in what a fragment's staleness and period are said to be."""


@dataclass
class WorkerRow:
    """One line of the table of workers, and its lane in the timeline."""

    worker: int
    host: str = ""
    attempt: int = 0
    state: str = "joined"
    steps: int = 0
    rows: int = 0
    loss: float | None = None
    busy: float = 0.0
    gap_s: float = 0.0
    seen: float = 0.0
    lost: int = 0
    sent: int = 0
    received: int = 0
    stepped: float = 0.0
    exchanged: float = 0.0
    waited: float = 0.0
    lane: Series = field(default_factory=lambda: Series(LANE_POINTS))
    told: dict[str, float] = field(default_factory=dict)
    """Counters of the attempt that reports, as last told."""

    def grow(self, name: str, told: float) -> float:
        """How far a counter went that starts again with each attempt."""
        before = self.told.get(name, 0.0)
        self.told[name] = told
        return max(0.0, told - before)

    def table(self) -> dict[str, Any]:
        names = ("worker", "host", "attempt", "state", "steps", "rows", "loss", "busy", "gap_s", "seen", "lost")
        return {name: getattr(self, name) for name in (*names, "sent", "received")}


class Marks:
    """Lines of what happened; those that are rare are not pushed out by those that are frequent."""

    def __init__(self) -> None:
        self._often: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
        self._rare: deque[dict[str, Any]] = deque(maxlen=MOST_DEATHS)
        self._count = 0

    def in_order(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they came."""
        return sorted((*self._often, *self._rare), key=lambda mark: int(mark["n"]))

    def add(self, now: float, kind: str, text: str, worker: int | None = None) -> None:
        """Adds a line; one that says what one of the newest said takes its place, and counts how often it came."""
        self._count += 1
        told = {"n": self._count, "id": self._count, "t": now, "kind": kind, "text": text[:LONGEST]}
        told |= {"worker": worker, "times": 1}
        if kind in RARE:
            self._rare.append(told)
            return
        for mark in list(self._often)[-FOLDED:]:
            if all(mark[name] == told[name] for name in ("kind", "text", "worker")):
                told |= {"id": mark["id"], "times": mark["times"] + 1}
                self._often.remove(mark)
        self._often.append(told)


class Totals:
    """What all workers come to, once a second."""

    def __init__(self) -> None:
        self.sums = {"rows": 0.0, "sent": 0.0, "received": 0.0, "stepped": 0.0, "alive": 0.0}
        self.newest: dict[str, float | None] = {}
        self.ticked: float | None = None
        """When a second was last over."""
        self._before: dict[str, float] = {}
        self.losses: list[float] = []
        """Of the steps since then."""

    def add(self, grown: Mapping[str, float]) -> None:
        """Adds what a worker reports."""
        for name, value in grown.items():
            self.sums[name] += value

    def tick(
        self, now: float, workers: Mapping[int, WorkerRow], series: Mapping[str, Series], *, last: bool = False
    ) -> None:
        """Adds a point to the series where a second is over, or the run."""
        took = now - (self.ticked if self.ticked is not None else now)
        if self.ticked is not None and took < TICK_S and not last:
            return
        self.ticked = now
        steps, loss = max((row.steps for row in workers.values()), default=0), None
        if self.losses:
            loss = sum(self.losses) / len(self.losses)
            series["train"].add(now, float(steps), loss)
            self.losses = []
        grown = {name: value - self._before.get(name, 0.0) for name, value in self.sums.items()}
        self._before = dict(self.sums)
        self.newest = {
            "time": now,
            "steps": float(steps),
            "loss": loss,
            "rows_per_s": grown["rows"] / took if took > 0 else None,
            "busy": min(1.0, grown["stepped"] / grown["alive"]) if grown["alive"] > 0 else None,
            "sent_bytes": self.sums["sent"],
            "workers": float(sum(row.state == "stepping" for row in workers.values())),
        }
        series["total"].add(now, *self.sums.values())


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


PLAIN: dict[str, Callable[[dict[str, Any]], tuple[str, str, int | None]]] = {
    "round_stalled": lambda event: (
        "stalled",
        f"worker {event.get('worker')} waits for {event.get('waited_for')}",
        _number(event.get("worker")),
    ),
    "slot_awaited": lambda event: (
        "stalled",
        f"no slot to visit workers {event.get('workers')} on {event.get('host')}",
        _number(event.get("moved")),
    ),
    "checkpoint_failed": lambda event: (
        "hurts",
        f"checkpoint {event.get('name')} could not be written: {event.get('reason')}",
        None,
    ),
}
"""Events that are a line and nothing else: its kind, its text, and the worker that it is about."""


def row_of(workers: dict[int, WorkerRow], event: dict[str, Any], now: float) -> WorkerRow:
    """The row of the worker that an event is about."""
    worker = int(event["worker"])
    if worker not in workers and len(workers) >= MOST_ROWS:
        raise ValueError(f"worker {worker} is one too many for a page")
    row = workers.setdefault(worker, WorkerRow(worker))
    row.seen = row.seen or now
    return row


def show(head: dict[str, Any], told: dict[str, Any]) -> None:
    """Puts values at the head of the page, as much of each as a page shows."""
    head |= {name: _modest(value) for name, value in told.items()}


class EventReducer:
    """What has happened so far. Events come as they stand in `events.jsonl`; a run that begins anew starts it anew."""

    def __init__(self) -> None:
        self.beginnings = 0
        """How often it started; who reads along has to start again too."""
        self.changed = self.count = 0
        """Grows with every event, so that who looks knows whether to look again."""
        self._begin()

    def _begin(self) -> None:
        self.head: dict[str, Any] = {"state": "waiting"}
        self.workers: dict[int, WorkerRow] = {}
        self.series: dict[str, Series] = {"train": Series(fold="mean"), "total": Series()}
        self.fragments: dict[int, dict[str, float]] = {}
        self._marks = Marks()
        self._totals = Totals()
        self._untimed = 0.0
        """Rows that were stepped before the time that rows a second are counted over."""
        self._shift = 0.0
        """Added to times: a run that goes on later, or in another virtual time, goes on where it stopped."""

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What happened, in order."""
        return self._marks.in_order()

    @property
    def newest(self) -> dict[str, float | None]:
        """What the last second of the run came to, for those who keep such numbers elsewhere."""
        return self._totals.newest

    def feed(self, event: dict[str, Any]) -> None:
        """Takes an event in; kinds it does not know are counted and left."""
        self.count += 1
        self.changed += 1
        try:
            if event.get("kind") == "run_started" and "began" in self.head:
                self._start_again(event)
            kind = str(event.get("kind"))
            act, told = getattr(self, f"_on_{kind}", None), PLAIN.get(kind)
            now = float(event["time"]) + self._shift
            if act is not None:
                act(event, now)
            if told is not None:
                self._marks.add(now, *told(event))
            self.head["now"] = max(now, float(self.head.get("now", now)))
        except Exception:  # another version's, or a damaged line: no reason to end a run or a page
            self.head["unread"] = int(self.head.get("unread", 0)) + 1

    def _start_again(self, event: dict[str, Any]) -> None:
        if event.get("resumed_from"):
            self._shift = float(self.head["now"]) - float(event["time"])
            return
        self.beginnings += 1
        self._begin()

    # -- kinds ------------------------------------------------------------------------------------------------------

    def _on_run_started(self, event: dict[str, Any], now: float) -> None:
        names = ("strategy", "knobs", "workers", "rows", "validation_rows", "seed", "resumed_from", "version")
        began = self.head.get("began", now)
        show(self.head, {name: event.get(name) for name in names} | {"state": "running", "began": began})
        self.head.pop("reason", None)
        if event.get("resumed_from"):
            passed = "".join(f"; {name} passed over: {why}" for name, why in (event.get("passed_over") or {}).items())
            self._marks.add(now, "resumed", f"resumed from {event['resumed_from']}{passed}")
        for row in self.workers.values():
            row.told, row.attempt, row.state = {}, -1, "joined"
        self._totals.ticked = now

    def _on_worker_joined(self, event: dict[str, Any], now: float) -> None:
        row = row_of(self.workers, event, now)
        attempt = int(event.get("attempt", 0))
        if attempt != row.attempt:  # one that was only not heard for a while counts on
            row.told = {}
        row.host, row.attempt, row.state, row.seen = str(event.get("host", ""))[:LONGEST], attempt, "stepping", now
        if event.get("again"):
            self._marks.add(now, "reborn", f"worker {row.worker} is back on {row.host}", row.worker)

    def _on_worker_lost(self, event: dict[str, Any], now: float) -> None:
        row = row_of(self.workers, event, now)
        row.state, row.lost = "lost", row.lost + 1
        reason = str(event.get("reason", "")).splitlines()
        self._marks.add(
            now, "lost", f"worker {row.worker} on {row.host} lost: {reason[0] if reason else ''}", row.worker
        )

    def _on_worker_failed(self, event: dict[str, Any], now: float) -> None:
        row = row_of(self.workers, event, now)
        row.state = "failed"
        self._marks.add(now, "failed", f"worker {row.worker} failed: {event.get('error', '')}", row.worker)

    def _on_generation_formed(self, event: dict[str, Any], now: float) -> None:
        members = event.get("members", ())
        show(self.head, {"generation": event.get("generation"), "stepping": self.head.get("stepping", now)})
        self._marks.add(now, "generation", f"generation {event.get('generation')}: {len(members)} workers")

    def _on_progressed(self, event: dict[str, Any], now: float) -> None:
        row = row_of(self.workers, event, now)
        row.attempt = int(event.get("attempt", row.attempt))
        rows, steps = _count(event["rows"]), _count(event["steps"])
        more = {"rows": max(0.0, rows - row.rows)}
        more["sent"] = row.grow("sent", float(event.get("bytes_sent", 0)))
        more["received"] = row.grow("received", float(event.get("bytes_received", 0)))
        more["stepped"] = row.grow("stepped", float(event.get("stepped_s", 0.0)))
        row.exchanged += row.grow("exchanged", float(event.get("exchanged_s", 0.0)))
        row.waited += row.grow("waited", float(event.get("waited_s", 0.0)))
        more["alive"] = max(0.0, now - row.seen) if row.state == "stepping" and row.seen else 0.0
        row.stepped += more["stepped"]
        row.sent, row.received = row.sent + int(more["sent"]), row.received + int(more["received"])
        row.rows, row.steps, row.seen = max(row.rows, rows), max(row.steps, steps), now
        row.busy, row.gap_s = float(event.get("busy", 0.0)), max(row.gap_s, float(event.get("gap_s", 0.0)))
        row.state = "stepping"
        self._totals.add(more)
        if event.get("loss") is not None:
            row.loss = float(event["loss"])
            self._totals.losses.append(row.loss)
        row.lane.add(now, row.stepped, row.exchanged, row.waited)
        if "stepping" not in self.head:  # a log without generations: what the first report has took an unknown time
            self.head["stepping"], self._untimed = now, self._totals.sums["rows"]
        if now > self.head["stepping"]:
            self.head["rows_per_s"] = (self._totals.sums["rows"] - self._untimed) / (now - self.head["stepping"])
        self._totals.tick(now, self.workers, self.series)

    def _on_round_landed(self, event: dict[str, Any], now: float) -> None:
        if event.get("fragments") != self.head.get("fragments"):  # cut anew
            self.fragments = {}
        show(self.head, {name: event.get(name) for name in ("codec", "fragments", "round")})
        if event.get("fragment") is None:
            return
        fragment = int(event["fragment"])
        if fragment not in self.fragments and len(self.fragments) >= MOST_ROWS:
            raise ValueError(f"fragment {fragment} is one too many for a page")
        seen = self.fragments.setdefault(fragment, {})
        for name in ("late", "period"):
            if event.get(name) is not None:
                before = seen.get(name, float(event[name]))
                seen[name] = (1 - FRESH) * before + FRESH * float(event[name])
        seen["seconds"] = float(event.get("seconds", 0.0))

    def _on_setting_changed(self, event: dict[str, Any], now: float) -> None:
        show(self.head, {"choice": event.get("why") or self.head.get("choice")})
        if event.get("why"):
            self._marks.add(now, "setting", str(event["why"]))

    def _on_tried(self, event: dict[str, Any], now: float) -> None:
        for name in ("joint", "replicas", "best", "alone"):
            if event.get(name) is not None:
                series = self.series.setdefault(f"t:{name}", Series())
                series.add(now, float(event.get("steps", 0)), float(event[name]))
        if event.get("hurts"):
            self._marks.add(now, "hurts", f"exchanging hurts: {event['hurts']}")

    def _on_evaluated(self, event: dict[str, Any], now: float) -> None:
        metrics = {name[:LONGEST]: float(value) for name, value in (event.get("metrics") or {}).items()}
        for name, value in metrics.items():
            if f"m:{name}" not in self.series and len(self.series) >= MOST_METRICS:
                raise ValueError(f"metric {name} is one too many for a page")
            self.series.setdefault(f"m:{name}", Series()).add(now, float(event.get("steps", 0)), value)
        show(self.head, {"metrics": metrics, "evaluated": event.get("number")})
        if event.get("best"):
            show(self.head, {"best": {"number": event.get("number"), "metrics": metrics}})

    def _on_checkpoint_saved(self, event: dict[str, Any], now: float) -> None:
        show(self.head, {"checkpoint": event.get("name")})
        self._marks.add(now, "saved", f"checkpoint {event.get('name')}")

    def _on_run_ended(self, event: dict[str, Any], now: float) -> None:
        self._totals.tick(now, self.workers, self.series, last=True)
        show(self.head, {"state": "ended", "reason": event.get("reason"), "summary": event.get("summary") or {}})
        for row in self.workers.values():
            row.state = "done" if row.state == "stepping" else row.state
        self._marks.add(now, "ended", f"ended: {event.get('reason')}")


def _modest(value: Any, depth: int = 0) -> Any:
    """A value of a log with its texts, tables and lists cut to what a page keeps.

    >>> _modest({"why": "x" * 1000, "steps": 3}) == {"why": "x" * LONGEST, "steps": 3}
    True
    """
    if isinstance(value, str):
        return value[:LONGEST]
    if isinstance(value, dict) and depth < MOST_LEVELS:
        return {str(name)[:LONGEST]: _modest(one, depth + 1) for name, one in islice(value.items(), MOST_ENTRIES)}
    if isinstance(value, list | tuple) and depth < MOST_LEVELS:
        return [_modest(one, depth + 1) for one in value[:MOST_ENTRIES]]
    too_deep = isinstance(value, dict | list | tuple)
    return None if too_deep or (isinstance(value, int) and abs(value) >= MOST_COUNT) else value


def _count(value: Any) -> int:
    """A counter; one that no run comes to is another's, and has no place in a sum."""
    found = int(value)
    if not 0 <= found < MOST_COUNT:
        raise ValueError(f"{found} is no count")
    return found


class Reader:
    """One who reads along: gets all of a story once, and then what is new."""

    def __init__(self) -> None:
        self._start(-1)

    def _start(self, beginning: int) -> None:
        self._beginning = beginning
        self._seen: dict[str, Mark] = {}
        self._changed, self._marks = -1, 0

    def news(self, story: EventReducer, *, detail: bool = True) -> dict[str, Any] | None:
        """What came since the last time; None where nothing did. Without detail, only what runs are compared by."""
        fresh = story.beginnings != self._beginning
        if fresh:
            self._start(story.beginnings)
        if story.changed == self._changed:
            return None
        self._changed = story.changed
        told: dict[str, Any] = {"head": story.head, "count": story.count, "series": {}, "fresh": fresh}
        every = dict(story.series)
        rows = [story.workers[worker].table() for worker in sorted(story.workers)]
        told["lost"] = sum(int(row["lost"]) for row in rows)
        if detail:
            every |= {f"w:{row.worker}": row.lane for row in story.workers.values()}
            told["workers"] = rows
            told["fragments"] = [{"fragment": n, **story.fragments[n]} for n in sorted(story.fragments)]
            told["marks"] = [mark for mark in story.marks if mark["n"] > self._marks]
            self._marks = max((int(mark["n"]) for mark in told["marks"]), default=self._marks)
        for name, series in every.items():
            new = series.since(self._seen.get(name))
            if new is not None:
                told["series"][name] = new
                self._seen[name] = series.mark
        return told
