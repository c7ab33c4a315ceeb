"""Messages between the coordinator and workers, and among workers: one dataclass each, fields in header order.

`header_of` makes the header of a message. The four tables at the end, by sender and receiver, decode headers. Letters
between an agent and Spark's short tasks are defined in `thinwire.exchange.spark`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from thinwire import events
from thinwire.protocol.forms import (
    Check,
    Field,
    Header,
    Kinds,
    by_number,
    form,
    is_count,
    is_number,
    is_pair,
    is_real,
    is_table,
    is_text,
    is_truth,
    list_of,
    maybe,
    or_empty,
    table_of,
)
from thinwire.rules.compression import CODECS

COORDINATOR = -1
"""The coordinator's number among peers."""
ANY_ATTEMPT = -1
"""In place of an attempt's number: any attempt."""
MOST_PIECES = 1 << 20
"""Most chunks of a result, and most pieces of a chunk."""


class Message(NamedTuple):
    """One message in transit: its sender, its header, and an optional payload of raw bytes."""

    sender: int
    header: Header
    payload: memoryview | None = None


# -- checks of single fields ------------------------------------------------------------------------------------------

_ADDRESS = re.compile(
    r"tcp://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}|(memory:)?[0-9]{1,18}\.[0-9]{1,18}"
)
"""Addresses of a socket, of a queue in this process, or of an agent that Spark's jobs visit (by worker and attempt)."""
_MEETING = re.compile(r"[A-Za-z0-9._\[\]:-]{1,255}:[0-9.]{1,40}")
_SAVE = re.compile(r"[0-9]{1,18}-(final|step-[0-9]{1,18})")


def is_address(value: Any) -> bool:
    """Whether a value has the form of an address at which a worker can be reached.

    >>> is_address("tcp://10.0.0.7:41234"), is_address("ipc:///tmp/x")
    (True, False)
    """
    return is_text(value) and bool(_ADDRESS.fullmatch(value))


def _is_meeting(value: Any) -> bool:
    return is_text(value) and bool(_MEETING.fullmatch(value))


def _is_checkpoint(value: Any) -> bool:
    return is_text(value) and bool(_SAVE.fullmatch(value))


def _is_codec(value: Any) -> bool:
    return is_text(value) and value in CODECS


def _is_anything(value: Any) -> bool:
    return True


def _is_shard(value: Any) -> bool:
    return value in ("train", "validation")


def _is_piece(value: Any) -> bool:
    return is_count(value) and value < 2**31


def _or_nothing(value: dict[str, Any] | None) -> dict[str, Any]:
    return value or {}


_is_progress = form(
    {"steps": is_count, "rows": is_count, "position": is_pair, "busy": is_number, "gap_s": is_number},
    loss=maybe(is_number),
    first_loss=maybe(is_number),
    stepped_s=is_number,
    waited_s=is_number,
    exchanged_s=is_number,
    evaluated_s=is_number,
    gradient_norm=maybe(is_number),
    score=is_count,
    note=is_table,
)
_is_answer = form(
    {
        "since": is_count,
        "line": is_count,
        "live": list_of(is_count),
        "due": list_of(is_count),
        "still": list_of(is_count),
    },
    kept=by_number(list_of(is_pair)),
    went=is_pair,
)
_is_part = form({"name": is_text, "size_bytes": is_count, "digest": is_text})
_is_member = form(
    {"address": is_address, "attempt": is_count},
    position=maybe(is_pair),
    steps=is_count,
    first_loss=maybe(is_number),
)
_is_group = form({"n": is_count}, at=maybe(_is_meeting))


def _pair(value: list[int]) -> tuple[int, int]:
    return value[0], value[1]


def _by_worker(value: dict[str, Any]) -> dict[int, Any]:
    return {int(worker): entry for worker, entry in value.items()}


def _by_text(value: Mapping[int, Any]) -> dict[str, Any]:
    return {str(worker): entry for worker, entry in value.items()}


