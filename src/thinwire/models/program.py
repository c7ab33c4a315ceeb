"""A network as data: a list of tensor operations in JSON, and the `nn.Module` that carries them out.

A saved model cannot always name the code of its network: it was written in a notebook, or is not installed where the
model is loaded. `exported` writes down which operations the network consists of, and `Program` runs them. The document
is data that anybody may have changed, so that reading it calls nothing that the document chose: each operation is one
of `OPERATIONS`, with arguments of the types that torch declares for it. Before a program is accepted it is carried out
on torch's meta device, where tensors have shapes and no memory.

The document is a JSON object::

    {
      "format": 1,
      "transform": false,                                          whether the fit's transform is a part of it
      "inputs": [{"dtype": "float32", "shape": [3]}],              of one row
      "state": [{"name": "0.weight", "dtype": "float32", "shape": [2, 3], "trained": true}, …],
      "constants": ["c0"],                                         tensors beside the document
      "nodes": [{"op": "permute.default", "args": [{"state": "0.weight"}, [1, 0]], "kwargs": {}}, …],
      "output": 1                                                  a value: inputs come first, then one a node
    }

An argument is a number, a text, a truth value, null, a list of arguments, or an object with one key: `value` (of an
input or an earlier node), `state`, `constant`, `float` (what JSON cannot write), `dtype`, `memory_format`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
import reprlib
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError, DataError
from thinwire.models.budget import Budget, ExceededError

FORMAT = 1
MOST_BYTES = 64 << 20
"""Of a document."""
MOST_NODES = 100_000
MOST_ITEMS = 65_536
"""Of one list."""
MOST_DEPTH = 4
"""Lists within the arguments of an operation."""
MOST_NAME = 500
MOST_MODULES = 65_536
"""That hold parameters and buffers: each dot in a name stands for one."""
TRIED_ROWS = (2, 3)
"""Numbers of rows for which a program is carried out before it is accepted."""
ROWS = 7
"""Copies of the example row: few other sizes in a network are equal to it."""

# Operations of torch's core set, without those that change a tensor in place, draw random numbers, give a size that
# depends on values, or look at memory without a check.
_CORE = """
    abs acos acosh _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d add.Scalar add.Tensor addmm alias
    amax amin any any.dim any.dims arange.start_step argmax argmin asin asinh atan atan2 atanh avg_pool1d avg_pool2d
    avg_pool3d bitwise_and.Scalar bitwise_and.Tensor bitwise_not bitwise_or.Scalar bitwise_or.Tensor
    bitwise_xor.Scalar bitwise_xor.Tensor bmm cat _cdist_forward ceil clamp clamp.Tensor clone col2im constant_pad_nd
    convolution copy cos cosh cumsum diagonal div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode elu embedding
    eq.Scalar eq.Tensor erf exp expand expm1 fill.Scalar flip floor fmod.Scalar fmod.Tensor full full_like gather
    ge.Scalar ge.Tensor gelu grid_sampler_2d gt.Scalar gt.Tensor hardtanh index.Tensor index_put index_select isinf
    isnan le.Scalar le.Tensor leaky_relu log log10 log1p log2 _log_softmax logical_and logical_not logical_or
    logical_xor lt.Scalar lt.Tensor max.dim max_pool2d_with_indices max_pool3d_with_indices maximum mean mean.dim
    min.dim minimum mm mul.Scalar mul.Tensor _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training
    native_group_norm native_layer_norm ne.Scalar ne.Tensor neg permute pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    prod prod.dim_int reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu remainder.Scalar
    remainder.Tensor repeat replication_pad2d replication_pad3d round rsqrt scalar_tensor scatter.src scatter.value
    scatter_add scatter_reduce.two select.int select_scatter sigmoid sign sin sinh slice.Tensor slice_scatter _softmax
    sort split_with_sizes sqrt squeeze.dim squeeze.dims sub.Scalar sub.Tensor sum.dim_IntList sym_numel sym_size.int
    tan tanh _to_copy topk trunc unsqueeze upsample_bilinear2d.vec upsample_nearest2d.vec var.correction var.dim view
    where.self
