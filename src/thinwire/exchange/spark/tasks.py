"""What short tasks do on an executor: visit the boxes of their machine. Each job runs one of these on some machines."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.errors import ProtocolError, ThinwireError
from thinwire.exchange.notes import is_note
from thinwire.exchange.round import BY_DESIGN, MOST_WEIGHT
from thinwire.exchange.spark.box import Frame, GoneError, boxes, knock, machine, receive, sweep
from thinwire.exchange.spark.link import BEAT, EXACT, SparkWire, letter_of
from thinwire.exchange.spark.shared_memory import SharedMemory
from thinwire.rules.compression import codec
from thinwire.rules.finite import count_not_finite, is_finite

GRACE_S, CONFIRM_S = 0.02, 1.0
"""How long a visit goes on once one agent has said something, and while one has not confirmed what it was brought."""
CARRIED_PER_S = 200e6
"""About what a job carries: to wait that long for the others of this machine is cheaper than to come again."""
CHUNK_BYTES = 4 << 20


def say_where(wire: SparkWire, rows: Iterable[Any]) -> list[Any]:
    """Each of the places that a task is for, with the machine it runs on."""
    return [(place, machine(wire.place)) for place in rows]


class Members(NamedTuple):
    """Who is in a generation: agents by name."""

    generation: int
    workers: dict[str, int]


def carry_mail(
    wire: SparkWire,
    where: str,
    bags: dict[str, Any],
    frames: list[Any],
    wait_s: float,
    members: Members,
    rows: Iterable[Any],
) -> list[Any]:
    """Brings letters, waits for some, and fetches them: a header as text, and after it all frames in pieces.

    Contributions to one round by several agents of this machine come back as one, added up. Where all members are on
    this machine they need not travel at all: the mean is handed to them at once.
    """
    for _ in rows:
        pass  # a worker of Python's that leaves rows unread is not used again
    if machine(wire.place) != where:
        return [json.dumps({"elsewhere": True})]
    doors: dict[socket.socket, str] = {}
    told: dict[str, dict[str, Any]] = {}
    fetched: dict[str, list[memoryview]] = {}
    sheets: dict[int, Frame] = {}
    for name in boxes(wire.place):
        bag = bags.get(name, {"letters": [], "ack": 0})
        wanted = sorted({letter[3] for letter in bag["letters"] if letter[3] is not None})
        for index in wanted:
            if index not in sheets:
                sheets[index] = SharedMemory.of(getattr(frames[index], "value", frames[index]))
        order = {index: place for place, index in enumerate(wanted)}
        letters = [[n, who, header, None if f is None else order[f]] for n, who, header, f in bag["letters"]]
        asked = {"t": "post", "letters": letters, "ack": bag["ack"], "wait": wait_s}
        try:
            doors[knock(wire.place, wire.token, name, asked, [sheets[index] for index in wanted])] = name
        except GoneError:
            told[name] = {"gone": True}
        except OSError:
            continue  # it does not take its mail; its silence is the coordinator's matter
    if not doors:
        sweep(wire.place)
    at_home = bool(members.workers) and set(members.workers) <= set(doors.values())
    _listen(doors, told, fetched, wait_s, at_home)
    _leave_out(told, fetched)
    if at_home:
        _settle(wire, members, told, fetched)
    sizes, out = _packed(told, fetched)
    text = json.dumps({"boxes": told, "sizes": sizes})
    return [text, *(bytes(part[at : at + CHUNK_BYTES]) for part in out for at in range(0, len(part), CHUNK_BYTES))]


def _listen(
    doors: dict[socket.socket, str],
    told: dict[str, dict[str, Any]],
    fetched: dict[str, list[memoryview]],
    wait_s: float,
    at_home: bool,
) -> None:
    """What the boxes say: first what they have seen, and then, sooner or later, their letters.

    Once one has said something the others have a moment more; all the time there is, where it only gave to a round that
    can be settled here.
    """
    began = time.monotonic()
    deadline = began + wait_s + GRACE_S
    while doors:
        now = time.monotonic()
        confirmed = all(name in told for name in doors.values())
        until = deadline if confirmed else max(deadline, began + CONFIRM_S)
        if now >= until:
            break
        for door in select.select(list(doors), [], [], until - now)[0]:
            name = doors[door]
            try:
                header, frames = receive(door)
            except Exception:  # it went, or says what nobody understands
                header, frames = {"letters": None}, []
            if not understood(header, frames):
                door.close()
                del doors[door]
                continue
            told.setdefault(name, {"seen": 0, "letters": []}).update(header)
            if "letters" in header:
                fetched[name] = frames
                door.close()
                del doors[door]
                kinds = {letter[2]["t"] for letter in header["letters"]} - {BEAT}
                if kinds and not (at_home and kinds == {"launched"}):
                    carried = sum(frame.nbytes for frame in frames)
                    deadline = min(deadline, time.monotonic() + GRACE_S + carried / CARRIED_PER_S)
    for door in doors:
        door.close()


def understood(header: dict[str, Any], frames: list[memoryview]) -> bool:
    """Whether a box's answer is one: what it has seen, letters whose frames have come, or both.

    Contributions are looked at here, on the machine that they come from: one that does not fit harms no other.
    """
    try:
        int(header.get("seen", 0))
        for number, other, inner, frame in header.get("letters", []):
            int(number), int(other), letter_of(inner)
            if frame is not None and not (type(frame) is int and 0 <= frame < len(frames)):
                return False
            if inner["t"] == "launched":
                (start, stop), _ = inner["s"], inner["r"]
                size = codec(inner["k"]).size_bytes(int(stop) - int(start))
                whole = type(inner["g"]) is int and is_note(inner["n"]) and 0.0 <= float(inner["w"]) <= MOST_WEIGHT
                if not whole or (frame is not None and frames[frame].nbytes != size):
                    return False
    except (ArithmeticError, LookupError, ThinwireError, TypeError, ValueError):
        return False
    return True


def _leave_out(told: dict[str, dict[str, Any]], fetched: dict[str, list[memoryview]]) -> None:
    """Takes what is not finite out of contributions, here, where each is still told from the others."""
    for name, frames in fetched.items():
        for letter in told[name]["letters"]:
            header, frame = letter[2], letter[3]
            if header["t"] != "launched" or frame is None or _may_be_infinite(str(header["r"])):
                continue
            packing, (start, stop) = codec(header["k"]), header["s"]
            data = np.frombuffer(frames[frame], np.uint8)
            packed = torch.from_numpy(data if data.flags.writeable else data.copy())
            if not packing.is_finite(packed, stop - start):
                values = count_not_finite(packing.decode(packed, stop - start))
                letter[2], letter[3] = header | {"w": 0.0, "x": max(1, values)}, None


def _may_be_infinite(key: str) -> bool:
    return key.partition(":")[0] in BY_DESIGN


def _is_finite(values: Any) -> bool:
    return is_finite(torch.from_numpy(values))


def _settle(
    wire: SparkWire, members: Members, told: dict[str, dict[str, Any]], fetched: dict[str, list[memoryview]]
) -> None:
    """Hands all members the mean of a round that all have given to; what they said of it is then over.

    Should this task fail in the middle, letters are still in their boxes: whoever comes next does the same again, and
    agents that have the mean already pass over it.
    """
    rounds: dict[str, dict[str, list[Any]]] = {}
    for name in members.workers:
        for letter in told.get(name, {}).get("letters", []):
            if letter[2]["t"] == "launched" and letter[2]["g"] == members.generation and letter[2]["k"] == EXACT:
                rounds.setdefault(str(letter[2]["r"]), {})[name] = letter
    for key, letters in rounds.items():
        counts = [float(letter[2]["w"]) for letter in letters.values()]
        absent = any(w and letter[3] is None for w, letter in zip(counts, letters.values(), strict=True))
        if set(letters) != set(members.workers) or absent:
            continue  # others are elsewhere with theirs, or it lies there for a job to read
        total = None
        for name, letter in letters.items():
            if letter[3] is not None:
                total = _added(total, np.frombuffer(fetched[name][letter[3]], np.float32), float(letter[2]["w"]))
        first = next(iter(letters.values()))[2]
        header = {name: first[name] for name in ("g", "r", "s", "k")} | {"t": "sum", "m": EXACT}
        header["n"] = {str(members.workers[name]): letter[2]["n"] for name, letter in letters.items()}
        if total is not None:
            total *= np.float32(1 / sum(counts))
            total = total if _may_be_infinite(key) or _is_finite(total) else None
        header["x"] = [members.workers[name] for name, letter in letters.items() if letter[2].get("x")]
        frames = [] if total is None else [SharedMemory.of(total)]
        if all(_handed(wire, name, header, frames) for name in members.workers):
            for letter in letters.values():
                kept = {field: letter[2][field] for field in ("a", "x") if field in letter[2]}
                letter[2], letter[3] = {"t": "settled", "r": key} | kept, None


def _handed(wire: SparkWire, name: str, header: dict[str, Any], frames: list[Frame]) -> bool:
    try:
        with knock(wire.place, wire.token, name, {"t": "hand", "header": header}, frames) as door:
            return bool(receive(door)[0].get("taken"))
    except (GoneError, OSError, ProtocolError):
        return False


def _added(total: Any, values: Any, weight: float) -> Any:
    """A sum with so much of some values more; what was mapped stays as it is."""
    if total is None:
        return values * np.float32(weight)
    if len(total) != len(values):
        raise ValueError(f"{len(values)} numbers were given to a round of {len(total)}")
    return np.add(total, values if weight == 1 else values * np.float32(weight), out=total)


def _packed(
    told: dict[str, dict[str, Any]], fetched: dict[str, list[memoryview]]
) -> tuple[list[int], list[memoryview]]:
    """Frames as they travel: those of one round and generation are weighed and added up, and told apart by no one."""
    out: list[Any] = []
    sums: dict[tuple[str, int], int] = {}
    for name in sorted(fetched):  # whoever answered first: sums are to come out the same
        frames = fetched[name]
        for letter in told[name]["letters"]:
            header, frame = letter[2], letter[3]
            if frame is None:
                continue
            if header["t"] != "launched" or header["k"] != EXACT:
                letter[3] = len(out)
                out.append(frames[frame])
                continue
            key, values = (str(header["r"]), int(header["g"])), np.frombuffer(frames[frame], np.float32)
            if key in sums:
                letter[3] = None
                _added(out[sums[key]], values, float(header["w"]))
            else:
                sums[key] = letter[3] = len(out)
                out.append(_added(None, values, float(header["w"])))
    views = [memoryview(part).cast("B") for part in out]
    return [view.nbytes for view in views], views


def read_parts(
    wire: SparkWire,
    job: str,
    key: str,
    generation: int,
    names: list[str],
    size: int,
    slices: int,
    rows: Iterable[Any],
) -> Iterator[Any]:
    """Reads this machine's contributions to a round and adds them up: by slice, their weight, their sum, and whose."""
    for _ in rows:
        pass
    total, weight, who = None, 0.0, []
    for name in boxes(wire.place):
        if name not in names:
            continue
        found = None
        asked = {"t": "read", "r": key, "g": generation, "job": job}
        with contextlib.suppress(GoneError, OSError, ProtocolError), _knock(wire, name, asked) as door:
            found = receive(door)
        if found is None or found[0]["w"] is None:
            continue
        if found[1] and len(found[1][0]) != 4 * size:
            raise ValueError(f"agent {name} offers {len(found[1][0])} bytes for round {key}, which is of {4 * size}")
        who.append(name)
        if found[1]:
            values = np.frombuffer(found[1][0], np.float32)
            if not _may_be_infinite(key) and not bool(np.isfinite(values).all()):
                continue
            weight += float(found[0]["w"])
            if total is None:
                total = values * np.float32(found[0]["w"])
            else:
                total += values * np.float32(found[0]["w"])
    if not who:
        return
    borders = [size * i // slices for i in range(slices + 1)]
    for index in range(slices):
        part = b"" if total is None else total[borders[index] : borders[index + 1]].tobytes()
        yield index, (weight, part, who)


def _knock(wire: SparkWire, name: str, asked: dict[str, Any]) -> socket.socket:
    return knock(wire.place, wire.token, name, asked, [])


def sum_parts(rows: Iterable[Any]) -> Iterator[Any]:
    """Adds up what there is of each slice, and divides it by its weight."""
    sums: dict[int, Any] = {}
    weights: dict[int, float] = {}
    who: dict[int, list[str]] = {}
    for index, (weight, part, names) in rows:
        data = np.frombuffer(part, np.float32)
        weights[index] = weights.get(index, 0.0) + weight
        who.setdefault(index, []).extend(names)
        if index not in sums or not len(sums[index]):
            sums[index] = data.copy()
        elif len(data):
            sums[index] += data
    for index, data in sums.items():
        mean = data / np.float32(weights[index]) if weights[index] > 0 else data
        yield index, mean.tobytes(), who[index]