Pair = tuple[int, int]
Note = dict[str, Any]
"""What a worker sends beside its contribution to a round; `thinwire.exchange.notes` checks the content."""

# -- fields that several messages have --------------------------------------------------------------------------------

Attempt = Annotated[int, Field("a", is_count)]
Generation = Annotated[int, Field("g", is_count)]
Landed = Annotated[int, Field("landed", is_count)]
Steps = Annotated[int, Field("steps", is_count)]
Rows = Annotated[int, Field("rows", is_count)]
RoundKey = Annotated[str, Field("r", is_text)]
Span = Annotated[Pair, Field("s", is_pair, _pair, list)]
"""First and last value of a fragment of the model."""
CodecName = Annotated[str, Field("k", _is_codec)]
ChunkNumber = Annotated[int, Field("c", is_count)]
Weight = Annotated[float, Field("w", is_real, float)]
OwnNote = Annotated[Note, Field("n", is_table)]
Notes = Annotated[dict[int, Note], Field("n", by_number(is_table), _by_worker, _by_text)]
Key = Annotated[int, Field("k", is_count)]
"""The number of a tuple in a table."""
Name = Annotated[Pair, Field("p", is_pair, _pair, list)]
"""A publication of a table: the generation in which it was announced, and its number there."""

# -- from a worker to the coordinator ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Join:
    """A worker asks for a seat."""

    tag: ClassVar[str] = "join"
    attempt: Attempt
    address: Annotated[str, Field("address", is_address)]
    host: Annotated[str, Field("host", is_text)] = "?"
    pid: Annotated[int, Field("pid", is_count)] = 0
    thinwire: Annotated[str, Field("thinwire", is_text)] = "of an unknown version"
    protocol: Annotated[Any, Field("protocol", _is_anything)] = None
    rows: Annotated[int | None, Field("rows", is_count)] = None
    """Its training rows; None where it could not read them."""
    held: Annotated[int, Field("held", is_count)] = 0
    """Its validation rows."""
    same: Annotated[str | None, Field("same", is_text)] = None
    """The label of all its rows; None where labels differ."""
    meets: Annotated[str | None, Field("meets", maybe(_is_meeting))] = None
    """Address where the members of its group meet, if this worker is the first of a group."""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """A worker that has yet to join asks for a piece of its rows."""

    tag: ClassVar[str] = "fetch"
    attempt: Attempt
    name: Annotated[str, Field("name", _is_shard)]
    index: Annotated[int, Field("i", _is_piece)]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A worker's heartbeat with its progress."""

    tag: ClassVar[str] = "beat"
    attempt: Attempt
    landed: Landed
    progress: Annotated[dict[str, Any], Field("progress", or_empty(_is_progress), _or_nothing)]
    """Empty until a replacement has taken its first step."""
    sent_bytes: Annotated[int, Field("bytes", is_count)]
    received_bytes: Annotated[int, Field("received", is_count)]
    waiting: Annotated[dict[str, list[int]], Field("waiting", table_of(list_of(is_count)))]
    """Its open rounds, and for each the workers from which it lacks a message."""
    refused: Annotated[int, Field("refused", is_count)]
    sure: Annotated[bool, Field("sure", is_truth)] = False
    """Whether this heartbeat must be delivered, since no later one would replace it."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The answer to `Prepare`."""

    tag: ClassVar[str] = "prepared"
    attempt: Attempt
    generation: Generation
    landed: Landed
    fresh: Annotated[bool, Field("fresh", is_truth)]
    """Whether the worker has yet to take the joint state over."""
    since: Annotated[int, Field("since", is_count)]
    """The newest generation whose joint state it held."""
    digest: Annotated[str, Field("digest", is_text)]
    table: Annotated[dict[str, Any] | None, Field("more", or_empty(_is_answer))] = None
    """What the worker knows of the table's tuples (`thinwire.exchange.table.plan.Answer`)."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Sums over a worker's validation rows."""

    tag: ClassVar[str] = "evaluated"
    attempt: Attempt
    number: Annotated[int, Field("p", is_count)]
    sums: Annotated[dict[str, float], Field("sums", table_of(is_number))]
    weights: Annotated[dict[str, float], Field("weights", table_of(is_number))]
    rows: Rows
    steps: Steps
    done: Annotated[int, Field("done", is_count)]
    """Training rows that the worker has done."""


