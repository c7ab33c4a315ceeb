"""Converts a tree to JSON and named tensors, and back.

Values that JSON has represent themselves. Other values are objects whose `"$"` names their kind::

    2**80                {"$": "int", "hex": "0x100…"}
    nan, inf             {"$": "float", "bits": "7ff8000000000000"}
    (1, 2)               {"$": "tuple", "items": [1, 2]}
    {3: "a"}             {"$": "dict", "items": [[3, "a"]]}      dicts with an int key, or with the key "$"
    Counter              {"$": "Counter", "items": [[3, 1]]}     MultiStepLR keeps its milestones in one
    b"…"                 {"$": "bytes", "name": "rng.seed"}      a uint8 tensor of that name
    torch.Tensor         {"$": "tensor", "name": "model.weight"}
    numpy.ndarray        {"$": "array", "name": "rng.keys", "dtype": "<u4", "shape": [624]}   likewise uint8
    numpy.float32(1)     {"$": "scalar", "dtype": "<f4", "hex": "0000803f"}
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from thinwire.errors import CheckpointError

MAX_DEPTH = 100
"""Most levels of nesting: far more than any optimizer's state has, far fewer than the interpreter's recursion limit."""

_ALLOWED = (
    "A checkpoint holds dicts with str or int keys, lists, tuples, None, bool, int, float, str, bytes, "
    "torch tensors, NumPy arrays and NumPy scalars"
)
_PLAIN_KEY = re.compile(r"[\w.-]+")
_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9A-Za-z]+\])?")
_LARGEST_JSON_INT = 2**53  # every reader of JSON keeps integers up to this exact
_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)


def flatten(tree: object) -> tuple[object, dict[str, torch.Tensor]]:
    """The tree as a value for `json`, and the tensors to which it refers by name.

    The tensors are contiguous, on the CPU and without gradient. They may share memory with those of the tree.

    Raises:
        CheckpointError: The tree has a value of a type that a checkpoint cannot store; the message gives its path.

    >>> flatten({"lr": 0.1, "betas": (1, 2)})
    ({'lr': 0.1, 'betas': {'$': 'tuple', 'items': [1, 2]}}, {})
    """
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(tree, "", 0, tensors), tensors


def restore(node: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """The tree from which `flatten` made the node.

    Raises:
        CheckpointError: `flatten` never returns such a node. The input is not trusted.
    """
    try:
        return _restore(node, 0, tensors)
    except (TypeError, ValueError, OverflowError, RuntimeError, LookupError, struct.error) as error:
        raise damaged(f"a value in it cannot be rebuilt ({error})") from error


def parse(text: str | bytes, *, what: str) -> object:
    """The value of a JSON text; `what` names the text in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise damaged(f"{what} is not JSON ({error})") from error


def damaged(why: str) -> CheckpointError:
    """The error for data that thinwire did not write."""
    return CheckpointError(
        f"the checkpoint data are damaged: {why}. Only unchanged output of thinwire can be read. "
        "Resume from another checkpoint, or copy this one again from its source."
    )


