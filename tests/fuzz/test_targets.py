"""Every decoder of bytes from outside, without a fuzzer: its seeds, its corpus, and some thousand changed ones."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.run import table
from tests.fuzz.target import Target
from tests.fuzz.targets import CORPUS, TARGETS, unpack

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Whatever is refused is also logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def changed(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, put in, left out, or from another place."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, count = chance.randrange(len(found) + 1), chance.choice((1, 1, 2, 4, 8))
        kind = chance.randrange(4)
        if kind == 0:
            found[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            found[at:at] = chance.randbytes(count)
        elif kind == 2:
            del found[at : at + count]
        else:
            other = chance.randrange(len(found) + 1)
            found[at:at] = found[other : other + count]
    return bytes(found)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_true_inputs_and_those_a_fuzzer_found_do_no_harm(target: Target) -> None:
    for data in (b"", *target.seeds(), *unpack(target.name)):
        target.run(data)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_changed_inputs_do_no_harm(target: Target) -> None:
    chance, known = random.Random(target.name), [*target.seeds(), *unpack(target.name)]
    for _ in range(target.changes):
        data = changed(chance.choice(known), chance)[: target.most_bytes]
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"{target.name} with {data.hex()}") from error


def test_every_target_has_a_small_corpus_and_no_other_has_one() -> None:
    assert {path.stem for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 200 << 10


def test_the_how_to_lists_every_target() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "fuzz.md").read_text()
    assert table() in page, "the page's table is what `python -m tests.fuzz.run --table` prints"
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(TARGETS)


@pytest.mark.long
def test_the_fuzzer_runs_a_target_and_tells_of_it(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: see the extra fuzz")
    command = [sys.executable, "-m", "tests.fuzz.run", "units", "--inputs", "2000", "--work", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert '"target": "units", "inputs": 2000' in told.stdout
    assert any((tmp_path / "units" / "corpus").iterdir())