@dataclass(frozen=True, kw_only=True)
class Caught:
    """A worker has taken the joint state over; it takes no part in publications up to this one."""

    tag: ClassVar[str] = "caught"
    attempt: Attempt
    published: Annotated[int, Field("published", is_count)]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A worker has written its parts of a checkpoint."""

    tag: ClassVar[str] = "saved"
    attempt: Attempt
    name: Annotated[str, Field("name", _is_checkpoint)]
    parts: Annotated[list[dict[str, Any]], Field("parts", list_of(_is_part))]
    steps: Steps
    fails: Annotated[bool, Field("fails", is_truth)]
    """Whether its last steps were skipped because their gradients were not finite."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A worker's rows are done."""

    tag: ClassVar[str] = "finished"
    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """A worker holds the final model; lost workers are no longer replaced."""

    tag: ClassVar[str] = "agreed"
    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A worker has ended an epoch of its rows."""

    tag: ClassVar[str] = "epoch"
    attempt: Attempt
    epoch: Annotated[int, Field("epoch", is_count)]
    rows: Rows
    loss: Annotated[float | None, Field("loss", maybe(is_number))]
    gradient_norm: Annotated[float | None, Field("norm", maybe(is_number))] = None
    """Mean norm of the gradients that were measured."""


@dataclass(frozen=True, kw_only=True)
class Happened:
    """An event for the run's log, by its kind and fields."""

    tag: ClassVar[str] = "event"
    attempt: Attempt
    kind: Annotated[str, Field("kind", is_text)]
    fields: Annotated[dict[str, Any], Field("fields", is_table)]

    @property
    def is_possible(self) -> bool:
        return _is_event(self.kind, self.fields)

    @property
    def type(self) -> type[events.Event] | None:
        """The event's class; None for an event of another version of thinwire."""
        return WORKER_EVENTS.get(self.kind)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A worker's error."""

    tag: ClassVar[str] = "failed"
    attempt: Attempt
    kind: Annotated[str, Field("kind", is_text)]
    """The error's class."""
    error: Annotated[str, Field("error", is_text)]
    traceback: Annotated[str, Field("traceback", is_text)]


@dataclass(frozen=True, kw_only=True)
class ModelPiece:
    """A piece of a model: base of the messages that carry one."""

    attempt: Attempt
    part: Annotated[int, Field("part", is_count)]
    """The number in its group of the worker that holds this part of the model."""
    index: Annotated[int, Field("i", is_count)]
    count: Annotated[int, Field("n", is_count)]
    chunk: Annotated[int, Field("chunk", is_count)]
    chunks: Annotated[int, Field("chunks", is_count)]

    @property
    def is_possible(self) -> bool:
        return self.index < self.count <= MOST_PIECES and self.chunk < self.chunks <= MOST_PIECES


@dataclass(frozen=True, kw_only=True)
class Result(ModelPiece):
    """A piece of the model that a run gives back."""

    tag: ClassVar[str] = "result"


@dataclass(frozen=True, kw_only=True)
class Shown(ModelPiece):
    """A piece of the joint model of an evaluation, for callbacks that take models."""

    tag: ClassVar[str] = "shown"
    number: Annotated[int, Field("p", is_count)]


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A worker has lost the other members of its group."""

    tag: ClassVar[str] = "apart"
    attempt: Attempt
    meeting: Annotated[int, Field("n", is_count)]
    """The last meeting of the group that the worker took part in."""
    why: Annotated[str, Field("why", is_text)]


@dataclass(frozen=True, kw_only=True)
class Bye:
    """A worker's last message."""

    tag: ClassVar[str] = "bye"
    attempt: Attempt


