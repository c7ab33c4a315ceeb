"""Builds a network without holding all of it in memory: large tensors are recorded, and computed one by one on request.

A factory runs unchanged, under its seed. A large tensor becomes a tensor without memory, and the operations on it are
recorded. A random operation also runs once on temporary memory, to advance the generator; the generator's state before
it is kept, so that the value computed later is the same to the last bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from thinwire.replicas.torch import build_module

M_MMAP_THRESHOLD, FRUGAL, USUAL = -3, 1 << 18, 32 << 20
"""Size in bytes from which allocations return to the system when freed: while a network is built, and otherwise."""
LARGE = 1 << 16
"""Elements from which a tensor is not held in memory."""


class _Done(NamedTuple):
    function: Any
    arguments: Any
    outputs: list[Tensor]
    random: Tensor | None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations on large tensors while the mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done: list[_Done] = []
        self._scratch = torch.empty(0)
        self._parents: dict[int, int] = {}
        """Parents of a union-find structure of storages that were computed together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        unheld = any(t.device.type == "meta" for t in given)
        if not given and _is_large(func, args):
            kwargs = {**kwargs, "device": torch.device("meta")}
            unheld = True
        if not unheld:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:  # the program needs the value
            return func(self.value(args[0]))
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            random = torch.get_rng_state()
            func(*tree_map(self._held, args), **(tree_map(self._held, kwargs) | _here(kwargs)))
        found = func(*tree_map(_unheld, args), **tree_map(_unheld, kwargs))
        outputs = [t for t in tree_flatten(found)[0] if isinstance(t, Tensor)]
        if func._schema.is_mutable or not {_storage(t) for t in outputs} <= {_storage(t) for t in given}:
            self._done.append(_Done(func, (args, kwargs), outputs, random))
            touched = [_storage(t) for t in (*given, *outputs) if t.device.type == "meta"]
            for other in touched[1:]:
                self._parents[self._root(other)] = self._root(touched[0])
        return found

    def _held(self, x: Any) -> Any:
        """A tensor in reused memory: new allocations in between would fragment the heap."""
        if not isinstance(x, Tensor) or x.device.type != "meta":
            return x
        if x.dtype != torch.float32:
            return torch.empty(x.shape, dtype=x.dtype)
        if self._scratch.numel() < x.numel():
            self._scratch = torch.empty(x.numel())
        return self._scratch[: x.numel()].view(x.shape)

    def _root(self, storage: int) -> int:
        while self._parents.get(storage, storage) != storage:
            storage = self._parents[storage]
        return storage

    def value(self, tensor: Tensor) -> Tensor:
        """The value of a tensor; intermediate results are freed."""
        if tensor.device.type != "meta":
            return tensor.detach()
        mine, made = self._root(_storage(tensor)), dict[int, Any]()

        def real(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.device.type != "meta":
                return x
            base = torch.empty(0, dtype=x.dtype)
            return base.set_(made[_storage(x)], x.storage_offset(), x.size(), x.stride())

        before = torch.get_rng_state()
        try:
            for done in self._done:
                if all(self._root(_storage(t)) != mine for t in done.outputs if t.device.type == "meta"):
                    continue
                if done.random is not None:
                    torch.set_rng_state(done.random)
                args, kwargs = tree_map(real, done.arguments)
                with torch.no_grad():
                    found = done.function(*args, **(kwargs | _here(kwargs)))
                values = [t for t in tree_flatten(found)[0] if isinstance(t, Tensor)]
                for unheld, value in zip(done.outputs, values, strict=True):
                    if _storage(unheld) not in made:
                        made[_storage(unheld)] = _as(value, unheld).untyped_storage()
        finally:
            torch.set_rng_state(before)
        asked: Tensor = real(tensor.detach())
        return asked


# torch wraps the method to keep its compiler out, which loads the compiler: a second and 75 MB.
Deferred.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    Deferred.__torch_dispatch__, "__wrapped__", Deferred.__torch_dispatch__
)


class _HidesMeta(TorchFunctionMode):
    """Hides that a tensor has no memory: torch's initialisers skip such tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


def deferred(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Deferred]:
    """The module that a factory builds, and the record from which the values of its large tensors are computed."""
    with Deferred() as notes, _HidesMeta():
        module = build_module(factory, seed)
    notes._scratch = torch.empty(0)
    return module, notes


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the generators of random numbers at the end of the block."""
    drawn, plain = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        np.random.set_state(drawn)
        random.setstate(plain)


def network_of(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A network, and the function that returns the values of its tensors. A factory's large tensors have no memory."""
    if isinstance(model, nn.Module):
        return model, torch.Tensor.detach
    module, notes = deferred(model, seed)
    return module, notes.value


def _is_large(func: Any, args: Any) -> bool:
    names = [a.name for a in func._schema.arguments]
    if "device" not in names:
        return False
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    count = 1
    for size in sizes:
        count *= int(size)
    return bool(sizes) and count >= LARGE


def _as(value: Tensor, unheld: Tensor) -> Tensor:
    """A value with the memory layout of its recorded tensor."""
    if value.stride() == unheld.stride() and value.storage_offset() == unheld.storage_offset():
        return value
    size = unheld.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(unheld.shape, unheld.stride(), strict=True))
    base = torch.empty(size, dtype=value.dtype)
    base.as_strided(unheld.size(), unheld.stride(), unheld.storage_offset()).copy_(value)
    return base


def _unheld(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and x.device.type != "meta" else x


def _here(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if "device" in kwargs else {}


@contextlib.contextmanager
def frugal() -> Iterator[None]:
    """Returns large memory to the system as soon as it is freed.

    Otherwise free memory would stay with the process, in pieces between live tensors and too small for new ones.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc, which lacks mallopt
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, FRUGAL)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, USUAL)