"""
# Operations that torch keeps whole or writes in place of the above, by its version.
_OTHERS = """
    arange arange.start baddbmm detach erfc grid_sampler_3d hardsigmoid hardswish linear log_sigmoid_forward logsumexp
    mish new_full new_ones new_zeros ones ones_like replication_pad1d rsub.Scalar silu softplus square std.correction
    sum t transpose.int tril triu upsample_bicubic2d.vec upsample_linear1d.vec upsample_nearest1d.vec
    upsample_nearest3d.vec upsample_trilinear3d.vec zeros zeros_like
"""
OPERATIONS = frozenset(name if "." in name else f"{name}.default" for name in (_CORE + _OTHERS).split())
"""What a program may consist of, as torch names its overloads, beside `WHOLE`."""
WHOLE: Mapping[str, Callable[..., Any]] = {
    "item": operator.getitem,
    "int.add": operator.add,
    "int.floordiv": operator.floordiv,
    "int.mod": operator.mod,
    "int.mul": operator.mul,
    "int.neg": operator.neg,
    "int.sub": operator.sub,
}
"""Parts of several results, and arithmetic on numbers of rows."""
_TRUSTING = (
    "native_group_norm.default",
    "_native_batch_norm_legit_no_training.default",
    "_native_batch_norm_legit.no_stats",
)
"""Operations whose kernels take sizes on trust."""
_MODES = {
    "grid_sampler_2d.default": (("interpolation_mode", 2), ("padding_mode", 2)),
    "grid_sampler_3d.default": (("interpolation_mode", 1), ("padding_mode", 2)),
}
"""Operations that give memory as they find it where they do not know a mode, and the highest of each."""
_TRUNCATING = ("div.Tensor_mode", "div.Scalar_mode")
_NAME_OF = {function: name for name, function in WHOLE.items()}
DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
MEMORY_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
_MADE_HERE = ("layout", "device", "pin_memory", "non_blocking")
"""Arguments that say where a tensor lies: left out, since a program runs where its inputs are."""
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Unexportable(Exception):  # noqa: N818 - it is no failure: the model is saved by its code alone
    """Why a network cannot be written as a program; the message completes "the network cannot be exported: …"."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A tensor's dtype and shape, by name and as a list; of an input without the dimension of rows."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} in the shape {self.shape}"


