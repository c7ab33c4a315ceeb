"""Every error that thinwire raises, with the exit code of a command that it ends.

::

    ThinwireError              1   something went wrong in a run
    ├── ConfigError            2   a recipe, option or argument is not understood (also a ValueError)
    ├── DataError              3   the data cannot be read, or does not fit what was asked of it (also a ValueError)
    ├── WorkerError            4   user code failed on a worker; carries its whole traceback
    ├── LostWorkersError       5   too few workers are left, and no replacement came in time
    ├── TimedOutError          6   a wait passed its deadline (also a TimeoutError)
    ├── DivergedError          7   the loss is not a finite number any more
    ├── CheckpointError        8   a checkpoint is missing, damaged or of another run
    ├── ProtocolError          9   a peer sent a message that the protocol does not allow
    └── Interrupted          130   the user pressed Ctrl-C; the run left a checkpoint

Messages have three parts: what was wrong with the value shown, what is allowed, what to do. All errors can be pickled.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ThinwireError(Exception):
    """Base class of all errors of thinwire."""

    exit_code = 1


class ConfigError(ThinwireError, ValueError):
    """A recipe, option or argument is not understood."""

    exit_code = 2


class DataError(ThinwireError, ValueError):
    """The data cannot be read, or does not fit what was asked of it."""

    exit_code = 3


class WorkerError(ThinwireError):
    """User code failed on a worker; the message ends in the worker's whole traceback."""

    exit_code = 4


class LostWorkersError(ThinwireError):
    """Too few workers are left, and no replacement came in time."""

    exit_code = 5


class TimedOutError(ThinwireError, TimeoutError):
    """A wait passed its deadline."""

    exit_code = 6


class DivergedError(ThinwireError):
    """The loss is not a finite number any more."""

    exit_code = 7


class CheckpointError(ThinwireError):
    """A checkpoint is missing, damaged or of another run."""

    exit_code = 8


class ProtocolError(ThinwireError):
    """A peer sent a message that the protocol does not allow."""

    exit_code = 9


class Interrupted(ThinwireError):  # noqa: N818 - the name users see says what happened
    """The user pressed Ctrl-C; the run left a checkpoint."""

    exit_code = 130


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The allowed words as a sentence, after the word that is closest to `word`.

    >>> nearest("spraknet", ["mpca", "sparknet"])
    "Did you mean 'sparknet'? Allowed: mpca, sparknet."
    >>> nearest("zzz", ["mpca"])
    'Allowed: mpca.'
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(names)}."
