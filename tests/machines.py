"""docs/explanation/machines.md from the tables of the state machines: `make machines` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from thinwire.coordinator import checkpoints, ending, generation, member
from thinwire.exchange import ledger
from thinwire.protocol.transitions import Transitions
from thinwire.worker import life, publication

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "machines.md"
HEAD = """# State machines

<!-- Written by `make machines` from the tables in the source; a test fails where this page and a table differ. -->

Each machine has one owner, and no other class changes its state. An event that a state does not allow raises
`InvalidTransitionError`: it shows a mistake in thinwire, never a message that a faulty worker made up, since such
messages are refused before they reach a machine. [How workers live and die](how-workers-live-and-die.md) tells what the
machines do together, and [decision 0018](../decisions/0018-machines-as-tables.md) why they are cut as they are.
"""


class Machine(NamedTuple):
    """A machine on the page."""

    title: str
    file: str
    owner: str
    text: str
    table: Transitions[Any, Any]


MACHINES = (
    Machine(
        "A run",
        "coordinator/ending.py",
        "Ending",
        "One for each attempt of a run at the coordinator.",
        ending.TRANSITIONS,
    ),
    Machine(
        "A generation",
        "coordinator/generation.py",
        "Agreement",
        "The agreement of all members on who they are and which joint state they go on from. It is made anew whenever "
        "members change, while a run trains and while it ends.",
        generation.TRANSITIONS,
    ),
    Machine(
        "A worker's membership",
        "coordinator/member.py",
        "Roster",
        "One for each worker number, over all of its attempts.",
        member.TRANSITIONS,
    ),
    Machine(
        "A checkpoint",
        "coordinator/checkpoints.py",
        "CheckpointCommits",
        "One for each checkpoint, from the first part that a worker reports.",
        checkpoints.TRANSITIONS,
    ),
    Machine(
        "A worker's life",
        "worker/life.py",
        "Life",
        "One at each worker. The joint state may have to be fetched again in any of these states, and what the "
        "coordinator says may be heard in any of them: both are noted beside the machine.",
        life.TRANSITIONS,
    ),
    Machine(
        "A publication",
        "worker/publication.py",
        "Publication",
        "One at each worker for each joint model that is published. The verdict is noted beside it: a worker may hear "
        "the verdict on a publication that it never had.",
        publication.TRANSITIONS,
    ),
    Machine(
        "A round at one worker",
        "exchange/ledger.py",
        "Ledger",
        "One for each round at each worker that takes part in it, through all generations until the round is over. "
        "That the stepping thread adopts the reply of a round that has landed is no part of it.",
        ledger.TRANSITIONS,
    ),
)


def page() -> str:
    """The page as the tables have it."""
    sections = [HEAD]
    for machine in MACHINES:
        where = f"Table: `{machine.file}`; owner: `{machine.owner}`; first state: `{machine.table.initial.name}`."
        sections.append(f"## {machine.title}\n\n{machine.text} {where}\n\n{machine.table.to_markdown()}")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
