"""What `fit` promises: accuracy, equality with plain training, row accounting, errors that tell.

What is learnt is asserted in virtual time, where it depends on nothing else that this machine does. Runs with real
processes show that it works between these too.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.data import Position, Sampler, open_source
from thinwire.errors import ConfigError, DataError, DivergedError, ProtocolError, WorkerError
from thinwire.models import cnn8, mlp
from thinwire.strategies.registry import STRATEGIES as REGISTERED

STRATEGIES = {
    "synchronous": tw.Synchronous(),
    "sparknet": tw.SparkNet(period=10),
    "sparknet-time": tw.SparkNet(period_s=0.02),
    "sparknet-warmup": tw.SparkNet(period=10, warmup=10),
    "mpca-1": tw.MPCA(fragments=1),
    "mpca-2": tw.MPCA(fragments=2),
    "mpca-3": tw.MPCA(),
    "mpca-gradient": tw.MPCA(form="gradient"),
    "mpca-unweighted": tw.MPCA(weigh_steps=False),
    "diloco": tw.DiLoCo(period=10),
    "diloco-streaming": tw.DiLoCo(period=12, fragments=3, overlap=True),
    "easgd": tw.EASGD(period=5),
    "easgd-one-server": tw.EASGD(period=5, servers=1, tuple_size=500),
    "eamsgd": tw.EASGD(period=5, momentum=0.9),
    "deepspark": tw.DeepSpark(period=5),
    "parameter-table": tw.ParameterTable(),
    "parameter-table-strict": tw.ParameterTable(consistency="strict"),
    "parameter-table-ahead": tw.ParameterTable(ahead=1, staleness=3),
    "parameter-table-compensated": tw.ParameterTable(compensation=0.04),
    "relay": tw.Relay(),
    "auto": tw.Auto(),
    "relay-fixed": tw.Relay(bits=2, fragments=4, momentum=0.3),
}


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.002)


def fit_digits(strategy: Any, workers: int, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": momentum_sgd,
        "strategy": strategy,
        "cluster": tw.Local(workers=workers),
        "epochs": 15,
        "batch_size": 32,
        "validation": 0.2,
        "progress": False,
    }
    return tw.fit(changes.pop("model", cnn8), changes.pop("data", "digits"), **(settings | changes))


FOUR = ("synchronous", "mpca-3", "easgd", "parameter-table", "relay")
"""Strategies that train four workers here, the others two."""
CASES = [(name, 4 if name in FOUR else 2) for name in STRATEGIES]
PLAIN = [
    (name, workers)
    for name, workers in CASES
    if name in (*FOUR, "sparknet", "diloco", "deepspark", "auto", "mpca-gradient")
]
"""One of each strategy: what their variants compute, conformance and golden trajectories hold."""
MORE = [(name, 2 if name in FOUR else 4) for name in ("synchronous", "sparknet", "mpca-3", "diloco", "easgd", "relay")]
REAL = ("sparknet", "relay", "easgd")
"""One that stops for its rounds, one that steps on meanwhile, one with servers."""


def long_unless(among: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that are not among the first are for `make test-all`."""
    return [pytest.param(*case, marks=[] if case in among else pytest.mark.long) for case in cases]


def virtual(workers: int, **given: Any) -> tw.Simulated:
    return tw.Simulated(workers=workers, **({"step_s": 0.02, "link": "100mbit", "spread": 0.2} | given))


def optimizer_for(name: str) -> Any:
    """What DiLoCo's outer momentum was published with; and without momentum where gradients come late.

    There the momentum is the strategy's, or that of the lateness (Mitliagkas et al. 2016).
    """
    if name.startswith("diloco"):
        return adamw
    late = name == "eamsgd" or (name.startswith("parameter-table") and "strict" not in name)
    return plain_sgd if late else momentum_sgd


def test_every_strategy_is_among_them() -> None:
    assert {type(strategy) for strategy in STRATEGIES.values()} == set(REGISTERED.values())
    assert {STRATEGIES[name].timing for name in REAL} == {strategy.timing for strategy in STRATEGIES.values()}


@pytest.mark.parametrize(("name", "workers"), long_unless(PLAIN, CASES + MORE))
def test_every_strategy_learns_digits(name: str, workers: int) -> None:
    result = fit_digits(
        STRATEGIES[name],
        workers,
        cluster=virtual(workers),
        epochs=40,
        until="val_accuracy >= 0.965",
        optimizer=optimizer_for(name),
    )
    assert max(row["val_accuracy"] for row in result.history) >= 0.95
    assert result.summary["rounds"] > 0
    assert result.summary["bytes_sent"] > 0
    assert result.summary["refused"] == 0
    assert result.summary["workers_lost"] == 0


