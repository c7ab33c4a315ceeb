"""Deadlines of every wait in a run."""

from __future__ import annotations

from dataclasses import dataclass, fields

from thinwire.values import check_fields, number


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds after which each wait ends."""

    start_s: float = 120.0
    """From the start of the run, until the first generation forms with the workers that have joined."""
    gather_s: float = 120.0
    """From the last join, until the first generation forms with the workers that have joined."""
    silence_s: float = 15.0
    """From a worker's last heartbeat, until the worker counts as lost."""
    reconnect_s: float = 1.0
    """From the break of a worker's connection, until the worker counts as lost."""
    prepare_s: float = 15.0
    """From a `prepare`, until a worker that has not answered counts as lost."""
    rejoin_s: float = 120.0
    """From the loss of a worker, until the end of the run no longer waits for its replacement."""
    settle_s: float = 0.05
    """From a join or a loss, until a generation is called, so that several changes at once make one generation."""
    stall_s: float = 20.0
    """From the last landed round, while workers wait for one, until the same members form a new generation."""
    join_s: float = 300.0
    """From a worker's join, until a generation has formed and the worker holds the joint model."""
    round_s: float = 300.0
    """From the launch of a round that a worker cannot go on without, until the worker gives up."""
    finish_s: float = 86400.0
    """From the end of a worker's own rows, until all workers have done theirs."""
    conclude_s: float = 600.0
    """From the last step of any worker, until the final evaluation and checkpoint are done."""

    def __post_init__(self) -> None:
        check_fields(self, "Deadlines", **{field.name: number(least=0) for field in fields(self)})
