"""Runs one schedule: the real session, coordinator, workers, exchange and checkpoints on a virtual clock."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import thinwire
from thinwire.checkpoint import CheckpointStore
from thinwire.checkpoint.finite import why_not_finite
from thinwire.cluster.simulated import Simulated
from thinwire.errors import DivergedError, LostWorkersError, ThinwireError
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.identifiers import FINAL
from thinwire_lab.schedules.draw import EPOCHS, JOINT, MENU, STEP_S, Schedule
from thinwire_lab.schedules.invariants import BrokenInvariantError, InvariantChecker
from thinwire_lab.schedules.ledger import Ledger, LedgerPart, LedgerReplica, loss

ROWS, BATCH = 16, 4
"""Rows of one worker, and rows of one step."""
PATIENCE_S = 120.0
"""Time limit of a run, after the end of the last fault; an undisturbed run takes four seconds."""
DEADLINES = Deadlines(
    start_s=10.0,
    gather_s=2.0,
    silence_s=4.0,
    prepare_s=4.0,
    rejoin_s=10.0,
    stall_s=3.0,
    join_s=60.0,
    round_s=60.0,
    finish_s=90.0,
    conclude_s=60.0,
)
LEDGERS = {"sparknet": "shares", "table, eventual": "ones", "table, bounded": "ones", "table on the driver": "ones"}
"""Strategies whose finished model shows how often each step counts, and how."""


@dataclass(frozen=True)
class Verdict:
    """The result of a schedule."""

    seed: int
    name: str
    ok: bool
    what: str
    """"complete", "incomplete", "lost", "diverged", or the violated invariant."""
    seconds: float
    """Seconds of virtual time."""
    lost: int
    generations: int
    digest: str
    """Digest of all events and of the result: equal for two versions of the code with the same behaviour."""

    @property
    def replay(self) -> str:
        """The command that runs the schedule again."""
        return f"thinwire testbed schedules --seeds {self.seed}"


class _Site:
    """The simulated cluster of one schedule; see `thinwire.cluster.base.Cluster`."""

    def __init__(self, schedule: Schedule) -> None:
        self.cluster = Simulated(
            workers=schedule.workers,
            step_s=STEP_S,
            faults=schedule.faults,
            revives=schedule.revives,
            store_s=schedule.store_s,
            seed=schedule.seed,
        )
        self._schedule = schedule
        self.made = self.cluster.site(None)
        ledger = LEDGERS.get(schedule.name, "none")
        self.checker = InvariantChecker(self.made.time, ledger=ledger, group_size=schedule.group_size)
        self.made.replica = self._replica
        self.made.part = self._part
        self.made.observe = self.checker.observe
        self.made.time.at(schedule.calm_at + PATIENCE_S, self._late)

    def site(self, data: Any) -> Any:
        return self.made

    def _replica(self, model: Any, spec: Any, worker: int = 0) -> LedgerReplica:
        made = LedgerReplica(self.checker, model, spec, worker, step_s=STEP_S, spread=self._schedule.spread)
        found: LedgerReplica = self.made.nan_injection.around(worker, made)
        return found

    def _part(self, placement: Any, model: Any, spec: Any, worker: int, *, crew: Any, **given: Any) -> LedgerPart:
        made = LedgerPart(self.checker, spec, worker, crew, step_s=STEP_S, spread=self._schedule.spread)
        found: LedgerPart = self.made.nan_injection.around(worker, made)
        return found

    def _late(self) -> None:
        raise BrokenInvariantError(f"the run had not ended {PATIENCE_S:.0f} s after the last fault")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses warnings about intended failures, which would otherwise fill the output."""
    logger = logging.getLogger("thinwire")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # includes warnings about a slow store
            yield
    finally:
        logger.setLevel(level)


