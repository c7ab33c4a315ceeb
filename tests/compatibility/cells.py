"""What is run for each cell of docs/reference/what-works-with-what.md, in virtual time, and what it is compared with.

Two references, both in plain torch:

- where workers step together, one optimizer that is given all workers' rows in every step
- where each worker steps by itself, an optimizer beside it that is given the worker's rows, and before every step the
  parameters that the exchange has left it with
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire import caffe, events
from thinwire.caffe.training import whole_loss
from thinwire.errors import ConfigError
from thinwire.models.boltzmann import Contrast, EnergyModel, Seen

ROWS, CLASSES, WORKERS, STEPS = 120, 3, 3, 4
TOLERANCE = 1e-3
"""Of a parameter after `STEPS` steps, absolute and relative."""
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, 4)).astype("f4")
Y = RANDOM.integers(0, CLASSES, ROWS)
W = RANDOM.uniform(0.1, 3.0, ROWS).astype("f4")
BUCKETS = 8
CATEGORIES = np.digitize(X[:, 0], np.linspace(-1.5, 1.5, BUCKETS - 1))
INPUTS, LABELS, WEIGHTS = torch.from_numpy(X), torch.from_numpy(Y), torch.from_numpy(W)

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES, bias=False))


def table(*, sparse: bool = True) -> nn.Module:
    return nn.Sequential(nn.Embedding(BUCKETS, CLASSES, sparse=sparse))


NET = """
layer { name: "d" type: "Input" top: "data" top: "label" input_param { shape { dim: 8 dim: 4 } shape { dim: 8 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 8
        weight_filler { type: "xavier" } } }
layer { name: "tanh" type: "TanH" bottom: "ip" top: "tanh" }
layer { name: "out" type: "InnerProduct" bottom: "tanh" top: "out" inner_product_param { num_output: 3
        weight_filler { type: "xavier" } } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""


def caffe_net() -> nn.Module:
    return caffe.loads(NET)


class Machine(EnergyModel):
    """An energy model that makes rows up without drawing them, so that all replicas make up the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(4, 6))
        self.bias = nn.Parameter(torch.zeros(6))

    def energy(self, rows: Tensor) -> Tensor:
        return -nn.functional.softplus(rows @ self.weight + self.bias).sum(1)

    def made_up(self, rows: Tensor) -> Tensor:
        return torch.sigmoid(rows @ self.weight + self.bias) @ self.weight.t()

    def contrast(self, inputs: Any, *, stage: int, k: int, chain: Tensor | None) -> Contrast:
        (rows,) = inputs
        made = self.made_up(rows).detach()
        return Contrast(self.energy(rows).mean(), self.energy(made).mean(), made, (rows - made).square().mean())

    def forward(self, *inputs: Tensor) -> Seen:
        (rows,) = inputs
        return Seen(rows, self.made_up(rows), self.energy(rows), self.energy(rows.flip(0)))


class Halving(torch.optim.Optimizer):
    """A user's own: gradient descent whose step is halved until the loss falls."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        loss = closure()
        start = [p.detach().clone() for p in held]
        downhill = [p.grad.clone() for p in held]
        rate = self.param_groups[0]["lr"]
        while rate > 1e-6:
            with torch.no_grad():
                for parameter, before, slope in zip(held, start, downhill, strict=True):
                    parameter.copy_(before - rate * slope)
            if closure() < loss:
                break
            rate /= 2
        return loss


def _(kind: Any, **settings: Any) -> Factory:
    return functools.partial(kind, **settings)


def by_group(kind: Any, first: dict[str, Any], **settings: Any) -> Factory:
    """An optimizer whose first parameter has settings of its own."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        one, *others = parameters
        made: torch.optim.Optimizer = kind([{"params": [one], **first}, {"params": others}], **settings)
        return made

    return make


def without_first(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    _, *others = parameters
    return torch.optim.SGD(others, lr=0.1, momentum=0.9)


o = torch.optim
OPTIMIZERS: dict[str, Factory] = {
    "SGD": _(o.SGD, lr=0.1),
    "SGD, momentum": _(o.SGD, lr=0.1, momentum=0.9),
    "SGD, Nesterov": _(o.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, weight decay": _(o.SGD, lr=0.1, weight_decay=0.1),
    "SGD, dampening": _(o.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, lr = 0": _(o.SGD, lr=0.0),
    "SGD, lr a tensor": lambda p: o.SGD(p, lr=torch.tensor(0.1)),
    "SGD, foreach": _(o.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": _(o.SGD, lr=0.1, momentum=0.9, fused=True),
    "SGD, maximize": _(o.SGD, lr=0.1, maximize=True),
    "SGD, a rate by group": by_group(o.SGD, {"lr": 0.02}, lr=0.1, momentum=0.9),
    "SGD, one parameter left out": without_first,
    "Adam": _(o.Adam, lr=0.02),
    "Adam, AMSGrad": _(o.Adam, lr=0.02, amsgrad=True),
    "AdamW": _(o.AdamW, lr=0.02, weight_decay=0.1),
    "AdamW, decay by group": by_group(o.AdamW, {"weight_decay": 0.0}, lr=0.02, weight_decay=0.1),
    "Adamax": _(o.Adamax, lr=0.02),
    "NAdam": _(o.NAdam, lr=0.02),
    "RAdam": _(o.RAdam, lr=0.02),
    "Adagrad": _(o.Adagrad, lr=0.1),
    "Adadelta": _(o.Adadelta, lr=1.0),
    "RMSprop": _(o.RMSprop, lr=0.01),
    "RMSprop, centered": _(o.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": _(o.Rprop, lr=0.01),
    "ASGD": _(o.ASGD, lr=0.1),
    "Adafactor": _(o.Adafactor, lr=0.02),
    "Muon": lambda p: o.Muon(p, lr=0.02),
    "LBFGS": _(o.LBFGS, max_iter=2),
    "LBFGS, strong Wolfe": _(o.LBFGS, max_iter=2, line_search_fn="strong_wolfe"),
    "ConjugateGradient": _(tw.ConjugateGradient, iterations=2),
    "own, with a closure": Halving,
}

OPTIMIZERS_OF_SPARSE: dict[str, Factory] = {
    "SGD": _(o.SGD, lr=0.1),
    "SGD, momentum": _(o.SGD, lr=0.1, momentum=0.9),
    "SGD, weight decay": _(o.SGD, lr=0.1, weight_decay=0.1),
    "Adagrad": _(o.Adagrad, lr=0.1),
    "Adam": _(o.Adam, lr=0.02),
    "LBFGS": _(o.LBFGS, max_iter=2),
    "SparseAdam": _(o.SparseAdam, lr=0.02),
}

rates = o.lr_scheduler
SCHEDULES: dict[str, Callable[[o.Optimizer], Any]] = {
    "StepLR": lambda made: rates.StepLR(made, 2, 0.5),
    "LambdaLR": lambda made: rates.LambdaLR(made, lambda step: 0.9**step),
    "MultiplicativeLR": lambda made: rates.MultiplicativeLR(made, lambda step: 0.9),
    "PolynomialLR": lambda made: rates.PolynomialLR(made, 3 * STEPS),
    "CosineAnnealingWarmRestarts": lambda made: rates.CosineAnnealingWarmRestarts(made, 3),
    "OneCycleLR": lambda made: rates.OneCycleLR(made, 0.3, 3 * STEPS),
    "OneCycleLR, cycle_momentum=False": lambda made: rates.OneCycleLR(made, 0.3, 3 * STEPS, cycle_momentum=False),
    "CyclicLR": lambda made: rates.CyclicLR(made, 0.02, 0.2, step_size_up=2),
    "SequentialLR, a warm-up": lambda made: rates.SequentialLR(
        made, [rates.LinearLR(made, 0.1, 1.0, 2), rates.ExponentialLR(made, 0.8)], [2]
    ),
    "ChainedScheduler": lambda made: rates.ChainedScheduler(
        [rates.ExponentialLR(made, 0.9), rates.ConstantLR(made, 0.5, 2)]
    ),
}

STRATEGIES: dict[str, tw.Strategy] = {
    "Synchronous": tw.Synchronous(),
    "ParameterTable, strict": tw.ParameterTable(consistency="strict"),
    "ParameterTable, one group": tw.ParameterTable(groups=1),
    "SparkNet": tw.SparkNet(period=2),
    "DiLoCo": tw.DiLoCo(period=2),
    "EASGD": tw.EASGD(period=2),
    "EAMSGD": tw.EASGD(period=2, momentum=0.5),
    "DeepSpark": tw.DeepSpark(period=2),
    "MPCA": tw.MPCA(),
    "Relay, displacements": tw.Relay(sends="displacements"),
    "Auto, displacements": tw.Auto(sends="displacements"),
}


@dataclass(frozen=True)
class Outcome:
    """What a cell came to."""

    kind: Literal["equal", "refused", "neither"]
    reason: str = ""


@dataclass(frozen=True)
class Plain:
    """Plain torch with an optimizer."""

    factory: Factory
    bfloat16: bool = False
    """Whether it computes under autocast."""
    weighted: bool = False
    """Whether rows have weights."""
    categories: bool = False
    """Whether the network is an embedding with sparse gradients."""
    replica: Literal["torch", "Caffe", "energy"] = "torch"
    """What trains: a module of torch, a Caffe net, or an energy model by contrastive divergence."""
    scheduler: Callable[[o.Optimizer], Any] | None = None
    """What moves the learning rate, after each step."""

    def scheduled(self, made: o.Optimizer) -> Callable[[], None]:
        """What moves its rate on."""
        moving = None if self.scheduler is None else self.scheduler(made)
        return lambda: None if moving is None else moving.step()

    def net(self) -> nn.Module:
        """The network; an optimizer that does not take sparse gradients is compared with one of dense gradients."""
        if self.replica != "torch":
            return caffe_net() if self.replica == "Caffe" else Machine()
        return table(sparse=self.factory is OPTIMIZERS_OF_SPARSE["SparseAdam"]) if self.categories else net()

    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        """A step on some rows."""

        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
                loss = self.loss(module, rows)
            loss.backward()
            return loss

        optimizer.step(closure)

    def loss(self, module: Any, rows: Tensor) -> Tensor:
        """What a step on some rows goes down."""
        if self.replica == "Caffe":
            found: Tensor = module(INPUTS[rows], LABELS[rows]).loss
            return found
        if self.replica == "energy":
            contrast = module.contrast([INPUTS[rows]], stage=0, k=1, chain=None)
            return contrast.positive - contrast.negative
        inputs = torch.from_numpy(CATEGORIES) if self.categories else INPUTS
        losses = nn.functional.cross_entropy(module(inputs[rows]), LABELS[rows], reduction="none")
        weights = WEIGHTS[rows] if self.weighted else torch.ones(len(rows))
        return (losses * weights).sum() / weights.sum()

    def with_all_rows(self) -> list[Tensor]:
        """The parameters that one optimizer comes to with all rows."""
        torch.manual_seed(0)
        module = self.net()
        optimizer = self.factory(module.parameters())
        move_on = self.scheduled(optimizer)
        for _step in range(STEPS):
            self.step(module, optimizer, torch.arange(ROWS))
            move_on()
        return [p.detach() for p in module.parameters()]


class Shadowed:
    """Makes optimizers, each with another beside it that plain torch feeds."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self._factory = plain, plain.factory
        self.distances: list[dict[int, float]] = []
        """Of each optimizer made, how far steps were from the ones beside it, by the worker whose rows those saw."""
        self.stepped = self.exchanged = False
        """Whether a step has moved parameters, and whether an exchange has, between two steps."""

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = list(parameters)
        made: Any = self._factory(iter(held))
        if [p.shape for p in held] != [p.shape for p in self._plain.net().parameters()]:
            return made  # the driver looks at it
        beside = [self._beside(worker) for worker in range(WORKERS)]
        distances: dict[int, float] = {}
        after: list[Tensor] = []
        inner = made.step

        @functools.wraps(type(made).step)
        def step(_: Any, *closure: Any) -> Any:
            nonlocal after
            before = [p.detach().clone() for p in held]
            moved = not after or not all(map(torch.equal, before, after))
            self.exchanged |= bool(after) and moved
            found = inner(*closure)
            after = [p.detach().clone() for p in held]
            self.stepped |= not all(map(torch.equal, before, after))
            for worker, take in enumerate(beside):
                far = max(map(_distance, after, take(before if moved else None)))
                distances[worker] = max(distances.get(worker, 0.0), far)
            return found

        made.step = types.MethodType(step, made)  # torch's schedulers take it apart
        self.distances.append(distances)
        optimizer: torch.optim.Optimizer = made
        return optimizer

    def _beside(self, worker: int) -> Callable[[list[Tensor] | None], list[Tensor]]:
        plain = self._plain.net()
        optimizer = self._factory(plain.parameters())
        mine, move_on = rows_of(worker), self._plain.scheduled(optimizer)

        def take(before: list[Tensor] | None) -> list[Tensor]:
            if before is not None:  # an exchange has moved them
                with torch.no_grad():
                    for parameter, value in zip(plain.parameters(), before, strict=True):
                        parameter.copy_(value)
            with torch.enable_grad():
                self._plain.step(plain, optimizer, mine)
            move_on()
            return [p.detach() for p in plain.parameters()]

        return take

    def is_equal(self, tolerance: float) -> bool:
        """Whether each worker's steps were those of the optimizer that was given its rows, after exchanges."""
        workers = [d for d in self.distances if d]
        own = all(any(d[worker] <= tolerance for d in workers) for worker in range(WORKERS))
        return own and len(workers) == WORKERS and self.exchanged == self.stepped


def _distance(one: Tensor, other: Tensor) -> float:
    """In tolerances."""
    return float(((one - other).abs() / (TOLERANCE * (1 + other.abs()))).max())


def rows_of(worker: int) -> Tensor:
    """The rows that are dealt to a worker; see `thinwire.data.split`."""
    order = np.random.Generator(np.random.Philox(0)).permutation(ROWS)
    return torch.from_numpy(order[worker::WORKERS].copy())


def outcome(
    optimizer: Factory,
    strategy: tw.Strategy,
    tolerance: float = 1.0,
    *,
    categories: bool = False,
    replica: Literal["torch", "Caffe", "energy"] = "torch",
    **more: Any,
) -> Outcome:
    """Runs a cell; `tolerance` is in multiples of `TOLERANCE`."""
    log: list[events.Event] = []
    together = strategy.subject == "gradients"
    bfloat16, scheduler = more.get("precision") == "bfloat16", more.get("scheduler")
    plain = Plain(optimizer, bfloat16, "weight" in more, categories, replica, scheduler)
    shadowed = Shadowed(plain)
    settings: dict[str, Any] = {
        "strategy": strategy,
        "optimizer": optimizer if together else shadowed,
        "cluster": tw.Simulated(workers=WORKERS, step_s=0.01),
        "batch_size": ROWS,
        "steps": STEPS if together else 2 * STEPS,
        "progress": False,
        "callbacks": [log.append],
    }
    try:
        model, data, own = _given(plain)
        run = tw.fit(model, data, **(settings | own | more))
    except ConfigError as error:
        return Outcome("neither" if log else "refused", str(error))
    except Exception as error:
        return Outcome("neither", f"{type(error).__name__}: {error}")
    if together:
        far = max(map(_distance, run.model.state_dict().values(), plain.with_all_rows()))
        return Outcome("equal") if far <= tolerance else Outcome("neither", f"{far * TOLERANCE:.3g} from one worker")
    if shadowed.is_equal(tolerance):
        return Outcome("equal")
    return Outcome("neither", f"exchanged: {shadowed.exchanged}, stepped: {shadowed.stepped}, {shadowed.distances}")


def _given(plain: Plain) -> tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]:
    """What `fit` is called with: the network, the data, and what they need beside."""
    if plain.replica == "Caffe":
        return caffe_net, {"data": X, "label": Y}, {"inputs": ["data", "label"], "label": None, "loss": whole_loss}
    if plain.replica == "energy":
        return Machine, {"features": X}, {"label": None, "algorithm": tw.ContrastiveDivergence()}
    data = {"features": CATEGORIES if plain.categories else X, "label": Y} | ({"w": W} if plain.weighted else {})
    return (table if plain.categories else net), data, {}


@dataclass(frozen=True)
class Section:
    """A table of the page: a cell is what its row and its column ask `outcome` for, together."""

    title: str
    about: str
    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]]

    def outcome(self, row: str, column: str) -> Outcome:
        return outcome(**(self.rows[row] | self.columns[column]))


