"""The documentation is true of this tree: its code runs, its links lead somewhere, its tables are the source's own."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs import code_blocks, example_here, page_here, run_here, shortened

import thinwire
from thinwire import errors, events, recipe
from thinwire.cli.extras import EXTRAS
from thinwire.cli.main import parser
from thinwire.models import ZOO
from thinwire.protocol.deadlines import Deadlines
from thinwire.replicas.objectives import LOSSES, METRICS, OPTIMIZERS, SCHEDULERS
from thinwire.rules.compression import CODECS
from thinwire.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
CARD_HEADINGS = [
    "Idea",
    "Equation",
    "When to use",
    "Knobs",
    "Bytes per round",
    "When a worker is lost",
    "Attribution",
]
DECISION_HEADINGS = ["Context", "Decision", "Why", "What it costs", "When to revisit"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(arguments: list[str], folder: Path, timeout_s: float = 800) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def headings(text: str, level: int = 2) -> list[str]:
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(rf"^{'#' * level} (.+)$", without_code, re.MULTILINE)


def sections(path: Path) -> dict[str, str]:
    """A page's text by its headings of the second level."""
    parts = re.split(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of the tables whose first heading is `first`."""
    found: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not set(cells[0]) <= set("-: "):
            found.append(cells)
    return found


def word(cell: str) -> str:
    return re.split(r"[ =]", cell.strip("`"))[0].strip("`")


def value(cell: str) -> Any:
    text = cell.strip("`")
    return text == "true" if text in ("true", "false") else ast.literal_eval(text)


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    """In a process of its own, as a reader runs it."""
    blocks = code_blocks(ROOT / "README.md")
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(shortened(block))
        assert run([str(script)], tmp_path).strip()


WHOLE = {
    "tutorials/choosing-a-strategy.md": (),
    "how-to/drills.md": (),
    "how-to/watch.md": ("mlflow", "tensorboard"),
}
"""Pages whose code is one program from top to bottom, and what it needs; those for Spark are in tests/spark."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page if page != "how-to/watch.md" else pytest.param(page, marks=pytest.mark.long) for page in WHOLE]
)
def test_the_code_of_a_page_runs_as_one_program(page: str, tmp_path: Path) -> None:
    for module in WHOLE[page]:
        pytest.importorskip(module, reason=f"{module} is not installed")
    page_here(DOCS / page, tmp_path)


ABOUT = {"hugging-face": {"transformers", "peft"}, "watch": {"mlflow"}}
"""Names in the code of pages that are not named after their library."""


def test_code_of_other_libraries_is_at_least_python() -> None:
    """Blocks marked `py` are of libraries that cannot be installed here."""
    marked = {page: code_blocks(page, "py") for page in sorted(DOCS.rglob("*.md"))}
    assert [page.stem for page in marked if marked[page]] == [
        "hugging-face",
        "lightning",
        "elephas",
        "horovod",
        "sparktorch",
        "watch",
    ]
    for page, blocks in marked.items():
        for block in blocks:
            names = {alias.split(".")[0] for alias in imported(ast.parse(block))}
            assert ABOUT.get(page.stem, {page.stem}) & names, "it is of the library that the page is about"


