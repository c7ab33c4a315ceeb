"""Packs what a fuzzer found into the committed corpus: `python -m tests.fuzz.pack TARGET…`, all without any.

Of all inputs those are kept that reach a line of the source which no smaller one reaches, and those that were findings.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.target import Target
from tests.fuzz.targets import CORPUS, TARGETS, unpack

MOST_BYTES = 8 << 10
"""Of one target's inputs, together."""
LONGEST = 1 << 10
SOURCE = f"{os.sep}thinwire{os.sep}"


def lines_of(target: Target, data: bytes) -> set[tuple[str, int]]:
    """The lines of the source that an input reaches."""
    found: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, value: Any) -> Any:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def called(frame: FrameType, event: str, value: Any) -> Any:
        return local if SOURCE in frame.f_code.co_filename else None

    sys.settrace(called)
    try:
        with contextlib.suppress(Exception):
            target.run(data)
    finally:
        sys.settrace(None)
    return found


def pack(name: str, work: Path) -> tuple[int, int]:
    """Writes a target's archive; returns how many inputs it holds and their bytes."""
    target = TARGETS[name]
    seen: set[tuple[str, int]] = set()
    for data in target.seeds():
        seen |= lines_of(target, data)
    findings = [path.read_bytes() for path in sorted((work / "findings").glob("*")) if path.suffix != ".txt"]
    grown = {path.read_bytes() for path in (work / "corpus").glob("*")} | set(unpack(name))
    kept: list[bytes] = []
    for data in (*sorted(set(findings), key=len), *sorted(grown, key=lambda d: (len(d), d))):
        reached = lines_of(target, data) - seen
        if data in kept:
            continue
        if (reached or data in findings) and len(data) <= LONGEST and sum(map(len, kept)) + len(data) <= MOST_BYTES:
            seen |= reached
            kept.append(data)
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for data in kept:
            archive.writestr(zipfile.ZipInfo(hashlib.sha1(data).hexdigest()[:12]), data, zipfile.ZIP_DEFLATED)
    return len(kept), sum(map(len, kept))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for each in sys.argv[1:] or TARGETS:
        print(each, *pack(each, Path(".fuzz") / each))
