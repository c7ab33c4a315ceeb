"""Stores Python objects as JSON, and restores the few forms that are allowed.

Anybody may have written the data that is read. Each place in a saved model or estimator (a *slot*) therefore takes only
certain forms, whatever else could be imported:

    slot       plain value      by name, of a module that is imported  by name, of a trusted module  other kinds
    model      a network's name a class below torch.nn.Module          also functions           zoo, settings, caffe
    transform  None             nothing                                functions                partial, table, tokenize
    loss       a loss's name    the functions of FUNCTIONAL            also functions
    optimizer  an optimizer's   a class below torch.optim.Optimizer    also functions
    scheduler  a scheduler's    a class below LRScheduler              also functions
    strategy   a strategy's     nothing                                nothing                       strategy
    option     any              nothing                                nothing

A Caffe network is stored as its prototxt with the mean images that it names, and reads no file. A network of the zoo
may have settings: plain values for its factory. A table is the plain values of a `TableEncoder`. A partial is
`decode_images` with names of columns, or two composed transforms. A tokenizer is the text of a `tokenizer.json` with
plain settings, which the library `tokenizers` reads as data. A pickle in any slot is run only if the caller allows it.
An optimizer or scheduler may have settings beside its name: keyword arguments of torch's own classes, as plain values.
This module never calls what a name refers to, and the data do not determine later arguments in other ways.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.cluster.frames import decode_images
from thinwire.data.tables import TableEncoder
from thinwire.data.tokens import Tokenize
from thinwire.errors import CheckpointError, ConfigError, ThinwireError
from thinwire.models import ZOO, ZooModel
from thinwire.replicas.objectives import LOSSES, OPTIMIZERS, OWN, SCHEDULERS
from thinwire.run.definition import composed, in_turn
from thinwire.spark.imports import LISTED, RefusedError, defined, is_defined
from thinwire.strategies import STRATEGIES, Strategy, name_of, strategy

Code = dict[str, Any]
"""A Python object in JSON: a plain value, a name, or pickled code."""
FUNCTIONAL = frozenset(
    {
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    }
)
"""Losses of (output, label) in torch.nn.functional."""
MOST_IN_TURN = 8
"""Most levels of composed transforms; `code_of` writes two at most."""


class WithheldError(CheckpointError):
    """Stored code that may not be used here: its module is not imported or not trusted, or the code is a pickle."""


class Withheld(NamedTuple):
    """Placeholder in an estimator for stored code that may not be used here.

    Attributes:
        code: the stored code, which is stored again unchanged.
        why: the error's message when the object is needed.
    """

    code: Code
    why: str


class Slot(NamedTuple):
    """The forms that one place of a saved model or estimator takes.

    Attributes:
        names: plain texts that the slot takes; None takes any plain value.
        base: subclasses of this class may be named, in imported modules.
        functions: whether functions of trusted modules may be named.
        kinds: further kinds of code.
    """

    names: Mapping[str, Any] | None = {}
    base: type | None = None
    functions: bool = False
    kinds: tuple[str, ...] = ()


SLOTS = {
    "model": Slot(ZOO, nn.Module, True, ("zoo", "settings", "caffe")),
    "transform": Slot(functions=True, kinds=("partial", "tokenize", "table")),
    "loss": Slot({**LOSSES, OWN: None}, None, True),
    "optimizer": Slot(OPTIMIZERS, torch.optim.Optimizer, True),
    "scheduler": Slot(SCHEDULERS, LRScheduler, True),
    "strategy": Slot(STRATEGIES, kinds=("strategy",)),
    "option": Slot(None),
}
KEYS = {
    "value": {"value"},
    "strategy": {"name", "knobs"},
    "zoo": {"name"},
    "settings": {"name", "settings"},
    "table": {"state"},
    "caffe": {"net", "file", "shapes", "files"},
    "name": {"module", "name"},
    "partial": {"of", "args"},
    "tokenize": {"settings"},
    "pickle": {"data"},
}
"""The kinds of code, and the keys of each beside its kind."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where code was read, and what the caller allows.

    Attributes:
        path: the folder that is loaded.
        modules: packages whose functions and classes may be named, and which are imported.
        allow_pickle: whether pickled code is run.
    """

    path: str
    modules: Sequence[str] = ()
    allow_pickle: bool = False


def code_of(value: Any) -> Code:
    """An object as JSON; by name if it has one."""
    if isinstance(value, Withheld):
        return value.code
    if isinstance(value, Strategy):
        return {"kind": "strategy", "name": name_of(value), "knobs": dataclasses.asdict(value)}
    if isinstance(value, Tokenize):
        return {"kind": "tokenize", "settings": value.settings}
    if isinstance(value, ZooModel) and value.name in ZOO:
        return {"kind": "settings", "name": value.name, "settings": dict(value.settings)}
    if isinstance(value, TableEncoder):
        return {"kind": "table", "state": value.state()}
    for name, factory in ZOO.items():
        if value is factory:
            return {"kind": "zoo", "name": name}
    if type(value).__module__ == "thinwire.caffe.training" and hasattr(value, "plain"):
        return {"kind": "caffe", **value.plain()}
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if is_defined(value, module, qualified):
        return {"kind": "name", "module": module, "name": qualified}
    if isinstance(value, functools.partial) and not value.keywords:
        if value.func is decode_images and _are_columns(value.args):
            return {"kind": "partial", "of": "decode_images", "args": [{"kind": "value", "value": list(value.args[0])}]}
        if value.func is composed and len(value.args) == 2:
            return {"kind": "partial", "of": "in_turn", "args": [code_of(part) for part in value.args]}
    try:
        return {"kind": "value", "value": json.loads(json.dumps(value))}
    except TypeError:
        import cloudpickle

        return {"kind": "pickle", "data": base64.b64encode(cloudpickle.dumps(value)).decode()}


def made_of(code: Code, slot: str, source: Source) -> Any:
    """Restores an object, if its form is one that the slot takes.

    Raises:
        CheckpointError: The slot does not take the form; or it is a pickle, or of a module that is not trusted.
    """
    try:
        return _made_of(code, slot, source, 0)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise damaged(source.path, error) from error


def with_decoder(code: Code, transform: Callable[..., Any], source: Source) -> Any:
    """A transform of the caller in place of the stored one, after the stored decoder of image columns."""
    return in_turn(decoder_in(code, source), transform)


def decoder_in(code: Code, source: Source) -> Any:
    """The decoder of image columns at the beginning of a stored transform; None where there is none."""
    parts = code.get("args") if code.get("kind") == "partial" and code.get("of") == "in_turn" else [code]
    first = parts[0] if isinstance(parts, list) and parts else None
    if isinstance(first, dict) and first.get("kind") == "partial" and first.get("of") == "decode_images":
        return made_of(first, "transform", source)
    return None


def decoder_and_rest(transform: Any) -> tuple[Any, Any]:
    """Splits a fit's transform into the decoder of image columns and the user's transform; either may be None."""
    if isinstance(transform, functools.partial):
        if transform.func is decode_images:
            return transform, None
        if transform.func is composed and decoder_and_rest(transform.args[0])[1] is None:
            return transform.args[0], transform.args[1]
    return None, transform


def damaged(path: str, error: Exception) -> CheckpointError:
    """The error for a folder that thinwire did not write."""
    return CheckpointError(
        f"{path!r} is damaged ({error!r}); only unchanged output of thinwire can be read. Copy it again from its "
        "source."
    )


def _made_of(code: Code, slot: str, source: Source, depth: int) -> Any:
    kind = code["kind"]
    if kind not in KEYS or set(code) != {"kind", *KEYS[kind]}:
        raise ValueError(f"code of the kind {reprlib.repr(kind)} with {reprlib.repr(sorted(code))}")
    if kind == "value":
        return _plain(code["value"], slot, source)
    if kind == "pickle":
        return _unpickled(code["data"], source)
    if kind == "name":
        return _named(code["module"], code["name"], slot, source)
    if kind not in SLOTS[slot].kinds:
        raise _unknown(slot, kind, source)
    if kind == "zoo":
        return ZOO[code["name"]]
    if kind in ("settings", "table"):
        try:
            return TableEncoder.of_state(code["state"]) if kind == "table" else _with_settings(**code)
        except ConfigError as error:
            raise damaged(source.path, error) from error
    if kind == "caffe":
        from thinwire.caffe.training import NetFactory  # imported here: it needs protobuf

        return NetFactory.of_plain(code["net"], code["file"], code["shapes"], code["files"])
    if kind == "strategy":
        return strategy(code["name"], code["knobs"])
    if kind == "tokenize":
        return Tokenize.of(code["settings"])
    return _partial(code["of"], code["args"], source, depth)


def _plain(value: Any, slot: str, source: Source) -> Any:
    names = SLOTS[slot].names
    if names is None or value is None or (isinstance(value, str) and value in names):
        return value
    name = value.get("name") if slot in ("optimizer", "scheduler") and isinstance(value, dict) else None
    if isinstance(name, str) and name in names:
        return value  # the settings go to the named class of torch
    # `fit` takes this form, and would import the module
    if slot == "model" and isinstance(value, str) and ":" in value:
        module, _, name = value.partition(":")
        return _named(module, name, slot, source)
    raise _unknown(slot, value, source)


def _with_settings(name: Any, settings: Any, kind: str) -> ZooModel:
    """A network of the zoo with settings; other names are refused, whatever could be imported."""
    if not isinstance(name, str) or name not in ZOO or not isinstance(settings, dict):
        raise ValueError(f"the network {reprlib.repr(name)} with {reprlib.repr(settings)}")
    return ZooModel(name, settings)


def _partial(of: Any, args: Any, source: Source, depth: int) -> Any:
    if of == "decode_images" and isinstance(args, list) and len(args) == 1 and set(args[0]) == {"kind", "value"}:
        columns = args[0]["value"]
        if args[0]["kind"] == "value" and _are_columns([columns]):
            return functools.partial(decode_images, columns)
    if of == "in_turn" and isinstance(args, list) and len(args) == 2 and depth < MOST_IN_TURN:
        first, second = (_made_of(part, "transform", source, depth + 1) for part in args)
        if callable(first) and callable(second):
            return functools.partial(composed, first, second)
    raise _unknown("transform", of, source)


def _are_columns(args: Sequence[Any]) -> bool:
    names = args[0] if len(args) == 1 else None
    return isinstance(names, (list, tuple)) and bool(names) and all(type(name) is str for name in names)


def _named(module: Any, name: Any, slot: str, source: Source) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError(f"the name {reprlib.repr((module, name))}")
    try:
        found, trusted = defined(module, name, folder=source.path, modules=source.modules)
    except RefusedError as error:
        raise _refused(module, name, slot, source, str(error)) from error
    base = SLOTS[slot].base
    if base is not None and issubclass(type(found), type) and issubclass(cast(type, found), base):
        return found
    if slot == "loss" and module == "torch.nn.functional" and name in FUNCTIONAL:
        return found
    if trusted and SLOTS[slot].functions and type(found) is FunctionType:
        return found
    what = (
        "not a function" if base is None else f"neither a class below {base.__module__}.{base.__name__} nor a function"
    )
    raise _refused(module, name, slot, source, f"it is {what} of a module that is trusted")


def _unpickled(data: str, source: Source) -> Any:
    if not source.allow_pickle:
        raise WithheldError(
            f"{source.path!r} holds code that has no name to import it by (a lambda, or a function of a notebook). "
            "Give it again (TorchModel.load(path, model=make_net, transform=prepare)), or run what is stored if you "
            "trust it: allow_pickle=True"
        )
    import cloudpickle

    return cloudpickle.loads(base64.b64decode(data))


def _refused(module: str, name: str, slot: str, source: Source, why: str) -> WithheldError:
    shown = reprlib.repr(f"{module}.{name}")
    top = module.partition(".")[0]
    trust = "" if top in LISTED else ", or trust its module if it is yours: modules=['package']"
    give = f"; give it yourself ({slot}=…){trust}" if SLOTS[slot].functions or SLOTS[slot].base else ""
    return WithheldError(f"{source.path!r} names {shown} as its {slot}, which cannot be used: {why}{give}")


def _unknown(slot: str, value: Any, source: Source) -> CheckpointError:
    return CheckpointError(
        f"{source.path!r} asks for {reprlib.repr(value)} as its {slot}, which is not known; it was not written by this "
        "version of thinwire, or was changed. Load what you saved, or save it again"
    )
