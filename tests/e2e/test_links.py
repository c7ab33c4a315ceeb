"""What a run takes the wire for, and that it holds to what it has chosen; on links of known rates, in virtual time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.units import rate_bytes

SENTENCE = re.compile(
    r"(Processors, not the wire, are the limit: a round takes [\d.]+ m?s beside its bytes\."
    r"|(The link is no limit"
    r"|The link is fast \([\d.]+ [kMG]bit/s\): one exchange of the whole model takes less than a step"
    r"|The link carries [\d.]+ [kMG]bit/s: one exchange of the whole model takes "
    r"([\d.]+|more than 1,000) steps? of [\d.]+ m?s)(, and a round [\d.]+ m?s beside its bytes)?\.)"
    r" Sending displacements in \d+ bits? a value(, \d+ fragments in turn,)? (in the background|while steps wait)\."
)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))


def changes(strategy: tw.Strategy, cluster: tw.Cluster, **given: Any) -> list[events.SettingChanged]:
    log: list[events.Event] = []
    asked: dict[str, Any] = {"inputs": ["pixels"], "steps": 120, "batch_size": 4, "progress": False, "seed": 1}
    asked |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "callbacks": [log.append]}
    tw.fit(network, "digits", strategy=strategy, cluster=cluster, **(asked | given))
    return [e for e in log if isinstance(e, events.SettingChanged)]


@pytest.mark.parametrize(
    ("rate", "strategy", "machines"),
    [
        ("10mbit", tw.Relay(), {"latency_s": 0.02}),
        ("30mbit", tw.Auto(), {"handling": "200mbit", "contention": 0.3, "spread": 0.2}),
        ("100mbit", tw.Relay(), {"spread": 0.5, "slow": {2: 1.5}}),
        ("300mbit", tw.Auto(), {"handling": "200mbit", "contention": 0.3, "spread": 0.2}),
        ("1gbit", tw.Relay(), {"handling": "200mbit", "contention": 0.3}),
    ],
    ids=["10mbit far", "30mbit busy", "100mbit uneven", "300mbit busy", "1gbit busy"],
)
def test_the_wire_is_taken_for_what_it_is_whatever_machines_do(
    rate: str, strategy: tw.Strategy, machines: dict[str, Any]
) -> None:
    log = changes(strategy, tw.Simulated(workers=3, link=rate, step_s=0.02, **({"latency_s": 0.0} | machines)))
    assert 1 <= len(log) <= 2, [e.why for e in log]
    for each in log:
        assert each.bytes_per_s is not None
        assert rate_bytes(rate) / 2 < each.bytes_per_s < rate_bytes(rate) * 2
        assert SENTENCE.fullmatch(each.why), each.why


def test_a_link_at_the_border_of_two_settings_does_not_make_it_change_its_mind() -> None:
    """Steps are uneven, so that the exchange is now more and now fewer steps than the border."""
    cluster = tw.Simulated(workers=3, ratio=1.0, spread=0.5, contention=0.2, latency_s=0.0)
    assert len(changes(tw.Auto(), cluster, steps=300)) <= 2


def test_a_link_that_changes_is_answered_once() -> None:
    fault = tw.Fault(at_s=2.0, kind="link", link="1mbit")
    cluster = tw.Simulated(workers=3, link="1gbit", step_s=0.02, latency_s=0.0, faults=(fault,))
    log = changes(tw.Relay(), cluster, steps=500)
    assert len(log) == 2, [e.why for e in log]
    assert log[-1].setting["codec"] == "sign2"
    assert log[-1].bytes_per_s == pytest.approx(rate_bytes("1mbit"), rel=0.2)


@pytest.mark.parametrize(
    "cluster",
    [
        tw.Local(workers=3, processes=False),
        pytest.param(tw.Local(workers=2), marks=pytest.mark.processes),
    ],
    ids=["threads", "processes"],
)
def test_within_one_machine_no_wire_steers(cluster: tw.Cluster) -> None:
    """However long rounds take there, processors take it: fewer bits would gain nothing."""
    log = changes(tw.Relay(), cluster, steps=80, batch_size=16)
    assert all(e.bytes_per_s is None for e in log)
    assert {e.setting["codec"] for e in log} <= {"int4"}
    assert len(log) <= 2
    assert all(e.why.startswith(("The link is no limit", "Processors, not the wire, are the limit")) for e in log)
