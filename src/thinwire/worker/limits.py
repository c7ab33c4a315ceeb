"""How long a worker takes steps, and when it may conclude."""

from __future__ import annotations

from thinwire.worker.generation import Generation
from thinwire.worker.life import Life
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.step_statistics import StepStatistics

LAGS = 0.8
"""A worker that has done less than this share of another's rows is behind, not merely unlucky with a processor."""


def goes_on(plan: WorkerPlan, meter: StepStatistics, generation: Generation, life: Life) -> bool:
    """Whether a worker has further steps to take."""
    if life.stopping or (plan.steps is not None and meter.steps >= plan.steps):
        return False
    return plan.beyond is None or not _rests(plan, meter, generation)


def _rests(plan: WorkerPlan, meter: StepStatistics, generation: Generation) -> bool:
    """Whether a worker whose epochs are done takes no step beyond them: no other member lags far behind.

    Rows are those of the last round's notes: the others' notes are as old as the worker's own.
    """
    if plan.epochs is None or meter.position[0] < plan.epochs:
        return False
    if len(generation.members) < (plan.beyond or 0):
        return True
    rows = generation.rows_at_round
    return all(rows.get(other, 0) >= LAGS * rows.get(plan.worker, 0) for other in generation.members)


def concludes(life: Life, generation: Generation, rounds: OpenRounds, *, counts_rounds: bool) -> bool:
    """Whether all workers are done, and their last rounds, which may be slower than the word of it, have landed."""
    if life.num_rounds is None or generation.needs_state:
        return False
    return not counts_rounds or generation.alone or rounds.landed >= life.num_rounds
