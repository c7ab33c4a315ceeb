"""State machines as tables: each row is a transition, and an event that no row allows raises.

`docs/explanation/machines.md` is generated from the tables, so the page and the code cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Enum)
Cause = TypeVar("Cause", bound=Enum)


class InvalidTransitionError(RuntimeError):
    """A state machine got an event that its state does not allow: a defect of thinwire, not of a message."""


class Row(NamedTuple, Generic[State, Cause]):
    """One line of a table: in each of the states `before`, the event `cause` leads to the state `after`."""

    before: tuple[State, ...]
    cause: Cause
    after: State


class Transitions(Generic[State, Cause]):
    """All transitions of one machine. The value of each state and of each event is the sentence that explains it."""

    def __init__(self, initial: State, rows: Iterable[Row[State, Cause]]) -> None:
        self.initial, self.rows = initial, tuple(rows)
        self._after: dict[tuple[State, Cause], State] = {}
        for row in self.rows:
            for before in row.before:
                if (before, row.cause) in self._after:
                    raise InvalidTransitionError(f"two rows say what {row.cause.name} does in {before.name}")
                self._after[before, row.cause] = row.after

    def allows(self, state: State, cause: Cause) -> bool:
        """Whether an event may happen in a state."""
        return (state, cause) in self._after

    def after(self, state: State, cause: Cause) -> State:
        """The state that follows.

        Raises:
            InvalidTransitionError: No row of the table has this event in this state.
        """
        after = self._after.get((state, cause))
        if after is None:
            allowed = ", ".join(sorted(known.name for before, known in self._after if before is state)) or "nothing"
            raise InvalidTransitionError(f"{state} does not allow {cause.name}; it allows {allowed}")
        return after

    def to_markdown(self) -> str:
        """The table for a page of documentation: the states, and the transitions between them."""
        states, lines = type(self.initial), []
        lines += ["| state | meaning |", "|---|---|"]
        lines += [f"| `{state.name}` | {state.value} |" for state in states]
        lines += ["", "| in | when | then |", "|---|---|---|"]
        for row in self.rows:
            before = ", ".join(f"`{state.name}`" for state in row.before)
            lines.append(f"| {before} | {row.cause.value} | `{row.after.name}` |")
        return "\n".join(lines) + "\n"
