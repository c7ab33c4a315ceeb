"""Stores estimators and models anywhere that Spark can write: as JSON, safetensors, and code by name where possible."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

from thinwire.errors import CheckpointError, ConfigError, ThinwireError
from thinwire.spark.objects import SLOTS, Code, Source, damaged, made_of
from thinwire.version import __version__

PIECE_BYTES = 16 << 20
WEIGHTS, PROGRAM = "weights", "program"
KEY = "thinwire"
FORMAT = 1
"""Format version of the content under `KEY` and of the weights beside it."""


class Saved(NamedTuple):
    """What is stored beside the parameters."""

    more: dict[str, Any]
    code: dict[str, Code]
    weights: bytes = b""
    program: bytes = b""


def write_saved(path: str, instance: Any, saved: Saved, writer: Any, *, leave_out: Collection[str] = ()) -> None:
    """Writes an estimator or a model. Values of parameters must be plain, except for those in `leave_out`."""
    session = writer.sparkSession
    context = _context(session)
    form = {"format": FORMAT, "version": __version__, "digest": _digest(saved.weights)}
    extra = {KEY: {**form, "more": saved.more, "code": saved.code, "size_bytes": len(saved.weights)}}
    if saved.program:
        extra[KEY][PROGRAM] = {"size_bytes": len(saved.program), "digest": _digest(saved.program)}
    DefaultParamsWriter.saveMetadata(instance, path, context, extraMetadata=extra, paramMap=_plain(instance, leave_out))
    for name, data in ((WEIGHTS, saved.weights), (PROGRAM, saved.program)):
        pieces = [(i, data[start : start + PIECE_BYTES]) for i, start in enumerate(range(0, len(data), PIECE_BYTES))]
        if pieces:
            frame = session.createDataFrame([(i, bytearray(p)) for i, p in pieces], "piece int, data binary")
            frame.write.mode("overwrite").parquet(f"{path}/{name}")


def read_saved(path: str, instance: Any, reader: Any, *, leave_out: Collection[str] = ()) -> Saved:
    """Reads what `write_saved` has written, and sets the instance's parameters."""
    session = reader.sparkSession
    try:
        metadata = DefaultParamsReader.loadMetadata(path, _context(session))
    except (RecursionError, ValueError) as error:
        raise damaged(path, error) from error
    saved, size_bytes = held_in(metadata, path)
    try:
        refuse_objects(metadata, path, leave_out)
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise damaged(path, error) from error
    weights = _read(session, path, WEIGHTS, size_bytes, metadata[KEY].get("digest"))
    size_bytes, digest = program_in(metadata[KEY], path)
    return saved._replace(weights=weights, program=_read(session, path, PROGRAM, size_bytes, digest))


def _read(session: Any, path: str, name: str, size_bytes: int, digest: Any) -> bytes:
    """Reads the data under a name beside the metadata; earlier versions wrote no digest of the weights."""
    if not size_bytes:
        return b""
    rows = session.read.parquet(f"{path}/{name}").orderBy("piece").collect()
    return _checked(b"".join(bytes(row["data"]) for row in rows), path, name, digest, size_bytes)


def _checked(data: bytes, path: str, name: str, digest: Any, size_bytes: int) -> bytes:
    if len(data) != size_bytes:
        raise CheckpointError(f"{path!r} holds {len(data)} bytes of {name} where {size_bytes} belong")
    if data and digest is not None and digest != _digest(data):
        raise CheckpointError(
            f"the {name} in {path!r} {'are damaged: their' if name == WEIGHTS else 'is damaged: its'} digest is not "
            "the one stored beside the parameters. Copy the folder again from its source, or save the model again."
        )
    return data


def read_folder(path: str) -> tuple[dict[str, Any], Saved]:
    """The metadata of a saved stage, and what is stored beside them, read without Spark.

    Args:
        path: a folder, or an address that fsspec knows.
    """
    try:
        files, root = fsspec.core.url_to_fs(path)
        parts = sorted(files.glob(f"{root}/metadata/part-*"))
        text = files.cat_file(parts[0]) if parts else b""
    except (OSError, ImportError, ValueError) as error:
        raise CheckpointError(f"{path!r} cannot be read: {error}. Name the folder that save() was given") from error
    if not parts:
        raise CheckpointError(
            f"{path!r} is not a saved model: it has no metadata. Name the folder that save() was given"
        )
    try:
        metadata = json.loads(text.splitlines()[0])
    except (LookupError, RecursionError, ValueError) as error:
        raise damaged(path, error) from error
    saved, size_bytes = held_in(metadata, path)
    if not isinstance(metadata.get("paramMap"), dict):
        raise damaged(path, ValueError("it has no parameters"))
    weights = _checked(
        _pieces(files, root, WEIGHTS, size_bytes), path, WEIGHTS, metadata[KEY].get("digest"), size_bytes
    )
    size_bytes, digest = program_in(metadata[KEY], path)
    program = _checked(_pieces(files, root, PROGRAM, size_bytes), path, PROGRAM, digest, size_bytes)
    return metadata, saved._replace(weights=weights, program=program)


