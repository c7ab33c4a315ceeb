"""A replica of a torch module: gradient, update, evaluation, and all the state it must not lose."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.errors import ConfigError
from thinwire.parameters import Buffers, FlatParameters
from thinwire.replicas.algorithms import Algorithm, BackPropagation, Memory
from thinwire.replicas.calls import arguments, called_under, takes_names
from thinwire.replicas.flaws import Flaw, flaw_of
from thinwire.replicas.keras import KerasModule, is_keras
from thinwire.replicas.metrics import condense, measure
from thinwire.replicas.objectives import (
    Loss,
    Metric,
    Objective,
    OptimizerFactory,
    SchedulerFactory,
    metrics_of,
)
from thinwire.replicas.owed import Owed
from thinwire.replicas.schedules import Asked, begun, go_on, plain, position, resume
from thinwire.replicas.searches import needs_closure, step_along
from thinwire.replicas.sparse import leave_unchecked, make_dense, takes_sparse
from thinwire.replicas.widths import Narrowed, Scale, pieces_of, rounded, unscale
from thinwire.rules.finite import is_finite


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How a replica trains; the same on every worker.

    Args:
        loss: a name or a callable of (output, label).
        optimizer: makes the optimizer from the parameters.
        algorithm: how the gradient is found.
        scheduler: makes a learning-rate scheduler from the optimizer.
        scheduler_every: whether the scheduler moves after each step or each epoch.
        metrics: names, or callables of (output, label) by name, measured on validation rows.
        clip_norm: largest norm of a gradient.
        precision: "bfloat16" and "float16" compute forward passes under autocast, float16 with a scaled loss.
        accumulate: pieces that a step's rows are computed in, one after the other.
        compile: whether forward passes of training go through torch.compile.
        device: "cpu", "cuda", or "auto": CUDA where there is one.
        seed: of the model's first values, and with the worker's number of dropout and the like.
    """

    loss: str | Loss
    optimizer: OptimizerFactory
    algorithm: Algorithm = field(default_factory=BackPropagation)
    scheduler: SchedulerFactory | None = None
    scheduler_every: Literal["step", "epoch"] = "epoch"
    metrics: tuple[str, ...] | Mapping[str, Metric] = field(default_factory=tuple)
    clip_norm: float | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    accumulate: int = 1
    compile: bool = False
    device: str = "auto"
    seed: int = 0
    dense: str | None = None
    """Why gradients of embeddings are to be dense, in words; None where a worker steps along its own."""


PIECE_BYTES = 8 << 20
_building = threading.Lock()


def build_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module itself, or what its factory makes under the seed."""
    if is_keras(model):
        return KerasModule(model)
    if isinstance(model, nn.Module):
        return model
    with _building:  # workers that are threads share torch's generator
        torch.manual_seed(seed)
        before = random.getstate()
        random.seed(seed)  # where Keras's initializers take theirs from
        try:
            made = model()
        finally:
            random.setstate(before)
    if is_keras(made):
        return KerasModule(made)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"the model factory returned {type(made).__name__}; it must return a torch.nn.Module or a Keras model"
        )
    return made


def resolve_device(name: str) -> torch.device:
    """The device meant by a name."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device = {name!r}, but this worker sees no CUDA device; use 'cpu' or 'auto'")
    return torch.device(name)


