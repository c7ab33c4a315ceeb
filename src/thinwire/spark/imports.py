"""Looks up functions and classes that a saved model names; imports modules only if the program trusts them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from thinwire.errors import ConfigError

LISTED = ("thinwire", "torch")
"""Packages that cannot be trusted as a whole: a saved model may name only what `thinwire.spark.objects` lists."""
LONGEST = 500
"""Most characters of a dotted name."""

_trusted: set[str] = set()


class RefusedError(Exception):
    """The reason why a name is not looked up; completes the message "X.Y cannot be used: …"."""


def trust_modules(*names: str) -> None:
    """Allows every saved model that this process loads to name functions and classes of these packages.

    `PipelineModel.load` and `CrossValidatorModel.load` pass no arguments on to the stages. `TorchModel.load` and
    `TorchEstimator.load` take `modules=` for a single load. Everything in a trusted package may be imported and called,
    so name only your own packages.

    Args:
        names: packages or modules; each includes everything below it.
    """
    _trusted.update(checked(names))


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Checks names of packages to trust; refuses those where trust would be dangerous or have no effect."""
    if isinstance(names, str):
        raise ConfigError(f"modules = {names!r} is one text; give a list of names: modules=[{names!r}]")
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"modules holds {name!r}, which is not a module's name; write it as 'package.module'")
        top = name.partition(".")[0]
        if top in LISTED or _is_own(top):
            raise ConfigError(
                f"modules holds {name!r}. A saved model may name only listed parts of {', '.join(LISTED)}, and nothing "
                "of Python's own library. Name your own packages, or give the object itself (model=, transform=)"
            )
    return tuple(names)


def defined(module: str, name: str, *, folder: str, modules: Sequence[str] = ()) -> tuple[object, bool]:
    """The object that a module defines under a name, and whether the program trusts that module.

    A module that is not trusted is used only if it is already imported. Nothing is called, and no attribute is
    accessed: the name is looked up in the namespaces of the module and its classes.

    Args:
        module: its full name.
        name: `__qualname__` of a class or a function.
        folder: the folder that contains the name; modules in it are refused even if trusted.
        modules: trusted packages, in addition to those of `trust_modules`.

    Raises:
        RefusedError: The object must not be used.
    """
    for text in (module, name):
        if len(text) > LONGEST or not all(part.isidentifier() for part in text.split(".")):
            raise RefusedError("this is not the name of a module's class or function")
    top = module.partition(".")[0]
    if _is_own(top):
        raise RefusedError("it is of Python's own library, or of the program's main file")
    trusted = top not in LISTED and any(f"{module}.".startswith(f"{known}.") for known in (*modules, *_trusted))
    if not trusted and module not in sys.modules:
        raise RefusedError("its module is not imported here, and not among the modules that are trusted")
    imported = module in sys.modules
    found = _looked_up(module, name) if imported else None
    for spec in _specs(module):
        _refuse_strange(spec, folder, imported=imported)
    if not imported:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise RefusedError(f"importing its module failed: {error!r}") from error
        found = _looked_up(module, name)
    return found, trusted


def is_defined(value: object, module: object, name: object) -> bool:
    """Whether an imported module defines a value under a name, so that the value can be stored by that name."""
    if not isinstance(module, str) or not isinstance(name, str) or _is_own(module.partition(".")[0]):
        return False
    try:
        return _looked_up(module, name) is value
    except RefusedError:
        return False


def _is_own(top: str) -> bool:
    return top in sys.stdlib_module_names or top in ("__main__", "__mp_main__")


def _looked_up(module: str, name: str) -> object:
    found: object = sys.modules.get(module)
    if not issubclass(type(found), ModuleType):
        raise RefusedError("its module is not there")
    for part in name.split("."):
        names = _names(found)
        if part not in names:
            raise RefusedError(f"there is no {part!r}")
        found = names[part]
        if issubclass(type(found), ModuleType):
            raise RefusedError(f"{part!r} is another module; name that one")
    if issubclass(type(found), type):
        home = _names(found).get("__module__")
    elif type(found) is FunctionType and "." not in name:
        home = found.__module__
    else:
        raise RefusedError("it is neither a class nor a module's own function")
    if home != module:
        raise RefusedError(f"it is defined in {home!r}: only the module that defines something can be named for it")
    return found


def _names(holder: Any) -> Mapping[str, Any]:
    """The namespace of a module or a class, read without calling its hooks; empty for other objects."""
    for kind in (ModuleType, type):
        if issubclass(type(holder), kind):
            own: Any = vars(kind)["__dict__"]
            return cast("Mapping[str, Any]", own.__get__(holder))
    return {}


def _specs(module: str) -> Iterator[ModuleSpec]:
    """The specs of a module and its parent packages, outermost first, without importing any."""
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if name in sys.modules:
            spec = _names(sys.modules[name]).get("__spec__")
        else:
            spec = _searched(name, None if spec is None else spec.submodule_search_locations or [])
        if not isinstance(spec, ModuleSpec):
            raise RefusedError(f"there is no module {name!r}, or none that was found on the Python path")
        yield spec


def _searched(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def _refuse_strange(spec: ModuleSpec, folder: str, *, imported: bool) -> None:
    """Refuses modules in the loaded folder, and namespace packages, since any folder can pass for one."""
    for place in (spec.origin or "", *(spec.submodule_search_locations or ())):
        if place and _is_below(place, folder):
            raise RefusedError(f"{spec.name!r} is a part of the folder that is loaded")
    if not imported and not spec.has_location:
        raise RefusedError(f"{spec.name!r} is a folder without __init__.py; import the module first, if it is yours")


def _is_below(place: str, folder: str) -> bool:
    parts = urlsplit(folder)
    if parts.scheme == "file":
        folder = unquote(parts.path)
    elif "://" in folder:
        return False  # Python imports nothing from remote storage
    places, roots = ({os.path.abspath(p), os.path.realpath(p)} for p in (place, folder))
    return any(p == root or p.startswith(root.rstrip(os.sep) + os.sep) for p in places for root in roots)
