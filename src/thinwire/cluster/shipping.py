"""Ships the user's own code to machines that do not have it."""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle

THERE = (
    *("thinwire", "pyspark", "py4j"),
    *("torch", "numpy", "numba", "pyarrow", "zmq", "safetensors", "fsspec", "cloudpickle", "rich"),
)
"""Packages that every worker has, wherever they are installed: thinwire's own requirements among them."""


def packed(value: Any) -> bytes:
    """Pickles a value with its code: functions and classes of modules that are not installed travel by value."""
    registered = sys.modules.get("thinwire.caffe.layers.base")
    if registered is not None and registered.OWN:
        value = _After(_Registered(dict(registered.OWN)), value)
    with _by_value():
        return bytes(cloudpickle.dumps(value))


class _Registered:
    """The user's own Caffe layers, which are registered as they are unpickled."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self._layers = layers

    def __reduce__(self) -> Any:
        from thinwire.caffe.layers.base import adopt

        return adopt, (self._layers,)


class _After:
    """A value that is unpickled after another one: pickle builds the parts in order."""

    def __init__(self, first: Any, value: Any) -> None:
        self._parts = first, value

    def __reduce__(self) -> Any:
        return _second, self._parts


def _second(first: Any, value: Any) -> Any:
    return value


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    earlier = cloudpickle.list_registry_pickle_by_value()
    loaded = list(sys.modules.items())
    named = {m.__name__: m for name, m in loaded if _is_users(name, m)}  # each module once: some have two names
    own = [module for name, module in named.items() if name not in earlier]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(name: str, module: ModuleType | None) -> bool:
    """Whether a module comes from the user's own files. Installed packages must be installed on executors too."""
    path = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not path or name == "__main__" or name.partition(".")[0] in THERE:
        return False
    if not path.endswith(".py") or sys.modules.get(module.__name__) is not module:
        return False
    path = os.path.realpath(path)
    if any(f"{os.sep}{folder}{os.sep}" in path for folder in ("site-packages", "dist-packages")):
        return False  # of another environment, added by a .pth file or PYTHONPATH
    return not any(path.startswith(root + os.sep) for root in _installed())


def _installed() -> set[str]:
    places = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    return {os.path.realpath(place) for place in (*places, sys.prefix, sys.base_prefix) if place}