def _pieces(files: Any, root: str, name: str, size_bytes: int) -> bytes:
    if not size_bytes:
        return b""
    rows: list[tuple[int, bytes]] = []
    for file in files.glob(f"{root}/{name}/part-*.parquet"):
        with files.open(file) as opened:
            try:
                table = pq.read_table(opened, columns=["piece", "data"])
            except (pa.ArrowException, OSError, ValueError) as error:
                raise damaged(root, error) from error
            rows += zip(table["piece"].to_pylist(), table["data"].to_pylist(), strict=True)
    return b"".join(data for _, data in sorted(rows))


def has_saved(path: str, reader: Any) -> bool:
    """Whether a saved stage of Spark ML is at a path."""
    try:
        DefaultParamsReader.loadMetadata(path, _context(reader.sparkSession))
    except Exception:  # errors of Spark and Hadoop, whose classes differ by version and storage
        return False
    return True


def held_in(metadata: Any, path: str) -> tuple[Saved, int]:
    """What the metadata list as stored beside the parameters, and the number of bytes of weights."""
    if not isinstance(metadata, dict) or KEY not in metadata:
        raise CheckpointError(f"{path!r} was not written by thinwire; name the folder that save() was given")
    try:
        held, uid = metadata[KEY], metadata["uid"]
        number = held.get("format", 1)  # the first versions wrote no format number
        if type(number) is int and number > FORMAT:
            raise CheckpointError(
                f"{path!r} is of format {number}. This thinwire, {__version__}, reads formats 1 to {FORMAT}. "
                f"Install thinwire {held.get('version', 'that wrote it')} or newer."
            )
        more, code, size_bytes = held["more"], held["code"], held["size_bytes"]
    except (AttributeError, LookupError, TypeError) as error:
        raise damaged(path, error) from error
    tables = isinstance(more, dict) and isinstance(code, dict) and all(isinstance(c, dict) for c in code.values())
    if not tables or not isinstance(uid, str) or type(size_bytes) is not int or size_bytes < 0:
        raise damaged(path, ValueError(f"size_bytes = {size_bytes!r}, or what is held is no table"))
    return Saved(more, code), size_bytes


def program_in(held: dict[str, Any], path: str) -> tuple[int, str | None]:
    """Size and digest of the program that the metadata list; 0 and None for a model without one."""
    if PROGRAM not in held:
        return 0, None
    told = held[PROGRAM]
    if not isinstance(told, dict) or set(told) != {"size_bytes", "digest"}:
        raise damaged(path, ValueError("its program is no table"))
    size_bytes, digest = told["size_bytes"], told["digest"]
    if type(size_bytes) is not int or size_bytes < 0 or not isinstance(digest, str):
        raise damaged(path, ValueError(f"its program has size_bytes = {size_bytes!r}"))
    return size_bytes, digest


def refuse_objects(metadata: dict[str, Any], path: str, objects: Collection[str]) -> None:
    """Refuses parameters that may hold objects where they are outside `KEY`; their defaults must be names."""
    for name in objects:
        if name in metadata["paramMap"]:
            raise ValueError(f"the parameter {name!r} is among the plain parameters")
        value = metadata["defaultParamMap"].get(name)
        if value is not None and value != {}:
            if not isinstance(value, str):
                raise ValueError(f"the default of {name!r} is not a name")
            made_of({"kind": "value", "value": value}, slot_of(name), Source(path))


def slot_of(name: str) -> str:
    """The slot of a parameter, or of an argument of `fit`.

    >>> slot_of("model"), slot_of("fitOptions.transform"), slot_of("fitOptions.codec")
    ('model', 'transform', 'option')
    """
    option = name.removeprefix("fitOptions.")
    return option if option in SLOTS else "option"


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
