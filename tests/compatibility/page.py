"""docs/reference/what-works-with-what.md: written from what cells came to, and read back."""

from __future__ import annotations

import re
from pathlib import Path

from tests.compatibility.cells import SECTIONS, STEPS, TOLERANCE, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-works-with-what.md"
Key = tuple[str, str, str]
"""Section, row and column."""
HEAD = f"""# What works with what

Every cell of these tables is a run in virtual time (`tests/compatibility`). `make compatibility` writes this page from
what the runs came to. A cell says one of two things:

- **=**: the run is equal to plain torch. Under `Synchronous` and `ParameterTable` (strict, or with one group) the model
  is the one that a single optimizer comes to with all workers' rows after {STEPS} steps. Under the other strategies
  each worker's steps are those of an optimizer of its own, with the worker's rows, from where the exchange has left the
  replica. A parameter may differ by {TOLERANCE:g}, absolute and relative, where the table does not say otherwise.
- **A number**: `fit` refuses the run with a `ConfigError` before a worker starts. The reason with that number says what
  to use instead.

A test fails where a cell is neither, or is not what this page says. The tables leave out what virtual time cannot run,
and what is not installed where they are made. Tests with real processes compare these: `Pipeline` with one process in
`tests/unit/placement/test_placed.py`, `exchange="spark"` with the mesh in `tests/spark/test_spark_exchange.py`, and a
Keras model with the same network of torch in `tests/e2e/test_keras.py`. `Relay` and `Auto` are here with
`sends="displacements"`; what they do with gradients is compared in `tests/simulated/test_joint_optimizer.py`.
"""


def keys() -> list[Key]:
    """All cells."""
    return [(s.title, row, column) for s in SECTIONS for row in s.rows for column in s.columns]


def written(found: dict[Key, Outcome]) -> str:
    """The page."""
    wrong = {key: outcome.reason for key, outcome in found.items() if outcome.kind == "neither"}
    if wrong:
        raise ValueError(f"cells that are neither equal nor refused: {wrong}")
    reasons: list[str] = []
    text = HEAD
    for section in SECTIONS:
        text += f"\n## {section.title}\n\n{section.about}\n\n"
        text += f"| | {' | '.join(section.columns)} |\n|---|{'---|' * len(section.columns)}\n"
        for row in section.rows:
            cells = []
            for column in section.columns:
                outcome = found[section.title, row, column]
                reason = general(outcome.reason)
                if outcome.kind == "refused" and reason not in reasons:
                    reasons.append(reason)
                cells.append("=" if outcome.kind == "equal" else str(reasons.index(reason) + 1))
            text += f"| {row} | {' | '.join(cells)} |\n"
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    counted = [outcome.kind for outcome in found.values()]
    total = f"{len(counted)} cells: {counted.count('equal')} equal, {counted.count('refused')} refused."
    return f"{text}\n## Reasons\n\n{listed}\n\n{total}\n"


def general(reason: str) -> str:
    """A reason without the optimizer that it was given for."""
    return re.sub(r"^train\.optimizer is \w+, whose step", "The optimizer's step", reason)


def read() -> dict[Key, Outcome]:
    """What the page says of each cell."""
    text = PAGE.read_text()
    listed = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    found: dict[Key, Outcome] = {}
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        lines = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
        if not lines:
            continue
        columns = [cell.strip() for cell in lines[0][1:]]
        for row, *cells in lines[2:]:
            for column, cell in zip(columns, cells, strict=True):
                said = cell.strip()
                outcome = Outcome("equal") if said == "=" else Outcome("refused", listed[said])
                found[title, row.strip(), column] = outcome
    return found