@pytest.mark.parametrize(("name", "workers"), long_unless([(name, 2) for name in REAL], [*CASES, *MORE]))
def test_every_strategy_trains_on_real_processes(name: str, workers: int) -> None:
    result = fit_digits(STRATEGIES[name], workers, epochs=3, optimizer=optimizer_for(name))
    assert result.summary["complete"]
    assert result.summary["rows"] == 3 * 1438
    assert result.summary["rounds"] > 0
    assert result.summary["bytes_sent"] > 0
    assert result.summary["refused"] == 0
    assert result.summary["workers_lost"] == 0
    assert 0 < result.summary["evaluated_s"] < result.summary["train_seconds"]
    assert math.isfinite(result.summary["val_loss"])


ONE = tw.Local(workers=1, threads=1)


def plain_training(rows: int, epochs: int, seed: int) -> dict[str, torch.Tensor]:
    """The loop a user would write, on the rows and in the order that one worker sees them."""
    source = open_source("digits")
    batch = next(iter(source.batches()))
    pixels = torch.tensor(np.stack(batch.column("pixels").to_numpy_ndarray()), dtype=torch.float32)
    label = torch.tensor(batch.column("label").to_numpy())
    threads = torch.get_num_threads()
    torch.set_num_threads(ONE.threads_each)
    torch.manual_seed(seed)
    model = cnn8()
    optimizer = momentum_sgd(model.parameters())
    order = shard_order(rows, seed)
    pixels, label = pixels[order], label[order]
    sampler = Sampler(rows, 32, seed, 0)
    for epoch in range(epochs):
        for number in range(sampler.batches_per_epoch):
            chosen = torch.from_numpy(sampler.rows(Position(epoch, number)))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels[chosen]), label[chosen]).backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def shard_order(rows: int, seed: int) -> torch.Tensor:
    """Which row of the source lies where in the only worker's shard."""
    import tempfile

    from thinwire.data import Shard, split

    source = open_source({"row": np.arange(rows)})
    with tempfile.TemporaryDirectory() as folder:
        (files,) = split(source, workers=1, directory=folder, seed=seed)
        taken = Shard.open(files.train).take(np.arange(rows))["row"]
        assert isinstance(taken, torch.Tensor)
        return taken.clone()


@pytest.mark.parametrize("name", ["synchronous", "sparknet", "mpca-3", "diloco", "relay"])
def test_one_worker_equals_plain_training_bit_for_bit_and_exchanges_nothing(name: str) -> None:
    result = fit_digits(STRATEGIES[name], 1, cluster=ONE, epochs=2, validation=None, seed=3)
    expected = plain_training(1797, 2, 3)
    for key, value in result.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert result.summary["bytes_sent"] == 0
    assert result.summary["rounds"] == 0


