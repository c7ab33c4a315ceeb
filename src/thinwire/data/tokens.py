"""Transforms of text and of ragged rows: a tokenizer that is saved as data, and Hugging Face's data collators."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from thinwire.errors import ConfigError, DataError
from thinwire.values import choice, known_only, named, optional, text, whole

FIELDS = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
    "special_tokens_mask": "special_tokens_mask",
}
"""Columns that a tokenizer can make, with their names in the `tokenizers` library."""
ALWAYS = ("input_ids", "attention_mask", "token_type_ids")
"""Columns that inputs may name for any tokenizer."""
MOST_LENGTH = 1 << 20
"""Most tokens of one text; tokenizers without a limit report a larger one."""
PADS = ("[PAD]", "<pad>", "<|pad|>")
NAME = "tokenize"
SETTINGS = ("json", "columns", "makes", "max_length", "padding", "side", "cut", "pad_id", "pad_type_id")


@final
class Tokenize:
    """A transform that turns a column of text into token ids, padded to the longest text of each batch.

    A model that is saved with it keeps the tokenizer as data, and loads without the tokenizer's code or files.

    Args:
        tokenizer: a fast tokenizer of transformers, a tokenizer of the library `tokenizers`, or the path of a
            `tokenizer.json` or of the folder into which `save_pretrained` wrote it. Nothing is downloaded.
        columns: the column of text; two columns are encoded as pairs.
        max_length: most tokens, special ones included; longer texts are truncated. By default the tokenizer's own
        limit.
        padding: "longest" pads to the longest text of the batch, "max_length" always to `max_length`.
    """

    def __init__(
        self,
        tokenizer: Any,
        columns: str | Sequence[str] = "text",
        *,
        max_length: int | None = None,
        padding: str = "longest",
    ) -> None:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        optional(whole(1, MOST_LENGTH))("transform.max_length", max_length)
        found = _described(tokenizer)
        self._take(
            found | {"columns": list(names), "padding": padding, "max_length": max_length or found["max_length"]}
        )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Tokenize:
        """A transform from the plain values of `settings`; the values may come from an untrusted file.

        Raises:
            ConfigError: A value is missing, of another type or out of range.
            ValueError: The tokenizer cannot be read.
        """
        made = cls.__new__(cls)
        made._take(settings)
        made._tokenizer()
        return made

    def _take(self, settings: Mapping[str, Any]) -> None:
        if set(settings) != set(SETTINGS):
            raise ConfigError(f"a tokenizer has the settings {', '.join(SETTINGS)}; here are {sorted(settings)[:12]}")
        columns, makes = settings["columns"], settings["makes"]
        if not isinstance(columns, list) or len(columns) not in (1, 2) or not all(map(_is_name, columns)):
            raise ConfigError(
                f"transform.columns = {columns!r} is not possible; name one column of text, or a pair of two"
            )
        if not isinstance(makes, list) or not makes or any(name not in FIELDS for name in makes):
            raise ConfigError(f"transform.tokenizer makes {makes!r}; use one or more of {', '.join(FIELDS)}")
        text("'{…}'")("transform.tokenizer", settings["json"])
        choice("longest", "max_length")("transform.padding", settings["padding"])
        optional(whole(1, MOST_LENGTH))("transform.max_length", settings["max_length"])
        choice("left", "right")("transform.tokenizer.padding_side", settings["side"])
        choice("left", "right")("transform.tokenizer.truncation_side", settings["cut"])
        optional(whole(0))("transform.tokenizer.pad_token_id", settings["pad_id"])
        whole(0)("transform.tokenizer.pad_token_type_id", settings["pad_type_id"])
        if settings["padding"] == "max_length" and settings["max_length"] is None:
            raise ConfigError("transform.padding = 'max_length' needs a length; give one, such as max_length=128")
        self._settings = {**settings, "columns": list(columns), "makes": list(dict.fromkeys(makes))}
        self._made: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, as plain values."""
        return dict(self._settings)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of text."""
        return tuple(self._settings["columns"])

    @property
    def makes(self) -> tuple[str, ...]:
        """The columns that replace the text column where inputs name it."""
        return tuple(self._settings["makes"])

    def given(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """The network's inputs, with text columns replaced by the columns made from them."""
        found = [made for name in inputs for made in (self.makes if name in self.columns else (name,))]
        return tuple(dict.fromkeys(found))

    def reads(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """The columns of the data from which these inputs are made."""
        found = [
            read
            for name in self.given(inputs)
            for read in (self.columns if name in (*self.makes, *ALWAYS) else (name,))
        ]
        return tuple(dict.fromkeys(found))

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        settings, tokenizer = self._settings, self._tokenizer()
        texts = [_texts(name, columns) for name in self.columns]
        found = [tokenizer.encode(*each) for each in zip(*texts, strict=True)]
        length = max((len(each.ids) for each in found), default=0)
        if settings["padding"] == "max_length":
            length = settings["max_length"]
        if settings["pad_id"] is None and any(len(each.ids) != length for each in found):
            raise DataError(
                f"the texts of column {self.columns[0]!r} have different numbers of tokens, and the tokenizer has no "
                "token to pad with; give it one: tokenizer.pad_token = tokenizer.eos_token"
            )
        fills = {
            "input_ids": settings["pad_id"] or 0,
            "token_type_ids": settings["pad_type_id"],
            "special_tokens_mask": 1,
        }
        made: dict[str, Any] = {}
        for name in dict.fromkeys((*self.makes, *ALWAYS)):
            values = np.full((len(found), length), fills.get(name, 0), np.int64)
            for row, each in enumerate(found):
                own = getattr(each, FIELDS[name])
                start = length - len(own) if settings["side"] == "left" else 0
                values[row, start : start + len(own)] = own
            made[name] = torch.from_numpy(values)
        return columns | made

    def _tokenizer(self) -> Any:
        """The tokenizer itself, built once for each process."""
        if self._made is None:
            made = _library().Tokenizer
            try:
                self._made = made.from_str(self._settings["json"])
            except Exception as error:  # the library raises plain Exception
                raise ValueError(f"the tokenizer cannot be read: {error}") from error
            self._made.no_padding()
            self._made.no_truncation()
            if self._settings["max_length"] is not None:
                self._made.enable_truncation(self._settings["max_length"], direction=self._settings["cut"])
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return self._settings

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._take(state)

    def __repr__(self) -> str:
        return f"Tokenize({', '.join(map(repr, self.columns))}, max_length={self._settings['max_length']})"


@final
class Collate:
    """A transform that passes a batch's rows to a collator, as a PyTorch DataLoader or a Trainer of transformers does.

    A data collator of transformers may be passed to `fit` directly.

    Args:
        collator: takes a list of rows, each a dict of columns, and returns a dict of tensors with one row for each.
        columns: the columns passed to it; by default all, without text columns for a collator of transformers.
    """

    def __init__(
        self, collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]], columns: Sequence[str] | None = None
    ) -> None:
        if isinstance(collator, type) or not callable(collator):
            raise ConfigError(f"Collate takes a function of a list of rows; here is {collator!r}")
        self.collator, self.columns = collator, None if columns is None else tuple(columns)

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        names = self.columns or tuple(columns)
        theirs = is_collator(self.collator) and self.columns is None
        plain = {n: _plain(columns[n]) for n in names if n in columns and not (theirs and _holds_text(columns[n]))}
        count = max(map(len, plain.values()), default=0)
        made = self.collator([{name: values[row] for name, values in plain.items()} for row in range(count)])
        if not isinstance(made, Mapping):
            raise DataError(
                f"the collator {type(self.collator).__name__} gave a {type(made).__name__}; it must give a dict of "
                "tensors by the names of columns"
            )
        return columns | dict(made)


