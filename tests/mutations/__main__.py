"""Plants each mutation in a copy of the tree, and says whether the tests of `make test` catch it.

python -m tests.mutations                     each with the tests that are expected to catch it
python -m tests.mutations --all               each with all tests of `make test`
python -m tests.mutations -k "short batch"    those whose name has these words
python -m tests.mutations --baseline          the expected tests on the tree as it is, which must pass
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mutations.planted import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("caught.json")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - |$)", re.MULTILINE)


def copied(folder: Path) -> Path:
    """The tree as git sees it, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def caught_by(tree: Path, tests: list[str], lanes: int) -> tuple[int, list[str]]:
    """How pytest ended, and the tests that failed."""
    line = [sys.executable, "-m", "pytest", "-m", "not long", "-q", "--no-header", "-x", *tests]
    if lanes:
        line += ["-n", str(lanes), "--dist", "loadscope"]
    paths = os.pathsep.join([str(tree / "src"), str(tree / "lab" / "src")])
    done = subprocess.run(line, cwd=tree, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    return done.returncode, FAILED.findall(done.stdout)


def plant(tree: Path, mutation: Mutation) -> None:
    path = tree / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has the text of {mutation.name!r} not once"
    path.write_text(text.replace(mutation.old, mutation.new))


def record(found: dict[str, Any]) -> None:
    """Keeps what was found, in the order of the list; earlier findings of others stay."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    both = before | found
    RECORD.write_text(json.dumps({m.name: both[m.name] for m in MUTATIONS if m.name in both}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run all tests of `make test`")
    parser.add_argument("--baseline", action="store_true", help="plant nothing: the tests must pass")
    parser.add_argument("-k", dest="words", default="", help="only mutations whose name has these words")
    parser.add_argument("--lanes", type=int, default=0, help="processes that tests are dealt out to")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.words in m.name]
    wrong = 0
    for mutation in chosen:
        with tempfile.TemporaryDirectory(prefix="thinwire-mutation-") as folder:
            tree = copied(Path(folder))
            if not options.baseline:
                plant(tree, mutation)
            code, failed = caught_by(tree, [] if options.all else list(mutation.tests), options.lanes)
        right = code == 0 if options.baseline else code != 0
        wrong += not right
        told = ", ".join(failed[:3]) or f"pytest ended with {code}"
        print(f"{'ok   ' if right else 'WRONG'} {mutation.name}: {told}", flush=True)
        if not options.baseline:
            record({mutation.name: {"guarantee": mutation.guarantee, "caught": right, "by": failed[:5]}})
    print(f"{len(chosen) - wrong} of {len(chosen)} as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
