"""The generators that a replica's dropout and augmentation draw from."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch

building = threading.Lock()
"""Workers that are threads share torch's generator: models are made, and generators seeded, one after the other."""


def seed_worker(seed: int, worker: int) -> None:
    """Each worker draws its own dropout and augmentation; worker 0 draws what a plain run would."""
    own = (seed + 1) * 1_000_003 + worker
    random.seed(own)
    np.random.seed(own % 2**32)
    if worker:
        with building:
            torch.manual_seed(own % 2**63)


def random_state(device: torch.device) -> dict[str, Any]:
    """Where all generators are."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Has all generators go on from a state."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