# -- from the coordinator to a worker ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pong:
    """Answer to a heartbeat: the coordinator is alive."""

    tag: ClassVar[str] = "pong"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Another attempt holds this worker's seat and cannot be spared; the receiver waits."""

    tag: ClassVar[str] = "wait"


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """The worker's seat was given up, and it may ask for it again."""

    tag: ClassVar[str] = "rejoin"


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The receiver is to end."""

    tag: ClassVar[str] = "leave"
    why: Annotated[str, Field("why", is_text)]
    done: Annotated[bool, Field("done", is_truth)] = False
    """Whether the receiver's work is done; otherwise another attempt has taken its place."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a worker's rows."""

    tag: ClassVar[str] = "piece"
    name: Annotated[str, Field("name", is_text)]
    index: Annotated[int, Field("i", is_count)]
    count: Annotated[int, Field("n", is_count)]


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """A generation is about to form: until its commit, the receiver merges nothing."""

    tag: ClassVar[str] = "prepare"
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A generation has formed."""

    tag: ClassVar[str] = "commit"
    generation: Generation
    members: Annotated[dict[int, dict[str, Any]], Field("members", by_number(_is_member), _by_worker, _by_text)]
    """By worker, its address, its attempt, and the position where its predecessor stopped."""
    reference: Annotated[int, Field("reference", is_count)]
    """The member that holds the newest joint state."""
    landed: Landed
    digest: Annotated[str, Field("digest", is_text)]
    since: Annotated[int, Field("since", is_count)]
    tables: Annotated[dict[int, dict[str, Any]], Field("more", by_number(_is_answer), _by_worker, _by_text)]
    """Answers of the members about the table's tuples."""
    total_rows: Annotated[int, Field("rows", is_count)]
    totals: Annotated[dict[int, int], Field("totals", by_number(is_count), _by_worker, _by_text)]
    """Rows that each worker has done."""
    group: Annotated[dict[str, Any] | None, Field("group", _is_group)] = None
    """The number of the group's meeting, and the address where it meets."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of an evaluation."""

    tag: ClassVar[str] = "verdict"
    number: Annotated[int, Field("p", is_count)]
    best: Annotated[bool, Field("best", is_truth)]
    stop: Annotated[str | None, Field("stop", maybe(is_text))]
    """Why the run is to end; None where it goes on."""
    metrics: Annotated[dict[str, float], Field("metrics", table_of(is_number))]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The receiver, as the first worker, is to end the run at its next round."""

    tag: ClassVar[str] = "stop"
    why: Annotated[str, Field("why", is_text)]
    save: Annotated[bool, Field("save", is_truth)]


@dataclass(frozen=True, kw_only=True)
class Stand:
    """A worker of the same group was lost."""

    tag: ClassVar[str] = "stand"


@dataclass(frozen=True, kw_only=True)
class Conclude:
    """All rows are done: the run ends once these rounds have landed."""

    tag: ClassVar[str] = "conclude"
    landed: Landed


@dataclass(frozen=True, kw_only=True)
class Done:
    """The driver has the model."""

    tag: ClassVar[str] = "done"


# -- among workers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Open:
    """A round has begun in which the receiver sums no chunk."""

    tag: ClassVar[str] = "open"
    generation: Generation
    attempt: Attempt
    round: RoundKey
    span: Span
    codec: CodecName
    chunk: ChunkNumber


@dataclass(frozen=True, kw_only=True)
class Part:
    """A contribution to a chunk of a round, for the worker that sums the chunk."""

    tag: ClassVar[str] = "part"
    generation: Generation
    attempt: Attempt
    round: RoundKey
    span: Span
    codec: CodecName
    chunk: ChunkNumber
    weight: Weight
    note: Annotated[Note | None, Field("n", is_table)] = None


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The mean of a chunk, from the worker that summed it."""

    tag: ClassVar[str] = "sum"
    generation: Generation
    attempt: Attempt
    round: RoundKey
    span: Span
    codec: CodecName
    chunk: ChunkNumber
    counted: Annotated[list[int], Field("i", list_of(is_count))]
    """The workers whose contributions are in it."""
    notes: Annotated[dict[int, Note] | None, Field("n", by_number(is_table), _by_worker, _by_text)] = None
    dropped: Annotated[tuple[int, ...], Field("x", list_of(is_count), tuple, list)] = ()
    """The workers whose contributions were not finite."""
    empty: Annotated[bool, Field("e", is_truth)] = False
    """Whether no worker contributed."""


