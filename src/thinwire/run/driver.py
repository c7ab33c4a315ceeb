"""One run on the driver: the workers launched, served, and summed up."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from torch import Tensor, nn

from thinwire import events
from thinwire.checkpoint import CheckpointStore, Manifest, Part, decode
from thinwire.cluster.base import Dealt, Site
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.errors import CheckpointError, DivergedError
from thinwire.placement import assembled
from thinwire.placement.deferred import kept_generators
from thinwire.protocol.identifiers import checkpoint_number, final_checkpoint_name
from thinwire.replicas.frozen import load_over_base
from thinwire.replicas.torch import build_module
from thinwire.rules.finite import is_finite
from thinwire.run.display import Display
from thinwire.run.job import Job, work
from thinwire.run.run_log import RunLog
from thinwire.strategies import name_of
from thinwire.strategies.base import unsettled
from thinwire.transport.ports import Hub, Wire
from thinwire.version import __version__

KEEP_CHECKPOINTS = 2
SETTLE_S = 5.0
"""What a commit has left where a run has failed."""
_logger = logging.getLogger("thinwire.run")


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The checkpoint that a run goes on from."""

    store: CheckpointStore
    manifest: Manifest
    passed_over: dict[str, str]
    """Why newer ones cannot be used, by name."""

    @property
    def place(self) -> tuple[str, str]:
        """Store and name, for workers."""
        return self.store.url, self.manifest.name