def play(schedule: Schedule, callbacks: Any = ()) -> Verdict:
    """Runs a schedule and checks its result."""
    torch.set_num_threads(1)
    site = _Site(schedule)
    ended: dict[str, Any] = {}
    gone: set[tuple[int, int]] = set()
    seen = hashlib.sha256()

    def see(event: Any) -> None:
        seen.update(json.dumps({**vars(event), "kind": event.kind, "run": ""}, sort_keys=True, default=str).encode())
        if event.kind == "run_ended":
            ended.update(event.summary)
        elif event.kind == "worker_lost":
            gone.add((event.worker, event.attempt))
        elif event.kind == "worker_joined":
            gone.discard((event.worker, event.attempt))

    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # memory, since a disk would be the slowest part
    with _quiet(), tempfile.TemporaryDirectory(prefix="thinwire-schedule-", dir=folder) as out:
        try:
            what = _run(schedule, site, out, [see, *callbacks])
            site.checker.check_end(gone)
            ok = True
        except BrokenInvariantError as error:
            ok, what = False, str(error)
        except LostWorkersError as error:
            ok, what = schedule.harsh, "lost" if schedule.harsh else f"LostWorkersError: {error}"
        except DivergedError as error:  # no finite replica was left
            ok = any(fault.kind == "nan" for fault in schedule.faults) and "worker " in str(error)
            what = "diverged" if ok else f"DivergedError: {error}"
        except ThinwireError as error:
            ok, what = False, f"{type(error).__name__}: {error}"
        except Exception:
            ok, what = False, traceback.format_exc()
        finally:
            site.made.time.stop()
        try:
            _check_checkpoints(out)
        except (BrokenInvariantError, ThinwireError) as error:
            ok, what = False, f"{type(error).__name__}: {error}"
    lost, generations = int(ended.get("workers_lost", 0)), int(ended.get("generations", 0))
    seconds = site.made.time.now()
    seen.update(f"{ok} {what if ok else ''} {seconds!r}".encode())
    return Verdict(schedule.seed, schedule.name, ok, what, seconds, lost, generations, seen.hexdigest()[:16])


def _run(schedule: Schedule, site: _Site, out: str, callbacks: list[Any]) -> str:
    rows = ROWS * schedule.workers
    x, y = np.zeros((rows, 1), np.float32), np.zeros(rows, np.int64)
    size = schedule.group_size
    result = thinwire.fit(
        functools.partial(Ledger, size),
        {"x": x, "y": y},
        inputs=["x"],
        label="y",
        loss=loss,
        optimizer=_adam if schedule.name in JOINT else _plain,
        strategy=(MENU | JOINT)[schedule.name](),
        placement=thinwire.TensorParallel(group_size=size) if size > 1 else None,
        cluster=site,
        epochs=EPOCHS,
        batch_size=BATCH,
        validation={"x": x[:4], "y": y[:4]},
        metrics=(),
        checkpoint_every=5,
        out=out,
        seed=schedule.seed,
        deadlines=DEADLINES,
        callbacks=callbacks,
        progress=False,
    )
    site.checker.check_rows(result.summary, dict.fromkeys(range(schedule.workers), ROWS), EPOCHS)
    site.checker.check_model(result.model.state_dict()["values"])
    last = str(result.summary["checkpoint"])
    if not last.endswith(FINAL) and result.summary["unsaved"] is None:
        raise BrokenInvariantError(f"the last checkpoint is {last}, and the summary gives no reason")
    complete, lacking = result.summary["complete"], set(result.summary["lacking"])
    if not complete and not schedule.harsh and not (lacking and lacking <= schedule.unawaited):
        raise BrokenInvariantError(f"not complete: {result.summary['reason']}")
    return "complete" if complete else "incomplete"


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def _check_checkpoints(out: str) -> None:
    """Checks that every listed checkpoint is whole and finite, and has a joint model."""
    store = CheckpointStore(f"{out}/checkpoints")
    for manifest in store.manifests():
        for part in manifest.parts:
            tree: Any = store.read_part(manifest, part.name)
            if why := why_not_finite(tree):
                raise BrokenInvariantError(f"checkpoint {manifest.name}, {part.name}: {why}")
        if not any(part.name.startswith("joint") for part in manifest.parts):
            raise BrokenInvariantError(f"checkpoint {manifest.name} has no joint model")
