"""The language models of the zoo, placed on groups through `fit`, come to the parameters of one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.models.sequences import masked_cross_entropy

ROWS, STEPS = 6, 3


def trained(model: str, workers: int, placement: Any) -> tw.Result:
    """Every step takes all rows, so that it does not matter which worker has which."""
    text = np.random.default_rng(5).integers(0, 256, (ROWS, 8))
    return tw.fit(
        model,
        {"characters": text[:, :-1], "next": text[:, 1:]},
        inputs=["characters"],
        label="next",
        loss=masked_cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        strategy=tw.Synchronous(),
        placement=placement,
        cluster=tw.Simulated(workers=workers, step_s=0.01),
        epochs=STEPS,
        batch_size=ROWS // workers,
        progress=False,
    )


@pytest.mark.parametrize("model", ["char_rnn", "char_lstm", "char_lstm_peephole"])
@pytest.mark.parametrize("kind", ["planned", "tensor_parallel"])
def test_a_language_model_on_a_group_of_three_is_that_of_one_worker(model: str, kind: str) -> None:
    links = {"link_gbit": 1000.0, "latency_ms": 0.0} if kind == "planned" else {}  # so that layers are shared out
    alone = trained(model, 1, None).model.state_dict()
    found = trained(model, 3, {"kind": kind, "group_size": 3, **links}).model.state_dict()
    assert set(found) == set(alone)
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=name)
