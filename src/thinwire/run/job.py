"""What travels to a worker, and what a worker does with it."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit

import torch
from torch import nn

from thinwire import logs
from thinwire.checkpoint import CheckpointStore, Manifest, decode, encode
from thinwire.data import Batch, Loader, Position, Sampler, Shard, ShardFiles
from thinwire.data.feeds import Feed
from thinwire.errors import CheckpointError, ConfigError, ThinwireError, TimedOutError
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.exchange.signals import CutOffError, LeftError
from thinwire.exchange.spark.rounds import THROUGH_SPARK
from thinwire.exchange.table.table import on_table
from thinwire.placement import Crew, GroupReplica, Placement, Whole, between_processes, part_of
from thinwire.protocol.clock import REAL, Time
from thinwire.protocol.forms import header_of
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import COORDINATOR, TO_WORKER, Failed, Fetch, Join, Piece
from thinwire.protocol.observation import Observer, unobserved
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.frozen import refuse_other_base
from thinwire.replicas.labels import ANY, Labels
from thinwire.replicas.torch import resolve_device
from thinwire.run.searches import Setup, refuse_search
from thinwire.strategies import Strategy
from thinwire.transport.ports import Link, Wire
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batches
from thinwire.worker.worker import Worker

FETCH_S, ASK_S = 60.0, 10.0
_log = logging.getLogger("thinwire.worker")
Transform = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of the data are what."""

    inputs: tuple[str, ...]
    label: str | None
    labels: Labels = ANY
    """What the loss takes."""
    weight: str | None = None
    transform: Transform | None = None
    reads: tuple[str, ...] | None = None
    """Columns of the data that the inputs are made of, where a transform says so; else the inputs themselves."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a worker needs; plain values, and the user's own model, loss and transform."""

    model: nn.Module | Callable[[], nn.Module]
    spec: TrainSpec
    strategy: Strategy
    plan: WorkerPlan
    """With worker 0, attempt 0 filled in; each worker puts its own."""
    workers: int
    feed: Feed
    columns: Columns
    batch_size: int
    wire: Wire
    exchange: str
    """How training's traffic moves: "mesh", "table" or "spark"."""
    checkpoints: str | None
    resume: tuple[str, str] | None
    """Store and name of the checkpoint to go on from."""
    base: str | None = None
    """A digest of the network's frozen parameters on the driver; None where it could not be made there."""
    silence_s: float = 30.0
    placement: Placement = field(default_factory=Whole)
    time: Time = REAL
    prefetch: int | None = None
    """Batches that a thread gathers ahead; None leaves it to the loader."""
    replica: Callable[..., TorchReplica] = TorchReplica
    """What makes a replica that is whole."""
    crew: Callable[..., Crew] | None = between_processes
    """What makes a worker's end of its group; None where workers cannot form groups."""
    part: Callable[..., GroupReplica] = part_of
    """What makes a worker's part of a replica that spans its group."""
    observe: Observer = unobserved
    alike: Mapping[str, str] = field(default_factory=dict)
    """What a run that goes on from this one's checkpoints must have alike, by name."""
    run: str = ""
    """What log records name the run by."""
    log: logs.Wanted | None = None
    """How the driver logs, and its workers with it."""


class ShardBatches:
    """A worker's rows; see `thinwire.worker.ports.Batches`."""

    def __init__(self, files: ShardFiles, job: Job, worker: int, device: torch.device) -> None:
        columns = job.columns
        make = functools.partial(
            Loader,
            inputs=columns.inputs,
            label=columns.label,
            labels=columns.labels,
            weight=columns.weight,
            transform=columns.transform,
            device=device,
            prefetch=job.prefetch,
        )
        shard = Shard.open(files.train)
        sampler = Sampler(shard.num_rows, job.batch_size, job.spec.seed, worker)
        self.num_rows = shard.num_rows
        self.batches_per_epoch = sampler.batches_per_epoch
        self._training = make(shard, sampler)
        self._validation: Loader | None = None
        self.num_validation_rows = 0
        if files.validation is not None:
            held = Shard.open(files.validation)
            self.num_validation_rows = held.num_rows
            order = Sampler(held.num_rows, max(job.batch_size, 256), job.spec.seed, worker, shuffle=False)
            self._validation = make(held, order)

    def training(self, start: tuple[int, int], epochs: int | None) -> Iterator[Batch]:
        return self._training.batches(Position(*start), epochs)

    def validation(self) -> Iterator[Batch]:
        return iter(()) if self._validation is None else self._validation.batches(Position(0, 0), 1)


