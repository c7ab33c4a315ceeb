"""Caffe's messages, made from `fields.txt` by the protobuf library; users add the parameters of their own layers."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from thinwire.errors import ConfigError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    raise ImportError("thinwire.caffe needs protobuf: pip install 'thinwire[caffe]'") from error

_PACKAGE = "thinwire_caffe"
_SCALARS = {
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "float": descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
}
_RAW = ("data", "diff", "double_data", "double_diff")
_added: list[str] = []


def extend(fields: str) -> None:
    """Adds messages and fields in the notation of `fields.txt`; a message named again gets more fields."""
    if fields in _added:
        return
    _added.append(fields)
    try:
        _build.cache_clear()
        message("NetParameter")
    except (TypeError, ValueError, IndexError, KeyError) as error:
        _added.remove(fields)
        _build.cache_clear()
        raise ConfigError(
            f"these fields cannot be added to Caffe's messages: {error}; write them as fields.txt does"
        ) from error


def message(name: str, *, raw: bool = False) -> Any:
    """The class of a message. With `raw`, a blob's numbers are bytes: on the wire a packed field is just that."""
    return _build(raw)[name]


@functools.cache
def _build(raw: bool) -> dict[str, Any]:
    table: dict[str, dict[str, list[str]]] = {}
    enums: dict[str, list[str]] = {}
    for text in (resources.files("thinwire.caffe").joinpath("fields.txt").read_text("utf-8"), *_added):
        _read(text, table, enums)
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto2")
    for name in sorted(enums):
        if "." not in name:
            _enum(file.enum_type.add(), name, enums[name])
    for name, fields in table.items():
        made = file.message_type.add(name=name)
        inner = {n.partition(".")[2]: values for n, values in enums.items() if n.startswith(f"{name}.")}
        for enum, values in inner.items():
            _enum(made.enum_type.add(), enum, values)
        for field, words in fields.items():
            _field(made.field.add(name=field), words, name, inner, set(enums), as_bytes=raw and name == "BlobProto")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{n}")) for n in table}


def _read(text: str, table: dict[str, dict[str, list[str]]], enums: dict[str, list[str]]) -> None:
    current = ""
    for line in text.splitlines():
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if line.startswith("message "):
            current = words[1]
            table.setdefault(current, {})
        elif line.startswith("enum "):
            enums[words[1]] = words[2:]
        else:
            table[current][words[0]] = words[1:]


def _enum(made: Any, name: str, values: list[str]) -> None:
    made.name = name
    for value in values:
        label, _, number = value.partition("=")
        made.value.add(name=label, number=int(number))


def _field(
    made: Any, words: list[str], owner: str, inner: dict[str, list[str]], enums: set[str], *, as_bytes: bool
) -> None:
    kind = words[1].rstrip("*+")
    repeated, packed = words[1] != kind, words[1].endswith("+")
    made.number = int(words[0])
    made.label = made.LABEL_REPEATED if repeated else made.LABEL_OPTIONAL
    if as_bytes and made.name in _RAW:
        made.label, kind, packed = made.LABEL_OPTIONAL, "bytes", False
    if packed:
        made.options.packed = True
    if kind in _SCALARS:
        made.type = _SCALARS[kind]
    elif kind in inner:
        made.type, made.type_name = made.TYPE_ENUM, f".{_PACKAGE}.{owner}.{kind}"
    elif kind in enums:
        made.type, made.type_name = made.TYPE_ENUM, f".{_PACKAGE}.{kind}"
    else:
        made.type, made.type_name = made.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if len(words) > 2 and not repeated:
        made.default_value = words[2][1:]
