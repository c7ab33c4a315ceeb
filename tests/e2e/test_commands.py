"""Every command that the documentation tells one to type is typed by a test, or named here with a reason."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.programs import Done

from thinwire import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ERRORS = DOCS / "reference" / "errors"
PROGRAMS = ("thinwire", "make", "python", "python3", "pip", "grep", "git", "cat", "printf", "ls", "tail", "df", "du")
PROGRAM = re.compile(rf"^(\w+=\S+ )*((env/bin/)?({'|'.join(PROGRAMS)}|venv-pack)|spark-submit|kubectl|timeout|\.) ")

HERE = "tests/e2e/test_commands.py"
PAGE = f"{HERE}::test_what_a_page_says_works"
EXECUTED = {
    ("README.md", "make demo"): "tests/spark/test_documentation.py::test_an_example_runs_and_prints_something",
    ("README.md", "thinwire train"): PAGE,
    ("docs/how-to/resume.md", ""): PAGE,
    ("docs/how-to/watch.md", ""): PAGE,
    ("docs/how-to/drills.md", "thinwire train"): PAGE,
    ("docs/how-to/drills.md", "grep"): PAGE,
    ("docs/how-to/drills.md", "thinwire testbed chaos"): "lab/tests/test_chaos.py::"
    "test_a_run_under_chaos_ends_with_every_row_and_whole_checkpoints",
    ("docs/how-to/drills.md", "thinwire testbed soak"): "lab/tests/test_soak.py::"
    "test_a_short_soak_keeps_its_rows_and_says_what_grew",
    ("docs/how-to/runbook.md", "thinwire doctor"): "tests/spark/test_doctor.py::"
    "test_versions_and_rows_are_shown_and_an_empty_partition_is_warned_of",
    ("docs/how-to/runbook.md", ""): f"{HERE}::test_the_runbook_s_commands_work_on_a_run_that_lost_a_worker",
    ("docs/how-to/caffe.md", "thinwire caffe show"): "tests/e2e/test_caffe.py::"
    "test_a_network_a_solver_and_weights_are_shown",
    ("docs/how-to/caffe.md", "thinwire caffe convert"): "tests/e2e/test_caffe.py::"
    "test_weights_are_converted_and_come_back_the_same",
    ("docs/how-to/plan.md", "thinwire plan"): "tests/e2e/test_cli.py::test_a_plan_is_printed_layer_by_layer",
    ("docs/how-to/simulate.md", "thinwire simulate"): "tests/e2e/test_simulated.py::"
    "test_the_command_compares_strategies_and_draws",
    ("docs/how-to/train-on-spark.md", "thinwire doctor"): "tests/spark/test_doctor.py::"
    "test_versions_and_rows_are_shown_and_an_empty_partition_is_warned_of",
    ("docs/reference/cli.md", "thinwire"): "tests/e2e/test_docs.py::"
    "test_the_command_line_page_has_every_command_and_option",
    ("docs/reference/errors/exit-130.md", ""): "tests/e2e/test_resume.py::"
    "test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on",
    ("docs/reference/errors/", ""): f"{HERE}::test_an_error_is_provoked_as_its_page_says",
    ("docs/tutorials/first-run.md", ""): "tests/e2e/test_first_day.py::test_a_stranger_s_first_hour",
}
"""Page or folder, and how a command begins: the test that types it, or the same with files that are here."""

NOT_HERE = {
    ("README.md", "make test"): "this suite itself",
    ("CONTRIBUTING.md", "make test"): "this suite itself",
    ("docs/how-to/add-a-strategy.md", "make test"): "this suite itself",
    ("docs/how-to/add-a-strategy.md", "python -m pytest"): "parts of this suite, with a strategy that a reader adds",
    ("docs/how-to/add-a-strategy.md", "REGENERATE=1"): "writes golden files for a strategy that a reader adds",
    ("docs/how-to/add-a-strategy.md", "git"): "shows what the line before it wrote",
    ("docs/how-to/clusters.md", "python3 -m venv"): "fetches packages",
    ("docs/how-to/clusters.md", "env/bin/venv-pack"): "for YARN, which is not here",
    ("docs/how-to/clusters.md", "PYSPARK_DRIVER_PYTHON"): "YARN is not here",
    ("docs/how-to/clusters.md", "spark-submit"): "Kubernetes is not here",
    ("docs/how-to/train-on-spark.md", "pip install"): "fetches packages",
    ("docs/how-to/drills.md", "pip install"): "fetches a package",
    (
        "docs/how-to/fuzz.md",
        "make fuzz",
    ): "fetches atheris, and takes hours; tests/fuzz plays the corpora and changed inputs",
    (
        "docs/reference/cli.md",
        "THINWIRE_LOG=json",
    ): "needs jq; tests/unit/test_logs.py and tests/spark/test_logs.py read such lines",
    ("docs/how-to/drills.md", "thinwire testbed run"): "needs root and a program of the reader's",
}
"""The same: why nobody types it here."""


def pages() -> list[Path]:
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [body for language, body in found if language in languages]


def place(table: dict[tuple[str, str], str], page: str, command: str) -> str | None:
    named = [key for key in table if page.startswith(key[0]) and command.startswith(key[1])]
    return table[max(named, key=lambda key: (len(key[0]), len(key[1])))] if named else None


def typed(split: Callable[[str], list[str]]) -> list[tuple[str, str]]:
    """All commands of all pages."""
    found = []
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        found += [(name, command) for block in blocks(page, "sh") for command in split(block)]
        found += [(name, c) for block in blocks(page, "") for c in split(block) if PROGRAM.match(f"{c} ")]
    return found


def test_every_command_of_the_documentation_is_typed_by_a_test_or_has_a_reason(
    split: Callable[[str], list[str]],
) -> None:
    found = typed(split)
    assert len(found) > 60
    lost = [pair for pair in found if place(EXECUTED, *pair) is None and place(NOT_HERE, *pair) is None]
    assert not lost, "say in EXECUTED which test types it, or in NOT_HERE why none does"
    for table in (EXECUTED, NOT_HERE):
        for page, begins in table:
            used = any(name.startswith(page) and command.startswith(begins) for name, command in found)
            assert used, f"no page has {begins!r} under {page!r} any more"


@pytest.mark.parametrize("where", sorted(set(EXECUTED.values())))
def test_the_tests_that_type_commands_are_there(where: str) -> None:
    file, _, name = where.partition("::")
    assert name in {
        node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
    }


def brief(command: str) -> str:
    """A command of some epochs with few; what goes on has more to do than what it goes on from."""
    if not command.startswith("thinwire train "):
        return command
    return f"{command} --set train.epochs={3 if '--resume' in command else 2}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", ["README.md", "docs/how-to/resume.md", "docs/how-to/watch.md", "docs/how-to/drills.md"]
)
def test_what_a_page_says_works(page: str, shell: Any) -> None:
    told = ""
    for block in blocks(ROOT / page, "", "sh"):
        wanted = [c for c in block.replace("\\\n", "").splitlines() if place(EXECUTED, page, c) == PAGE]
        for command in filter(PROGRAM.match, wanted):
            if "runs/b" in command:
                shutil.copytree(shell.folder / "runs" / "a", shell.folder / "runs" / "b")
            told += shell.follow(command, brief)
    assert "val accuracy" in told
    assert page != "docs/how-to/watch.md" or "<html" in told


# -- errors -----------------------------------------------------------------------------------------------------------

KINDS = [k for k in errors.ThinwireError.__subclasses__() if k.__module__ == errors.__name__]  # tests may load others
CODES = sorted({kind.exit_code for kind in [errors.ThinwireError, *KINDS]})


def test_every_exit_code_has_a_page_of_the_same_form_and_every_page_a_code() -> None:
    assert {path.name for path in ERRORS.glob("exit-*.md")} == {f"exit-{code}.md" for code in CODES}
    for code in CODES:
        text = (ERRORS / f"exit-{code}.md").read_text()
        kinds = [k.__name__ for k in KINDS if k.exit_code == code] or ["ThinwireError"]
        assert all(f"`{kind}`" in text for kind in kinds)
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
            "What it means",
            "Example",
            "Likely causes",
            "What to do",
        ]


def pattern(quoted: str) -> str:
    """A quoted line as an expression: numbers and hosts are others each time, and … stands for the rest."""
    line = re.escape(quoted).replace("…", ".*").replace(r"on\ node1", r"on\ \S+")
    return re.sub(r"(?<![\d.])\d+(?![\d.])", r"\\d+", line)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("code", [code for code in CODES if code != 130])
def test_an_error_is_provoked_as_its_page_says(
    code: int, shell: Any, command: Callable[..., Done], split: Callable[[str], list[str]]
) -> None:
    """Tracebacks, and programs of one's own, in a process of their own; the others here."""
    page = ERRORS / f"exit-{code}.md"
    (block,) = blocks(page, "sh")
    (quoted,) = blocks(page, "text")
    (*before, last) = split(block)
    for program in blocks(page, "python"):
        (shell.folder / "mine.py").write_text(program)
    if code == 1 or not last.startswith("thinwire "):
        told = shell.run(block, code)
    else:
        assert not before
        done = command(*shlex.split(last.replace("\\\n", " "))[1:], folder=shell.folder)
        assert done.returncode == code, done.stderr
        told = done.stdout + done.stderr
    for line in (quoted.splitlines()[0], quoted.splitlines()[-1]):
        assert re.search(pattern(line), told), f"{line!r} is not in {told[-2000:]}"


