"""Prototxt files: read with every error at its line, and brought to the current form whatever their age."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import Any

from google.protobuf import text_format

from thinwire.caffe import schema
from thinwire.caffe.upgrade import upgraded
from thinwire.errors import ConfigError

MAX_BYTES = 16 << 20
"""A larger text is no network anybody wrote; the largest known are below one megabyte."""

LONGEST = 400
"""Characters of a parser's complaint that are worth reading."""

_TOKEN = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|#[^\n]*|\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Definition:
    """A network as it is written: the message in its current form, and where each layer stands.

    Attributes:
        net: a NetParameter without legacy fields.
        file: where it was read from.
        lines: for each of its layers the line it begins in; 0 where it came from another field.
    """

    net: Any
    file: str
    lines: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """A message travels as its own bytes."""
        return _unpacked, (self.net.SerializeToString(), self.file, self.lines)

    def error(self, index: int, text: str) -> ConfigError:
        """An error of one layer, with its place in the file."""
        layer = self.net.layer[index]
        return ConfigError(f"{self.file}:{self.lines[index]}: layer {layer.name!r} ({layer.type}): {text}")


def _unpacked(net: bytes, file: str, lines: tuple[int, ...]) -> Definition:
    return Definition(schema.message("NetParameter").FromString(net), file, lines)


def read_net(path: str | os.PathLike[str]) -> Definition:
    """The network that a prototxt file describes."""
    return parse_net(read_text(path), os.fspath(path))


def read_named_net(path: str) -> Definition:
    """The network of a file that another file names; if it is none, the error tells nothing of what is in it."""
    text = read_text(path)
    return definition(parse("NetParameter", text, path, quoted=False), path, _lines(text))


def parse_net(text: str, file: str = "prototxt") -> Definition:
    """The network that a prototxt describes."""
    net = parse("NetParameter", text, file)
    return definition(net, file, _lines(text))


def definition(net: Any, file: str, lines: list[int] | None = None) -> Definition:
    """A network's message, brought to the current form."""
    number = len(net.layer) + len(net.layers)
    lines = lines if lines is not None and len(lines) == number else [0] * number
    try:
        current, added = upgraded(net, lines)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return Definition(current, file, tuple(added))


def written(net: Any) -> str:
    """A network's text, as Caffe writes it."""
    return str(text_format.MessageToString(net))


def read_solver(path: str | os.PathLike[str]) -> Any:
    """The SolverParameter that a prototxt file holds."""
    return parse("SolverParameter", read_text(path), os.fspath(path))


def parse(name: str, text: str, file: str, *, quoted: bool = True) -> Any:
    """A message from its text form; unless `quoted`, an error tells the line alone, and nothing that stands there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # protobuf decodes escapes by Python's own rules
            return text_format.Parse(text, schema.message(name)())
    except text_format.ParseError as error:
        at = f"{file}:{error.GetLine()}" if error.GetLine() else file
        if quoted:
            said = re.sub(r"^\d+:\d+ ?: ", "", str(error)).replace("thinwire_caffe.", "")
            said = said if len(said) <= LONGEST else f"{said[:LONGEST]}…"
            raise ConfigError(f"{at}: {said} Correct this line, or register the layer it belongs to.") from error
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        at = file
        if quoted:
            raise ConfigError(f"{file} is not the text of a {name}: {str(error)[:LONGEST]}") from error
    # Out of the handlers: a traceback would show the parser's own complaint, which quotes the file.
    raise ConfigError(
        f"{at}: this is not the text of a {name}. Another file names it, so that nothing of it is shown here; if it is "
        "your network, `thinwire caffe show` says what is wrong with it."
    )


def read_text(path: str | os.PathLike[str]) -> str:
    """A prototxt file's text."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise ConfigError(f"{name!r} is not a file; give the path of a prototxt")
    if os.path.getsize(name) > MAX_BYTES:
        raise ConfigError(f"{name!r} has {os.path.getsize(name)} bytes; a prototxt has at most {MAX_BYTES}: is it one?")
    with open(name, "rb") as file:
        raw = file.read()
    if b"\x00" in raw:
        raise ConfigError(f"{name!r} is not text; weights are given apart, as weights=")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # comments of another time


def _lines(text: str) -> list[int]:
    """The line of every top-level `layer` and `layers`, in the order in which the message lists them."""
    found: dict[str, list[int]] = {"layer": [], "layers": []}
    depth, line = 0, 1
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token in "{<":
            depth += 1
        elif token in "}>":
            depth -= 1
        elif depth == 0 and token in found:
            found[token].append(line)
    return found["layer"] + found["layers"]