class Node(NamedTuple):
    """One operation, and the values that nothing after it needs."""

    op: str
    args: Any
    kwargs: Any
    done: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a document says, checked."""

    inputs: tuple[Form, ...]
    state: Mapping[str, tuple[Form, bool]]
    constants: tuple[str, ...]
    nodes: tuple[Node, ...]
    output: int
    transform: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self


class Program(nn.Module):
    """A network made of a document. Its parameters and buffers have the names of the network that was exported.

    It computes what that network computed in evaluation mode: dropout is gone, and batch normalisation uses its stored
    statistics, in training mode too. Its parameters can be trained. A new program is on the meta device until
    `load_state_dict(weights, assign=True)`.
    """

    def __init__(self, plan: Plan, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._plan = plan
        for name, (form, trained) in plan.state.items():
            empty = torch.empty(form.shape, dtype=DTYPES[form.dtype], device="meta")
            holder, last = self._holder(name)
            if trained:
                holder.register_parameter(last, nn.Parameter(empty, requires_grad=empty.is_floating_point()))
            else:
                holder.register_buffer(last, empty)
        fixed = nn.Module()
        for name in plan.constants:
            fixed.register_buffer(name, constants[name], persistent=False)
        self._fixed = fixed
        self._rows_at_once = max(TRIED_ROWS)
        """So many rows are known to be within the budget."""

    @classmethod
    def read(cls, data: bytes) -> Program:
        """The program that `exported` wrote.

        Raises:
            CheckpointError: `exported` writes no such document.
        """
        try:
            document, constants = _opened(data)
            plan = _plan_of(document, constants)
            _tried(cls(plan, _without_memory(constants)))
            program = cls(plan, constants)
        except _Refused as error:
            raise _damaged(str(error)) from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as e:
            raise _damaged(f"{type(e).__name__}: {reprlib.repr(str(e))}") from e
        return program

    @property
    def inputs(self) -> tuple[Form, ...]:
        """Of one row."""
        return self._plan.inputs

    def examples(self, rows: int) -> tuple[Tensor, ...]:
        """Inputs of the right form, all ones."""
        return tuple(torch.ones((rows, *form.shape), dtype=DTYPES[form.dtype]) for form in self._plan.inputs)

    @property
    def takes_columns(self) -> bool:
        """Whether it begins with the fit's transform, so that it takes columns as they are."""
        return self._plan.transform

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Refuses weights that are not those of the network that was exported.

        Raises:
            CheckpointError: A name, shape or type differs.
        """
        expected = {name: str(form) for name, (form, _) in self._plan.state.items()}
        found = {name: str(_form(value, value.shape)) for name, value in weights.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise _damaged(
                    f"of {reprlib.repr(name)} the weights hold {found.get(name, 'nothing')} and the program "
                    f"{expected.get(name, 'nothing')}"
                )

    def forward(self, *columns: Tensor) -> Tensor:
        """The network's output for some rows; those beyond the budget are computed after one another."""
        forms = self._plan.inputs
        if len(columns) != len(forms):
            raise DataError(f"the program takes {len(forms)} columns and was given {len(columns)}; give it as many")
        given = [_fitting(i, column, form) for i, (column, form) in enumerate(zip(columns, forms, strict=True))]
        try:
            if given[0].shape[0] == 1:  # exported for two rows and more: one alone would be broadcast in places
                return self._run([torch.cat([column, column]) for column in given])[:1]
            rows = given[0].shape[0]
            most = self._most_rows(rows) if type(rows) is int else rows  # of symbolic rows nothing is computed
            if most == rows:
                return self._run(given)
            return torch.cat([self(*(column[at : at + most] for column in given)) for at in range(0, rows, most)])
        except _Refused as error:
            raise _damaged(str(error)) from None

    def _most_rows(self, rows: int) -> int:
        """How many of some rows can be computed at once."""
        if rows <= self._rows_at_once:
            return rows
        empty = Program(self._plan, _without_memory(dict(self._fixed.named_buffers())))
        while rows > self._rows_at_once:
            try:
                _carried_out(empty, rows)
            except ExceededError:
                rows = max(rows // 2, self._rows_at_once)
            else:
                self._rows_at_once = rows
        return rows

    def _run(self, inputs: Sequence[Tensor], budget: Budget | None = None) -> Tensor:
        values: dict[int, Any] = dict(enumerate(inputs))
        device = inputs[0].device
        for index, node in enumerate(self._plan.nodes, len(inputs)):
            args = [self._value(arg, values) for arg in node.args]
            kwargs = {name: self._value(arg, values) for name, arg in node.kwargs.items()}
            values[index] = _called(node.op, args, kwargs, device)
            if budget is not None:
                budget.made(node.op, _by_name(node.op, args, kwargs), values[index])
            for each in node.done:
                done = values.pop(each)
                if budget is not None:
                    budget.freed(done)
        found = values[self._plan.output]
        if not isinstance(found, Tensor):
            raise _Refused(f"it gives a {type(found).__name__}, and no tensor")
        return found

    def _value(self, arg: Any, values: Mapping[int, Any]) -> Any:
        if isinstance(arg, Reference):
            if arg.kind == "value":
                return values[arg.of]
            if arg.kind == "constant":
                return self._fixed.get_buffer(arg.of)
            holder, _, last = arg.of.rpartition(".")
            return getattr(self.get_submodule(holder), last)
        return [self._value(each, values) for each in arg] if isinstance(arg, list) else arg

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        """The module that has a parameter, made where there is none, and the parameter's name in it."""
        *path, last = name.split(".")
        found: nn.Module = self
        for part in path:
            if part not in found._modules:
                found.add_module(part, nn.Module())
            child = found._modules[part]
            assert child is not None
            found = child
        return found, last

    def extra_repr(self) -> str:
        plan = self._plan
        return f"{len(plan.nodes)} operations, of {', '.join(map(str, plan.inputs))} a row"


class Reference(NamedTuple):
    """An argument that is a tensor, or a number that an operation gave."""

    kind: str
    of: Any


# -- reading ----------------------------------------------------------------------------------------------------------


class _Refused(Exception):  # noqa: N818 - it never leaves this module
    pass


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"the program of a saved model cannot be used ({what}). Only what thinwire wrote is read. Copy the folder "
        "again from where it came, or give the network: model=make_net"
    )