@dataclass(frozen=True, kw_only=True)
class Want:
    """The sender asks for the joint state."""

    tag: ClassVar[str] = "want"
    generation: Generation
    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class State:
    """A piece of the joint state, for a worker that asked for it."""

    tag: ClassVar[str] = "state"
    generation: Generation
    attempt: Attempt
    index: Annotated[int, Field("i", is_count)]
    count: Annotated[int, Field("n", is_count)]
    number: Annotated[int, Field("d", is_count)]
    """All pieces of one state have the same number."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A worker's contribution to a tuple."""

    tag: ClassVar[str] = "update"
    generation: Generation
    attempt: Attempt
    key: Key
    number: Annotated[int, Field("n", is_count)]
    weight: Weight
    rates: Annotated[tuple[float, ...], Field("rates", list_of(is_real), tuple, list)]
    """The sender's learning rates, by parameter group of its optimizer; empty where servers have rates of their own."""
    absent: Annotated[tuple[int, ...], Field("absent", list_of(is_count), tuple, list)]
    """Numbers of the parameters for which it has no gradient."""
    over: Annotated[bool, Field("over", is_truth)]
    """Whether an earlier plan of the table may have counted it already; it is answered without being counted."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The result of a contribution to a tuple."""

    tag: ClassVar[str] = "reply"
    generation: Generation
    attempt: Attempt
    key: Key
    number: Annotated[int, Field("n", is_count)]
    version: Annotated[int, Field("v", is_count)]
    to: Annotated[int, Field("to", is_count)]
    """The attempt that contributed."""
    empty: Annotated[bool, Field("e", is_truth)]


@dataclass(frozen=True, kw_only=True)
class Get:
    """A worker asks for the present value of a tuple."""

    tag: ClassVar[str] = "get"
    generation: Generation
    attempt: Attempt
    key: Key


@dataclass(frozen=True, kw_only=True)
class Value:
    """The present value of a tuple."""

    tag: ClassVar[str] = "value"
    generation: Generation
    attempt: Attempt
    key: Key


@dataclass(frozen=True, kw_only=True)
class Move:
    """A tuple, for its new host."""

    tag: ClassVar[str] = "move"
    generation: Generation
    attempt: Attempt
    key: Key


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The sender, as the new host, has received a tuple."""

    tag: ClassVar[str] = "moved"
    generation: Generation
    attempt: Attempt
    key: Key


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A checkpoint of a tuple, for the neighbour that would take the tuple over."""

    tag: ClassVar[str] = "copy"
    generation: Generation
    attempt: Attempt
    key: Key
    mark: Annotated[Pair, Field("v", is_pair, _pair, list)]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The first worker announces a publication of the table."""

    tag: ClassVar[str] = "mark"
    generation: Generation
    attempt: Attempt
    name: Name
    note: OwnNote


@dataclass(frozen=True, kw_only=True)
class Page:
    """A tuple of a publication."""

    tag: ClassVar[str] = "page"
    generation: Generation
    attempt: Attempt
    key: Key
    name: Name
    whole: Annotated[bool, Field("whole", is_truth)]
    """Whether the publication is saved, so that the page has all of the tuple's state."""


@dataclass(frozen=True, kw_only=True)
class Have:
    """A worker has all pages of a publication."""

    tag: ClassVar[str] = "have"
    generation: Generation
    attempt: Attempt
    name: Name


