"""When the first worker evaluates, saves and stops."""

from __future__ import annotations

from typing import NamedTuple, final

from thinwire.exchange.ports import Tree
from thinwire.protocol.identifiers import checkpoint_name
from thinwire.worker.checkpoint_writer import CheckpointWriter
from thinwire.worker.generation import Generation
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.step_statistics import StepStatistics

AUTO_SAVE_S = 15.0


class Decision(NamedTuple):
    """What is to be done with the joint model of the next round."""

    evaluate: bool = False
    save: bool = False
    stop: bool = False


@final
class PublicationSchedule:
    """What is due, by the rows of all workers and the steps of this one."""

    def __init__(
        self, plan: WorkerPlan, meter: StepStatistics, generation: Generation, writer: CheckpointWriter
    ) -> None:
        self._plan, self._meter, self._generation, self._writer = plan, meter, generation, writer
        self._epochs_done = self._evaluated_steps = self._saved_steps = 0
        self._saved_at = meter.now()
        self._announced_stop = False
        self.stop_reason: str | None = None
        """Why the coordinator asks for the end of the run; None unless it does."""

    @property
    def saves(self) -> bool:
        """Whether this run writes checkpoints."""
        return self._plan.checkpoint_every is not None

    def decide(self, number: int) -> Decision:
        """What to announce, given the number of the next publication; the end of the run is announced once."""
        due = self.due(number)
        if self.stop_reason is None or self._announced_stop:
            return due
        self._announced_stop = True
        return Decision(save=self.saves, stop=True)

    def due(self, number: int) -> Decision:
        """What is due by rows, steps and time, given the number of the next publication."""
        plan, meter, generation = self._plan, self._meter, self._generation
        generation.rows[plan.worker] = meter.rows_done
        epochs = sum(generation.rows.values()) // max(1, generation.total_rows)
        steps = meter.steps
        self._evaluated_steps, self._saved_steps = min(self._evaluated_steps, steps), min(self._saved_steps, steps)
        new_epoch = epochs > self._epochs_done
        self._epochs_done = max(self._epochs_done, epochs)
        last = plan.epochs is not None and epochs >= plan.epochs
        if plan.evaluate_every is None:
            evaluate = plan.evaluates and new_epoch and not last
        else:
            evaluate = plan.evaluates and steps - self._evaluated_steps >= plan.evaluate_every
        if evaluate:
            self._evaluated_steps = steps
        save = False
        if isinstance(plan.checkpoint_every, int):
            save = steps - self._saved_steps >= plan.checkpoint_every
        elif plan.checkpoint_every == "auto":
            save = new_epoch and not last and meter.now() - self._saved_at >= AUTO_SAVE_S
        return Decision(evaluate, save and self._begin_save(number))

    def _begin_save(self, number: int) -> bool:
        """Whether the store is ready for a checkpoint; where it is not, this one is left out."""
        steps, self._saved_at = self._meter.steps, self._meter.now()
        self._saved_steps = steps
        if self._writer.busy:
            self._writer.skip(checkpoint_name(number, steps))
            return False
        return True

    def tree(self) -> Tree:
        return {
            "epochs_done": self._epochs_done,
            "evaluated_steps": self._evaluated_steps,
            "saved_steps": self._saved_steps,
        }

    def load(self, epochs_done: int, evaluated_steps: int, saved_steps: int) -> None:
        self._epochs_done, self._evaluated_steps, self._saved_steps = epochs_done, evaluated_steps, saved_steps
