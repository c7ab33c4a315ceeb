"""Errors that end a run before its rows are done. Each says what to do."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire import events
from thinwire.coordinator.member import Seat
from thinwire.coordinator.membership import Lost
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    LostWorkersError,
    ThinwireError,
    TimedOutError,
    WorkerError,
)
from thinwire.protocol.messages import Failed

MISTAKES: dict[str, type[ThinwireError]] = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError)}
"""Errors about a user's settings that only a worker could find; they are raised without the worker's traceback."""

LEAVE_A_SLOT = (
    "Let other jobs of the session end first, ask for fewer workers, give executors more cores (spark.executor.cores), "
    "or use exchange='mesh'"
)


def failure(seat: Seat, failed: Failed, outcome: Outcome) -> tuple[events.WorkerFailed, ThinwireError]:
    """A worker's failure, as an event for the log and as an error for the user."""
    where = f"worker {seat.worker} on {seat.host} (pid {seat.pid}, attempt {seat.attempt})"
    event = events.WorkerFailed(
        worker=seat.worker,
        attempt=seat.attempt,
        host=seat.host,
        error=failed.error,
        traceback=failed.traceback,
    )
    if failed.kind == "DivergedError":
        return event, DivergedError(f"{where}: {failed.error}{outcome.last_good()}")
    if failed.kind == "LostWorkersError":
        return event, LostWorkersError(f"{where}: {failed.error}; go on from the last checkpoint with resume")
    if failed.kind == "TimedOutError":
        return event, TimedOutError(f"{where}: {failed.error}. Go on from the last checkpoint with resume.")
    mistake = MISTAKES.get(failed.kind)
    if mistake is not None:
        return event, mistake(f"{where}: {failed.error.removeprefix(f'{mistake.__name__}: ')}")
    return event, WorkerError(f"{where} failed: {failed.error}\n\n{failed.traceback}")


def keeps_failing(seats: Mapping[int, Seat], outcome: Outcome) -> DivergedError:
    """The error that ends a run in which every worker keeps skipping steps."""
    told = min(outcome.flawed.values(), key=lambda event: event.worker, default=None)
    where, what = "all workers", "losses or gradients are not finite"
    if told is not None:
        seat = seats.get(told.worker)
        where = f"worker {told.worker} on {told.host}" + (f" (pid {seat.pid}, attempt {seat.attempt})" if seat else "")
        when = f"in round {told.round}" if told.step is None else f"at step {told.step}"
        what = f"the {told.what} became NaN or infinite {when}"
    return DivergedError(f"{where}: {what}, and all workers keep skipping steps for it{outcome.last_good()}")


def nobody_came(policy: Policy, outcome: Outcome) -> TimedOutError:
    """The error that ends a run in which no generation has formed in time."""
    who = "no worker" if policy.group_size == 1 else f"no group of {policy.group_size} workers"
    what = f"{who} joined within {policy.deadlines.start_s:.0f} s"
    if outcome.obstacle:
        return TimedOutError(f"{what}: {outcome.obstacle}. {LEAVE_A_SLOT}.")
    return TimedOutError(f"{what}; look at the workers' output for why")


def nobody_left(policy: Policy, here: set[int], outcome: Outcome) -> LostWorkersError:
    """The error that ends a run in which no worker, or no whole group, is left."""
    lost = "all workers were lost"
    if policy.group_size > 1:
        lost = f"no group of {policy.group_size} is whole, of workers {sorted(here)} that are left,"
    what = f"{lost} and none came back"
    if outcome.obstacle:
        what = f"{what}; {outcome.obstacle}. {LEAVE_A_SLOT}"
    return LostWorkersError(f"{what}; go on from the last checkpoint with resume")


def too_few(policy: Policy, lost: Lost, alive: int) -> LostWorkersError:
    """The error that ends a run with fewer than `min_workers` workers."""
    return LostWorkersError(
        f"worker {lost.worker} was lost ({lost.reason}) and will not be replaced; {alive} of {policy.workers} workers "
        f"are left and at least {policy.min_workers} are needed. Go on from the last checkpoint with resume; on "
        "Local, max_restarts allows for more replacements."
    )


def too_slow(policy: Policy, slow: list[int]) -> TimedOutError:
    """The error that ends a run whose workers do not end in time."""
    within = f"{policy.deadlines.conclude_s:.0f} s of the last step"
    return TimedOutError(f"workers {slow} did not end within {within}; look at their logs")


def joint_model_lost() -> LostWorkersError:
    """The error that ends a run in which no worker holds the joint model."""
    return LostWorkersError(
        "all workers that held the joint model were lost before their replacements had taken it over; "
        "go on from the last checkpoint with resume"
    )
