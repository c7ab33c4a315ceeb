"""A replica of a torch module: gradient, update, evaluation, and all the state it must not lose."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.parameters import Buffers, FlatParameters
from thinwire.replicas.algorithms import Memory
from thinwire.replicas.calls import arguments, called_under, takes_names
from thinwire.replicas.evaluation import Sums, Tally, in_mode, measured_anew, norms_of
from thinwire.replicas.flaws import Flaw, flaw_of
from thinwire.replicas.gradients import Gradients
from thinwire.replicas.keras import KerasModule, is_keras
from thinwire.replicas.learning import Learning
from thinwire.replicas.objectives import Objective, OptimizerFactory, metrics_of
from thinwire.replicas.owed import Owed
from thinwire.replicas.randomness import building, random_state, seed_worker, set_random_state
from thinwire.replicas.searches import needs_closure, step_along
from thinwire.replicas.sparse import leave_unchecked, make_dense, takes_sparse
from thinwire.replicas.spec import TrainSpec as TrainSpec
from thinwire.replicas.widths import Narrowed, rounded
from thinwire.rules.finite import is_finite

SHARED = ("vector", "buffers", "counts", "learning")
"""The parts of a replica's tree that are equal on all replicas that never differ."""
PIECE_BYTES = 8 << 20


def build_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module itself, or what its factory makes under the seed."""
    if is_keras(model):
        return KerasModule(model)
    if isinstance(model, nn.Module):
        return model
    with building:
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


def in_pieces(state: dict[Any, Any]) -> list[dict[Any, Any]]:
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


def agree_alone(*said: bool) -> tuple[bool, ...]:
    """What a replica says, or any that steps together with it: no other does."""
    return said


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
        frozen = [(name, p) for name, p in trained.named_parameters() if not p.requires_grad]
        self.buffers = Buffers(trained)
        memory: Memory = {}
        self.optimizer = self.optimizer_by(spec.optimizer)
        self._learning = Learning(self.optimizer, spec, memory)
        if spec.dense is not None or spec.clip_norm is not None or not takes_sparse(self.optimizer):
            make_dense(trained)
        leave_unchecked(trained)
        self.steps = 0
        self.searches = needs_closure(self.optimizer)
        if self.searches and (spec.accumulate > 1 or spec.precision == "float16"):
            raise ConfigError(
                f"{type(self.optimizer).__name__} evaluates the loss itself, over the whole batch and without a scale; "
                "leave accumulate at 1 and precision at 'float32' or 'bfloat16', or use another optimizer"
            )
        self.objective = Objective(spec.loss)
        narrowed = Narrowed(trained, self.parameters.narrow) if self.parameters.narrow else trained
        self.network = cast(nn.Module, torch.compile(narrowed)) if spec.compile else narrowed
        """What forward passes of training go through."""
        once = spec.accumulate == 1 and spec.precision != "float16"
        self.is_plain = self.network is self.module and once and not takes_names(self.module)
        """Whether a gradient is one pass through the module in float32 or under autocast, called in order."""
        self._metrics = metrics_of(spec.metrics)
        self._owed = owed = Owed(self.device)
        self.gradients = Gradients(
            self.network,
            self.parameters.tensors,
            frozen,
            spec,
            self.objective,
            owed,
            device=self.device,
            searches=self.searches,
            memory=memory,
        )
        self.again, self.autocast = self.gradients.again, self.gradients.autocast
        self.gradient_norm, self.weight_of = self.gradients.norm, self.gradients.weight_of
        self.finish, self.owed_flaw = owed.finish, owed.flaw
        learning = self._learning
        self.learning, self.load_learning = learning.tree, learning.load
        self.schedule, self.load_schedule = learning.schedule, learning.load_schedule
        self.end_epoch, self.end_evaluation = learning.end_epoch, learning.end_evaluation
        self.begin_anew = learning.begin_anew
        seed_worker(spec.seed, worker)

    @property
    def vector(self) -> Tensor:
        return self.parameters.vector

    @property
    def rates(self) -> list[float]:
        """The learning rates of now, by the optimizer's groups."""
        return self._learning.rates

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
        return self.gradients.make(batch, self.steps)

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
        self._learning.end_step()

    # -- what is not finite -----------------------------------------------------------------------------------------

    def flaw(self, loss: float) -> Flaw | None:
        """What of the step just computed is not finite; a device's losses are read later, and its gradients never."""
        owed = self._owed.flaw(read=False)
        if owed is not None:
            return owed
        if self.device.type == "cpu" or self.spec.precision == "float16" or not math.isfinite(loss):
            return flaw_of(self.steps + 1, loss, self.parameters.tensors)
        return None

    agree = staticmethod(agree_alone)

    @property
    def is_finite(self) -> bool:
        """Whether all parameters are finite."""
        return is_finite(self.vector.detach())

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any], model: Tensor, buffers: dict[str, Tensor]) -> Sums:
        """Sums and weights of loss and metrics over batches, with another vector's parameters; and the rows."""
        tally = Tally(self.objective, self._metrics)
        with in_mode(self.module, training=False), torch.no_grad():
            names = rounded(self.parameters.named(model.to(self.device)), self.parameters.narrow) | buffers
            for batch in batches:
                with self.autocast():
                    own = self.spec.algorithm.evaluate(self.module, names, batch)
                    if own is None:
                        given, named = arguments(self.network, batch)
                        output = called_under(self.module, names, given, named)
                if own is None:
                    tally.add(batch, output)
                else:
                    tally.add_sums(batch, own)
        return tally.sums()

    def recalibrate(self, batches: Iterator[Any], model: Tensor) -> None:
        """Measures batch-norm statistics anew under another vector's parameters, into this module's buffers."""
        if not norms_of(self.module):
            return
        names = rounded(self.parameters.named(model.to(self.device)), self.parameters.narrow)
        with measured_anew(self.module), torch.no_grad():
            for batch in batches:
                given, named = arguments(self.network, batch)
                called_under(self.module, names, given, named)

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

    pieces_of = staticmethod(in_pieces)

    # -- state ------------------------------------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """Everything this replica needs to go on bit for bit."""
        return self.shared() | {
            "steps": self.steps,
            "random": random_state(self.device),
            "memory": self.gradients.tree(),
        }

    def load(self, tree: dict[str, Any]) -> None:
        self.steps = int(tree["steps"])
        self.load_shared(tree)
        set_random_state(tree["random"], self.device)
        self.gradients.load(tree.get("memory", {}))

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