@dataclass(frozen=True, kw_only=True)
class Go:
    """All workers have all pages of a publication."""

    tag: ClassVar[str] = "go"
    generation: Generation
    attempt: Attempt
    name: Name


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A worker's progress, for the first worker."""

    tag: ClassVar[str] = "note"
    generation: Generation
    attempt: Attempt
    note: OwnNote


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Whether a worker's rows are done; servers then wait for no contribution of it."""

    tag: ClassVar[str] = "done"
    generation: Generation
    attempt: Attempt
    done: Annotated[bool, Field("d", is_truth)]


# -- rounds that Spark sums -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A worker's contribution to a round, for the driver."""

    tag: ClassVar[str] = "launched"
    generation: Generation
    attempt: Attempt
    round: RoundKey
    span: Span
    codec: CodecName
    chunk: ChunkNumber
    weight: Weight
    note: OwnNote


@dataclass(frozen=True, kw_only=True)
class SparkOpen:
    """Another worker has launched a round."""

    tag: ClassVar[str] = "open"
    generation: Generation
    round: RoundKey
    span: Span
    codec: CodecName


@dataclass(frozen=True, kw_only=True)
class SparkSum:
    """The mean of a round."""

    tag: ClassVar[str] = "sum"
    generation: Generation
    round: RoundKey
    span: Span
    codec: CodecName
    packing: Annotated[str, Field("m", _is_codec)]
    """The codec of the mean."""
    notes: Notes
    dropped: Annotated[tuple[int, ...], Field("x", list_of(is_count), tuple, list)]


_REPORTS = Evaluated, Caught, Saved, Finished, Agreed, Epoch, Happened, Failed, Result, Shown, Apart, Bye
_TABLE = Update, Reply, Get, Value, Move, Moved, Copy, Mark, Page, Have, Go, Noted, Idle
TO_COORDINATOR = Kinds((Join, Fetch, Beat, Prepared, *_REPORTS))
TO_WORKER = Kinds((Pong, Wait, Rejoin, Leave, Piece, Prepare, Commit, Verdict, Stop, Stand, Conclude, Done))
AMONG_WORKERS = Kinds((Open, Part, Sum, Want, State, *_TABLE))
FROM_SPARK = Kinds((SparkOpen, SparkSum))

# -- events that workers send -----------------------------------------------------------------------------------------

_WORKER_EVENT_KINDS = (
    events.RoundLanded,
    events.SettingChanged,
    events.Tried,
    events.HandedOver,
    events.Rejoined,
    events.CheckpointFailed,
    events.NonFinite,
)
WORKER_EVENTS: dict[str, type[events.Event]] = {kind.kind: kind for kind in _WORKER_EVENT_KINDS}
"""Events that workers may send, by kind."""


def _check_of(hint: Any) -> Check:
    """The check of a field of an event, from its annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [_check_of(option) for option in get_args(hint)]
        return lambda value: any(option(value) for option in options)
    if origin is tuple:
        return list_of(_check_of(get_args(hint)[0]))
    checks: dict[Any, Check] = {
        int: is_count,
        float: is_number,
        str: is_text,
        bool: is_truth,
        type(None): lambda v: v is None,
    }
    return checks.get(hint, is_table)


def _event_checks(kind: type[events.Event]) -> Mapping[str, Check]:
    return {name: _check_of(hint) for name, hint in get_type_hints(kind).items() if name != "kind"}


_EVENT_CHECKS = {name: _event_checks(kind) for name, kind in WORKER_EVENTS.items()}
_EVENT_CHECKS["checkpoint_failed"] = {**_EVENT_CHECKS["checkpoint_failed"], "name": _is_checkpoint}


def _is_event(name: str, told: dict[str, Any]) -> bool:
    checks = _EVENT_CHECKS.get(name, {})
    if not checks:  # of another version of thinwire: it is left out, not refused
        return True
    optional = {"time"} | {
        field.name for field in fields(WORKER_EVENTS[name]) if hasattr(WORKER_EVENTS[name], field.name)
    }
    return set(told) <= set(checks) and all(
        checks[field](told[field]) if field in told else field in optional for field in checks
    )