def _opened(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    if len(data) < 8:
        raise _Refused(f"{len(data)} bytes")
    (size,) = struct.unpack("<Q", data[:8])
    if size > MOST_BYTES or size > len(data) - 8:
        raise _Refused(f"its document is {size} bytes long, of {len(data) - 8}; at most {MOST_BYTES} are read")
    document = json.loads(data[8 : 8 + size].decode())
    if type(document) is not dict:
        raise _Refused("its document is no table")
    try:
        return document, load(data[8 + size :]) if len(data) > 8 + size else {}
    except SafetensorError as error:
        raise _Refused(f"its constants are no safetensors: {error}") from error


def _plan_of(document: dict[str, Any], constants: Mapping[str, Tensor]) -> Plan:
    if document.get("format") != FORMAT or type(document["format"]) is not int:
        raise _Refused(f"its format is {reprlib.repr(document.get('format'))}, and {FORMAT} is read")
    _keys(document, {"format", "transform", "inputs", "state", "constants", "nodes", "output"})
    inputs = tuple(_form_of(each, set()) for each in _list(document["inputs"]))
    state = {}
    for each in _list(document["state"]):
        form, name, trained = _form_of(each, {"name", "trained"}), each["name"], each["trained"]
        if not _is_name(name) or type(trained) is not bool or name in state:
            raise _Refused(f"a parameter of the name {reprlib.repr(name)}")
        state[name] = (form, trained)
    _count_modules(state)
    names = _list(document["constants"])
    if sorted(map(str, names)) != sorted(constants) or not all(type(name) is str and name.isalnum() for name in names):
        raise _Refused(f"constants {reprlib.repr(names)}, with {reprlib.repr(sorted(constants))} beside it")
    if not inputs or type(document["transform"]) is not bool:
        raise _Refused("no inputs, or no word of a transform")
    scope = _Scope(frozenset(state), frozenset(names), len(inputs))
    nodes = []
    for each in _list(document["nodes"], MOST_NODES):
        nodes.append(scope.node(each))
        scope.known += 1
    output = document["output"]
    if type(output) is not int or not 0 <= output < scope.known:
        raise _Refused(f"an output of the number {reprlib.repr(output)}")
    return Plan(inputs, state, tuple(names), _with_lives(nodes, len(inputs), output), output, document["transform"])


@dataclasses.dataclass
class _Scope:
    """What arguments may refer to."""

    state: frozenset[str]
    constants: frozenset[str]
    known: int

    def node(self, given: Any) -> Node:
        _keys(given, {"op", "args", "kwargs"})
        op, args, kwargs = given["op"], _list(given["args"]), given["kwargs"]
        if type(op) is not str or (op not in OPERATIONS and op not in WHOLE):
            raise _Refused(f"the operation {reprlib.repr(op)} is none of those that a program may consist of")
        if type(kwargs) is not dict:
            raise _Refused(f"arguments {reprlib.repr(kwargs)}")
        node = Node(op, [self.argument(a) for a in args], {str(k): self.argument(v) for k, v in kwargs.items()})
        _declared(node)
        return node

    def argument(self, given: Any, depth: int = 0) -> Any:
        if given is None or type(given) in (bool, str):
            return given
        if type(given) is int and abs(given) < 1 << 63:
            return given
        if type(given) is float and math.isfinite(given):
            return given
        if type(given) is list and depth < MOST_DEPTH:
            return [self.argument(each, depth + 1) for each in _list(given)]
        if type(given) is not dict or len(given) != 1:
            raise _Refused(f"the argument {reprlib.repr(given)}")
        ((kind, of),) = given.items()
        if kind == "value" and type(of) is int and 0 <= of < self.known:
            return Reference(kind, of)
        named: Mapping[str, Any] = {"state": self.state, "constant": self.constants}
        if kind in named and type(of) is str and of in named[kind]:
            return Reference(kind, of)
        plain: Mapping[str, Mapping[str, Any]] = {"float": _FLOATS, "dtype": DTYPES, "memory_format": MEMORY_FORMATS}
        if kind in plain and type(of) is str and of in plain[kind]:
            return plain[kind][of]
        raise _Refused(f"the argument {reprlib.repr(given)}")


def _declared(node: Node) -> None:
    """Refuses arguments of another number, or of other names, than the operation has."""
    if node.op in WHOLE:
        wanted = 1 if node.op == "int.neg" else 2
        if len(node.args) != wanted or node.kwargs:
            raise _Refused(f"{node.op} with {len(node.args)} arguments; it has {wanted}")
        return
    arguments = _overload(node.op)._schema.arguments
    names = [a.name for a in arguments if a.name not in _MADE_HERE]
    placed = [a.name for a in arguments if not a.kwarg_only][: len(node.args)]
    lacking = {a.name for a in arguments if not a.has_default_value()} - set(placed) - set(node.kwargs)
    if len(placed) < len(node.args) or not set(node.kwargs) <= set(names) - set(placed) or lacking:
        raise _Refused(
            f"{node.op} with {len(node.args)} arguments and {reprlib.repr(sorted(node.kwargs))}; it has {names}"
        )


def _with_lives(nodes: Sequence[Node], first: int, output: int) -> tuple[Node, ...]:
    """The nodes, each with the values that are used for the last time there."""
    last: dict[int, int] = {}
    for index, node in enumerate(nodes, first):
        last[index] = index
        for used in _values_in([node.args, list(node.kwargs.values())]):
            last[used] = index
    ends: dict[int, list[int]] = {}
    for value, index in last.items():
        if value != output:
            ends.setdefault(index, []).append(value)
    return tuple(node._replace(done=tuple(ends.get(index, ()))) for index, node in enumerate(nodes, first))


def _values_in(args: Any) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, Reference):
            if arg.kind == "value":
                yield arg.of
        elif isinstance(arg, list):
            yield from _values_in(arg)


