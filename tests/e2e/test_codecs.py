"""Every codec under the real engine: what is sent in few bits is learnt from, in virtual time and between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.exchange.cuts import Cut, Cuts
from thinwire.rules.compression import CODECS
from thinwire.strategies import Setting

STRATEGIES: dict[str, Any] = {
    "sparknet": tw.SparkNet(period=5),
    "diloco": tw.DiLoCo(period=5, fragments=2, overlap=True, lr=0.7, momentum=0.3),
    "mpca": tw.MPCA(),
}


def fit(strategy: tw.Strategy, cluster: Any, **given: Any) -> tuple[tw.Result, set[str]]:
    """The result, and the codecs of its rounds."""
    used: set[str] = set()

    def see(event: events.Event) -> None:
        if isinstance(event, events.RoundLanded):
            used.add(event.codec)

    asked: dict[str, Any] = {"inputs": ["pixels"], "epochs": 8, "batch_size": 16, "validation": 0.2, "progress": False}
    asked |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "callbacks": [see], "seed": 1}
    return tw.fit("mlp", "digits", strategy=strategy, cluster=cluster, **(asked | given)), used


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        pytest.param(name, codec, marks=[] if codec == "sign2" or name == "sparknet" else pytest.mark.long)
        for name in STRATEGIES
        for codec in ("sign1", "sign2", "int4")
    ],
)
def test_strategies_that_leave_the_codec_open_learn_in_few_bits(name: str, codec: str) -> None:
    result, used = fit(STRATEGIES[name], tw.Simulated(workers=3, step_s=0.05), codec=codec)
    assert used == {codec}
    assert result.summary["val_accuracy"] >= 0.9


@pytest.mark.parametrize(
    "bits", [1, pytest.param(2, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)]
)
def test_relay_sends_as_many_bits_as_it_is_told_and_learns(bits: int) -> None:
    result, used = fit(tw.Relay(bits=bits), tw.Simulated(workers=3, ratio=20.0))
    assert {CODECS[name].bits for name in used} == {bits}
    assert result.summary["val_accuracy"] >= 0.9


@pytest.mark.parametrize("codec", [pytest.param("sign1", marks=pytest.mark.long), "sign2", "int4"])
def test_gradients_of_few_bits_teach_at_a_low_rate(codec: str) -> None:
    """At the rate of the other tests one bit a gradient is too few: what feedback holds back arrives too late."""
    low = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), "epochs": 12}
    result, used = fit(tw.Synchronous(codec=codec), tw.Simulated(workers=3, step_s=0.05), **low)
    assert used == {codec}
    assert result.summary["val_accuracy"] >= (0.8 if codec == "sign1" else 0.9)


def test_fewer_bits_send_fewer_bytes() -> None:
    sent = {
        codec: fit(tw.SparkNet(period=5), tw.Simulated(workers=3, step_s=0.05), codec=codec, epochs=2)[0].summary
        for codec in ("float32", "int4", "sign2", "sign1")
    }
    bytes_sent = [summary["bytes_sent"] for summary in sent.values()]
    assert bytes_sent == sorted(bytes_sent, reverse=True)


@pytest.mark.parametrize("strategy", [tw.SparkNet(period=5), tw.Synchronous(codec="int2")], ids=["run's", "own"])
def test_a_run_that_says_int2_is_one_in_two_bits(strategy: tw.Strategy) -> None:
    """Recipes of earlier versions name the codec so."""
    codec = "float32" if isinstance(strategy, tw.Synchronous) else "int2"
    _, used = fit(strategy, tw.Simulated(workers=2, step_s=0.05), codec=codec, epochs=1)
    assert used == {"sign2"}


def test_a_checkpoint_that_says_int2_is_read() -> None:
    saved = Cuts(Cut(1000, Setting(fragments=3, codec="int4"))).to_json()
    saved[0]["setting"]["codec"] = "int2"
    assert Cuts.from_json(saved).newest.setting == Setting(fragments=3, codec="sign2")


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [tw.SparkNet(period=5), tw.Relay(bits=1)], ids=["sparknet", "relay"])
def test_processes_exchange_signs(strategy: tw.Strategy) -> None:
    codec = "float32" if isinstance(strategy, tw.Relay) else "sign1"
    result, used = fit(strategy, tw.Local(workers=2), codec=codec)
    assert used == {"sign1"}
    assert result.summary["complete"]
    assert result.summary["val_accuracy"] >= 0.9