def is_collator(given: object) -> bool:
    """Whether an object is a data collator of transformers, or of a derived class."""
    return any(
        kind.__module__.startswith("transformers.data.data_collator") and kind.__name__.startswith("DataCollator")
        for kind in type(given).__mro__
    )


def transform_of(key: str, given: Mapping[str, Any]) -> Tokenize:
    """A transform as a recipe describes it: `{ name = "tokenize", tokenizer = "folder", columns = "text" }`."""
    name, settings = named(key, given, '{ name = "tokenize", tokenizer = "folder", columns = "text" }')
    choice(NAME)(f"{key}.name", name)
    known_only(key, settings, ("tokenizer", "columns", "max_length", "padding"), name)
    if "tokenizer" not in settings:
        raise ConfigError(f"{key}.tokenizer is missing; name a tokenizer.json, or the folder that holds one")
    return Tokenize(**settings)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"a tokenizer needs the package tokenizers, on executors too: pip install 'thinwire[hf]' ({error})"
        ) from None
    return tokenizers


def _described(tokenizer: Any) -> dict[str, Any]:
    """A tokenizer of any kind, as plain values."""
    if isinstance(tokenizer, str | os.PathLike):
        return _of_files(os.fspath(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and callable(getattr(backend, "to_str", None)):
        limit = getattr(tokenizer, "model_max_length", None)
        return {
            "json": backend.to_str(),
            "makes": [name for name in tokenizer.model_input_names if name in FIELDS],
            "max_length": limit if isinstance(limit, int) and limit <= MOST_LENGTH else None,
            "side": tokenizer.padding_side,
            "cut": tokenizer.truncation_side,
            "pad_id": tokenizer.pad_token_id,
            "pad_type_id": tokenizer.pad_token_type_id,
        }
    if callable(getattr(tokenizer, "to_str", None)) and callable(getattr(tokenizer, "encode", None)):
        return _of_library(tokenizer)
    raise ConfigError(
        f"transform.tokenizer is a {type(tokenizer).__name__}, which cannot travel as data; give a fast tokenizer of "
        "transformers (AutoTokenizer gives one wherever there is one), one of the library tokenizers, or the folder "
        "that holds a tokenizer.json"
    )


def _of_library(tokenizer: Any) -> dict[str, Any]:
    padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
    pads = (tokenizer.token_to_id(token) for token in PADS)
    return {
        "json": tokenizer.to_str(),
        "makes": ["input_ids", "attention_mask"],
        "max_length": truncation.get("max_length"),
        "side": padding.get("direction", "right"),
        "cut": truncation.get("direction", "right"),
        "pad_id": padding.get("pad_id", next((pad for pad in pads if pad is not None), None)),
        "pad_type_id": padding.get("pad_type_id", 0),
    }


def _of_files(path: str) -> dict[str, Any]:
    """Reads what `save_pretrained` or `Tokenizer.save` wrote, as data: code that the files name is not loaded."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    try:
        with open(file, encoding="utf-8") as opened:
            held = opened.read()
        found = _of_library(_library().Tokenizer.from_str(held))
    except ConfigError:
        raise
    except Exception as error:  # of the file, or of the library, which raises plain Exception
        raise ConfigError(
            f"transform.tokenizer = {path!r} cannot be read ({error}); name a tokenizer.json, or a folder that a fast "
            "tokenizer's save_pretrained wrote. Nothing is downloaded"
        ) from error
    beside = os.path.join(folder, "tokenizer_config.json")
    if not os.path.isfile(beside):
        return found
    with open(beside, encoding="utf-8") as opened:
        config = json.load(opened)
    pad = config.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    limit, makes = config.get("model_max_length"), config.get("model_input_names")
    if isinstance(pad, str):
        found["pad_id"] = _library().Tokenizer.from_str(held).token_to_id(pad)
    if isinstance(limit, int) and 0 < limit <= MOST_LENGTH:
        found["max_length"] = limit
    if isinstance(makes, list):
        found["makes"] = [name for name in makes if name in FIELDS] or found["makes"]
    return found | {
        "side": config.get("padding_side", found["side"]),
        "cut": config.get("truncation_side", found["cut"]),
    }


def _texts(name: str, columns: Mapping[str, Any]) -> list[str]:
    if name not in columns:
        raise DataError(f"column {name!r}, which is to be tokenized, is not there; the batch has {', '.join(columns)}")
    given = columns[name]
    values = given.tolist() if isinstance(given, torch.Tensor) else list(given)
    wrong = next((value for value in values if not isinstance(value, str)), None)
    if wrong is not None:
        raise DataError(
            f"column {name!r} holds {str(wrong)[:80]!r} ({type(wrong).__name__}), and a tokenizer takes text; name the "
            "column of text: Tokenize(tokenizer, 'text')"
        )
    return values


def _plain(values: Any) -> Any:
    """A column's rows in the form that collators take: numbers and lists."""
    if isinstance(values, torch.Tensor):
        return values.tolist()
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def _holds_text(values: Any) -> bool:
    return not isinstance(values, torch.Tensor) and len(values) > 0 and isinstance(values[0], str)