def _keys(given: Any, wanted: set[str]) -> None:
    if type(given) is not dict or set(given) != wanted:
        raise _Refused(f"{reprlib.repr(given)} where {sorted(wanted)} belong")


def _list(given: Any, most: int = MOST_ITEMS) -> list[Any]:
    if type(given) is not list or len(given) > most:
        raise _Refused(f"{reprlib.repr(given)} where a list of at most {most} belongs")
    return given


def _form_of(given: Any, more: set[str]) -> Form:
    _keys(given, {"dtype", "shape", *more})
    dtype, shape = given["dtype"], _list(given["shape"], 64)
    if type(dtype) is not str or dtype not in DTYPES:
        raise _Refused(f"the dtype {reprlib.repr(dtype)}")
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise _Refused(f"the shape {reprlib.repr(shape)}")
    return Form(dtype, tuple(shape))


def _count_modules(names: Iterable[str]) -> None:
    """Refuses names of parameters that lie in too many modules."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
            if len(found) > MOST_MODULES:
                raise _Refused(f"its parameters lie in more modules than {MOST_MODULES}")


def _is_name(name: Any) -> bool:
    return type(name) is str and len(name) <= MOST_NAME and all(name.split("."))


def _tried(program: Program) -> None:
    """Carries a program out on the meta device, where nothing is computed."""
    for rows in TRIED_ROWS:
        try:
            found = _carried_out(program, rows)
        except ExceededError as error:
            raise _Refused(str(error)) from None
        except _Refused:
            raise
        except Exception as error:  # torch's shape functions raise whatever they run into
            raise _Refused(f"it cannot be carried out: {type(error).__name__}: {_line(error)}") from error
        if found.dim() == 0 or found.shape[0] != rows:
            raise _Refused(f"it gives the shape {tuple(found.shape)} for {rows} rows")


def _carried_out(program: Program, rows: int) -> Tensor:
    """What a program without memory gives, within the budget for some rows."""
    forms = program._plan.inputs
    given = [torch.empty((rows, *form.shape), dtype=DTYPES[form.dtype], device="meta") for form in forms]
    held = itertools.chain(given, program.parameters(), program.buffers())
    with torch.no_grad():
        return program._run(given, Budget(rows, held))


def _without_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to("meta") for name, value in tensors.items()}


# -- running ----------------------------------------------------------------------------------------------------------


@functools.cache
def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if found is None:
        raise _Refused(f"this torch, {torch.__version__}, has no operation {name}")
    return found


@functools.cache
def _places_a_tensor(name: str) -> bool:
    """Whether an operation makes a tensor of none, so that it has to be told on which device."""
    arguments = _overload(name)._schema.arguments
    return any(a.name == "device" for a in arguments) and not any(str(a.type) == "Tensor" for a in arguments)


def _called(op: str, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    if op in WHOLE:
        return _whole(op, args)
    overload = _overload(op)
    if op in _TRUSTING:
        _look_at(op, _by_name(op, args, kwargs))
    elif op in _MODES or op.startswith("avg_pool"):
        _look_at_numbers(op, _by_name(op, args, kwargs))
    elif op in _TRUNCATING and kwargs.get("rounding_mode") == "trunc":
        return _truncated(overload, *args)
    return overload(*args, **kwargs, **({"device": device} if _places_a_tensor(op) else {}))


def _by_name(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operation by their names, those that are left out by their defaults."""
    if op in WHOLE:
        return {}
    arguments = _overload(op)._schema.arguments
    left_out = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return left_out | dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)


