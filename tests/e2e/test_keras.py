"""Keras models on TensorFlow, JAX and torch, each in a process of its own: a backend is chosen once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ["jax", "tensorflow", "torch"]

pytestmark = pytest.mark.timeout(1800)

TRAIN = """
import json, sys, numpy as np, torch
import thinwire as tw

def network():
    import keras
    layers = keras.layers
    return keras.Sequential([keras.Input((1, 8, 8)), layers.Flatten(), layers.Dense(64, activation="relu"),
                             layers.BatchNormalization(momentum=0.9), layers.Dropout(0.1), layers.Dense(10)])

def like():
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.1),
                         nn.Linear(64, 10))

def trained(model, strategy):
    return tw.fit(model, "digits", inputs=["pixels"], strategy=strategy, batch_size=32, validation=0.2, epochs=15,
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), cluster=tw.Local(workers=2),
                  progress=False)

found = {}
for strategy in (tw.SparkNet(period=10), tw.MPCA()):
    mine = trained(network, strategy)
    found[type(strategy).__name__] = [mine.summary["val_accuracy"], trained(like, strategy).summary["val_accuracy"]]
x = np.random.default_rng(0).random((4, 1, 8, 8), np.float32)
import keras
theirs = keras.ops.convert_to_numpy(mine.model.keras(x))
found["apart"] = float(np.abs(theirs - mine.model(torch.from_numpy(x)).detach().numpy()).max())
print(json.dumps(found))
"""

GRADIENTS = """
import copy, json, pickle, numpy as np, torch, keras
from thinwire.replicas.keras import KerasModule

model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])
module = KerasModule(model)
x = torch.randn(7, 5, requires_grad=True)
module(x).square().sum().backward()
w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in module.weights)
y = x.detach().clone().requires_grad_()
(torch.tanh(y @ w1 + b1) @ w2 + b2).square().sum().backward()
apart = [float((a.grad - b.grad).abs().max()) for a, b in zip((x, *module.weights), (y, w1, b1, w2, b2))]
again = pickle.loads(pickle.dumps(module))
same = bool(torch.equal(again(x), module(x))) and bool(torch.equal(copy.deepcopy(module)(x), module(x)))
print(json.dumps({"apart": max(apart), "same": same}))
"""

FLAWED = """
import json, torch
import thinwire as tw
from thinwire import events

def network():
    import keras
    layers = keras.layers
    return keras.Sequential([keras.Input((1, 8, 8)), layers.Flatten(), layers.Dense(16, activation="relu"),
                             layers.BatchNormalization(), layers.Dense(10)])

class Overflowing(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        found = super().step(closure)
        self.steps += 1
        if self.steps == 5 and torch.initial_seed() == 1_000_004:  # worker 1's
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = float("inf")
        return found

told = []
run = tw.fit(network, "digits", inputs=["pixels"], strategy=tw.Relay(), batch_size=32, steps=20, validation=0.2,
             optimizer=lambda p: Overflowing(p, lr=0.05), cluster=tw.Local(workers=2), progress=False,
             callbacks=[lambda e: told.append([e.worker, e.what]) if isinstance(e, events.NonFinite) else None])
finite = all(bool(v.isfinite().all()) for v in run.model.state_dict().values())
print(json.dumps({"complete": run.summary["complete"], "finite": finite, "told": told}))
"""


def run(code: str, backend: str, tmp_path: Path, timeout_s: float = 1700) -> dict[str, object]:
    needed = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}[backend]
    for name in ("keras", needed):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    line = [sys.executable, str(script)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_the_same_network_in_torch(backend: str, tmp_path: Path) -> None:
    found = run(GRADIENTS, backend, tmp_path)
    assert found["same"]
    assert float(str(found["apart"])) < 1e-4


def test_a_keras_model_that_overflows_at_one_worker_starts_again_there(tmp_path: Path) -> None:
    found = run(FLAWED, "jax", tmp_path)
    assert found["complete"]
    assert found["finite"]
    told = [tuple(each) for each in found["told"]]  # type: ignore[attr-defined]
    assert {worker for worker, _ in told} == {1}
    assert "parameters" in {what for _, what in told}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_keras_model_comes_as_far_as_the_same_torch_model(backend: str, tmp_path: Path) -> None:
    found = run(TRAIN, backend, tmp_path)
    for strategy in ("SparkNet", "MPCA"):
        mine, theirs = found[strategy]  # type: ignore[misc]
        assert mine > theirs - 0.03, strategy
    assert float(str(found["apart"])) < 1e-4


def test_the_code_of_the_how_to_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "keras.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert float(str(run(code + "print(model.count_params())", "jax", tmp_path))) == 5066
