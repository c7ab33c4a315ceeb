"""One row through model, loss, metrics and optimizer on the driver, before a worker starts.

What does not fit together is told here with the column and its value. What fails for another reason (no memory, a
file that only workers have, an error that the user's own code raises) is left to the workers, who tell of it with a
traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import logging
import math
import os
import random
import reprlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from thinwire.cluster.shipping import packed
from thinwire.data import Batch, Loader, Position, Sampler, Shard, write_shard
from thinwire.data.columns import Nullable
from thinwire.data.labels import look_at
from thinwire.errors import ConfigError, DataError, ThinwireError
from thinwire.parameters import check_trainable
from thinwire.replicas import BackPropagation, TrainSpec
from thinwire.replicas.calls import called, scores
from thinwire.replicas.frozen import base_digest
from thinwire.replicas.labels import WrongLabels
from thinwire.replicas.lightning import own_scheduler
from thinwire.replicas.metrics import computed, measure
from thinwire.replicas.objectives import OWN, NamedScheduler, Objective, metrics_of
from thinwire.replicas.quantiles import QUANTILES
from thinwire.replicas.sparse import refuse_sparse_adam
from thinwire.replicas.torch import build_module, refuse_held
from thinwire.run.job import Columns
from thinwire.run.losses import refuse_sums
from thinwire.run.networks import Held, Steps, copied, signature_of
from thinwire.run.optimizers import refuse_draws

_log = logging.getLogger("thinwire.run")
ROWS = 7
"""Copies of the row that make the batch: batch normalisation takes no single row, and few shapes have this size."""
_KINDS = (RuntimeError, IndexError, TypeError, ValueError)
"""What torch raises where tensors do not fit."""
_ELSEWHERE = ("cuda", "nvidia", "memory", "no kernel", "triton")
"""Words of errors that are of this machine."""
_shown = reprlib.Repr()
_shown.maxlist = _shown.maxtuple = 4


class Misfit(NamedTuple):
    """What was being done, and what came of it."""

    what: str
    error: Exception


@dataclass(frozen=True)
class Trial:
    """What is tried on the first row of the data.

    Attributes:
        model: what a worker builds its network from.
        spec: how it is trained.
        columns: what is what in the data, with all its transforms.
        batch_size: rows of a step.
        transforms: whether the user's own transform makes columns. A copy of it is tried, as workers get one: what it
            counts or keeps stays as it was. What it raises is left to workers, who may have files that are not here.
            Without it all labels are looked at as rows are dealt out.
        validated: whether there are validation rows to measure metrics on.
        nullable: which columns may have nulls, since a transform fills them.
        steps: how the run takes its steps.
        found: "base" is a digest of the network's frozen parameters, once it was made; "network" one of the names and
            shapes of its others, and "optimizer" says what steps them.
    """

    model: Any
    spec: TrainSpec
    columns: Columns
    batch_size: int
    transforms: bool
    validated: bool
    nullable: Nullable = False
    steps: Steps = field(default_factory=Steps)
    found: dict[str, str] = field(default_factory=dict, compare=False)

    def __call__(self, row: Any) -> tuple[int, ...] | None:
        """The shape of the network's output for one row; None where it cannot be told here.

        Raises:
            ConfigError: model, loss, metrics, optimizer or scheduler do not go together.
            DataError: the row does not fit the model or the loss.
        """
        with _undone():
            try:
                return self._tried(row)
            except ThinwireError:
                raise
            except Exception as error:
                _log.info("a row could not be tried on the driver: %s: %s", type(error).__name__, error)
                return None

    def inputs(self, row: Any) -> tuple[Tensor, ...] | None:
        """What the model is called with in a step of rows such as this one; None where it cannot be told here."""
        with _undone(), contextlib.suppress(_TransformError):
            batch = self._batch(row, self.batch_size)
            return None if batch is None else tuple(batch.inputs)
        return None

    def _tried(self, row: Any) -> tuple[int, ...] | None:
        made, batch = self.model, None
        try:
            batch = self._batch(row, min(ROWS, self.batch_size))
        except _TransformError as error:
            _log.info("the transform could not be tried on the driver: %s", error)
        module = (copied(made) if isinstance(made, nn.Module) else build_module(made, self.spec.seed)).cpu()
        check_trainable(module)
        self.found.update(base=base_digest(module), network=signature_of(module))
        self._stepped(module)
        if batch is None:
            return None
        self._weighed(batch)
        shape, held = None, Held.of(module)
        try:
            with contextlib.suppress(*_KINDS), torch.no_grad():
                shape = _shape(scores(called(module.eval(), batch)))
            self._learnt(module.train(), row, batch, shape)
            held.refuse_changes(module, self.steps.elsewhere)
        finally:
            held.put_back()
        return shape

    def _learnt(self, module: nn.Module, row: Any, batch: Batch, shape: tuple[int, ...] | None) -> None:
        """Tries loss and metrics; whether a label is of classes or of their probabilities depends on the output."""
        if shape is not None and self.columns.labels.output is None and batch.label is not None:
            labels = self.columns.labels.measured(shape)
            known = dataclasses.replace(self, columns=dataclasses.replace(self.columns, labels=labels))
            again = known._batch(row, batch.num_rows)
            known._learnt(module, row, batch if again is None else again, shape)
            return
        if not isinstance(self.spec.algorithm, BackPropagation):
            self.spec.algorithm.loss(module, batch, Objective(self.spec.loss), {"steps": 0})
        else:
            batch = self._trained(module, batch, row)
            self._lost(called(module, batch), batch, shape)
        if self.validated:
            self._measured(module.eval(), batch)

    def _batch(self, row: Any, rows: int) -> Batch | None:
        """The row so many times, as workers would get it; None where it cannot be had here."""
        columns = self.columns
        if columns.label is not None and columns.label in row.schema.names and not self.transforms:
            look_at(row, columns.label, WrongLabels(columns.labels, f"column {columns.label!r}"))
        with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
            path = os.path.join(folder, "row")
            try:
                write_shard(path, [row] * rows, row.schema, nullable=self.nullable)
            except DataError:  # nulls, say: told of with their number as rows are dealt out
                return None
            loader = Loader(
                Shard.open(path),
                Sampler(rows, rows, self.spec.seed, 0),
                inputs=columns.inputs,
                label=columns.label,
                labels=columns.labels,
                weight=columns.weight,
                transform=_copied(columns.transform) if self.transforms else columns.transform,
                prefetch=0,
            )
            return next(loader.batches(Position(), 1))

    def _trained(self, module: nn.Module, batch: Batch, row: Any) -> Batch:
        """The batch that the model takes: of a few rows, or of as many as a step has."""
        first: Exception | None = None
        for rows in (batch.num_rows, self.batch_size):
            tried = batch if rows == batch.num_rows else self._batch(row, rows)
            if tried is None:
                break
            try:
                called(module, tried)
                return tried
            except _KINDS as error:
                if not _is_misfit(error):
                    raise
                first = first or error
        assert first is not None
        raise DataError(self._unfit(module, batch, first)) from first

    def _unfit(self, module: nn.Module, batch: Batch, error: Exception) -> str:
        names = self.columns.inputs
        shapes = [tuple(each.shape[1:]) for each in batch.inputs]
        given = ", ".join(
            f"{name!r} of {str(each.dtype).removeprefix('torch.')} in the shape {shape} a row"
            for name, each, shape in zip(names, batch.inputs, shapes, strict=True)
        )
        if any(each.dtype == torch.float16 for each in batch.inputs):
            advice = "Give columns of float32: x.astype('float32'), or a cast in a transform"
        elif "same dtype" in str(error) and all(each.is_floating_point() for each in batch.inputs):
            advice = "Inputs are given in float32; give the model parameters of float32 too: model.float()"
        elif batch.num_rows == 1 and "more than 1 value" in str(error):
            advice = "Batch normalisation needs more rows in a batch: give a larger batch_size, or another layer"
        elif len(names) > 1 and not any(shapes):
            advice = (
                f"The model is called with {len(names)} tensors of one number a row; if it takes one tensor, put the "
                "columns together into one of arrays (VectorAssembler, np.stack(…, axis=1), or a transform)"
            )
        elif not any(shapes):
            advice = "A column of numbers gives one number a row; give it arrays, or add a dimension: x[:, None]"
        elif any(not each.is_floating_point() for each in batch.inputs):
            advice = "Give columns of the shape and type that its first layer takes, by a transform or in the model"
        else:
            advice = "Give rows of the shape that its first layer takes, or change the layer"
        values = ", ".join(_value(each) for each in batch.inputs)
        return (
            f"the model {type(module).__name__} cannot take a row of inputs={list(names)}: {given}, with {values}. "
            f"It says {type(error).__name__}: {_line(error)}. {advice}."
        )

    def _lost(self, output: Any, batch: Batch, shape: tuple[int, ...] | None) -> None:
        """Tries the loss on an output."""
        labels, named = self.columns.labels, isinstance(self.spec.loss, str) or self.columns.labels.kind != "any"
        if named and self.spec.loss != OWN:
            output = scores(output)
        if named and self.spec.loss != OWN and not isinstance(output, Tensor):
            part = repr(next(iter(output), "")) if isinstance(output, Mapping) else "0"
            raise ConfigError(
                f"the model's output is {_kind(output)}, and loss {labels.loss or self.spec.loss!r} takes one tensor; "
                "return the tensor from forward, or give a loss that takes one of it, such as "
                f"loss=lambda output, label: F.cross_entropy(output[{part}], label)"
            )
        if named and isinstance(output, Tensor) and (output.dim() == 0 or output.shape[0] != batch.num_rows):
            raise DataError(
                f"the model's output has the shape {tuple(output.shape)} for {batch.num_rows} rows of inputs="
                f"{list(self.columns.inputs)}; its first dimension must count rows. Give columns of the shape that the "
                "model takes, or keep the first dimension in forward."
            )
        if batch.label is not None and labels.kind == "classes" and shape:
            wrong = labels.measured(shape).wrong(_array(batch.label))
            if wrong.any():
                return  # told of with rows and number, as they are dealt out
        if named and labels.kind == "numbers" and batch.label is not None and labels.loss in _ALIKE:
            self._alike(output, batch.label)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                loss = Objective(self.spec.loss).mean(output, batch.label, batch.weight)
            except (*_KINDS, AttributeError) as error:
                if isinstance(error, ThinwireError) or not _is_misfit(error):
                    raise
                raise DataError(
                    self._unlike(output, batch, f"fails with {type(error).__name__}: {_line(error)}")
                ) from error
        if any("target size" in str(each.message) for each in told):
            raise DataError(self._unlike(output, batch, "compares every row with every label (torch broadcasts them)"))
        if self.steps.together is not None and batch.weight is None:
            refuse_sums(self.spec.loss, output, batch.label, self.steps.together)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on any parameter that can be trained: all are frozen, or the output is "
                "detached; leave requires_grad on, and no_grad, detach and item out of model and loss"
            )

    def _weighed(self, batch: Batch) -> None:
        """Looks at the row's weight."""
        if batch.weight is not None and (batch.weight.dim() != 1 or not 0 <= float(batch.weight[0]) < math.inf):
            raise DataError(
                f"column {self.columns.weight!r} is {_value(batch.weight)} in the first row; a weight is one number of "
                "0 or more. Give such a column as weight, or none."
            )

    def _alike(self, output: Tensor, label: Tensor) -> None:
        if output.numel() != label.numel():
            name, loss = self.columns.label, self.columns.labels.loss
            raise DataError(
                f"column {name!r} has {_size(label)} a row, the first {_value(label)}, and the model's output has "
                f"{_size(output)}, of shape {tuple(output.shape[1:])}; {loss} compares them one by one. Give the model "
                "as many outputs as there are numbers in a label, or another label."
            )

    def _unlike(self, output: Any, batch: Batch, what: str) -> str:
        loss = self.columns.labels.loss or (self.spec.loss if isinstance(self.spec.loss, str) else "")
        name = loss or getattr(self.spec.loss, "__name__", type(self.spec.loss).__name__)
        if batch.label is None:
            return f"loss {name!r} {what}, of {_kind(output)} alone. With label=None a loss takes the output only."
        return (
            f"column {self.columns.label!r} does not fit the model's output: loss {name!r} {what}, of {_kind(output)} "
            f"and {_kind(batch.label)}, the first label {_value(batch.label)}. Give labels and outputs that the loss "
            "takes: classes from 0 on and an output for each, or numbers and outputs of one shape."
        )

    def _stepped(self, module: nn.Module) -> None:
        """Tries what makes the optimizer, and what makes the scheduler."""
        own = getattr(self.spec.optimizer, "of_module", None)
        make, given = (self.spec.optimizer, module.parameters()) if own is None else (own, module)
        parameters = list(module.parameters())
        trained = [parameter.requires_grad for parameter in parameters]
        made = _called("optimizer", make, given, "the model's parameters")
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer gave {_kind(made)}; it must return a torch optimizer: "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        refuse_held(made, parameters, trained)
        self.found["optimizer"] = f"{type(made).__name__} of {len(made.param_groups)} groups"
        if self.steps.equal is not None:
            refuse_draws(make, made, self.steps.equal)
        refuse_sparse_adam(made, module, dense=self.spec.dense, clip_norm=self.spec.clip_norm)
        if self.spec.scheduler is None:
            return
        moved = _called("scheduler", self.spec.scheduler, made, "the optimizer")
        if moved is None and self.spec.scheduler is own_scheduler:
            return
        if not all(callable(getattr(moved, name, None)) for name in ("step", "state_dict", "load_state_dict")):
            raise ConfigError(
                f"scheduler gave {_kind(moved)}; it must return a learning-rate scheduler: "
                "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
            )
        if (
            isinstance(moved, ReduceLROnPlateau)
            and not self.validated
            and not isinstance(self.spec.scheduler, NamedScheduler)
        ):
            _log.warning("scheduler ReduceLROnPlateau has no effect: it follows validation rows, and there are none")
        if not isinstance(moved, ReduceLROnPlateau):
            made._opt_called = True  # type: ignore[attr-defined]  # torch warns of a scheduler that moves first
            _called("scheduler", lambda scheduler: scheduler.step(), moved, "the optimizer, moves once,")

    def _measured(self, module: nn.Module, batch: Batch) -> None:
        with torch.no_grad():
            output = called(module, batch)
            for name, metric in metrics_of(self.spec.metrics).items():
                try:
                    found = measure(name, metric, output, batch.label, batch.weight, batch.num_rows)
                except (*_KINDS, AttributeError) as error:
                    if isinstance(error, ThinwireError) or not _is_misfit(error):
                        raise
                    label = "no label" if batch.label is None else _kind(batch.label)
                    raise ConfigError(
                        f"metrics.{name} fails with {type(error).__name__}: {_line(error)}, of {_kind(output)} and "
                        f"{label}; a metric takes (output, label) of a batch and gives one number a row"
                    ) from error
                sums = {key: total for key, (total, count) in found.items() if count is None}
                try:
                    computed({name: metric}, sums)
                except ConfigError as error:  # of a single row it need not be defined, but it must be able to be called
                    if isinstance(error.__cause__, TypeError | AttributeError | KeyError):
                        raise