class NotesIds:
    """A transform that writes down which rows it was given."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        if len(columns["id"]) > 1 and len(set(columns["id"].tolist())) == 1:
            return columns  # copies of the first row, which the driver tries before a worker starts
        with open(f"{self.folder}/{os.getpid()}", "a") as file:
            file.write("".join(f"{int(i)}\n" for i in columns["id"]))
        return columns


@pytest.mark.parametrize(
    ("workers", "cluster"),
    [
        (1, "virtual"),
        (3, "virtual"),
        (3, "processes"),
        pytest.param(1, "processes", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("strategy", [tw.SparkNet(period=3), tw.Relay(), tw.Synchronous()], ids=repr)
def test_every_row_is_seen_exactly_once_an_epoch(
    tmp_path: Path, workers: int, cluster: str, strategy: tw.Strategy
) -> None:
    rows, epochs = 101, 3
    generator = np.random.default_rng(0)
    data = {
        "id": np.arange(rows),
        "pixels": generator.standard_normal((rows, 64)).astype("f4"),
        "label": generator.integers(0, 10, rows),
    }
    result = fit_digits(
        strategy,
        workers,
        model=mlp,
        cluster=virtual(workers) if cluster == "virtual" else tw.Local(workers=workers),
        data=data,
        epochs=epochs,
        batch_size=8,
        validation=None,
        transform=NotesIds(str(tmp_path)),
    )
    seen = Counter(int(line) for file in tmp_path.iterdir() for line in file.read_text().split())
    assert result.summary["rows"] == rows * epochs
    # recalibration and prefetching read rows ahead without training on them: none less than once an epoch
    assert set(seen) == set(range(rows))
    assert min(seen.values()) >= epochs
    if isinstance(strategy, tw.SparkNet | tw.Synchronous):
        assert set(seen.values()) == {epochs}


def test_several_inputs_weights_and_a_loss_of_ones_own() -> None:
    generator = np.random.default_rng(1)
    x, z = generator.standard_normal((2, 400, 3)).astype("f4")
    y = (x @ [1.0, -2.0, 0.5] + 0.3 * z[:, 0]).astype("f4")
    weight = np.ones(400, "f4")
    y[:50] += 100.0  # wrong labels, which their weight of zero must keep out
    weight[:50] = 0.0

    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.left(a) + self.right(b)

    def squared(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - label).square()

    result = tw.fit(
        TwoInputs,
        {"x": x, "z": z, "y": y, "w": weight},
        inputs=["x", "z"],
        label="y",
        weight="w",
        loss=squared,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
        strategy=tw.SparkNet(period=5),
        cluster=virtual(2),
        epochs=30,
        batch_size=16,
        validation=0.1,
        progress=False,
    )
    assert result.summary["val_loss"] < 0.01
    assert torch.allclose(result.model.left.weight.detach()[0], torch.tensor([1.0, -2.0, 0.5]), atol=0.05)


def test_early_stopping_gives_the_best_model_back() -> None:
    seen: list[events.Evaluated] = []
    result = fit_digits(
        tw.SparkNet(period=5),
        2,
        model=mlp,
        cluster=virtual(2),
        epochs=200,
        stop=tw.EarlyStopping(patience=3, metric="val_accuracy"),
        callbacks=[lambda e: seen.append(e) if isinstance(e, events.Evaluated) else None],
    )
    assert result.summary["epochs"] < 200
    assert "has not improved" in result.summary["reason"]
    best = max(e.metrics["val_accuracy"] for e in seen)
    source = open_source("digits")
    batch = next(iter(source.batches()))
    pixels = torch.tensor(np.stack(batch.column("pixels").to_numpy_ndarray()), dtype=torch.float32)
    with torch.no_grad():
        accuracy = (result.model(pixels).argmax(1).numpy() == batch.column("label").to_numpy()).mean()
    assert accuracy > best - 0.05


def test_a_target_ends_the_run() -> None:
    result = fit_digits(tw.Relay(), 2, cluster=virtual(2), epochs=300, until="val_accuracy >= 0.9")
    assert result.summary["reason"] == "target reached: val_accuracy >= 0.9"
    assert result.summary["epochs"] < 300


def test_a_callback_can_end_the_run() -> None:
    enough = lambda e: isinstance(e, events.Evaluated) and e.number >= 2  # noqa: E731
    result = fit_digits(tw.Relay(), 2, cluster=virtual(2), epochs=500, callbacks=[enough])
    assert result.summary["epochs"] < 500


def test_a_loss_that_is_not_finite_is_left_out_or_names_worker_and_step_and_keeps_the_checkpoint(
    tmp_path: Path,
) -> None:
    def poisoned(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, label)
        poisoned.calls = getattr(poisoned, "calls", 0) + 1  # type: ignore[attr-defined]
        return loss * float("nan") if poisoned.calls == poisoned.at else loss  # type: ignore[attr-defined]

    def poison_soon(event: events.Event) -> None:
        if isinstance(event, events.CheckpointSaved):
            poisoned.at = poisoned.calls + 5  # type: ignore[attr-defined]

    poisoned.at = -1  # type: ignore[attr-defined]
    threads: Any = {"cluster": tw.Local(workers=2, processes=False), "metrics": ()}
    with pytest.raises(DivergedError, match=r"worker \d on .*loss became nan at step \d+.*last good checkpoint is"):
        fit_digits(
            tw.SparkNet(period=5), 2, epochs=50, loss=poisoned, out=str(tmp_path), checkpoint_every=5,
            on_nonfinite="stop", callbacks=[poison_soon], **threads,
        )  # fmt: skip
    again = fit_digits(tw.SparkNet(period=5), 2, epochs=2, resume=str(tmp_path), **threads)
    assert math.isfinite(again.summary["val_loss"])
    told: list[Any] = []
    poisoned.calls, poisoned.at = 0, 40  # type: ignore[attr-defined] - each worker process counts from here
    result = fit_digits(tw.SparkNet(period=5), 2, epochs=4, loss=poisoned, metrics=(), callbacks=[told.append])
    assert result.summary["complete"]
    assert all(value.isfinite().all() for value in result.model.state_dict().values())
    flaws = [event for event in told if isinstance(event, events.NonFinite)]
    assert sorted((event.worker, event.what, event.times) for event in flaws) == [(0, "loss", 1), (1, "loss", 1)]
    assert {event.host for event in flaws} == {socket.gethostname()}


def test_a_workers_traceback_reaches_the_caller_whole() -> None:
    class Faulty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("the seventh seal")

    with pytest.raises(WorkerError) as caught:
        fit_digits(tw.Relay(), 2, model=Faulty)
    text = str(caught.value)
    assert "the seventh seal" in text
    assert "in forward" in text
    assert "Traceback (most recent call last)" in text


def test_a_factory_that_fails_is_reported_too() -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no weights here")

    with pytest.raises(WorkerError, match="no weights here"):
        fit_digits(tw.Relay(), 2, model=broken)


def test_a_run_leaves_events_a_summary_and_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = fit_digits(tw.Relay(), 2, epochs=2, out=str(out))
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    kinds = Counter(line["kind"] for line in lines)
    assert kinds["worker_joined"] == 2
    assert kinds["generation_formed"] == 1
    assert kinds["epoch_ended"] == 4
    assert kinds["run_ended"] == kinds["run_started"] == 1
    assert sum(line["rows"] for line in lines if line["kind"] == "epoch_ended") == result.summary["rows"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary == result.summary
    needed = "strategy workers steps rows epochs seconds train_loss val_loss val_accuracy busy bytes_sent rounds"
    assert set(f"{needed} generations workers_lost".split()) <= set(summary)
    assert (out / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"loss": "cross_entrpy"}, ConfigError, "Did you mean 'cross_entropy'"),
        ({"strategy": "rely"}, ConfigError, "Did you mean 'relay'"),
        ({"metrics": ["acuracy"]}, ConfigError, "Did you mean 'accuracy'"),
        ({"inputs": ["pixel"]}, DataError, "Did you mean 'pixels'"),
        ({"batch_size": 0}, ConfigError, "batch_size = 0"),
        ({"validation": 1.5}, ConfigError, "1.5"),
        ({"codec": "int3"}, ConfigError, "int"),
        ({"data": "digitz"}, DataError, "Did you mean 'digits'"),
        ({"until": "better"}, ConfigError, "val_accuracy >= 0.97"),
    ],
)
def test_what_is_not_understood_is_refused_before_anything_starts(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        fit_digits(changes.pop("strategy", tw.Relay()), 2, **changes)


def test_bf16_autocast_clipping_and_a_scheduler_work_together() -> None:
    result = fit_digits(
        tw.Relay(),
        2,
        cluster=virtual(2),
        precision="bfloat16",
        clip_norm=1.0,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 15),
    )
    assert result.summary["val_accuracy"] >= 0.93


class OfAnotherVersion:
    """A network that makes whoever unpickles it, which only a worker does, speak another protocol."""

    def __call__(self) -> nn.Module:
        return mlp()

    def __reduce__(self) -> Any:
        return _as_another_version, ()


def _as_another_version() -> Any:
    from thinwire.protocol import handshake as greeting

    greeting.PROTOCOL, greeting.__version__ = 99, "9.9.9"
    return mlp


def test_a_worker_process_of_another_protocol_ends_the_run_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"worker \d on .* runs thinwire 9\.9\.9, whose protocol is 99; the driver"):
        tw.fit(OfAnotherVersion(), "digits", inputs=["pixels"], epochs=1, progress=False)


def test_a_result_is_shown_in_one_line() -> None:
    found = tw.fit("mlp", "digits", steps=5, validation=0.2, cluster=tw.Simulated(workers=2), progress=False)
    shown = repr(found)
    assert "\n" not in shown
    assert len(shown) < 200
    assert shown.startswith("Result(")
    assert f"val_accuracy={found.summary['val_accuracy']:.4g}" in shown
    assert f"{sum(p.numel() for p in found.model.parameters()):,} parameters" in shown
    assert "steps=5" in shown
    assert "not complete" not in shown
