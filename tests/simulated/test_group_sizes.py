"""`group_size="auto"`: in virtual time, the size that is chosen is the one whose run is the shortest."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
    )


def trained(placement: Any, link: str, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"strategy": tw.Synchronous(), "steps": 4, "batch_size": 8, "progress": False}
    cluster = tw.Simulated(workers=4, step_s=0.02, link=link)
    found = tw.fit(wide, "digits", inputs=["pixels"], placement=placement, cluster=cluster, **(settings | changes))
    return found.summary


@pytest.mark.parametrize("link", ["20mbit", "100gbit"])
def test_the_size_that_is_chosen_is_that_of_the_shortest_run(link: str) -> None:
    seconds = {size: trained(tw.Planned(group_size=size), link)["train_seconds"] for size in (1, 2, 4)}
    chosen = trained(tw.Planned(group_size="auto"), link)
    assert chosen["train_seconds"] <= 1.02 * min(seconds.values())
    assert chosen["group_size"] == (1 if link == "100gbit" else min(seconds, key=seconds.__getitem__))
    assert chosen["group_size"] > 1 or link == "100gbit"


def test_every_form_of_a_placement_takes_auto() -> None:
    slow = "20mbit"
    named = trained({"kind": "planned", "group_size": "auto"}, slow)
    assert named["group_size"] == trained(tw.Planned(group_size="auto"), slow)["group_size"]
    assert trained(tw.TensorParallel(group_size="auto"), slow)["complete"]
    rare = trained(tw.Planned(group_size="auto"), slow, strategy=tw.SparkNet(period=1000))
    assert (rare["group_size"], rare["placement"]) == (1, "whole")


class Locked:
    """A transform that cannot be copied for the driver's trial of the first row."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, columns: Any) -> Any:
        return columns


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group_size = 'auto'.*use a whole number"):
        tw.Pipeline(group_size="auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"group_size = 'many' is not a count"):
        tw.Planned(group_size="many")
    with pytest.raises(ConfigError, match=r"the transform that makes it is run on workers only; give a number"):
        trained(tw.Planned(group_size="auto"), "1gbit", transform=Locked())
    with pytest.raises(ConfigError, match="fits into"):
        trained(tw.Planned(group_size="auto", memory_gb=1e-6), "1gbit")
