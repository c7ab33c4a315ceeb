"""Tries to have the loader of saved models call, or give back, every callable that there is.

`python -m tests.security.every_callable` imports what it can of Python's library, torch, NumPy, PySpark and
thinwire, and prints how many names it tried and how many of them the loader gives back.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.errors import CheckpointError
from thinwire.spark import objects
from thinwire.spark.objects import SLOTS, Source

PACKAGES = ("torch", "numpy", "pyspark", "thinwire", "safetensors", "pyarrow", "cloudpickle", "fsspec", "rich")
ACTS = ("antigravity", "this", "idlelib", "turtle", "lib2to3", "test", "pip", "ensurepip", "venv", "tkinter")
"""Modules that act, or want a screen, when they are imported: this program would do it, the loader never does."""
SLOW = (".tests", ".testing", "_test", "test_", "__main__", "._inductor.", ".onnx", ".conftest")
BASES: dict[str, type] = {"model": nn.Module, "optimizer": torch.optim.Optimizer, "scheduler": LRScheduler}
"""Written anew, so that a mistake in the loader's own table shows."""


@dataclass
class Tally:
    """What came of it: names tried, those given back, and those that were called or should not have been given."""

    seen: int = 0
    taken: set[str] = field(default_factory=set)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


class Watch:
    """Sees every call, Python's and C's, and whether one is of the callable that is looked for.

    A class that is written in C is made without a call that shows; what is made of it would be given back.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        """What the loader itself calls for any name."""
        self.learns, self.seen = False, False
        self._sought: set[int] = set()

    def look_for(self, value: object) -> None:
        self.seen = False
        parts = [value, *(vars(kind).get(n) for kind in _mro(value) for n in ("__init__", "__new__"))]
        both = (part for each in parts for part in (each, getattr(each, "__code__", None)) if part is not None)
        self._sought = {id(part) for part in both} - self.own

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        called = frame.f_code if event == "call" else arg if event == "c_call" else None
        if self.learns:
            self.own.add(id(called))
        elif id(called) in self._sought:
            self.seen = True


def _mro(value: object) -> tuple[type, ...]:
    return type.__dict__["__mro__"].__get__(value)[:-1] if isinstance(value, type) else ()


def tried(names: Sequence[str]) -> Tally:
    """Tries every callable of some modules in every slot, by its name and as a part of a partial."""
    tally, watch = Tally(), Watch()
    watch.learns = True
    for code in (name_code("torch", "nothing"), name_code("os", "system"), name_code("torch.optim.adam", "Adam")):
        _made(code, "optimizer", watch)
    watch.learns = False
    for module, name, value in candidates(names):
        tally.seen += 1
        watch.look_for(value)
        code = name_code(module, name)
        for slot in SLOTS:
            found = _made(code, slot, watch)
            if found is not None:
                tally.taken.add(name)
            if watch.seen or not (found is None or (found is value and is_right(slot, value))):
                tally.wrong.append((slot, module, name))
                break
    return tally


def _made(code: dict[str, Any], slot: str, watch: Watch) -> Any:
    sys.setprofile(watch)
    try:
        return objects.made_of(code, slot, Source("saved"))
    except CheckpointError:
        return None
    finally:
        sys.setprofile(None)


def name_code(module: str, name: str) -> dict[str, Any]:
    return {"kind": "name", "module": module, "name": name}


def is_right(slot: str, found: Any) -> bool:
    if slot in BASES:
        return isinstance(found, type) and BASES[slot] in found.__mro__
    return slot == "loss" and found.__module__ == "torch.nn.functional" and found.__name__ in objects.FUNCTIONAL


def candidates(names: Sequence[str]) -> Iterator[tuple[str, str, object]]:
    """Every callable of some modules: what is in a module, and what is in the classes that it defines."""
    for module in names:
        for name, value in list(vars(sys.modules[module]).items()):
            if callable(value):
                yield module, name, value
            if isinstance(value, type) and vars(value).get("__module__") == module:
                for inner, held in list(vars(value).items()):
                    if callable(held):
                        yield module, f"{name}.{inner}", held


def import_all() -> None:
    """Imports what there is, as far as it lets itself be imported."""
    names = [name for name in sorted(sys.stdlib_module_names) if not name.startswith(ACTS)]
    for package in PACKAGES:
        names.append(package)
        with contextlib.suppress(Exception):
            found = importlib.import_module(package)
            names += [
                each.name for each in pkgutil.walk_packages(found.__path__, f"{package}.", onerror=lambda _: None)
            ]
    for name in names:
        if not any(part in name for part in SLOW):
            with contextlib.suppress(BaseException):
                importlib.import_module(name)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        import_all()
        tally = tried([name for name, module in sorted(sys.modules.items()) if hasattr(module, "__dict__")])
    for wrong in tally.wrong[:100]:
        print(*wrong, file=sys.stderr)
    print("tried, and given back:", tally.seen, len(tally.taken))
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
