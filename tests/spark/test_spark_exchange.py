"""`exchange="spark"`: training over Spark's own jobs alone, on a cluster with a second slot on every executor."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.security.surroundings import Port, family, listening
from thinwire import events
from thinwire.cluster import preflight
from thinwire.errors import ConfigError
from thinwire.exchange.spark import link, post
from thinwire.exchange.spark.link import SparkWire, _executor
from thinwire.exchange.spark.places import Places
from thinwire.exchange.spark.slots import _lying_on, machines
from thinwire.models import mlp

from .conftest import LONGEST_S, PATIENT, Clusters, executor_of, one_executor_filled

pytestmark = pytest.mark.timeout(1800)
EPOCHS, BATCH = 2, 32


class Slow(nn.Module):
    """Steps that take as long as a network's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.03)
        return self.layer(x)


class Overflowing(torch.optim.SGD):
    """Worker 1's fifth step overflows: its generator has a seed of its own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.steps += 1
        if self.steps == 5 and torch.initial_seed() == 1_000_004:
            with torch.no_grad():
                next(iter(self.param_groups[0]["params"])).view(-1)[0] = float("inf")
        return found


def overflowing(parameters: Any) -> torch.optim.Optimizer:
    return Overflowing(parameters, lr=0.05)


class Books:
    """What a run's own ends have come to: broadcasts, and rounds that were settled on their machine."""

    def __init__(self) -> None:
        self.posts: list[post.Post] = []
        self.shared: list[post.Shared] = []

    @property
    def settled(self) -> int:
        return sum(each.settled for each in self.posts)

    @property
    def broadcasts(self) -> int:
        return sum(each.broadcasts for each in self.posts)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    """Everything of these kinds that is made from here on."""
    found = Books()
    for kind, made in ((post.Post, found.posts), (post.Shared, found.shared)):
        monkeypatch.setattr(kind, "__init__", _kept(kind.__init__, made))
    return found


def _kept(begin: Any, made: list[Any]) -> Any:
    def keep(self: Any, *given: Any) -> None:
        made.append(self)
        begin(self, *given)

    return keep


@pytest.fixture(scope="module")
def frame(clusters: Clusters, pairs: Any) -> Any:
    return clusters.digits().select("pixels", "label")


def fit(strategy: tw.Strategy, *, model: Any = mlp, data: Any = "digits", **changes: Any) -> tw.Result:
    """A run; from the name of a set, the driver deals out the same rows each time."""
    given: dict[str, Any] = {"inputs": ["pixels"], "cluster": tw.Spark(workers=2, preflight=False)}
    given |= {"exchange": "spark", "epochs": EPOCHS, "batch_size": BATCH, "validation": 0.2, "deadlines": PATIENT}
    given |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "progress": False}
    return tw.fit(model, data, strategy=strategy, **(given | changes))


def apart(one: tw.Result, other: tw.Result) -> float:
    """The largest difference between the parameters of two runs."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.fixture(scope="module")
def mesh(pairs: Any) -> tw.Result:
    """What SparkNet comes to over a mesh."""
    return fit(tw.SparkNet(period=10), exchange="mesh")


def cached(session: Any) -> int:
    """How many RDDs and DataFrames have rows in Spark's storage."""
    return len(session.sparkContext._jsc.sc().getRDDStorageInfo())


def test_sparknet_comes_to_what_it_comes_to_on_a_mesh_and_only_spark_s_own_ports_listen(
    pairs: Any, mesh: tw.Result, books: Books
) -> None:
    """Ports are from the sockets of every process below this one, while rounds are landing."""
    before, ports = set(listening()), set[Port]()
    commands: dict[int, str] = {}

    def look(event: events.Event) -> None:
        if isinstance(event, events.RoundLanded) and not commands:
            commands.update(family())
            ports.update(listening())

    ours = fit(tw.SparkNet(period=10), cluster=tw.Spark(workers=2), callbacks=[look])
    assert ours.summary["complete"]
    assert ours.summary["rounds"] > 0
    assert ours.summary["refused"] == 0
    assert apart(ours, mesh) < 1e-4, "the same rows, steps and means, summed in another order"
    assert any("java" in commands.get(port.pid, "") for port in ports), "Spark's own are seen"
    for port in ports - before:
        command = commands.get(port.pid, "")
        assert "java" in command.split("\0")[0] or "pyspark.daemon" in command, f"{port} listens: {command}"