def _look_at_numbers(op: str, given: Mapping[str, Any]) -> None:
    """Refuses numbers with which a kernel would end the process, or give memory as it found it."""
    for name, most in _MODES.get(op, ()):
        if type(given[name]) is not int or not 0 <= given[name] <= most:
            raise _Refused(f"{op} with {name} = {reprlib.repr(given[name])}; 0 to {most} are known")
    divisor = given.get("divisor_override")
    if divisor is not None and (type(divisor) is not int or divisor < 1):
        raise _Refused(f"{op} with divisor_override = {reprlib.repr(divisor)}; at least 1 is needed")


def _truncated(overload: Any, dividend: Any, divisor: Any) -> Tensor:
    """Division rounded to zero. torch's own ends the process where the least whole number is divided by -1."""
    kind = torch.result_type(dividend, divisor)
    if kind.is_floating_point or not kind.is_signed:
        return cast(Tensor, overload(dividend, divisor, rounding_mode="trunc"))
    if not isinstance(divisor, Tensor):
        if divisor == -1:
            return torch.neg(torch.as_tensor(dividend).to(kind))
        return cast(Tensor, overload(dividend, divisor, rounding_mode="trunc"))
    negates = divisor.to(kind) == -1
    found = overload(dividend, torch.where(negates, 1, divisor), rounding_mode="trunc")
    return torch.where(negates, -found, found)


def _whole(op: str, args: list[Any]) -> Any:
    if op == "item":
        if not isinstance(args[0], (tuple, list)) or type(args[1]) is not int:
            raise _Refused("item of what has no items")
    elif any(isinstance(arg, (Tensor, str, list, tuple, float)) or arg is None for arg in args):
        raise _Refused(f"{op} of what is no whole number")
    found = WHOLE[op](*args)
    if type(found) is int and abs(found) >= 1 << 63:
        raise _Refused(f"{op} gives {reprlib.repr(found)}")
    return found


