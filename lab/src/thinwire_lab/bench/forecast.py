"""`thinwire bench forecast`: a simulated cluster's predictions against measurements on an emulated network.

Workers with steps of a fixed time exchange a vector on four nodes of the testbed. The same loop, strategies and
exchange run in virtual time. The processor time for packing, encrypting and adding is measured once, without a network.
Plain sockets, independent of thinwire, measure the rate of the network when all nodes send at once.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from thinwire.checkpoint import decode, encode
from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.cluster.simulated.links import SimulatedHub, SimulatedWire
from thinwire.cluster.simulated.network import Network
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.handshake import hello
from thinwire.rules.period import Link
from thinwire.strategies import strategy
from thinwire_lab.bench.paced import ROWS, PacedReplica, paced
from thinwire_lab.bench.processes import Processes
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.bench.worker_process import NoReplacements
from thinwire_lab.testbed import Testbed

WORKERS, SIZE = 4, 2_500_000
TARGET, LATENCY_S = 0.15, 2e-4


@dataclass(frozen=True)
class _Case:
    name: str
    knobs: dict[str, Any]
    step_s: float
    rate: str
    steps: int
    warm_up: int = 8


CASES = (
    _Case("synchronous", {}, 0.2, "1gbit", 30),
    _Case("sparknet", {"period": 5}, 0.2, "1gbit", 40, 10),
    _Case("mpca", {"pull": 0.0, "pull_peak": 0.0}, 0.2, "1gbit", 40, 10),
    _Case("synchronous", {}, 0.2, "100mbit", 12),
    _Case("sparknet", {"period": 10}, 0.2, "100mbit", 40, 10),
    _Case("mpca", {"pull": 0.0, "pull_peak": 0.0}, 0.2, "100mbit", 50, 10),
)


def forecast(quick: bool, say: Say) -> Report:
    """Time per round and share of time spent stepping, predicted and measured."""
    why_not = Testbed.why_not()
    if why_not is not None:
        return Report("forecast", [], {}, [f"all of it: {why_not}"])
    say("what the processors take, without a network")
    handling = _handling()
    rates: dict[str, float] = {}
    rows: list[Row] = []
    measured: dict[str, Any] = {"size": SIZE, "workers": WORKERS, "handling_bytes_per_s": handling, "cases": []}
    for case in CASES[:3] if quick else CASES:
        say(f"{case.name} at {case.rate}")
        options = {"size": SIZE, "name": case.name, "knobs": case.knobs, "codec": "float32", "step_s": case.step_s}
        options |= {"warm_up": case.warm_up, "steps": case.steps}
        with Testbed(WORKERS + 1, case.rate) as bed:
            if case.rate not in rates:
                rates[case.rate] = _carried(bed)
            real = _mean(Processes(bed, workers=WORKERS).run("paced_steps", options | {"exchanging": True}), case)
        said = _mean(simulated(case, handling, rates[case.rate]), case)
        measured["cases"].append({"case": vars(case), "measured": real, "predicted": said})
        for key, title in (("round_s", "time per round"), ("busy", "share spent stepping")):
            off = abs(said[key] - real[key]) / real[key]
            detail = f"predicted {said[key]:.3f}, measured {real[key]:.3f}"
            rows.append(Row(f"{title}, off by", f"{case.name} at {case.rate}", off, TARGET, detail, at_most=True))
    measured["carried_bytes_per_s"] = rates
    return Report("forecast", rows, measured)


def _mean(found: list[dict[str, Any]], case: _Case) -> dict[str, float]:
    return {
        "round_s": statistics.mean(one["round_s"] for one in found),
        "busy": min(1.0, statistics.mean(one["steps_per_s"] for one in found) * case.step_s),
    }


def _handling() -> float:
    """Bytes a second of each worker's exchange if only processors limit it."""
    options = {"size": SIZE, "codec": "float32", "blocks": 1, "block": 8, "gloo": False, "interface": "lo"}
    results = Processes(None, workers=WORKERS).run("exchange_seconds", options)
    seconds: float = statistics.median(max(times) for times in zip(*(r["ours"] for r in results), strict=True))
    return 2 * 2 * 4 * SIZE * (WORKERS - 1) / WORKERS / seconds  # sent and received, in both halves of an exchange


def _carried(bed: Testbed) -> float:
    """Bytes a second of each node in each direction when all send to all, as in each half of an exchange."""
    size = 4 * SIZE * (WORKERS - 1) // WORKERS
    hosts = [bed.address(node) for node in range(WORKERS)]
    results = Processes(bed, workers=WORKERS).run("all_to_all", {"size_bytes": size, "hosts": hosts})
    seconds: float = statistics.median(max(times) for times in zip(*(r["seconds"] for r in results), strict=True))
    return size / seconds


def simulated(case: _Case, handling: float, bytes_per_s: float) -> list[dict[str, Any]]:
    """The same workers in virtual time, on a link with this rate."""
    time = VirtualTime()
    link = Link(LATENCY_S, bytes_per_s)
    wire = SimulatedWire(time, Network(time, link, WORKERS + 1), WORKERS, handling)
    found: list[dict[str, Any]] = []

    def work(worker: int) -> None:
        chosen = strategy(case.name, case.knobs)
        replica = PacedReplica(SIZE, case.step_s, worker, pause=time)
        joint = JointState(chosen, replica.vector.detach().clone(), WORKERS)
        seat = Identity(worker, 0, hello() | {"rows": ROWS})
        trees = TreeCodec(encode, decode)
        peer = Peer(wire.link(worker, 0), seat, joint, codec_name="float32", trees=trees, time=time)
        found.append(paced(peer, replica, joint, worker, "float32", warm_up=case.warm_up, steps=case.steps))

    for worker in range(WORKERS):
        time.fiber(lambda w=worker: work(w), f"worker-{worker}", worker).start()  # type: ignore[misc]
    policy = Policy(workers=WORKERS, deadlines=Deadlines(silence_s=60.0))
    Coordinator(SimulatedHub(wire), NoReplacements(), policy, emit=lambda event: None, time=time).run()
    time.stop()
    return found
