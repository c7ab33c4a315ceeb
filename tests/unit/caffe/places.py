"""Where real Caffe files and data sets are, where they are at hand."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SHARED = Path(__file__).parents[4] / "shared" / "data"


def files() -> Path:
    """The folder of real Caffe files, named by THINWIRE_CAFFE or beside the checkout; skips where there is none."""
    found = Path(os.environ.get("THINWIRE_CAFFE", SHARED / "caffe"))
    if not found.is_dir():
        pytest.skip("real Caffe files are not here: name their folder in THINWIRE_CAFFE")
    return found


@functools.cache
def _fetched(name: str) -> Path | None:
    if f"THINWIRE_{name.upper()}" in os.environ:
        return Path(os.environ[f"THINWIRE_{name.upper()}"])
    if not (SHARED / "get").exists():
        return None
    folder = Path(tempfile.mkdtemp(prefix="thinwire-sets-"))
    done = subprocess.run(
        [sys.executable, str(SHARED / "get"), name, "--to", str(folder)], capture_output=True, timeout=100
    )
    return None if done.returncode else folder / name


def _folder(name: str) -> Path:
    found = _fetched(name)
    if found is None:
        pytest.skip(f"{name} is not here: name its folder in THINWIRE_{name.upper()}")
    return found


def mnist(split: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images as LeNet's data layer gives them, and labels."""
    at = _folder("mnist") / split
    images = np.fromfile(f"{at}-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 1, 28, 28)
    return images.astype(np.float32) / 256, np.fromfile(f"{at}-labels-idx1-ubyte", np.uint8)[8:]


def cifar10(*names: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images less their mean, and labels, of some of its files in their order."""
    from thinwire import caffe

    rows = [np.fromfile(_folder("cifar10") / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in names]
    raw = np.concatenate(rows)
    mean = caffe.read_mean(files() / "golden" / "cifar10_mean.binaryproto").numpy()
    return raw[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) - mean, raw[:, 0]