class NoBatches:
    """The rows of a helper, which has none; see `thinwire.worker.ports.Batches`."""

    num_rows = num_validation_rows = batches_per_epoch = 0

    def training(self, start: tuple[int, int], epochs: int | None) -> Iterator[Batch]:
        return iter(())

    def validation(self) -> Iterator[Batch]:
        return iter(())


def work(
    job: Job,
    worker: int,
    attempt: int,
    *,
    first: bool = True,
    given: Iterable[Any] | None = None,
    gpu: int | None = None,
) -> bool:
    """Runs one worker to its end; whatever goes wrong in it reaches the coordinator with its traceback.

    The rest of the arguments are those of `thinwire.cluster.base.Entry`.
    """
    if job.log is not None and threading.current_thread() is threading.main_thread():  # else the driver's own is there
        logs.start(job.log)
    logs.enter(run=job.run, worker=worker, attempt=attempt)
    _log.info("worker %s starts, attempt %s", worker, attempt)
    link = job.wire.link(worker, attempt)
    peer: Peer | None = None
    runner: Worker | None = None
    try:
        runner, peer = _build(job, worker, attempt, link, first, given, gpu)
        runner.run()
    except LeftError as left:
        return left.done
    except CutOffError as cut:
        _log.warning("worker %s ends: %s", worker, cut)
        if peer is None:
            link.close()
        return False
    except BaseException as error:
        report = Failed(
            attempt=attempt,
            kind=type(error).__name__ if isinstance(error, ThinwireError) else "",
            error=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
        )
        if peer is not None and peer.started:
            peer.report(report)
        else:
            link.send(COORDINATOR, header_of(Join(attempt=attempt, address=link.address, **hello())))
            link.send(COORDINATOR, header_of(report))
            link.close()
    finally:
        if peer is not None and peer.started:
            peer.close()
        _log.info("worker %s ends", worker)
        logs.leave()
        if job.placement.size > 1 and runner is not None:
            cast(GroupReplica, runner.replica).crew.close()
    return True


def _build(
    job: Job, worker: int, attempt: int, link: Link, first: bool, given: Iterable[Any] | None, gpu: int | None
) -> tuple[Worker, Peer]:
    spec = job.spec
    if spec.device in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()  # a cluster that shows a task its own GPU alone may still name it by number
        spec = replace(spec, device=f"cuda:{worker % count if gpu is None else min(gpu, count - 1)}")
    helps = worker >= job.workers
    batches: Batches = NoBatches()
    told: dict[str, Any] = {}
    if not helps:
        fetch = functools.partial(_fetch, link, attempt, max(FETCH_S, job.silence_s))
        with job.feed.shard(worker, given, fetch) as files:
            batches = own = ShardBatches(files, job, worker, resolve_device(spec.device))
            told = {"held": own.num_validation_rows} | ({} if files.same is None else {"same": files.same})
    greeting = hello() | {"rows": batches.num_rows} | told
    replica: TorchReplica
    if job.placement.size > 1:
        replica = _part(job, spec, worker, attempt, link, batches)
        greeting["meets"] = replica.crew.address if replica.crew.part == 0 else None
    else:
        replica = job.replica(job.model, replace(spec, device="cpu") if helps else spec, worker)
        if job.base is not None:
            refuse_other_base(replica.module, job.base, f"worker {worker}")
    setup = Setup(
        spec=spec, strategy=job.strategy, placement=job.placement, exchange=job.exchange, codec=job.plan.codec
    )
    refuse_search(replica.optimizer, setup)
    kept = _kept(job, worker, first)
    replicas = job.workers // job.placement.size
    strategy = job.strategy.with_optimizer(spec.optimizer).laid_out(replica.parameters, replica.optimizer_by)
    joint = JointState(strategy, replica.vector.detach().cpu(), replicas, job.observe)
    settings: dict[str, Any] = {"carrier": THROUGH_SPARK} if job.exchange == "spark" else {}
    if job.exchange == "table":
        offsets = (*replica.parameters.offsets, replica.parameters.size) if strategy.subject == "gradients" else None
        settings = {"kind": on_table(workers=replicas, borders=offsets)}
    peer = Peer(
        link,
        Identity(worker, attempt, greeting),
        joint,
        **settings,
        codec_name=job.plan.codec,
        trees=TreeCodec(encode, decode),
        fresh=kept is None,
        silence_s=job.silence_s,
        stop_on_nonfinite=job.plan.on_nonfinite == "stop",
        time=job.time,
    )
    save = None if job.checkpoints is None else CheckpointStore(job.checkpoints).write_part
    plan = replace(job.plan, worker=worker, attempt=attempt)
    runner = Worker(plan, replica, batches, peer, joint, save)
    if kept is not None:
        _go_on(runner, job, *kept)
    return runner, peer


