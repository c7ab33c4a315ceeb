"""Codecs' loops compiled from C, for a machine with a GPU and without numba."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

SOURCE = os.path.join(os.path.dirname(__file__), "kernels.c")
FLAGS = ("-O3", "-march=x86-64-v3", "-ffp-contract=off", "-shared", "-fPIC")
BLOCK = 256
LIBRARY = "THINWIRE_KERNELS"
"""The environment variable that names a library compiled elsewhere, which is used even where numba is installed."""


class Kernels(NamedTuple):
    """As `thinwire.rules._kernels.Kernels`."""

    encode: Callable[..., None]
    accumulate: Callable[..., None]


def install() -> None:
    """Puts these loops in the place of numba's where numba is not installed, or where a library is named."""
    wanted = os.environ.get(LIBRARY) or importlib.util.find_spec("numba") is None
    if wanted and "thinwire.rules._kernels" not in sys.modules:
        made = ModuleType("thinwire.rules._kernels")
        made.load, made.Kernels = load, Kernels  # type: ignore[attr-defined]
        sys.modules["thinwire.rules._kernels"] = made


@cache
def load(name: str) -> Kernels:
    """The loops of a codec by name."""
    library = _library()
    encode, accumulate = getattr(library, f"encode_{name}"), getattr(library, f"accumulate_{name}")
    encode.restype = accumulate.restype = None

    def encoded(values: Any, work: Any, keep: bool, out: Any, real: int) -> None:
        count = ctypes.c_int64(values.size // BLOCK)
        encode(_at(values), _at(work), ctypes.c_int(keep), _at(out), count, ctypes.c_int64(real))

    def accumulated(packed: Any, weight: Any, fresh: bool, total: Any) -> None:
        count = ctypes.c_int64(total.size // BLOCK)
        accumulate(_at(packed), ctypes.c_float(weight), ctypes.c_int(fresh), _at(total), count)

    return Kernels(encoded, accumulated)


def compile_to(path: str) -> str:
    """Compiles the library to a path; returns the path."""
    subprocess.run(["cc", *FLAGS, "-o", path, SOURCE, "-lm"], check=True)
    return path


@cache
def _library() -> ctypes.CDLL:
    if known := os.environ.get(LIBRARY):
        return ctypes.CDLL(known)
    with tempfile.TemporaryDirectory() as folder:  # a library that is loaded stays when its file is removed
        return ctypes.CDLL(compile_to(os.path.join(folder, "kernels.so")))


def _at(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