def _flatten(value: object, path: str, depth: int, tensors: dict[str, torch.Tensor]) -> object:
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{path[:80]}… is nested more than {MAX_DEPTH} levels deep, or holds itself. {_ALLOWED}, nested "
            f"up to {MAX_DEPTH} levels. Flatten it, or leave out the circular reference."
        )
    # NumPy's float64, str_ and bytes_ are subclasses of Python's float, str and bytes, so they are checked first.
    if isinstance(value, np.generic):
        return _flatten_scalar(value, path)
    if value is None or isinstance(value, (bool, int, float, str)):
        return _flatten_plain(value)
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", "name": _keep(_tensor(value, path), path, tensors)}
    if isinstance(value, bytes):
        return {"$": "bytes", "name": _keep(_raw(np.frombuffer(value, np.uint8)), path, tensors)}
    if type(value) is np.ndarray:
        _check_numpy(value, path)
        name = _keep(_raw(value), path, tensors)
        return {"$": "array", "name": name, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, dict):
        return _flatten_dict(value, path, depth, tensors)
    if isinstance(value, (list, tuple)):
        items = [_flatten(item, f"{path}[{i}]", depth + 1, tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    raise _unknown(value, path)


def _flatten_plain(value: bool | int | float | str | None) -> object:
    # The base classes' own conversions are used, because a subclass (an IntEnum, torch's version) may override str().
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        # Hexadecimal, because conversion to decimal digits takes quadratic time and Python refuses more than 4300
        # digits.
        return number if abs(number) <= _LARGEST_JSON_INT else {"$": "int", "hex": hex(number)}
    real = float.__float__(value)
    return real if math.isfinite(real) else {"$": "float", "bits": struct.pack(">d", real).hex()}


def _flatten_scalar(value: np.generic, path: str) -> object:
    _check_numpy(value, path)
    raw = value.tobytes()[: value.dtype.itemsize]  # without the padding that NumPy gives empty text
    return {"$": "scalar", "dtype": value.dtype.str, "hex": raw.hex()}


def _flatten_dict(value: dict[object, object], path: str, depth: int, tensors: dict[str, torch.Tensor]) -> object:
    pairs: list[tuple[object, object]] = []
    for key, item in value.items():
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise _unknown(key, f"a key of {path or 'the tree'}")
        pairs.append((_flatten_plain(key), _flatten(item, _below(path, key), depth + 1, tensors)))
    if isinstance(value, Counter):
        return {"$": "Counter", "items": pairs}
    if "$" in value or not all(isinstance(key, str) for key in value):
        return {"$": "dict", "items": pairs}
    return {str(key): item for key, item in pairs}


def _below(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{hex(key) if abs(key) > _LARGEST_JSON_INT else int(key)}]"
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{str.__str__(key)!r}]"
    return f"{path}.{str.__str__(key)}" if path else str.__str__(key)


def _keep(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Stores the tensor under its path, which other readers of safetensors show as its name."""
    wanted = (path or "tree").encode("ascii", "backslashreplace").decode()
    name = wanted
    # {"a.b": …} and {"a": {"b": …}} have the same path, and safetensors reserves "__metadata__".
    while name in tensors or name == "__metadata__":
        name = f"{wanted}#{len(tensors)}"
        wanted += "#"
    tensors[name] = tensor
    return name


def _tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.dtype not in _DTYPES or value.layout != torch.strided or value.device.type == "meta":
        raise _unusual(value, path)
    try:
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path or 'the tree'} is a tensor that cannot be copied to the CPU ({error}). {_ALLOWED}. "
            "Initialise it first, or leave it out."
        ) from error
    if type(tensor) is not torch.Tensor or tensor.is_nested:  # such as a DTensor, whose data are in many processes
        raise _unusual(value, path)
    return tensor


def _raw(value: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
    return torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0).byte()


def _check_numpy(value: np.generic | np.ndarray[tuple[int, ...], np.dtype[np.generic]], path: str) -> None:
    dtype = value.dtype
    text_scalar = isinstance(value, (np.str_, np.bytes_))  # an empty text has no bytes
    if not _NUMPY_DTYPE.fullmatch(dtype.str) or dtype.hasobject or not (dtype.itemsize or text_scalar):
        raise CheckpointError(
            f"{path or 'the tree'} is a NumPy value of dtype {dtype}. Allowed are NumPy's booleans, numbers, "
            "dates and fixed-width strings. Convert it, for instance to one array a field or to a list."
        )


def _unknown(value: object, path: str) -> CheckpointError:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return CheckpointError(
        f"{path or 'the tree'} is {article} {name} ({reprlib.repr(value)}). {_ALLOWED}. "
        "Leave it out, or store the plain values it can be rebuilt from."
    )


def _unusual(value: torch.Tensor, path: str) -> CheckpointError:
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
    return CheckpointError(
        f"{path or 'the tree'} is a {type(value).__name__} of {value.dtype}, {value.layout}, on "
        f"{value.device}. Allowed are plain, dense tensors with data, of {names}. Convert it "
        "(to_dense(), to_local(), view_as_real(), …) and back after loading."
    )


def _restore(node: object, depth: int, tensors: Mapping[str, torch.Tensor]) -> object:
    if depth > MAX_DEPTH:
        raise damaged(f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, list):
        return [_restore(item, depth + 1, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _restore(item, depth + 1, tensors) for key, item in node.items()}
    kind = node["$"]
    if kind == "tensor":
        return _find(node, tensors)
    if kind == "bytes":
        return _find_raw(node, tensors)
    if kind == "array":
        return _restore_array(node, tensors)
    if kind == "scalar":
        return _restore_scalar(node)
    if kind == "int":
        return int(_text(node, "hex"), 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(_text(node, "bits")))[0]
    items = node.get("items")
    if kind not in ("tuple", "dict", "Counter") or not isinstance(items, list):
        raise damaged(f"it holds a value of the unknown kind {reprlib.repr(kind)}")
    if kind == "tuple":
        return tuple(_restore(item, depth + 1, tensors) for item in items)
    pairs = dict(_restore_pairs(items, depth, tensors))
    return Counter(pairs) if kind == "Counter" else pairs


def _restore_pairs(
    items: list[object], depth: int, tensors: Mapping[str, torch.Tensor]
) -> Iterable[tuple[str | int, object]]:
    for item in items:
        if not isinstance(item, list) or len(item) != 2:
            raise damaged("a dict in it does not consist of keys and values")
        key = _restore(item[0], depth + 1, tensors)
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise damaged(f"a dict in it has the key {reprlib.repr(key)}")
        yield key, _restore(item[1], depth + 1, tensors)


def _restore_array(node: dict[str, object], tensors: Mapping[str, torch.Tensor]) -> object:
    dtype = _numpy_dtype(node)
    shape = node.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise damaged(f"it holds an array of shape {reprlib.repr(shape)}")
    raw = _find_raw(node, tensors)
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(raw):
        raise damaged(f"it holds {len(raw)} bytes for an array of {dtype} and shape {reprlib.repr(shape)}")
    return np.ndarray(tuple(shape), dtype, buffer=bytearray(raw) if raw else None)


def _restore_scalar(node: dict[str, object]) -> object:
    dtype, raw = _numpy_dtype(node), bytes.fromhex(_text(node, "hex"))
    if len(raw) != dtype.itemsize:
        raise damaged(f"it holds {len(raw)} bytes for one value of {dtype}")
    if dtype.kind == "S":  # both kinds of text would lose trailing NULs in an array
        return np.bytes_(raw)
    if dtype.kind == "U":
        return np.str_(raw.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
    return np.frombuffer(raw, dtype)[0]


def _numpy_dtype(node: dict[str, object]) -> np.dtype[np.generic]:
    text = _text(node, "dtype")
    if not _NUMPY_DTYPE.fullmatch(text):
        raise damaged(f"it holds a NumPy value of dtype {reprlib.repr(text)}")
    return np.dtype(text)


def _find(node: dict[str, object], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name = _text(node, "name")
    if name not in tensors:
        raise damaged(f"it refers to the tensor {reprlib.repr(name)}, which is not there")
    return tensors[name]


def _find_raw(node: dict[str, object], tensors: Mapping[str, torch.Tensor]) -> bytes:
    tensor = _find(node, tensors)
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise damaged(f"the tensor {reprlib.repr(node['name'])} does not hold plain bytes")
    return tensor.numpy().tobytes()


def _text(node: dict[str, object], field: str) -> str:
    text = node.get(field)
    if not isinstance(text, str):
        raise damaged(f"a value of kind {reprlib.repr(node['$'])} in it has no {field!r}")
    return text