def imported(tree: ast.Module) -> list[str]:
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return plain + [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'thinwire[docs]'")
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    told = run(["-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")], ROOT)
    assert not told.strip()
    page = (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert "Trains a model on data with several workers" in page
    assert (tmp_path / "site" / "project" / "index.html").exists()
    assert "https://fonts" not in page


EXAMPLES = {
    "own_data.py": [],
    "cifar10_strategies.py": ["--steps", "24"],
    "char_lstm.py": ["--steps", "8"],
    "compare_strategies.py": ["--epochs", "1", "--workers", "2", "--picture", "picture.svg"],
    "pretrain.py": [],
}
LONG = ("char_lstm.py", "compare_strategies.py", "pretrain.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name not in LONG else pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES]
)
def test_an_example_runs_and_prints_something(name: str, tmp_path: Path) -> None:
    assert len(example_here(name, *EXAMPLES[name], folder=tmp_path).split()) > 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_that_resumes_ends_where_an_unbroken_run_ends(tmp_path: Path) -> None:
    assert "bit for bit: yes" in run_here(ROOT / "examples" / "resume.py", folder=tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: see the extra dev")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: see the extra dev")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: see the extra dev")
    book = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    assert all(not cell.outputs for cell in book.cells if cell.cell_type == "code"), "outputs are not committed"
    nbclient.NotebookClient(book, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    shown = [out["data"]["text/plain"] for out in outputs if out.output_type == "display_data"]
    assert any("done" in text and "█" in text for text in shown), "the bar is one output that was replaced"
    assert not any(out.output_type == "error" for out in outputs)


def test_the_first_example_is_the_readmes() -> None:
    _, *statements = ast.parse((ROOT / "examples" / "first_run.py").read_text()).body
    (block,) = code_blocks(ROOT / "README.md")
    assert [ast.dump(s) for s in statements] == [ast.dump(s) for s in ast.parse(block).body]


def test_every_example_is_run_by_a_test() -> None:
    on_spark = (ROOT / "tests" / "spark" / "test_documentation.py").read_text()
    elsewhere = {path.name for path in (ROOT / "examples").glob("*.py") if f'"{path.name}"' in on_spark}
    tested = {"first_run.py", "resume.py", *EXAMPLES, *elsewhere}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == tested


def test_the_strategy_that_the_how_to_adds_works_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, strategy = code_blocks(DOCS / "how-to" / "add-a-strategy.md")
    found = []
    for name, code in (("thinwire.rules.capped", rule), ("thinwire.strategies.capped", strategy)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, name, "exec"), module.__dict__)
        found.append(module)
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test for test in finder.find(found[0], globs=vars(found[0])) if test.examples]
    assert examples
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in examples)
    capped = found[1].Capped(period=5, cap=0.5)
    joint, worker = capped.open(torch.ones(3))
    reply, joint = capped.merge(joint, torch.tensor([0.25, -4.0, 0.0]), 0, capped.setting(None, None))
    assert torch.equal(reply, torch.tensor([0.75, 1.5, 1.0]))
    assert torch.equal(capped.adopt(worker, torch.zeros(3), torch.zeros(3), reply)[0], joint.model)
    with pytest.raises(errors.ConfigError, match="cap"):
        found[1].Capped(cap=-1.0)


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{named(page)} links to {target}"
        if anchor:
            text = aim.read_text()
            anchors = [_anchor(title) for level in (1, 2, 3) for title in headings(text, level)]
            assert anchor in anchors, f"{named(page)} links to {target}"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_every_page_is_reached_from_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", index)}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= linked


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len([line for line in text.splitlines() if not line.startswith("|")]) <= 115
    assert re.search(r"^make demo\b", text, re.MULTILINE)
    assert re.search(r"^make test\b", text, re.MULTILINE)


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("*.md")), ids=named)
def test_a_decision_has_its_headings(page: Path) -> None:
    assert headings(page.read_text()) == DECISION_HEADINGS


# -- strategies -------------------------------------------------------------------------------------------------------


def test_every_strategy_has_a_card_and_every_card_a_strategy() -> None:
    assert {page.stem for page in (DOCS / "strategies").glob("*.md")} == set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_card_has_the_fixed_headings(name: str) -> None:
    assert headings((DOCS / "strategies" / f"{name}.md").read_text()) == CARD_HEADINGS


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_card_lists_every_knob_with_its_default(name: str) -> None:
    table = rows(sections(DOCS / "strategies" / f"{name}.md")["Knobs"], "name")
    documented = {word(cells[0]): value(cells[1]) for cells in table}
    assert documented == {field.name: field.default for field in dataclasses.fields(STRATEGIES[name])}


def test_the_readme_has_a_row_for_every_strategy() -> None:
    table = rows((ROOT / "README.md").read_text(), "strategy")
    linked = {re.findall(r"docs/strategies/(\w+)\.md", cells[0])[0] for cells in table}
    assert linked == set(STRATEGIES)


# -- reference --------------------------------------------------------------------------------------------------------


def test_the_recipe_page_has_every_section_and_no_other() -> None:
    documented = {title.strip("[]") for title in sections(DOCS / "reference" / "recipe.md") if title.startswith("[")}
    assert documented == set(recipe.sections())