class Run:
    """One run on the driver: launches the workers, serves them, and sums up."""

    def __init__(
        self,
        job: Job,
        cluster: Site,
        dealt: Dealt,
        log: RunLog,
        store: CheckpointStore | None,
        earlier: Earlier | None,
        seed: int,
    ) -> None:
        self._job, self._cluster, self._dealt, self._log = job, cluster, dealt, log
        self._store, self._earlier, self._seed = store, earlier, seed
        self._coordinator: Coordinator | None = None
        self.lost = self.generations = 0
        self._models: dict[int, dict[int, dict[int, bytes]]] = {}
        """By evaluation, joint models that callbacks are yet to be given."""
        self._judged: dict[int, events.Evaluated] = {}
        """Evaluations whose models are yet to come."""
        self._committed: set[str] = set()
        self.saved: str | None = None
        """The newest checkpoint of this run."""

    def execute(self, hub: Hub, policy: Policy, progress: bool | None) -> tuple[Outcome, float]:
        began = self._job.time.now()
        self._log.emit(self._started(policy))
        with _own_interrupts():
            return self._served(hub, policy, progress, began)

    def _served(self, hub: Hub, policy: Policy, progress: bool | None, began: float) -> tuple[Outcome, float]:
        workforce = self._cluster.launch(
            functools.partial(work, self._job), self._dealt, self._job.wire, self._job.strategy.helpers
        )
        self._io = self._job.time.executor("commit")
        try:
            coordinator = self._coordinator = Coordinator(
                hub,
                workforce,
                policy,
                emit=self._emit,
                commit=self._begin_commit if self._store is not None else None,
                meta=self._meta,
                resumed=None if self._earlier is None else dict(self._earlier.manifest.meta),
                show=self._show if self._job.plan.shows else None,
                serve=None if self._dealt.server is None else self._dealt.server.piece,
                time=self._job.time,
                observe=self._job.observe,
            )
            with Display(coordinator, self._job, progress) as display:

                def turn() -> None:
                    for event in hub.notices():
                        coordinator.note(event)
                    display.turn()

                self._log.listen(display.see)
                interrupted = False
                try:
                    while True:
                        try:
                            outcome = coordinator.run(turn)
                            break
                        except KeyboardInterrupt:
                            if interrupted:
                                raise
                            interrupted = True
                            display.say("stopping at the next round with a checkpoint; Ctrl-C again to stop at once")
                            coordinator.interrupt()
                finally:
                    self._log.leave(display.see)
            return outcome, self._job.time.now() - began
        finally:
            workforce.stop()
            if self._coordinator is not None:
                self._coordinator.publications.settle(SETTLE_S)
                self._io.shutdown(wait=False)
                self.saved = self._coordinator.outcome.checkpoint or self.saved
                self.lost += self._coordinator.outcome.workers_lost
                self.generations += self._coordinator.outcome.generations

    @property
    def store(self) -> CheckpointStore | None:
        """Where its checkpoints are written."""
        return self._store

    def go_on_from(self, earlier: Earlier, wire: Wire) -> None:
        """The next time it is executed it begins at that checkpoint, with workers of its own on another wire."""
        self._job, self._earlier = dataclasses.replace(self._job, wire=wire, resume=earlier.place), earlier

    def _started(self, policy: Policy) -> events.RunStarted:
        strategy = self._job.strategy
        return events.RunStarted(
            strategy=name_of(strategy),
            knobs=dataclasses.asdict(strategy),
            workers=policy.workers,
            rows=self._dealt.rows,
            validation_rows=self._dealt.validation_rows,
            seed=self._seed,
            resumed_from=None if self._earlier is None else self._earlier.manifest.name,
            passed_over={} if self._earlier is None else self._earlier.passed_over,
            run=self._job.run,
            version=__version__,
        )

    def _meta(self) -> dict[str, Any]:
        assert self._coordinator is not None
        at = {str(w): _at(p) for w, p in self._coordinator.membership.roster.remembered.items()}
        before: dict[str, Any] = {} if self._earlier is None else dict(self._earlier.manifest.meta)
        if before.get("workers") == self._job.workers:
            at = before.get("workers_at", {}) | at  # some have yet to be heard of
        return {
            **self._job.alike,
            "strategy": name_of(self._job.strategy),
            "workers": self._job.workers,
            "placement": repr(self._job.placement),
            "seed": self._seed,
            "total_rows": self._coordinator.membership.roster.total_rows,
            "workers_at": at,
            "rows_done": sum(int(each["rows"] or 0) for each in at.values()),
            "train_s": self._coordinator.training_time.seconds,
            "thinwire": __version__,
            "finite": True,
        }

    def _show(self, number: int, results: dict[int, dict[int, bytes]]) -> bool:
        """Callbacks are given the joint model of an evaluation, once that is judged; True where one ends the run."""
        self._models[number] = results
        return self._shown(number)

    def _shown(self, number: int) -> bool:
        if number not in self._models or number not in self._judged:
            return False
        event, model = self._judged.pop(number), self._module(self._models.pop(number)).eval()
        for held in (self._models, self._judged):
            for older in [each for each in held if each < number]:
                del held[older]
        return self._log.show(model, event)

    def _emit(self, event: events.Event) -> bool:
        if isinstance(event, events.Evaluated) and self._job.plan.shows:
            self._judged[event.number] = event
            stops = self._log.emit(event)
            return self._shown(event.number) or stops
        if isinstance(event, events.CheckpointFailed) and self._store is not None:
            self._io.submit(self._discard, event.name)
        return self._log.emit(event)

    def _discard(self, name: str) -> None:
        """What was written of a checkpoint that failed may be the very room that the next one needs."""
        assert self._store is not None
        try:
            self._store.discard(name)
        except CheckpointError as error:
            _logger.warning("what was written of checkpoint %s is left: %s", name, error)

    def _begin_commit(self, name: str, step: int, parts: list[dict[str, Any]], meta: dict[str, Any]) -> Future[int]:
        return self._io.submit(self._commit, name, step, parts, meta)

    def _commit(self, name: str, step: int, parts: list[dict[str, Any]], meta: dict[str, Any]) -> int:
        assert self._store is not None
        written = tuple(Part(p["name"], int(p["size_bytes"]), p["digest"]) for p in parts)
        self._store.commit(Manifest(name=name, step=step, parts=written, meta=meta))
        self._committed.add(name)
        try:
            last = final_checkpoint_name(
                checkpoint_number(name)
            )  # it may be half written, and its name sorts before this
            protect = () if name == last else (*self._needed, last)
            self._store.prune(KEEP_CHECKPOINTS, protect, self._unfit)
        except CheckpointError as error:  # the new one is whole for all that
            _logger.warning("older checkpoints are left: %s", error)
        return sum(p.size_bytes for p in written)

    @property
    def _needed(self) -> tuple[str, ...]:
        """What a worker that takes another's place reads, until the run is over."""
        return () if self._earlier is None else (self._earlier.manifest.name,)

    @property
    def _unfit(self) -> tuple[str, ...]:
        """Checkpoints in this run's own store that it could not go on from, and has not written anew since."""
        if self._earlier is None or self._store is None or self._earlier.store.url != self._store.url:
            return ()
        return tuple(self._earlier.passed_over.keys() - self._committed)

    def trained(self, outcome: Outcome) -> nn.Module:
        """The module with the run's parameters.

        Raises:
            DivergedError: They are not finite.
        """
        module = _untrained(self._job)
        # An infinity may be meant, in a mask that is a buffer, say; NaN is not.
        meant = {name for name, value in _floating(module) if not is_finite(value) and not value.isnan().any()}
        _load(self._job, module, outcome.results)
        for name, value in _floating(module):
            if name not in meant and not is_finite(value):
                raise DivergedError(f"{name!r} of the trained model is not finite{outcome.last_good()}")
        return module.eval()

    def _module(self, results: dict[int, dict[int, bytes]]) -> nn.Module:
        """The module with parameters that workers have sent."""
        module = _untrained(self._job)
        _load(self._job, module, results)
        return module

    def summary(self, outcome: Outcome, seconds: float) -> dict[str, Any]:
        metrics = outcome.metrics
        late = unsettled(self._job.strategy, outcome.rounds) if outcome.rounds else ""
        if late:
            _logger.warning("%s", late)
        found = {
            "strategy": name_of(self._job.strategy),
            "workers": self._job.workers,
            "placement": self._job.placement.name,
            "group_size": self._job.placement.size,
            "steps": outcome.steps,
            "rows": outcome.rows,
            "epochs": round(outcome.epochs, 4),
            "seconds": round(seconds, 3),
            "train_seconds": round(outcome.train_s, 3),
            "train_loss": outcome.train_loss,
            "val_loss": metrics.get("val_loss"),
            "val_accuracy": metrics.get("val_accuracy"),
            "validation_rows": outcome.validation_rows,
            "left_out": outcome.left_out,
            "best_evaluation": outcome.best_evaluation,
            "best_val_loss": outcome.best_metrics.get("val_loss"),
            "model": "best" if self._job.plan.keeps_best and outcome.best_evaluation is not None else "last",
            "busy": round(outcome.busy, 4),
            "evaluated_s": round(outcome.evaluated_s, 3),
            "step_s": None if outcome.step_s is None or self._earlier else round(outcome.step_s, 9),
            "bytes_sent": outcome.bytes_sent,
            "rounds": outcome.rounds,
            "generations": self.generations,
            "workers_lost": self.lost,
            "refused": outcome.refused,
            "complete": not outcome.unreplaced and not outcome.interrupted,
            "reason": outcome.reason,
            "lacking": sorted(outcome.unreplaced),
            "choice": outcome.choice or None,
            "warnings": [*outcome.warnings, *([late] if late else [])],
            "nonfinite": outcome.nonfinite,
            "checkpoint": outcome.checkpoint,
            "unwritten": outcome.unwritten,
            "unsaved": outcome.unsaved,
            "resumed_from": None if self._earlier is None else self._earlier.manifest.name,
            "passed_over": {} if self._earlier is None else self._earlier.passed_over,
            "seed": self._seed,
        }
        found |= {k: v for k, v in metrics.items() if k not in found}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}

    def how_to_resume(self, out: str | None, outcome: Outcome) -> str:
        if out is None:
            return "interrupted; nothing was kept, because the run has no out folder: give one to be able to go on"
        unsaved = f"; {outcome.unsaved}" if outcome.unsaved else ""
        if outcome.checkpoint is None:
            return f"interrupted; no checkpoint had been written{unsaved}"
        return f"interrupted after {outcome.steps} steps; go on with resume={out!r} (or --resume {out}){unsaved}"


def _untrained(job: Job) -> nn.Module:
    with kept_generators():
        made = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else build_module(job.model, job.spec.seed)
    return made.cpu()


def _load(job: Job, module: nn.Module, results: dict[int, dict[int, bytes]]) -> None:
    """Gives a module what workers have sent."""
    chunks: Any = [decode(data) for part in results.values() for data in part.values()]
    if job.placement.size == 1:
        whole = {name: value for chunk in chunks for name, value in chunk.items()}
    else:
        whole = module.state_dict() | assembled(chunks)
    load_over_base(module, whole)


def _floating(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that can be other than finite."""
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta:
            yield name, value


@contextlib.contextmanager
def _own_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here: Spark's own handler would end the workers before they can save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if earlier is None else earlier)


def _at(progress: dict[str, Any]) -> dict[str, Any]:
    """Where a worker was, for one that has no part of its own in a checkpoint."""
    return {name: progress.get(name) for name in ("position", "steps", "rows")}
