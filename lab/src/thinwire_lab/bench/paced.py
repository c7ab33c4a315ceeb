"""Steps kept: a worker whose gradients take a fixed time, as on an accelerator, with or without an exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast, final

import torch
from torch import Tensor, nn

from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Peer
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.strategies import Strategy, strategy
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Replica
from thinwire.worker.worker import Worker
from thinwire_lab.bench.worker_process import Place, join

ROWS = 64
SETTLED_CYCLE = 1000
"""An exchange cycle at which every schedule has reached its end."""


class _Batch(NamedTuple):
    num_rows: int
    position: tuple[int, int]
    weight: None = None


@final
class _Batches:
    """Batches without content; see `thinwire.worker.ports.Batches`."""

    num_rows = ROWS * 1_000_000
    batches_per_epoch = 1_000_000

    def training(self, start: tuple[int, int], epochs: int | None) -> Iterator[_Batch]:
        epoch, batch = start
        while True:
            yield _Batch(ROWS, (epoch, batch))
            batch += 1

    def validation(self) -> Iterator[_Batch]:
        return iter(())


class _Flat(nn.Module):
    """A model that consists only of its parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Pause(Protocol):
    """How the time of a step passes."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealPause:
    """Real time."""

    now = staticmethod(time.perf_counter)

    def sleep(self, seconds: float) -> None:
        deadline = self.now() + seconds
        while (left := deadline - self.now()) > 0:
            time.sleep(left)


@final
class PacedReplica:
    """A replica of `size` parameters on the CPU whose gradient is a wait; otherwise a `TorchReplica`.

    With `alone` it also does the strategy's arithmetic of a step (MPCA's pull), which a loop without exchange would not
    do, so that the comparison excludes this arithmetic.
    """

    def __init__(
        self, size: int, step_s: float, worker: int, alone: Strategy | None = None, pause: Pause | None = None
    ) -> None:
        spec = TrainSpec(loss="mse", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device="cpu")
        self._replica = TorchReplica(lambda: _Flat(size), spec, worker)
        self._step_s, self._worker, self._alone = step_s, worker, alone
        self._pause: Pause = pause or RealPause()
        self._state = alone.open(self.vector)[1] if alone else None
        self.steps = 0
        self.ends: list[float] = []
        self.seen: list[int] = []
        """Rounds that had landed by the end of each step."""
        self.look: Callable[[], int] = int

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    @property
    def vector(self) -> Tensor:
        return self._replica.vector

    def gradient(self, batch: Any) -> float:
        """Waits for the nominal time of a step, with nothing else of the loop inside that time."""
        if self._alone is not None:
            with torch.no_grad():
                self._alone.before_step(self._state, self.vector, SETTLED_CYCLE)
        self._pause.sleep(self._step_s)
        return 0.0

    def update(self) -> None:
        """Counts the step. The first step makes the replicas differ, so that there is something to exchange."""
        if self.steps == 0:
            made = torch.Generator().manual_seed(self._worker)
            with torch.no_grad():
                self.vector.add_(torch.randn(self.vector.numel(), generator=made), alpha=1e-3)
        self.steps += 1
        self.ends.append(self._pause.now())
        self.seen.append(self.look())


def paced_steps(
    place: Place,
    *,
    size: int,
    name: str,
    knobs: dict[str, Any],
    codec: str,
    step_s: float,
    warm_up: int,
    steps: int,
    exchanging: bool,
) -> dict[str, Any]:
    """Steps per second of one worker in the real worker loop, after `warm_up` steps."""
    chosen = strategy(name, knobs)
    replica = PacedReplica(size, step_s, place.worker, None if exchanging else chosen)
    joint = JointState(chosen, replica.vector.detach().clone(), place.workers)
    return paced(join(place, joint, codec, ROWS), replica, joint, place.worker, codec, warm_up=warm_up, steps=steps)


def paced(
    peer: Peer, replica: PacedReplica, joint: JointState, number: int, codec: str, *, warm_up: int, steps: int
) -> dict[str, Any]:
    """Results of one worker after `warm_up` steps, with the link and the time of its peer."""
    plan = WorkerPlan(worker=number, attempt=0, epochs=None, steps=warm_up + steps, evaluates=False, codec=codec)
    replica.look = lambda: joint.landed
    worker = Worker(plan, cast(Replica, replica), _Batches(), peer, joint, None)
    worker.run()
    peer.close()
    measured, rounds = replica.ends[warm_up - 1 :], replica.seen[warm_up - 1 :]
    seconds = measured[-1] - measured[0]
    return {
        "steps_per_s": (len(measured) - 1) / seconds,
        "round_s": seconds / max(1, rounds[-1] - rounds[0]),
        "rounds": joint.landed,
        "fragments": joint.cuts.newest.setting.fragments,
        "codec": joint.cuts.newest.setting.codec or codec,
        "bytes": peer.bytes_sent,
        "link_bytes_per_s": worker._tuner.bytes_per_s,
    }
