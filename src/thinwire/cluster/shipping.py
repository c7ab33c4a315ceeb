"""The user's own code on its way to machines that do not have it."""

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


def packed(value: Any) -> bytes:
    """A value with its code: functions and classes of modules that are not installed travel whole, not by name."""
    with _by_value():
        return bytes(cloudpickle.dumps(value))


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    earlier = cloudpickle.list_registry_pickle_by_value()
    own = [m for name, m in list(sys.modules.items()) if name not in earlier and _is_users(name, m)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(name: str, module: ModuleType | None) -> bool:
    """Whether a module is of the user's own files rather than of an installed package, which executors need as well."""
    path = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not path or name == "__main__" or name.partition(".")[0] == "thinwire":
        return False
    if not path.endswith(".py") or sys.modules.get(module.__name__) is not module:
        return False
    path = os.path.realpath(path)
    return not any(path.startswith(root + os.sep) for root in _installed())


def _installed() -> set[str]:
    places = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    return {os.path.realpath(place) for place in (*places, sys.prefix, sys.base_prefix) if place}