def _look_at(op: str, given: Mapping[str, Any]) -> None:
    """Refuses sizes by which a kernel would read beyond a tensor."""
    x, sides = given["input"], [given.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise _Refused(f"{op} of what has no channels")
    channels = x.shape[1]
    if op == "native_group_norm.default":
        sizes, groups = [given[name] for name in ("N", "C", "HxW")], given["group"]
        if any(isinstance(each, (Tensor, float)) for each in (*sizes, groups)) or groups < 1 or channels % groups:
            raise _Refused(f"{op} of {channels} channels in {reprlib.repr(groups)} groups")
        if sizes[0] != x.shape[0] or sizes[1] != channels or sizes[0] * sizes[1] * sizes[2] != x.numel():
            raise _Refused(f"{op} of {sizes} values, in the shape {tuple(x.shape)}")
    elif op == "_native_batch_norm_legit.no_stats" and given["training"] is not True:
        raise _Refused(f"{op} of statistics that are not there")
    for side in sides:
        if side is not None and not (isinstance(side, Tensor) and tuple(side.shape) == (channels,)):
            raise _Refused(f"{op} with statistics of another number than its {channels} channels")


def _fitting(index: int, column: Tensor, form: Form) -> Tensor:
    dtype = DTYPES[form.dtype]
    if tuple(column.shape[1:]) != form.shape or not torch.can_cast(column.dtype, dtype):
        given = _form(column, column.shape[1:])
        raise DataError(
            f"input {index} of the program is {given} a row; it takes {form}, as in the fit. Give columns of that "
            "form, or load the model with its code: model=make_net"
        )
    return column.to(dtype)


def _form(value: Tensor, shape: Sequence[int]) -> Form:
    return Form(str(value.dtype).removeprefix("torch."), tuple(int(size) for size in shape))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


# -- exporting --------------------------------------------------------------------------------------------------------


class _Called(nn.Module):
    """A network that is called with columns one by one, after the fit's transform if there is one."""

    def __init__(self, network: nn.Module, names: Sequence[str], transform: Callable[..., Any] | None) -> None:
        super().__init__()
        self.network, self._names, self._transform = network, names, transform

    def forward(self, *columns: Tensor) -> Any:
        if self._transform is None:
            return self.network(*columns)
        given = self._transform(dict(zip(self._names, columns, strict=True)))
        wanted = [given[name] for name in self._names]
        for name, each in zip(self._names, wanted, strict=True):
            if not isinstance(each, Tensor):
                raise Unexportable(f"its transform makes {type(each).__name__} of column {name!r}, and no tensor")
        return self.network(*(each.float() if each.dtype == torch.float64 else each for each in wanted))


def exported(
    module: nn.Module,
    examples: Sequence[Tensor],
    *,
    names: Sequence[str] = (),
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> bytes:
    """A network as a program: a document, and the tensors that are not in its `state_dict`.

    Args:
        module: the network; its parameters are not written.
        examples: its inputs for some rows, at least two; other programs take another number of rows only.
        names: of the columns, where there is a transform.
        transform: what the fit did with the columns before the network; it becomes a part of the program.

    Raises:
        Unexportable: It cannot be written as a program.
    """
    network = copy.deepcopy(module).cpu().eval()
    called = _Called(network, names, transform).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about what it does itself
        try:
            data = _written(_traced(called, examples), network, examples, transform is not None)
        except Unexportable:
            raise
        except Exception as error:
            raise Unexportable(f"{type(error).__name__}: {_line(error)}") from error
    try:
        _compared(data, called, network, examples)
    except (CheckpointError, DataError) as error:
        raise Unexportable(str(error)) from error
    return data


def _traced(called: nn.Module, examples: Sequence[Tensor]) -> Any:
    rows = torch.export.Dim("rows", min=2, max=1 << 40)
    forms = (tuple({0: rows} for _ in examples),)
    found = torch.export.export(called, tuple(examples), dynamic_shapes=forms, strict=False)
    return found.run_decompositions()


def _written(program: Any, network: nn.Module, examples: Sequence[Tensor], transform: bool) -> bytes:
    from safetensors.torch import save

    state = network.state_dict()
    trained = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for name, value in state.items():
        if not isinstance(value, Tensor) or str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise Unexportable(f"its state {name!r} is a {type(value).__name__}, and no tensor of numbers")
    writer = _Writer(program, state)
    nodes, output = writer.written()
    document = {
        "format": FORMAT,
        "transform": transform,
        "inputs": [_described(x, x.shape[1:]) for x in examples],
        "state": [_described(v, v.shape) | {"name": n, "trained": n in trained} for n, v in state.items()],
        "constants": sorted(writer.constants),
        "nodes": nodes,
        "output": output,
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MOST_BYTES or len(nodes) > MOST_NODES:
        raise Unexportable(f"it has {len(nodes)} operations in {len(text)} bytes; {MOST_NODES} are allowed")
    return struct.pack("<Q", len(text)) + text + (save(writer.constants) if writer.constants else b"")


def _described(value: Tensor, shape: Sequence[int]) -> dict[str, Any]:
    form = _form(value, shape)
    return {"dtype": form.dtype, "shape": list(form.shape)}


class _Writer:
    """The nodes of a traced network as JSON."""

    def __init__(self, program: Any, state: Mapping[str, Tensor]) -> None:
        self._program, self._state = program, state
        self._found: dict[Any, Any] = {}
        self.constants: dict[str, Tensor] = {}

    def written(self) -> tuple[list[dict[str, Any]], int]:
        signature = self._program.graph_signature
        if signature.buffers_to_mutate or getattr(signature, "user_inputs_to_mutate", None):
            raise Unexportable(f"it changes {sorted(signature.buffers_to_mutate.values())} as it predicts")
        inputs = list(signature.user_inputs)
        self._found = {name: {"value": i} for i, name in enumerate(inputs)}
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        held |= getattr(signature, "inputs_to_lifted_tensor_constants", {})
        nodes: list[dict[str, Any]] = []
        needed = self._needed()
        for node in self._program.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                if node.name not in self._found:
                    self._found[node.name] = self._held(held[node.name])
            elif node.op == "call_function":
                nodes.append(self._node(node))
                self._found[node.name] = {"value": len(inputs) + len(nodes) - 1}
            elif node.op == "output":
                (given,) = node.args
                if len(given) != 1 or not hasattr(given[0], "name"):
                    raise Unexportable("its output is not one tensor")
                return nodes, self._output(given[0], nodes, len(inputs))
            else:
                raise Unexportable(f"it has a part of the kind {node.op}")
        raise Unexportable("it has no output")

    def _output(self, node: Any, nodes: list[dict[str, Any]], inputs: int) -> int:
        found = self._found[node.name]
        if "value" not in found:  # a parameter itself
            nodes.append({"op": "alias.default", "args": [found], "kwargs": {}})
            return inputs + len(nodes) - 1
        return int(found["value"])

    def _needed(self) -> set[Any]:
        """What the output depends on; checks of sizes are not in it."""
        open_ones = [node for node in self._program.graph.nodes if node.op == "output"]
        found: set[Any] = set(open_ones)
        while open_ones:
            for node in open_ones.pop().all_input_nodes:
                if node not in found:
                    found.add(node)
                    open_ones.append(node)
        return found

    def _held(self, name: str) -> dict[str, str]:
        own = name.removeprefix("network.")
        if own in self._state:
            return {"state": own}
        tensor = self._program.constants[name] if name in self._program.constants else self._program.state_dict[name]
        self.constants[f"c{len(self.constants)}"] = tensor.detach().clone().contiguous()
        return {"constant": f"c{len(self.constants) - 1}"}

    def _node(self, node: Any) -> dict[str, Any]:
        op = _NAME_OF.get(node.target) or str(node.target).removeprefix("aten.")
        if op not in WHOLE and (op not in OPERATIONS or str(node.target) != f"aten.{op}"):
            raise Unexportable(f"it uses {node.target}, which is none of the operations of a program")
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items() if k not in _MADE_HERE}
        return {"op": op, "args": [self._argument(arg) for arg in node.args], "kwargs": kwargs}

    def _argument(self, given: Any) -> Any:
        if hasattr(given, "op") and hasattr(given, "users"):
            return self._found[given.name]
        if isinstance(given, float) and not math.isfinite(given):
            return {"float": str(given)}
        if given is None or isinstance(given, (bool, int, float, str)):
            return given
        if isinstance(given, (list, tuple)):
            return [self._argument(each) for each in given]
        for kind, known in (("dtype", DTYPES), ("memory_format", MEMORY_FORMATS)):
            for name, value in known.items():
                if given is value:
                    return {kind: name}
        raise Unexportable(f"it uses {given!r} as an argument")


def _compared(data: bytes, called: nn.Module, network: nn.Module, examples: Sequence[Tensor]) -> None:
    """Refuses a program that does not compute what the network does: one that draws random numbers, say."""
    program = Program.read(data)
    program.load_state_dict(network.state_dict(), assign=True)
    for rows in (len(examples[0]), 2, 1):
        given = [x[:rows] for x in examples]
        with torch.no_grad():
            expected, found = called(*given), program(*given)
        if found.shape != expected.shape or not torch.allclose(
            found.double(), expected.double(), rtol=1e-3, atol=1e-4, equal_nan=True
        ):
            raise Unexportable("it does not give the same numbers as the network; does that draw random ones?")