class TorchReplica:
    """One model with its optimizer. Its trainable parameters are views of `vector`."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], spec: TrainSpec, worker: int = 0) -> None:
        self.device = resolve_device(spec.device)
        self.module = build_module(model, spec.seed).to(self.device)
        self._outfit(spec, self.module, worker)

    def _outfit(self, spec: TrainSpec, trained: nn.Module, worker: int) -> None:
        """Lays out a module's parameters, and makes what steps them."""
        self.spec = spec
        self.parameters = FlatParameters(trained)
        self._frozen = [(name, p) for name, p in trained.named_parameters() if not p.requires_grad]
        self.buffers = Buffers(trained)
        self.optimizer = self.optimizer_by(spec.optimizer)
        self._asked_for = _settings(self.optimizer)
        if spec.dense is not None or spec.clip_norm is not None or not takes_sparse(self.optimizer):
            make_dense(trained)
        leave_unchecked(trained)
        self.scheduler = spec.scheduler(self.optimizer) if spec.scheduler else None
        self._plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.steps = 0
        self.searches = needs_closure(self.optimizer)
        if self.searches and (spec.accumulate > 1 or spec.precision == "float16"):
            raise ConfigError(
                f"{type(self.optimizer).__name__} evaluates the loss itself, over the whole batch and without a scale; "
                "leave accumulate at 1 and precision at 'float32' or 'bfloat16', or use another optimizer"
            )
        self._batch: Any = None
        self._fresh: Tensor | None = None
        self._memory: Memory = {}
        self.objective = Objective(spec.loss)
        self.network = self._network(trained)
        """What forward passes of training go through."""
        self._metrics = metrics_of(spec.metrics)
        self._owed = Owed(self.device)
        self._seed(worker)

    def _network(self, trained: nn.Module) -> nn.Module:
        found = Narrowed(trained, self.parameters.narrow) if self.parameters.narrow else trained
        return cast(nn.Module, torch.compile(found)) if self.spec.compile else found

    @property
    def is_plain(self) -> bool:
        """Whether a gradient is one pass through the module in float32 or under autocast, called in order."""
        return (
            self.network is self.module
            and self.spec.accumulate == 1
            and self.spec.precision != "float16"
            and not takes_names(self.module)
        )

    @property
    def vector(self) -> Tensor:
        return self.parameters.vector

    def optimizer_by(self, factory: OptimizerFactory) -> torch.optim.Optimizer:
        """What a factory makes of this replica's parameters.

        Raises:
            ConfigError: It is no optimizer, or one of other parameters.
        """
        own = getattr(factory, "of_module", None)
        made = factory if own is None else lambda _: cast(torch.optim.Optimizer, own(self.module))
        return optimizer_of(made, list(self.module.parameters()), self.device)

    # -- stepping ---------------------------------------------------------------------------------------------------

    def gradient(self, batch: Any) -> float:
        """Computes the gradient of a batch's mean loss, and returns that loss; none of a loss that is not finite."""
        self._memory["steps"] = self.steps
        if self.searches:
            self._batch = batch
        if self.spec.precision == "float16":
            return self._scaled(batch)
        value, shown = self._passes(batch, 1.0)
        return self._owed.loss(self.steps + 1, shown) if value is None else value

    def _passes(self, batch: Any, scale: float) -> tuple[float | None, Tensor]:
        """Makes the gradients of a batch's loss times a scale, piece by piece; returns the loss, read on a CPU only."""
        for parameter in self.parameters.tensors:  # what zero_grad does, which takes 20 times as long to get there
            parameter.grad = None
        pieces = pieces_of(batch, self.spec.accumulate)
        if len(pieces) > 1:  # the mean of a piece without anything that counts is no number
            pieces = [piece for piece in pieces if self.weight_of(piece)] or [batch]
        whole = self.weight_of(batch) if len(pieces) > 1 else 1.0
        total: Tensor | None = None
        for piece in pieces:
            with self.autocast():
                loss, shown = self.spec.algorithm.loss(self.network, piece, self.objective, self._memory)
            self._refuse_thawed()
            if self.searches:
                self._fresh = loss.detach()
            if len(pieces) > 1:
                share = self.weight_of(piece) / whole if whole else 0.0
                loss, shown = loss * share, shown * share
            total = shown.detach() if total is None else total + shown.detach()
            # gradients may be on their way as soon as they are made
            if self.device.type != "cpu" or math.isfinite(total.item()):
                self.backward(loss * scale if scale != 1.0 else loss)
        assert total is not None
        return (total.item() if self.device.type == "cpu" else None), total

    def weight_of(self, batch: Any) -> float:
        """What the gradient of a batch counts by beside those of other batches."""
        if type(self.spec.algorithm) is BackPropagation:
            return self.objective.weight_of(batch.label, batch.weight, batch.num_rows)
        return self.spec.algorithm.weight_of(batch)

    def _scaled(self, batch: Any) -> float:
        """The gradient of a loss that is scaled so that small gradients do not vanish in float16."""
        scale = Scale(self._memory)
        while True:
            found = float(self._passes(batch, scale.value)[1])
            gradients = [p.grad for p in self.parameters.tensors if p.grad is not None]
            if unscale(gradients, scale.value):
                scale.held()
                return found
            if not math.isfinite(found) or not scale.overflowed():
                return found

    def _refuse_thawed(self) -> None:
        """Refuses a parameter that begins to learn in the middle of a run: workers do not exchange it."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} began to require a gradient after {self.steps} steps; workers exchange those "
                    "that require one when the run begins: let it require one from the start, and set requires_grad to "
                    "False for as long as it is to stay"
                )

    def backward(self, loss: Tensor) -> None:
        """Makes the gradients of a loss; whoever watches them hears of each."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, evaluate: Callable[[], Tensor] | None = None) -> None:
        """Takes the optimizer step on the gradients as they are now; `evaluate` makes them anew where it needs that."""
        self.clip()
        self.take_step(evaluate)

    def take_step(self, evaluate: Callable[[], Tensor] | None = None) -> None:
        """Takes the optimizer step on gradients that have been clipped."""
        if self.searches:
            step_along(self.optimizer, evaluate or self.again)
        else:
            self.optimizer.step()
        self.advance()

    def again(self) -> Tensor:
        """The loss and gradients of the step's batch with the parameters as they are now: first those just computed."""
        found, self._fresh = self._fresh, None
        return self._evaluated() if found is None else found

    def _evaluated(self) -> Tensor:
        for parameter in self.parameters.tensors:
            parameter.grad = None
        with torch.enable_grad(), self.autocast():
            loss, _ = self.spec.algorithm.loss(self.network, self._batch, self.objective, self._memory)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def gradient_norm(self) -> float:
        """The length of the gradient as it is now."""
        made = (p.grad for p in self.parameters.tensors if p.grad is not None)
        found = [grad.coalesce().values() if grad.is_sparse else grad for grad in made]
        if not found:
            return 0.0
        return float(torch.stack([torch.linalg.vector_norm(each.float()) for each in found]).norm())

    def clip(self) -> None:
        """Makes the gradients as short as they are to be at most."""
        if self.spec.clip_norm is not None:
            for parameter in self.parameters.tensors:
                if parameter.grad is not None and parameter.grad.is_sparse:  # of a function; modules are dense by now
                    parameter.grad = parameter.grad.to_dense()
            nn.utils.clip_grad_norm_(self.parameters.tensors, self.spec.clip_norm)

    def advance(self) -> None:
        """Counts a step, whoever took it, and moves a per-step scheduler on."""
        self.steps += 1
        self._owed.step()
        if self.scheduler is not None and self.spec.scheduler_every == "step" and not self._plateau:
            self._move_on()

    @property
    def rates(self) -> list[float]:
        """The learning rates of now, by the optimizer's groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _move_on(self) -> None:
        assert self.scheduler is not None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a server's optimizer may have stepped instead
        self.scheduler.step()

    def end_epoch(self) -> None:
        """Moves a per-epoch scheduler on; one that watches a metric waits for `end_evaluation`."""
        if self.scheduler is not None and self.spec.scheduler_every == "epoch" and not self._plateau:
            self._move_on()

    def end_evaluation(self, metrics: dict[str, float]) -> None:
        if self.scheduler is not None and self._plateau and "val_loss" in metrics:
            self.scheduler.step(metrics["val_loss"])

    # -- what is not finite -----------------------------------------------------------------------------------------

    def flaw(self, loss: float) -> Flaw | None:
        """What of the step just computed is not finite; a device's losses are read later, and its gradients never."""
        owed = self._owed.bad()
        if owed is not None:
            return Flaw("loss", 1, *owed)
        if self.device.type == "cpu" or self.spec.precision == "float16" or not math.isfinite(loss):
            return flaw_of(self.steps + 1, loss, self.parameters.tensors)
        return None

    def owed_flaw(self) -> Flaw | None:
        """What is not finite of the losses that a device still owed."""
        owed = self._owed.bad(read=True)
        return None if owed is None else Flaw("loss", 1, *owed)

    def agree(self, *said: bool) -> tuple[bool, ...]:
        """What this replica says, or any that steps together with it."""
        return said

    @property
    def is_finite(self) -> bool:
        """Whether all parameters are finite."""
        return is_finite(self.vector.detach())

    def begin_anew(self) -> None:
        """Forgets what the optimizer has learnt, as a replica does that starts from the joint model."""
        self.optimizer.state.clear()
        self._memory = {k: v for k, v in self._memory.items() if not isinstance(v, Tensor)}

    def finish(self) -> None:
        """Returns once a device has done what was asked of it."""
        self._owed.finish()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What forward passes are made under."""
        if self.spec.precision != "float32":
            return torch.autocast(self.device.type, dtype=getattr(torch, self.spec.precision))
        return contextlib.nullcontext()

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, batches: Iterable[Any], model: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float], int]:
        """Sums and weights of loss and metrics over batches, with another vector's parameters; and the rows."""
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        rows = 0
        training = self.module.training
        self.module.eval()
        names = rounded(self.parameters.named(model.to(self.device)), self.parameters.narrow) | buffers
        try:
            with torch.no_grad():
                for batch in batches:
                    with self.autocast():
                        own = self.spec.algorithm.evaluate(self.module, names, batch)
                        if own is None:
                            given, named = arguments(self.network, batch)
                            output = called_under(self.module, names, given, named)
                    if own is None:
                        self._measure(batch, output, sums, weights)
                    for name, (total, counted) in (own or {}).items():
                        sums[name] = sums.get(name, 0.0) + total
                        weights[name] = weights.get(name, 0.0) + counted
                    rows += batch.num_rows
        finally:
            self.module.train(training)
        condense(self._metrics, sums, whole=True)
        return sums, weights, rows

    def _measure(self, batch: Any, output: Any, sums: dict[str, float], weights: dict[str, float]) -> None:
        """Adds a batch's loss and metrics to sums, and what they count to weights."""
        found: dict[str, Any] = {"val_loss": self.objective.total(output, batch.label, batch.weight, batch.num_rows)}
        for name, metric in self._metrics.items():
            measured = measure(name, metric, output, batch.label, batch.weight, batch.num_rows)
            found |= {f"val_{key}": value for key, value in measured.items()}
        for name, (total, counted) in found.items():
            sums[name] = sums.get(name, 0.0) + total
            if counted is not None:
                weights[name] = weights.get(name, 0.0) + counted
        condense(self._metrics, sums, whole=False)

    def recalibrate(self, batches: Iterator[Any], model: Tensor) -> None:
        """Measures batch-norm statistics anew under another vector's parameters, into this module's buffers."""
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if not norms:
            return
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        names = rounded(self.parameters.named(model.to(self.device)), self.parameters.narrow)
        training = self.module.training
        self.module.train()
        with torch.no_grad():
            for batch in batches:
                given, named = arguments(self.network, batch)
                called_under(self.module, names, given, named)
        self.module.train(training)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    def state_of(self, model: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The module's state_dict with a joint model's parameters and buffers in place of its own, without the base."""
        known, named = (
            self.parameters.named(model) | buffers,
            list(self.module.named_parameters(remove_duplicate=False)),
        )
        numbers = {id(p): name for name, p in zip(self.parameters.names, self.parameters.tensors, strict=True)}
        known |= {alias: known[numbers[id(p)]] for alias, p in named if id(p) in numbers}  # of tied ones too
        left_out = {alias for alias, p in named if id(p) not in numbers}
        state = {}
        for name, value in self.module.state_dict().items():
            if name not in left_out:
                found = known.get(name, value).to(self.parameters.narrow.get(name, value.dtype))
                state[name] = found.detach().cpu().clone().reshape(value.shape)
        return state

    def pieces_of(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """A state in pieces that are not too large to be packed one after the other."""
        found: list[dict[str, Any]] = [{}]
        size = 0
        for name, value in state.items():
            if size > PIECE_BYTES:
                found.append({})
                size = 0
            found[-1][name] = value
            size += value.nbytes
        return found

    # -- state ------------------------------------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """Everything this replica needs to go on bit for bit."""
        return {
            "vector": self.vector.detach().cpu().clone(),
            "buffers": self.buffers.vector(),
            "counts": self.buffers.counts(),
            "steps": self.steps,
            "learning": self.learning(),
            "random": self._random_state(),
            "memory": {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self._memory.items()},
        }

    def load(self, tree: dict[str, Any]) -> None:
        with torch.no_grad():
            self.vector.copy_(tree["vector"])
        self.buffers.load(tree["buffers"], tree["counts"])
        self.steps = int(tree["steps"])
        self.load_learning(tree["learning"])
        self._set_random_state(tree["random"])
        kept = tree.get("memory", {})
        self._memory = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in kept.items()}

    def shared(self) -> dict[str, Any]:
        """What replicas that never differ have in common, the optimizer's state with it."""
        return {
            "vector": self.vector.detach().cpu().clone(),
            "buffers": self.buffers.vector(),
            "counts": self.buffers.counts(),
            "learning": self.learning(),
        }

    def load_shared(self, tree: dict[str, Any]) -> None:
        with torch.no_grad():
            self.vector.copy_(tree["vector"])
        self.buffers.load(tree["buffers"], tree["counts"])
        self.load_learning(tree["learning"])

    def learning(self) -> dict[str, Any]:
        """The optimizer's and the scheduler's state; a copy, since theirs goes on changing in place."""
        scheduler = None if self.scheduler is None else plain(self.scheduler.state_dict())
        asked_for = self._asked_for
        return copy.deepcopy({"optimizer": self.optimizer.state_dict(), "scheduler": scheduler, "asked_for": asked_for})

    def schedule(self) -> dict[str, Any]:
        """Where the learning rate's schedule is, for a replica that joins late."""
        return position(self.scheduler, self.optimizer, _rates(self._asked_for))

    def load_schedule(self, tree: dict[str, Any]) -> None:
        """Goes on at another replica's learning rate; without a schedule it is the same anyway."""
        go_on(self.scheduler, self.optimizer, tree, _rates(self._asked_for))

    def load_learning(self, tree: dict[str, Any]) -> None:
        """Goes on with a saved state, but with the settings that were changed since: a smaller learning rate, say."""
        first = begun(self.optimizer)
        self.optimizer.load_state_dict(tree["optimizer"])
        for group, now, then in zip(self.optimizer.param_groups, self._asked_for, tree["asked_for"], strict=True):
            group.update({k: v for k, v in now.items() if k != "lr" and v != then.get(k)})
        rates = {"then": _rates(tree["asked_for"]), "now": _rates(self._asked_for)}
        resume(self.scheduler, self.optimizer, tree["scheduler"], first=first, **rates)

    def _seed(self, worker: int) -> None:
        """Each worker draws its own dropout and augmentation; worker 0 draws what a plain run would."""
        own = (self.spec.seed + 1) * 1_000_003 + worker
        random.seed(own)
        np.random.seed(own % 2**32)
        if worker:
            with _building:
                torch.manual_seed(own % 2**63)

    def _random_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _set_random_state(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def optimizer_of(
    factory: OptimizerFactory, parameters: list[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """What a factory makes of a module's parameters, on their device."""
    trained = [parameter.requires_grad for parameter in parameters]
    made = factory(iter(parameters))
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer gave a {type(made).__name__}; it must return a torch optimizer: "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    refuse_held(made, parameters, trained)
    for group in made.param_groups:
        if device.type == "cpu" and group.get("capturable"):
            group["capturable"] = False  # for CUDA graphs, and torch refuses to step on a CPU with it
    return made


def refuse_held(made: torch.optim.Optimizer, parameters: list[nn.Parameter], trained: list[bool]) -> None:
    """Refuses an optimizer that holds what it should not, or does to parameters what is not its own to do.

    Args:
        made: the optimizer.
        parameters: the model's.
        trained: which of them required a gradient before it was made.
    """
    name, held = type(made).__name__, [p for group in made.param_groups for p in group["params"]]
    strange = len({id(p) for p in held} - {id(p) for p in parameters})
    if strange:
        raise ConfigError(
            f"train.optimizer holds {strange} parameters that are not the model's; every worker trains a model of its "
            "own: make the optimizer from the parameters that the function is given"
        )
    rates = [float(group["lr"]) for group in made.param_groups if isinstance(group.get("lr"), float | Tensor)]
    if not all(map(math.isfinite, rates)):
        raise ConfigError(
            f"train.optimizer {name} has a learning rate that is not finite, {rates}; use one of 0 or more"
        )
    if len({id(p) for p in held}) < len(held):
        raise ConfigError(
            f"train.optimizer {name} holds a parameter twice, and would step it twice; give each parameter once"
        )
    if any(p.requires_grad != before for p, before in zip(parameters, trained, strict=True)):
        raise ConfigError(
            f"the function that makes the optimizer {name} changes which parameters require a gradient; workers "
            "exchange those that did before: set requires_grad where the model is made"
        )
    if any(group.get("differentiable") for group in made.param_groups):
        raise ConfigError(
            f"train.optimizer {name} has differentiable = True, with which torch does not step the parameters of a "
            "model; leave it out"
        )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimizer's plain settings as they were asked for, group by group."""
    kinds = (bool, int, float, str)
    return [{k: v for k, v in g.items() if isinstance(v, kinds)} for g in optimizer.param_groups]


def _rates(settings: list[dict[str, Any]]) -> Asked:
    return [group.get("lr") for group in settings]
