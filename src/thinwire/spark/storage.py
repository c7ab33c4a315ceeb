"""Estimators and models on any storage that Spark can write: JSON, safetensors, and code by name where it has one."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

from thinwire import __version__
from thinwire.cluster.frames import decode_images
from thinwire.errors import CheckpointError, ConfigError, ThinwireError
from thinwire.models import ZOO
from thinwire.session import composed
from thinwire.strategies import Strategy, name_of, strategy

PIECE_BYTES = 16 << 20
WEIGHTS = "weights"
KEY = "thinwire"
FORMAT = 1
"""Of what stands under `KEY`, and of the weights beside it."""

OWN_PARTIALS: dict[str, Any] = {"decode_images": decode_images, "in_turn": composed}
"""Functions of ours that transforms are made of; partials of these are stored by name."""

Code = dict[str, Any]
"""A Python object in JSON: a plain value, a name to import it by, or pickled code."""


class Saved(NamedTuple):
    """What is stored beside the parameters."""

    more: dict[str, Any]
    code: dict[str, Code]
    weights: bytes = b""


def code_of(value: Any) -> Code:
    """An object as JSON; by name wherever it has one that can be imported."""
    if isinstance(value, Strategy):
        return {"kind": "strategy", "name": name_of(value), "knobs": dataclasses.asdict(value)}
    for name, factory in ZOO.items():
        if value is factory:
            return {"kind": "zoo", "name": name}
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if module not in (None, "__main__") and "<" not in name and _found(module, name) is value:
        return {"kind": "name", "module": module, "name": name}
    if isinstance(value, functools.partial) and value.func in OWN_PARTIALS.values() and not value.keywords:
        name = next(name for name, own in OWN_PARTIALS.items() if own is value.func)
        parts = [code_of(a) for a in value.args]
        if not any(part["kind"] == "pickle" for part in parts):
            return {"kind": "partial", "of": name, "args": parts}
    try:
        return {"kind": "value", "value": json.loads(json.dumps(value))}
    except TypeError:
        import cloudpickle

        return {"kind": "pickle", "data": base64.b64encode(cloudpickle.dumps(value)).decode()}


def made_of(code: Code, *, path: str, allow_pickle: bool) -> Any:
    """The object again. Pickled code is only run where the caller allows it."""
    try:
        return _made_of(code, path=path, allow_pickle=allow_pickle)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise _damaged(path, error) from error


def _made_of(code: Code, *, path: str, allow_pickle: bool) -> Any:
    kind = code["kind"]
    if kind == "value":
        return code["value"]
    if kind == "strategy":
        return strategy(code["name"], code["knobs"])
    if kind == "zoo":
        return ZOO[code["name"]]
    if kind == "name":
        found = _found(code["module"], code["name"])
        if found is None:
            raise CheckpointError(
                f"{path!r} needs {code['module']}.{code['name']}, which cannot be imported here; put its module on the "
                "Python path (or, for a model, give it: TorchModel.load(path, model=make_net))"
            )
        return found
    if kind == "partial":
        if str(code["of"]) not in OWN_PARTIALS:  # of anything else, with arguments, it would be as good as a pickle
            raise CheckpointError(
                f"{path!r} asks for {code['of']!r}, which is not known; it was not written by thinwire"
            )
        args = [made_of(a, path=path, allow_pickle=allow_pickle) for a in code["args"]]
        return functools.partial(OWN_PARTIALS[code["of"]], *args)
    if not allow_pickle:
        raise CheckpointError(
            f"{path!r} holds code that has no name to import it by (a lambda, or a function of a notebook). Give it "
            "again (for a model: TorchModel.load(path, model=make_net)), or run what is stored if you trust it: "
            "allow_pickle=True"
        )
    import cloudpickle

    return cloudpickle.loads(base64.b64decode(code["data"]))


def write_saved(path: str, instance: Any, saved: Saved, writer: Any, *, leave_out: Collection[str] = ()) -> None:
    """Writes an estimator or a model; what its parameters hold, save those left out, must be plain."""
    session = writer.sparkSession
    context = _context(session)
    form = {"format": FORMAT, "version": __version__, "digest": _digest(saved.weights)}
    extra = {KEY: {**form, "more": saved.more, "code": saved.code, "size_bytes": len(saved.weights)}}
    DefaultParamsWriter.saveMetadata(instance, path, context, extraMetadata=extra, paramMap=_plain(instance, leave_out))
    if saved.weights:
        data = saved.weights
        pieces = [(i, data[start : start + PIECE_BYTES]) for i, start in enumerate(range(0, len(data), PIECE_BYTES))]
        frame = session.createDataFrame([(i, bytearray(p)) for i, p in pieces], "piece int, data binary")
        frame.write.mode("overwrite").parquet(f"{path}/{WEIGHTS}")


def read_saved(path: str, instance: Any, reader: Any) -> Saved:
    """Reads what `write_saved` wrote, and sets the instance's parameters."""
    session = reader.sparkSession
    metadata = DefaultParamsReader.loadMetadata(path, _context(session))
    saved, size_bytes = held_in(metadata, path)
    instance._resetUid(metadata["uid"])
    DefaultParamsReader.getAndSetParams(instance, metadata)
    if not size_bytes:
        return saved
    rows = session.read.parquet(f"{path}/{WEIGHTS}").orderBy("piece").collect()
    weights = b"".join(bytes(row["data"]) for row in rows)
    if len(weights) != size_bytes:
        raise CheckpointError(f"{path!r} holds {len(weights)} bytes of weights where {size_bytes} belong")
    digest = metadata[KEY].get("digest")
    if digest is not None and digest != _digest(weights):
        raise CheckpointError(
            f"the weights in {path!r} are damaged: their digest is not the one they were written with. Copy the "
            "folder again from where it came, or save the model again."
        )
    return saved._replace(weights=weights)