_ALIKE = ("mse", "l1", "smooth_l1", "bce_with_logits", *QUANTILES)
"""Losses by name that compare output and label one by one, however they are laid out."""


class _TransformError(Exception):
    """The user's own transform cannot be copied or called here."""


def _copied(transform: Any) -> Any:
    """A copy of a transform, which says what it raises as one error."""
    try:
        copy = cloudpickle.loads(packed(transform))  # its own functions travel whole: what they count is copied too
    except Exception as error:  # it holds a lock, say, which threads share
        raise _TransformError(f"no copy: {type(error).__name__}: {error}") from error

    def tried(columns: dict[str, Any]) -> Any:
        try:
            return copy(columns)
        except Exception as error:
            raise _TransformError(f"{type(error).__name__}: {error}") from error

    return tried


def _called(key: str, make: Any, given: Any, what: str) -> Any:
    try:
        return make(given)
    except (*_KINDS, AttributeError, ArithmeticError) as error:
        if isinstance(error, ThinwireError) or not _is_misfit(error):
            raise
        raise ConfigError(
            f"{key} fails with {type(error).__name__}: {_line(error)}; it is called with {what} and returns the {key}"
        ) from error


def _is_misfit(error: Exception) -> bool:
    """Whether an error is torch's or Python's about its arguments, not one that the user's code raises by itself."""
    if any(word in str(error).lower() for word in _ELSEWHERE):
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or f"{os.sep}torch{os.sep}" in place.tb_frame.f_code.co_filename:
        return True
    code = place.tb_frame.f_code
    return dis.opname[code.co_code[place.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Generators are afterwards as they were before; nobody hears of warnings, which workers give again."""
    numbers, plain = np.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(plain)


def _shape(output: Any) -> tuple[int, ...] | None:
    return tuple(output.shape[1:]) if isinstance(output, Tensor) else None


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
    return found


def _kind(value: Any) -> str:
    """A value in words, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} in the shape {tuple(value.shape[1:])} a row"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {_shown.repr(sorted(map(str, value)))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
    return f"a {type(value).__name__}"


def _value(tensor: Tensor) -> str:
    return str(_shown.repr(tensor[0].tolist()))


def _size(tensor: Tensor) -> str:
    count = tensor[0].numel()
    return "1 number" if count == 1 else f"{count} numbers"


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")[:300]