def test_the_last_line_of_a_complaint_names_its_page(command: Callable[..., Done]) -> None:
    told = command("train", "recipes/digits.toml", "--set", "train.epochz=3").stderr
    page = re.fullmatch(r"exit code 2: see (\S+)", told.splitlines()[-1])
    assert page is not None
    assert (ROOT / page[1]).exists()


# -- runbook ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_runbook_s_commands_work_on_a_run_that_lost_a_worker(shell: Any) -> None:
    faults = "[{at_s=1, worker=1, seconds=1}]"
    virtual = f"--set cluster.kind=simulated --set cluster.step_s=0.05 --set 'cluster.faults={faults}'"
    shell.run(f"thinwire train recipes/digits.toml {virtual} --set train.epochs=3 --out runs/a")
    told = {}
    for block in blocks(DOCS / "how-to" / "runbook.md", "sh"):
        if "thinwire doctor" in block:
            continue
        more = " --set train.epochs=5" if "lr=0.01" in block else " --set train.epochs=6"
        told[block] = shell.run(re.sub(r"(?m)^thinwire train .*$", lambda m, more=more: m[0] + more, block))
    first, *others = told.values()
    assert "worker 1:" in first
    assert "run_ended" in first
    assert re.search(r"checkpoint: \d+", first)
    assert all(text.strip() for text in others)
    assert any("by the simulation's fault" in text for text in others), "who was lost, and why"
    assert sum("val accuracy" in text for text in others) == 2, "the run was gone on with twice"