TABLES = ("ParameterTable, strict", "ParameterTable, one group")
GROUPED = {"cluster": tw.Simulated(workers=4, step_s=0.01)}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "Planned": {"placement": tw.Planned(group_size=2)},
    "TensorParallel": {"placement": tw.TensorParallel(group_size=2)},
}
CODED = ("Synchronous", "ParameterTable, strict", "SparkNet", "MPCA", "EASGD")
"""Strategies that leave the codec open, or refuse one."""
SECTIONS = [
    Section(
        "Optimizers and strategies",
        f"{WORKERS} workers, each with a replica of its own, over the exchange that the strategy takes by itself.",
        {name: {"optimizer": factory} for name, factory in OPTIMIZERS.items()},
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items() if name not in TABLES},
    ),
    Section(
        "Optimizers and parameter tables",
        f"{WORKERS} workers, whose servers step.",
        {name: {"optimizer": factory} for name, factory in OPTIMIZERS.items()},
        {name: {"strategy": STRATEGIES[name]} for name in TABLES},
    ),
    Section(
        "Optimizers and placements",
        "Four workers, two to a replica.",
        {name: {"optimizer": factory} for name, factory in OPTIMIZERS.items()},
        {
            f"{placed}, {name}": GROUPED | placement | {"strategy": STRATEGIES[name]}
            for placed, placement in PLACEMENTS.items()
            for name in ("Synchronous", "ParameterTable, strict")
        },
    ),
    Section(
        "Exchanges and strategies",
        f"{WORKERS} workers, with SGD and momentum.",
        {name: {"optimizer": OPTIMIZERS["SGD, momentum"], "exchange": name} for name in ("mesh", "table")},
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()},
    ),
    Section(
        "Rows with weights and strategies",
        f"{WORKERS} workers; plain torch has the loss Σ w·l / Σ w.",
        {
            name: {"optimizer": OPTIMIZERS[name], "weight": "w", "inputs": ["features"]}
            for name in ("SGD, momentum", "LBFGS, strong Wolfe")
        },
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()},
    ),
    Section(
        "Rows with weights and placements",
        "Four workers, two to a replica, with SGD and momentum.",
        {"weights": {"optimizer": OPTIMIZERS["SGD, momentum"], "weight": "w", "inputs": ["features"]}},
        {
            f"{placed}, {name}": GROUPED | placement | {"strategy": STRATEGIES[name]}
            for placed, placement in PLACEMENTS.items()
            for name in ("Synchronous", "ParameterTable, strict")
        },
    ),
    Section(
        "Codecs and strategies",
        f"{WORKERS} workers. A parameter may differ by 0.02: the gradients of `Synchronous` are rounded.",
        {
            f"{name}, {codec}": {"optimizer": OPTIMIZERS[name], "codec": codec, "tolerance": 20}
            for name in ("SGD, momentum", "LBFGS, strong Wolfe")
            for codec in ("bfloat16", "int8")
        },
        {name: {"strategy": STRATEGIES[name]} for name in CODED},
    ),
    Section(
        "bfloat16 and strategies",
        f'{WORKERS} workers with `precision="bfloat16"`. A parameter may differ by 0.02.',
        {
            name: {"optimizer": OPTIMIZERS[name], "precision": "bfloat16", "tolerance": 20}
            for name in ("SGD, momentum", "AdamW")
        },
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()},
    ),
    Section(
        "Sparse gradients and strategies",
        f"{WORKERS} workers and an `nn.Embedding` with `sparse=True`. Where the exchange or the optimizer takes "
        "no sparse gradients they are dense, and plain torch has an embedding with `sparse=False`.",
        {
            **{name: {"optimizer": factory, "categories": True} for name, factory in OPTIMIZERS_OF_SPARSE.items()},
            "SGD, clip_norm": {"optimizer": OPTIMIZERS_OF_SPARSE["SGD"], "categories": True, "clip_norm": 1e6},
        },
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()},
    ),
    Section(
        "Sparse gradients and placements",
        "Four workers, two to a replica, and an `nn.Embedding` with `sparse=True`.",
        {
            name: {"optimizer": OPTIMIZERS_OF_SPARSE[name], "categories": True}
            for name in ("SGD, momentum", "Adam", "SparseAdam")
        },
        {
            f"{placed}, {name}": GROUPED | placement | {"strategy": STRATEGIES[name]}
            for placed, placement in PLACEMENTS.items()
            for name in ("Synchronous", "ParameterTable, strict")
        },
    ),
    Section(
        "Learning-rate schedules and strategies",
        f"{WORKERS} workers, whose schedules move after each step.",
        {
            f"{optimizer}, {name}": {
                "optimizer": OPTIMIZERS[optimizer],
                "scheduler": schedule,
                "scheduler_every": "step",
            }
            for optimizer, names in (("SGD, momentum", SCHEDULES), ("AdamW", ("OneCycleLR", "SequentialLR, a warm-up")))
            for name, schedule in SCHEDULES.items()
            if name in names
        },
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()},
    ),
    Section(
        "Learning-rate schedules and placements",
        "Four workers, two to a replica, with SGD and momentum.",
        {
            name: {"optimizer": OPTIMIZERS["SGD, momentum"], "scheduler": schedule, "scheduler_every": "step"}
            for name, schedule in SCHEDULES.items()
        },
        {
            f"{placed}, {name}": GROUPED | placement | {"strategy": STRATEGIES[name]}
            for placed, placement in PLACEMENTS.items()
            for name in ("Synchronous", "ParameterTable, strict")
        },
    ),
    Section(
        "Replicas and strategies",
        f"{WORKERS} workers: a net of Caffe's, called with data and labels, and an energy model that learns by "
        "contrastive divergence from rows which it makes up without drawing them.",
        {
            f"{replica}, {name}": {"optimizer": OPTIMIZERS[name], "replica": key}
            for replica, key in (("Caffe net", "Caffe"), ("Contrastive divergence", "energy"))
            for name in ("SGD, momentum", "AdamW", "LBFGS, strong Wolfe", "ConjugateGradient")
        },
        {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()},
    ),
    Section(
        "Replicas and placements",
        "Four workers, two to a replica, with SGD and momentum.",
        {
            "Caffe net": {"optimizer": OPTIMIZERS["SGD, momentum"], "replica": "Caffe"},
            "Contrastive divergence": {"optimizer": OPTIMIZERS["SGD, momentum"], "replica": "energy"},
        },
        {
            f"{placed}, {name}": GROUPED | placement | {"strategy": STRATEGIES[name]}
            for placed, placement in PLACEMENTS.items()
            for name in ("Synchronous", "ParameterTable, strict")
        },
    ),
]
