"""Data sets that are known by name.

`digits` is part of the package: the test set of *Optical Recognition of Handwritten Digits* by E. Alpaydin
and C. Kaynak, UCI Machine Learning Repository (doi:10.24432/C50P49, CC BY 4.0), 1797 images of 8 by 8 pixels;
here as unsigned bytes, otherwise unchanged. The others are read from a folder of the files their authors
publish.
"""

from __future__ import annotations

import glob
import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import torch

from thinwire.data.arrays import table_of_arrays
from thinwire.errors import DataError, nearest

Array = np.ndarray[Any, Any]

_IDX_PREFIX = {"train": "train", "test": "t10k"}
_CIFAR_ROW = 1 + 3 * 32 * 32
TEXT_LENGTH = 64
MOST_BYTES = 4 << 30
"""Largest packed file that is read; the largest of these sets has a hundredth of that."""
_HOW_TO_GET = "Download and unpack the files from the set's home page, and name their folder."


def scale_pixels(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with "pixels" scaled from 0…255 to 0…1."""
    return {**columns, "pixels": torch.as_tensor(columns["pixels"]).to(torch.float32).div_(255)}


Loaded = tuple[Any, Callable[[dict[str, Any]], dict[str, Any]] | None]


def load_named(name: str, folder: str, split: str) -> Loaded:
    """The table and the transform of a named set."""
    if name == "digits":
        return _digits(folder, split), None
    if not folder:
        raise DataError(f"{name!r} needs a folder; {name}:DIR is allowed, DIR holding its files. {_HOW_TO_GET}")
    load = NAMES[name]
    assert load is not None
    return load(os.path.expanduser(folder), split), None if name == "text" else scale_pixels


def load_folder(folder: str, split: str) -> Loaded | None:
    """The set whose files are in a folder, recognised by their names; None where there are none."""
    folder = os.path.expanduser(folder)
    if any(_idx_path(folder, prefix, "images") for prefix in _IDX_PREFIX.values()):
        return _idx_set(folder, split), scale_pixels
    if any(_cifar_paths(folder, part) for part in ("train", "test")):
        return _cifar(folder, split), scale_pixels
    return None


def _digits(folder: str, split: str) -> Any:
    if folder or split != "train":
        raise DataError(
            f"digits has no {'folder' if folder else 'test split'}; it is one set of 1797 rows inside the "
            "package. Write 'digits' alone, with validation=0.2 to hold rows back."
        )
    raw = resources.files("thinwire.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        pixels, label = arrays["pixels"], arrays["label"]
    scaled = (pixels.reshape(-1, 1, 8, 8) / np.float32(16)).astype(np.float32)
    return table_of_arrays({"pixels": scaled, "label": label.astype(np.int64)})


def _idx_set(folder: str, split: str) -> Any:
    prefix = _IDX_PREFIX[split]
    arrays = {}
    for kind in ("images", "labels"):
        path = _idx_path(folder, prefix, kind)
        if path is None:
            raise DataError(
                f"no file {prefix}-{kind}-idx?-ubyte in {folder!r}; it must be there, as it is or as .gz. {_HOW_TO_GET}"
            )
        arrays[kind] = _read_idx(path, 3 if kind == "images" else 1)
    images, labels = arrays["images"], arrays["labels"]
    if len(images) != len(labels):
        raise DataError(
            f"{folder!r} has {len(images)} {split} images and {len(labels)} labels; there must be one for "
            f"each. {_HOW_TO_GET}"
        )
    return table_of_arrays({"pixels": images[:, None], "label": labels.astype(np.int64)})


def _idx_path(folder: str, prefix: str, kind: str) -> str | None:
    number = 3 if kind == "images" else 1
    for joint in "-.":
        for end in ("", ".gz"):
            path = os.path.join(folder, f"{prefix}-{kind}{joint}idx{number}-ubyte{end}")
            if os.path.isfile(path):
                return path
    return None


def _read_idx(path: str, num_dims: int) -> Array:
    """The array of bytes in an idx file; an uncompressed file is memory-mapped."""
    header = 4 + 4 * num_dims
    try:
        raw: Array
        if path.endswith(".gz"):
            with gzip.open(path) as file:
                head = file.read(header)  # gives the size, before a packed file is read whole
                size = math.prod(struct.unpack(f">{num_dims + 1}I", head)[1:])
                raw = np.frombuffer(head + file.read(min(size, MOST_BYTES) + 1), np.uint8)
        else:
            raw = np.memmap(path, np.uint8, "r")
        magic, *shape = struct.unpack(f">{num_dims + 1}I", raw[:header].tobytes())
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path!r} cannot be read ({error}); a whole idx file is needed. {_HOW_TO_GET}") from error
    if magic != 0x800 + num_dims or len(raw) != header + math.prod(shape):
        raise DataError(
            f"{path!r} is damaged: type {magic:#x}, shape {tuple(shape)}, {len(raw)} bytes; an idx file of "
            f"bytes in {num_dims} dimensions is needed. {_HOW_TO_GET}"
        )
    if 0 in shape:
        raise DataError(f"{path!r} has shape {tuple(shape)}: it is empty. {_HOW_TO_GET}")
    return raw[header:].reshape(shape)


def _cifar(folder: str, split: str) -> Any:
    paths = _cifar_paths(folder, split)
    if not paths:
        wanted = "test_batch.bin" if split == "test" else "data_batch_*.bin"
        raise DataError(
            f"no file {wanted} in {folder!r}; the binary version of CIFAR-10 must be there, in it or in its "
            f"subfolder cifar-10-batches-bin. {_HOW_TO_GET}"
        )
    parts = []
    for path in paths:
        raw = np.fromfile(path, np.uint8)
        if not len(raw) or len(raw) % _CIFAR_ROW:
            raise DataError(
                f"{path!r} has {len(raw)} bytes; a multiple of {_CIFAR_ROW} is needed, one label and 3x32x32 "
                f"pixels a row. {_HOW_TO_GET}"
            )
        parts.append(raw.reshape(-1, _CIFAR_ROW))
    pixels = np.concatenate([part[:, 1:] for part in parts]).reshape(-1, 3, 32, 32)
    return table_of_arrays({"pixels": pixels, "label": np.concatenate([p[:, 0] for p in parts]).astype(np.int64)})


def _cifar_paths(folder: str, split: str) -> list[str]:
    name = "test_batch.bin" if split == "test" else "data_batch_*.bin"
    for place in (folder, os.path.join(folder, "cifar-10-batches-bin")):
        if paths := sorted(glob.glob(os.path.join(glob.escape(place), name))):
            return paths
    return []


def _text(path: str, split: str) -> Any:
    """Rows of 64 characters of a text, and for each character the next one; the last tenth is the test split."""
    try:
        raw = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path!r} cannot be read ({error}); name a file of text, as in text:FILE") from error
    border = len(raw) * 9 // 10
    part = raw[border:] if split == "test" else raw[:border]
    rows = (len(part) - 1) // TEXT_LENGTH
    if rows < 1:
        raise DataError(f"{path!r} has {len(raw)} bytes; ten rows of {TEXT_LENGTH} characters are needed at least")
    here, after = (part[start : start + rows * TEXT_LENGTH].reshape(rows, TEXT_LENGTH) for start in (0, 1))
    return table_of_arrays({"characters": here, "label": after.astype(np.int64)})


NAMES: dict[str, Callable[[str, str], Any] | None] = {
    "digits": None,
    "mnist": _idx_set,
    "fashion-mnist": _idx_set,
    "cifar10": _cifar,
    "text": _text,
}


def unknown_name(name: str) -> DataError:
    """The error for a text that names neither a set nor a path."""
    return DataError(
        f"data {name!r} is neither a known set nor a file that exists. {nearest(name, NAMES)} "
        "Name one of those (all but digits with a folder, as in 'mnist:DIR'), or a path to Parquet files."
    )