def held_in(metadata: Any, path: str) -> tuple[Saved, int]:
    """What metadata say is stored beside the parameters, and how many bytes of weights there are."""
    if not isinstance(metadata, dict) or KEY not in metadata:
        raise CheckpointError(f"{path!r} was not written by thinwire; name the folder that save() was given")
    try:
        held, uid = metadata[KEY], metadata["uid"]
        number = held.get("format", 1)  # the first versions wrote no number
        if type(number) is int and number > FORMAT:
            raise CheckpointError(
                f"{path!r} is of format {number}. This thinwire, {__version__}, reads formats 1 to {FORMAT}. "
                f"Install thinwire {held.get('version', 'that wrote it')} or newer."
            )
        more, code, size_bytes = held["more"], held["code"], held["size_bytes"]
    except (AttributeError, LookupError, TypeError) as error:
        raise _damaged(path, error) from error
    tables = isinstance(more, dict) and isinstance(code, dict) and all(isinstance(c, dict) for c in code.values())
    if not tables or not isinstance(uid, str) or type(size_bytes) is not int or size_bytes < 0:
        raise _damaged(path, ValueError(f"size_bytes = {size_bytes!r}, or what is held is no table"))
    return Saved(more, code), size_bytes


def _damaged(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path!r} is damaged ({error!r}); only unchanged output of thinwire can be read. Copy it again from where "
        "it came."
    )


def _digest(weights: bytes) -> str:
    return hashlib.blake2b(weights, digest_size=32).hexdigest()


def _plain(instance: Any, leave_out: Collection[str]) -> dict[str, Any]:
    plain = {}
    for param, value in instance._paramMap.items():
        if param.name in leave_out:
            continue
        try:
            plain[param.name] = json.loads(json.dumps(value))
        except TypeError as error:
            raise ConfigError(f"parameter {param.name!r} holds {value!r}, which cannot be stored") from error
    return plain


def _context(session: Any) -> Any:
    from thinwire.cluster.sessions import is_remote

    return session if is_remote(session) else session.sparkContext


@functools.lru_cache(maxsize=256)
def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _found(module: Any, name: str) -> Any:
    """What a module itself defines under a name; nothing of Python's own, which has no networks and much that harms."""
    if str(module).partition(".")[0] in sys.stdlib_module_names:
        return None
    found = _imported(str(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if getattr(found, "__module__", None) == module else None
