"""Fuzzes targets with atheris: `python -m tests.fuzz.run TARGET… --inputs 1000000`.

Each target runs in a process of its own, from its seeds and its committed corpus. An exception that the target does not
allow is a finding: its input is kept, once for each place in the source, and the run goes on. A crash, an input that
takes too long or too much memory ends the run. What ran is appended to benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
LONGEST_S, MOST_MB = 30, 3072
"""For one input."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="names; all without any")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many each gets")
    parser.add_argument("--seconds", type=int, default=0, help="at most, for each; 0 is no limit")
    parser.add_argument("--work", default=".fuzz", help="folder for corpora and findings")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/fuzz.json")
    parser.add_argument("--table", action="store_true", help="print what was recorded, as a table, and run nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return child(asked.targets[0], asked.child, Path(asked.work), asked.inputs, asked.seconds)
    from tests.fuzz.targets import TARGETS, unpack

    if asked.table:
        print(table())
        return 0
    strange = set(asked.targets) - set(TARGETS)
    if strange:
        parser.error(f"there is no target {sorted(strange)[0]!r}; there are {', '.join(TARGETS)}")
    bad = 0
    for name in asked.targets or TARGETS:
        work = Path(asked.work) / name
        for folder in ("corpus", "findings"):
            (work / folder).mkdir(parents=True, exist_ok=True)
        for data in (*TARGETS[name].seeds(), *unpack(name)):
            (work / "corpus" / hashlib.sha1(data).hexdigest()).write_bytes(data)
        told = fuzz(name, work, asked.inputs, asked.seconds)
        bad += bool(told["findings"] or told["ended_early"])
        print(json.dumps({k: v for k, v in told.items() if k != "machine"}), flush=True)
        if asked.record:
            record(told)
    return 1 if bad else 0


def fuzz(name: str, work: Path, inputs: int, seconds: int) -> dict[str, Any]:
    """Runs one target in a process of its own; returns what there is to record."""
    from tests.fuzz.targets import TARGETS
    from thinwire_lab.bench.report import machine

    command = [
        sys.executable,
        "-m",
        "tests.fuzz.run",
        TARGETS[name].run.__module__,
        "--child",
        name,
        "--work",
        str(work),
    ]
    command += ["--inputs", str(inputs), "--seconds", str(seconds)]
    before, began = set((work / "findings").iterdir()), time.monotonic()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", cwd=ROOT)
    took = time.monotonic() - began
    (work / "log").write_text(done.stderr)
    ran = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    found = sorted(path.name for path in set((work / "findings").iterdir()) - before if path.suffix != ".txt")
    return {
        "target": name,
        "inputs": int(ran[1]) if ran else 0,
        "seconds": round(took, 1),
        "edges": int(covered[-1][0]) if covered else 0,
        "corpus": len(list((work / "corpus").iterdir())),
        "findings": found,
        "ended_early": done.returncode != 0 or ran is None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "atheris": importlib.metadata.version("atheris"),
        "machine": machine(),
    }


def record(told: dict[str, Any]) -> None:
    """Appends a run to the committed results; two may end at once."""
    import fcntl

    with open(ROOT / ".fuzz.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
        partial = RESULTS.with_suffix(".partial")
        partial.write_text(json.dumps({"name": "fuzz", "runs": [*runs, told]}, indent=1) + "\n")
        os.replace(partial, RESULTS)
    os.unlink(ROOT / ".fuzz.lock")


def table() -> str:
    """All targets, and the inputs of all their recorded runs together; mended findings lie between some of them."""
    from tests.fuzz.targets import TARGETS

    runs = json.loads(RESULTS.read_text())["runs"]
    lines = ["| target | decoder | inputs | a second |", "|---|---|---|---|"]
    for name, target in TARGETS.items():
        own = [run for run in runs if run["target"] == name]
        inputs, seconds = sum(run["inputs"] for run in own), sum(run["seconds"] for run in own)
        lines.append(f"| `{name}` | {target.decoder} | {inputs:,} | {inputs / max(1.0, seconds):,.0f} |")
    return "\n".join(lines)


def child(module: str, name: str, work: Path, inputs: int, seconds: int) -> int:
    """In the process of its own: never returns, once atheris has taken over."""
    import atheris

    with atheris.instrument_imports(include=["thinwire"], enable_loader_override=False):
        found = importlib.import_module(module).TARGETS  # this module alone: to instrument all takes long
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    target, seen = next(each for each in found if each.name == name), set[str]()
    target.run(b"")  # what is imported and compiled once would pass for an input that takes long

    def once(data: bytes) -> None:
        try:
            target.run(data)
        except Exception as error:
            place = "".join(traceback.format_exception(error))
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f for f in frames if f"{os.sep}thinwire{os.sep}" in f.filename] or list(frames)
            key = f"{type(error).__name__} {ours[-1].filename} {ours[-1].lineno}"
            if key not in seen and len(seen) < 100:
                seen.add(key)
                path = work / "findings" / hashlib.sha1(data).hexdigest()
                path.write_bytes(data)
                path.with_suffix(".txt").write_text(f"{key}\n{place}")

    words = Path(tempfile.mkstemp(prefix="thinwire-fuzz-")[1])
    words.write_text("".join(f'"{"".join(f"{chr(92)}x{b:02x}" for b in word)}"\n' for word in target.words))
    options = [f"-runs={inputs}", f"-max_len={target.most_bytes}", f"-timeout={LONGEST_S}", f"-rss_limit_mb={MOST_MB}"]
    options += [f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={work / 'findings'}{os.sep}"]
    options += [f"-dict={words}"] if target.words else []
    atheris.Setup([sys.argv[0], *options, str(work / "corpus")], once)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