@pytest.mark.parametrize("section", recipe.sections())
def test_the_recipe_page_has_every_key_with_its_default(section: str) -> None:
    table = rows(sections(DOCS / "reference" / "recipe.md")[f"[{section}]"], "key")
    documented = {word(cells[0]): cells[2] for cells in table}
    if section == "strategy":
        assert documented == {"name": '`"relay"`'}
        return
    kind = type(getattr(recipe.Recipe(), section))
    assert set(documented) == {field.name for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        shown = documented[field.name]
        if field.default is None:
            assert not re.fullmatch(r"`[^`]*`", shown), f"{field.name} has no default"
        else:
            assert value(shown) == field.default, field.name


@pytest.mark.parametrize(
    ("section", "key", "names"),
    [
        ("model", "zoo", ZOO),
        ("train", "loss", LOSSES),
        ("train", "metrics", METRICS),
        ("train", "optimizer", OPTIMIZERS),
        ("train", "scheduler", SCHEDULERS),
        ("strategy", "name", STRATEGIES),
        ("exchange", "codec", CODECS),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_recipe_page_has_every_name_a_key_takes(section: str, key: str, names: dict[str, Any]) -> None:
    table = rows(sections(DOCS / "reference" / "recipe.md")[f"[{section}]"], "key")
    (meaning,) = (cells[3] for cells in table if word(cells[0]) == key)
    assert set(names) <= set(re.findall(r"`(\w+)`", meaning))


def options_of(command: argparse.ArgumentParser) -> set[str]:
    return {option for action in command._actions for option in action.option_strings if option.startswith("--")}


def test_the_command_line_page_has_every_command_and_option() -> None:
    top = parser()
    (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    text = sections(DOCS / "reference" / "cli.md")
    assert {title for title in text if title.startswith("thinwire ")} == {
        f"thinwire {name}" for name in commands.choices
    }
    start = (DOCS / "reference" / "cli.md").read_text().partition("\n## ")[0]
    assert {word(cells[0]) for cells in rows(start, "option")} == options_of(top)
    for name in set(commands.choices) - set(EXTRAS):  # those: lab/tests/test_commands.py
        command = commands.choices[name]
        documented = {word(cells[0]) for cells in rows(text[f"thinwire {name}"], "option")}
        assert documented == options_of(command) - {"--help"}, name


def kinds_of(base: type[Any]) -> list[type[Any]]:
    return [base, *(found for child in base.__subclasses__() for found in kinds_of(child))]


def test_the_events_page_has_every_event_with_its_fields() -> None:
    table = rows((DOCS / "reference" / "events.md").read_text(), "kind")
    documented = {word(cells[0]): (word(cells[1]), re.findall(r"`(\w+)`", cells[2])) for cells in table}
    expected = {
        kind.kind: (kind.__name__, [f.name for f in dataclasses.fields(kind) if f.name != "time"])
        for kind in kinds_of(events.Event)[1:]
        if kind.__module__ == events.__name__
    }
    assert documented == expected


def test_the_python_page_has_everything_that_the_package_offers() -> None:
    documented = set(re.findall(r"^::: \S+\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE))
    assert set(thinwire.__all__) - {"__version__"} <= documented


def test_the_errors_page_has_every_error_with_its_exit_code() -> None:
    table = rows((DOCS / "reference" / "errors" / "index.md").read_text(), "class")
    documented = {word(cells[0]): int(cells[1]) for cells in table}
    tree = [kind for kind in kinds_of(errors.ThinwireError) if kind.__module__ == errors.__name__]
    assert documented == {kind.__name__: kind.exit_code for kind in tree}
    codes = rows((DOCS / "reference" / "cli.md").read_text(), "code")
    assert {int(cells[0]) for cells in codes} == {0, *documented.values()}


def test_the_errors_page_has_every_deadline_with_its_default() -> None:
    table = rows((DOCS / "reference" / "errors" / "index.md").read_text(), "field")
    assert {word(cells[0]): float(cells[1]) for cells in table} == dataclasses.asdict(Deadlines())
