"""A deep belief network learns from digits without labels; then a network that begins with it learns from 100 labels.

python examples/pretrain.py
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire as tw
from thinwire.data import open_source
from thinwire.data.columns import dense
from thinwire.models.boltzmann import DBN

LABELS = 100


def machines() -> nn.Module:
    return DBN((64, 64, 64))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


learnt = tw.fit(
    machines,
    "digits",
    inputs=["pixels"],
    algorithm=tw.ContrastiveDivergence(k=1, stage_steps=600),
    strategy=tw.SparkNet(period=10),
    optimizer=sgd,
    batch_size=20,
    steps=1200,
).model

(batch,) = open_source("digits").batches()
pixels, label = torch.tensor(dense(batch.column("pixels"))), torch.tensor(dense(batch.column("label")))
few = {"pixels": pixels[:LABELS], "label": label[:LABELS]}


def accuracy(network: nn.Module) -> float:
    """On the rows whose labels were not shown."""
    trained = tw.fit(
        network, few, inputs=["pixels"], strategy="sparknet", optimizer=sgd, batch_size=10, epochs=60
    ).model
    return float((trained(pixels[LABELS:]).argmax(1) == label[LABELS:]).float().mean())


torch.manual_seed(0)
start = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10))
print(f"from a random start {accuracy(start):.3f}, from the deep belief network {accuracy(learnt.network(10)):.3f}")