def test_a_contribution_that_is_not_finite_is_left_out_and_told(frame: Any) -> None:
    flaws: list[events.NonFinite] = []
    keep = lambda event: flaws.append(event) if isinstance(event, events.NonFinite) else None  # noqa: E731
    run = fit(tw.SparkNet(period=5), data=frame, epochs=1, optimizer=overflowing, callbacks=[keep])
    assert run.summary["complete"]
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
    assert {flaw.worker for flaw in flaws} == {1}
    assert {"contribution", "parameters"} <= {flaw.what for flaw in flaws}
    assert run.summary["nonfinite"] == sum(flaw.times for flaw in flaws)


@pytest.mark.long
def test_mpca_trains_with_its_fragments_in_flight(frame: Any) -> None:
    summary = fit(tw.MPCA(), model=Slow, data=frame, epochs=4).summary
    assert summary["complete"]
    assert summary["rounds"] > 0
    assert summary["steps"] > summary["rounds"], "a round is due after every step: others were made meanwhile"


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        pytest.param(tw.Relay(quorum=1.0), None, id="relay"),
        pytest.param(tw.Relay(bits=1, quorum=1.0), "sign1", id="relay in one bit", marks=pytest.mark.long),
        pytest.param(tw.SparkNet(period=5), "sign2", id="sparknet in two bits", marks=pytest.mark.long),
    ],
)
def test_contributions_are_packed_as_strategy_or_run_say(frame: Any, strategy: tw.Strategy, codec: str | None) -> None:
    log: list[events.Event] = []
    given = {"codec": codec} if isinstance(strategy, tw.SparkNet) else {}
    summary = fit(strategy, model=Slow, data=frame, callbacks=[log.append], **given).summary
    assert summary["complete"]
    assert summary["rounds"] > 0
    used = {e.codec for e in log if isinstance(e, events.RoundLanded)}
    assert "float32" not in used
    assert codec is None or used == {codec}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"direct_bytes": 0}, id="by a shuffle", marks=pytest.mark.long),
        pytest.param({"apart": True}, id="each visited"),
    ],
)
def test_contributions_are_summed_wherever_they_lie(
    pairs: Any, mesh: tw.Result, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Large ones are read by a job; executors on machines of their own are visited each."""
    monkeypatch.setattr(link, "SparkWire", functools.partial(link.SparkWire, **how))
    found = fit(tw.SparkNet(period=10))
    assert found.summary["complete"]
    assert found.summary["rounds"] == mesh.summary["rounds"]
    assert apart(found, mesh) < 1e-4


def test_many_rounds_leave_nothing_behind(frame: Any, pairs: Any, books: Books) -> None:
    """No file of a broadcast on the driver, and no cached rows but the caller's own."""
    folder = pairs.sparkContext._temp_dir
    before = set(os.listdir(folder))
    summary = fit(tw.SparkNet(period=1), data=frame, evaluate_every=200).summary
    assert summary["rounds"] >= 40
    assert books.settled > 40, "all members are on one machine: rounds are settled there"
    assert all(each._left == 0 for each in books.shared), "broadcasts are destroyed once all have them"
    assert cached(pairs) <= 1, "the digits' own"
    deadline = time.monotonic() + LONGEST_S
    while set(os.listdir(folder)) - before:
        assert time.monotonic() < deadline, "Spark takes a broadcast's file away on a thread of its own"
        time.sleep(0.2)


def test_broadcasts_are_destroyed_once_all_have_them(pairs: Any, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SparkWire", functools.partial(link.SparkWire, apart=True))
    fit(tw.SparkNet(period=10), epochs=1)
    assert books.broadcasts > 0
    assert books.shared
    assert all(each._left == 0 for each in books.shared)


def boxes_of(run: str) -> list[Path]:
    """The boxes of a run's agents, on all executors of this machine."""
    return list(Path(tempfile.gettempdir()).glob(f"thinwire-{os.getuid()}-{run}*/*.box"))


def test_agents_that_fill_an_executor_are_started_again_where_they_can_be_visited(
    pairs: Any, books: Books, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another job holds all slots of one executor while the run starts, so that both agents get the other's."""
    monkeypatch.setattr(link, "SparkWire", functools.partial(link.SparkWire, apart=True))
    log: list[events.Event] = []
    with one_executor_filled(pairs, tmp_path) as over:

        def go_on() -> None:
            while not over.exists():
                if books.posts and len(boxes_of(books.posts[0]._wire.run)) == 2:
                    over.touch()
                time.sleep(0.1)

        watching = threading.Thread(target=go_on, daemon=True)
        watching.start()
        summary = fit(tw.SparkNet(period=10), epochs=1, batch_size=128, callbacks=[log.append]).summary
    watching.join()
    assert summary["complete"]
    assert summary["workers_lost"] == 0, "none had joined before"
    told = [event for event in log if isinstance(event, events.SlotAwaited)]
    assert any(event.moved is not None for event in told)
    assert all(event.slots == 2 for event in told)


def test_a_task_is_sent_to_the_executor_whose_slot_it_is_to_hold(pairs: Any) -> None:
    there = machines(pairs.sparkContext, apart=True)
    assert [machine.slots for machine in there] == [2, 2]
    found = []
    for machine in there:
        row = _lying_on(pairs.sparkContext, machine)
        found.append({executor for _ in range(3) for executor in row.mapPartitions(lambda _: [_executor()]).collect()})
    assert [len(executors) for executors in found] == [1, 1]
    assert found[0] != found[1]


def test_a_cluster_without_slots_for_visits_is_refused_with_its_executors(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By preflight before the run, and without preflight in a run of which nobody could be heard."""
    wanted = r"3 workers are asked for .* room for 2: (?s:.)*executor \d+ on [\d.]+: 2 slots;(?s:.)*at most 2 workers"
    monkeypatch.setattr(link, "SparkWire", functools.partial(link.SparkWire, apart=True))
    with pytest.raises(ConfigError, match=wanted):
        fit(tw.SparkNet(period=10), cluster=tw.Spark(workers=3, preflight=False))
    found = preflight.examine(pairs, 4, "127.0.0.1", ports=False)
    assert any(re.search(r"executors \d+, \d+ on [\d.]+: 4 slots\)", problem) for problem in found.problems)
    assert not any(
        "exchange='spark'" in each for each in preflight.examine(pairs, 3, "127.0.0.1", ports=False).problems
    )


class Held(SparkWire):
    """A wire whose second place is found when a file is there."""

    @property
    def place(self) -> str:
        from pyspark import TaskContext

        context = TaskContext.get()
        while context is not None and context.partitionId() == 1 and not os.path.exists(self.token):
            time.sleep(0.1)
        return self.run


@pytest.fixture
def boxes() -> Iterator[SparkWire]:
    """A run's wire, with the box of an agent on this machine."""
    wire = SparkWire(secrets.token_hex(6), "token")
    agent = wire.link(0, 0)
    yield wire
    agent.close()


def test_a_machine_that_is_left_leaves_no_cached_rows(pairs: Any, boxes: SparkWire) -> None:
    before = cached(pairs)
    places = Places(pairs.sparkContext, boxes)
    places.look()
    assert cached(pairs) == before + 1, "the rows by which the machine is found"
    for machine in places.machines():
        places.leave(machine)
    assert cached(pairs) == before
    places.look()
    places.close()
    assert cached(pairs) == before


@pytest.mark.parametrize("end", ["cancelled", "closed"])
def test_a_look_that_a_run_s_end_interrupts_leaves_no_cached_rows(
    pairs: Any, boxes: SparkWire, tmp_path: Path, end: str
) -> None:
    """Its job is cancelled, or goes on for longer than the run's end waits for it."""
    context, before, go_on = pairs.sparkContext, cached(pairs), tmp_path / "go on"
    places = Places(context, Held(boxes.run, str(go_on)))

    def look() -> None:
        context.addJobTag("held")
        with contextlib.suppress(Exception):
            places.look()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        deadline = time.monotonic() + LONGEST_S
        while cached(pairs) == before:
            assert time.monotonic() < deadline, "the look's job never began"
            time.sleep(0.1)
        if end == "cancelled":
            context.cancelJobsWithTag("held")
            looking.join()
        places.close()
    finally:
        go_on.touch()
        looking.join()
    assert cached(pairs) == before


def test_an_executor_that_dies_takes_its_agent_with_it_and_the_run_goes_on(frame: Any) -> None:
    pids: dict[int, int] = {}
    killed: list[int] = []

    def kill(event: events.Event) -> None:
        if isinstance(event, events.WorkerJoined):
            pids[event.worker] = event.pid
        if isinstance(event, events.RoundLanded) and event.round >= 2 and not killed:
            killed.append(executor_of(pids[0]))
            os.kill(killed[0], signal.SIGKILL)

    summary = fit(tw.SparkNet(period=10), data=frame, epochs=4, callbacks=[kill]).summary
    assert killed
    assert summary["complete"]
    assert summary["workers_lost"] >= 1


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(tw.EASGD(), "exchange='table'"), (tw.Relay(quorum=0.5), "quorum=1")],
    ids=["easgd", "quorum"],
)
def test_what_it_cannot_carry_is_refused_with_the_reason(pairs: Any, strategy: tw.Strategy, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fit(strategy)
    assert reason in str(refused.value)


def test_on_this_machine_alone_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tw\.Spark"):
        tw.fit("mlp", "digits", inputs=["pixels"], strategy=tw.SparkNet(), exchange="spark")