def _part(job: Job, spec: TrainSpec, worker: int, attempt: int, link: Link, batches: Batches) -> GroupReplica:
    """A worker's part of its group's replica, as its own rows and the placement ask for it."""
    first = next(iter(batches.training((0, 0), 1)), None)
    if first is None:
        raise ConfigError(
            f"worker {worker} has no rows, and each worker of a group needs some: use fewer workers, or more partitions"
        )
    size, host = job.placement.size, urlsplit(link.address).hostname or "127.0.0.1"
    assert job.crew is not None  # `thinwire.run.checks` has refused the placement otherwise
    crew, examples = job.crew(worker, attempt, size, host), list(cast(Batch, first).inputs)
    return job.part(job.placement, job.model, spec, worker, crew=crew, examples=examples, rows=job.batch_size)


def _fetch(link: Link, attempt: int, patience_s: float, name: str) -> Iterator[bytes]:
    """One of this worker's files, piece by piece from the coordinator.

    Raises:
        CutOffError: The coordinator has said nothing at all: nobody would hear of an error either.
        TimedOutError: The coordinator is there, and does not send a piece.
    """
    index, count, heard = 0, 1, False
    while index < count:
        asked, deadline = -math.inf, time.monotonic() + patience_s
        answer = None
        while answer is None:
            now = time.monotonic()
            if now > deadline and not heard:
                raise CutOffError(f"attempt {attempt} has heard nothing from the driver for {patience_s:.0f} s")
            if now > deadline:
                raise TimedOutError(f"the driver did not send piece {index} of {name!r} within {patience_s:.0f} s")
            if now - asked > ASK_S:  # what was asked may be lost with a connection
                asked = now
                link.send(COORDINATOR, header_of(Fetch(attempt=attempt, name=name, index=index)))
            for message in link.receive(0.5):
                heard = True
                body = TO_WORKER.decode(message.header)
                if isinstance(body, Piece) and (body.name, body.index) == (name, index):
                    answer, count = message, body.count
        yield bytes(answer.payload or b"")
        index += 1


def _kept(job: Job, worker: int, first: bool) -> tuple[Manifest, dict[str, Any], dict[str, Any] | None] | None:
    """The checkpoint that the run goes on from, its joint part and the worker's own; None in a run from the beginning.

    One that takes another's place reads it too: nobody may have been heard of yet.
    """
    if job.resume is None:
        return None
    store = CheckpointStore(job.resume[0])
    try:
        manifest = store.load(job.resume[1])
        part = worker % job.placement.size
        joint = store.read_part(manifest, f"joint-{part}" if part else "joint")
        if not isinstance(joint, dict):
            raise CheckpointError(f"checkpoint {manifest.name} holds no joint state; go on from another one")
        named = f"worker-{worker}"
        has_own = manifest.meta.get("workers") == job.workers and any(p.name == named for p in manifest.parts)
        own = store.read_part(manifest, named) if has_own else None
    except CheckpointError as error:
        if first:
            raise
        _log.warning("worker %s takes over from its peers alone: %s", worker, error)
        return None
    return manifest, joint, own  # type: ignore[return-value]


def _go_on(runner: Worker, job: Job, manifest: Manifest, joint: dict[str, Any], own: dict[str, Any] | None) -> None:
    runner.resume(joint, own)
    if own is not None:
        return
    if manifest.meta.get("workers") == job.workers:  # it had left, was lost, or had not come yet
        at = dict(manifest.meta.get("workers_at", {})).get(str(runner.plan.worker), {})  # type: ignore[call-overload]
        runner.meter.position = tuple(at.get("position") or (0, 0))
        runner.meter.steps = runner.replica.steps = int(at.get("steps") or 0)
        runner.meter.rows = int(at.get("rows") or 0)
        return
    epoch = int(manifest.meta["rows_done"]) // max(1, int(manifest.meta["total_rows"]))  # type: ignore[call-overload]
    runner.meter.position = (epoch, 0)
    runner.meter.steps = runner.replica.steps = manifest.step
    runner.meter.rows = epoch * runner.batches.num_rows
