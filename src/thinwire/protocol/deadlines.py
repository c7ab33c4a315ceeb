"""How long anything is waited for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from thinwire.values import check_fields, number


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds after which waiting turns into an answer."""

    start_s: float = 120.0
    """Until the first generation forms with those who are there."""
    gather_s: float = 120.0
    """Without a further join, until the first generation forms with those who are there."""
    silence_s: float = 15.0
    """Without a heartbeat, until a worker counts as lost."""
    reconnect_s: float = 1.0
    """After a worker's connection broke, until it counts as lost."""
    prepare_s: float = 15.0
    """Until a worker that does not answer a prepare counts as lost."""
    rejoin_s: float = 120.0
    """Until a lost worker's replacement is no longer waited for at the end of the run."""
    settle_s: float = 0.05
    """After a join or a loss, so that several at once make one generation."""
    stall_s: float = 20.0
    """Without a round landed while workers wait for one, until the same members form a generation anew."""
    join_s: float = 300.0
    """On a worker, from joining until a generation has formed and it holds the joint model."""
    round_s: float = 300.0
    """On a worker, for one round that it cannot go on without."""
    finish_s: float = 86400.0
    """On a worker, from the end of its own rows until all workers have done theirs."""
    conclude_s: float = 600.0
    """From the last worker's last step to the end of the final evaluation and checkpoint."""

    def __post_init__(self) -> None:
        check_fields(self, "Deadlines", **{field.name: number(least=0) for field in fields(self)})
