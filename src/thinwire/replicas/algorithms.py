"""How a gradient is found: back-propagation of a loss, or contrastive divergence of an energy (SINGA's Table 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.replicas.calls import called
from thinwire.replicas.objectives import Objective
from thinwire.values import check_fields, optional, truth, whole

Memory = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A training algorithm: it says of what the gradient is taken. Frozen; what it must remember is in a memory."""

    name = "algorithm"

    @abstractmethod
    def loss(self, module: nn.Module, batch: Any, objective: Objective, memory: Memory) -> tuple[Tensor, Tensor]:
        """What to differentiate, and what to report as loss.

        Args:
            module: the network.
            batch: its `inputs`, `label` and `weight`.
            objective: the loss that the user named.
            memory: of this worker: "steps" counts those taken; tensors put there go into its checkpoints.
        """

    def evaluate(
        self, module: nn.Module, values: Mapping[str, Tensor], batch: Any
    ) -> dict[str, tuple[float, float]] | None:
        """Sums and counts by name of a validation batch under other values; None leaves it to loss and metrics."""
        return None

    def weight_of(self, batch: Any) -> float:
        """What a batch's loss is a mean over, and so what its gradient counts by beside those of other workers."""
        return float(batch.num_rows)


@dataclass(frozen=True, kw_only=True)
class BackPropagation(Algorithm):
    """The gradient of the loss of the network's output; what everyone means by training."""

    name = "back_propagation"

    def loss(self, module: nn.Module, batch: Any, objective: Objective, memory: Memory) -> tuple[Tensor, Tensor]:
        found = objective.mean(called(module, batch), batch.label, batch.weight)
        return found, found

    def weight_of(self, batch: Any) -> float:
        return float(batch.num_rows if batch.weight is None else batch.weight.sum())


@dataclass(frozen=True, kw_only=True)
class ContrastiveDivergence(Algorithm):
    """Energies of rows against energies of rows that the network makes up itself (Hinton 2002).

    Args:
        k: steps of Gibbs sampling.
        persistent: whether made-up rows go on from those of the step before (Tieleman 2008), instead of from the batch.
        stage_steps: for networks of several stages (a DBN): how many steps each is learnt for, one after the other; the
            last goes on to the end.
    """

    name = "contrastive_divergence"
    k: int = 1
    persistent: bool = False
    stage_steps: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "algorithm", k=whole(1), stage_steps=optional(whole(1)), persistent=truth)

    def loss(self, module: nn.Module, batch: Any, objective: Objective, memory: Memory) -> tuple[Tensor, Tensor]:
        if not hasattr(module, "contrast"):
            raise ConfigError(
                f"{type(module).__name__} has no energy to contrast; give a thinwire.models.boltzmann.EnergyModel, "
                "or train by back-propagation"
            )
        machine: Any = module
        stage = self._stage(machine, memory)
        before = memory.get("chain") if self.persistent and memory.get("stage") == stage else None
        found = machine.contrast(batch.inputs, stage=stage, k=self.k, chain=before)
        if self.persistent:
            memory["chain"], memory["stage"] = found.chain.detach(), stage
        return found.positive - found.negative, found.error

    def _stage(self, module: Any, memory: Memory) -> int:
        last = int(module.stages) - 1
        if last and self.stage_steps is None:
            raise ConfigError(f"this network has {last + 1} stages; say how long each is learnt: stage_steps=…")
        return min(last, int(memory["steps"]) // self.stage_steps) if self.stage_steps else 0
