"""A replica that runs ahead of the joint model by its own steps, where workers send gradients and one optimizer steps.

What a worker has yet to send of a fragment is the sum of its gradients since it last sent it. When the fragment's new
values land, the replica takes them over with the joint optimizer's state, and takes the steps again whose gradients are
not in them: those that it has yet to send.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.joint import JointState, pieces
from thinwire.exchange.snapshot import brought
from thinwire.parameters import Fragment
from thinwire.rules.optimizer import MOVING, NO_GROUP, FlatOptimizer
from thinwire.strategies import Taken
from thinwire.worker.shares import Shares

HUGE = 1e30


class Ahead:
    """What one worker has yet to send, and what it does with what comes back.

    Args:
        replica: whose gradients are summed; its optimizer's state follows the joint one's.
        joint: the joint state.
        rule: the joint optimizer.
    """

    def __init__(self, replica: Any, joint: JointState, rule: FlatOptimizer) -> None:
        self._replica, self._joint, self._rule = replica, joint, rule
        self.sum = torch.zeros_like(replica.vector)
        """Of gradients, each times the weight of its rows."""
        self._views = replica.parameters.views(self.sum)
        self._shares = Shares()
        self._steps, self._weight = 0, 0.0
        self._seen = [0] * len(self._views)
        """By parameter, the last step with a gradient of it."""

    # -- what this worker gives -------------------------------------------------------------------------------------

    def add(self, weight: float) -> None:
        """Books the gradients of a step, of rows of this weight."""
        self._steps += 1
        self._weight += weight
        for number, (parameter, view) in enumerate(zip(self._replica.parameters.tensors, self._views, strict=True)):
            if parameter.grad is not None:
                view.add_(parameter.grad, alpha=weight)
                self._seen[number] = self._steps

    def note(self, fragment: Fragment, made: int) -> dict[str, Any]:
        """What to say with a fragment's sum, `made` steps having been made in all; empty where nothing is in it."""
        steps, weight = self._level(fragment)
        if not steps or weight <= 0:
            return {}
        made = max(made, self._joint.version)
        note: dict[str, Any] = {"taken": [weight, steps, max(0, made - steps)]}
        mean = fragment.of(self.sum) / weight
        note["square"] = _short(float(mean @ mean))
        if (spread := self._joint.spread.value) is not None:
            note["spread"] = _short(spread)
        note["groups"] = self._groups()
        if absent := self._absent(fragment, steps):
            note["absent"] = sorted(absent)
        return note

    def _level(self, fragment: Fragment) -> tuple[int, float]:
        """How many steps and what weight of rows a fragment's sum is of.

        Parts of a fragment that is cut in another way than before have waited for different numbers of steps. The sum
        is scaled to the mean of them, so that its mean gradient is right in every part. Without that, parts sent a step
        ago would have a fraction of their gradient, and Adam's magnitudes of them would be too small for long.
        """
        parts = self._shares.parts(fragment, self._steps, self._weight)
        if len({part[1:] for part in parts}) == 1:
            return parts[0][1:]
        mean_steps = sum(part.size * steps for part, steps, _ in parts) / fragment.size
        mean_weight = sum(part.size * weight for part, _, weight in parts) / fragment.size
        for part, _, weight in parts:
            if weight > 0:
                part.of(self.sum).mul_(mean_weight / weight)
        return max(1, round(mean_steps)), mean_weight

    def sent(self, fragment: Fragment) -> None:
        """A copy of a fragment's sum is on its way."""
        self._shares.take(fragment, self._steps, self._weight)
        fragment.of(self.sum).zero_()

    @property
    def has_any(self) -> bool:
        """Whether there are steps that no fragment of has been sent since."""
        return self._steps > 0 and bool(self.sum.any())

    def _groups(self) -> list[dict[str, Any]]:
        """The learning rates, and what else schedules have moved, as they are now."""
        found = []
        for group, first in zip(self._replica.optimizer.param_groups, self._rule.settings, strict=True):
            moved = [name for name in MOVING if name in group and (name == "lr" or group[name] != first.get(name))]
            found.append({name: _plain(group[name]) for name in moved})
        return found

    def _absent(self, fragment: Fragment, steps: int) -> frozenset[int]:
        """The parameters in a fragment, by number, of which the last so many steps had no gradient."""
        since = self._steps - steps
        return frozenset(index for index, _ in self._rule.inside(fragment) if self._seen[index] <= since)

    # -- what it takes over -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def land(self, fragment: Fragment, model: Tensor, made: int) -> None:
        """Takes over a fragment of the joint model and the joint optimizer, and the steps again that are not in it."""
        device, made = self._replica.vector.device, max(made, self._joint.version)
        state = [brought(values, device) for values in (model, *self._parts(fragment))]
        steps, weight = self._shares.since(fragment, self._steps, self._weight)
        if steps and weight > 0:
            absent = self._absent(fragment, steps)
            before, groups = max(0, made - steps), self._own_groups()
            taken = Taken(fragment, weight, steps, before, groups=groups, absent=absent)
            state = self._taken(fragment, state, taken)
        fragment.of(self._replica.vector).copy_(state[0])
        self._keep(fragment, state[1:], made)

    def _parts(self, fragment: Fragment) -> list[Tensor]:
        """The joint optimizer's state of a fragment as it would be by one step's gradient after the other."""
        parts = self._joint.parts(fragment)
        for name, values in zip(self._rule.names, parts, strict=True):
            if name in self._rule.magnitudes and self._joint.noise != 1.0:
                values.mul_(self._joint.noise ** (self._rule.magnitudes[name] / 2))
        return parts

    def _own_groups(self) -> tuple[dict[str, Any], ...]:
        return tuple({k: tuple(v) if isinstance(v, list) else v for k, v in g.items()} for g in self._groups())

    def _taken(self, fragment: Fragment, state: list[Tensor], taken: Taken) -> list[Tensor]:
        """A state after steps by what is yet to be sent, piece by piece."""
        found = [torch.empty_like(values) for values in state]
        for piece, near in pieces(fragment, (), self._joint.size):
            mean = piece.of(self.sum) / taken.rows
            here = replace(taken, fragment=piece)
            parts = [near.of(values) for values in state]
            with torch.enable_grad():
                stepped = self._rule.advance(parts[0], parts[1:], mean, here)
            for whole, part in zip(found, stepped, strict=True):
                near.of(whole).copy_(part)
        return found

    def _keep(self, fragment: Fragment, state: list[Tensor], made: int) -> None:
        """Writes the joint optimizer's state of a fragment into the replica's own optimizer."""
        optimizer, parameters = self._replica.optimizer, self._replica.parameters
        for index, piece in self._rule.inside(fragment):
            parameter, start = parameters.tensors[index], parameters.offsets[index]
            stop = min(piece.stop, start + parameter.numel())
            if stop <= piece.start or self._rule.group_of(index) == NO_GROUP:
                continue
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = self._rule.state_for(parameter, self._rule.group_of(index), made)
            own = optimizer.state[parameter]
            for name, values in zip(self._rule.names, state, strict=True):
                if isinstance(own.get(name), Tensor):
                    mine = own[name].view(-1)[piece.start - start : stop - start]
                    mine.copy_(values[piece.start - fragment.start : stop - fragment.start])

    def begin(self) -> None:
        """Nothing of what was done up to here is to be sent."""
        self.sum.zero_()
        self._shares.start(self._steps, self._weight)

    def open(self) -> None:
        """The replica's parameters are the joint model's: nothing is to be sent, and the optimizer's state follows."""
        self.begin()
        whole = Fragment(0, self._joint.size)
        if self._joint.version:
            device = self.sum.device
            with torch.no_grad():
                self._keep(whole, [brought(values, device) for values in self._parts(whole)], self._joint.version)

    def kept(self) -> list[Tensor]:
        """What the replica's own optimizer keeps, laid out as the joint optimizer's state is."""
        found = [torch.zeros(self._joint.size) for _ in self._rule.names]
        for parameter, start in zip(self._replica.parameters.tensors, self._replica.parameters.offsets, strict=True):
            own = self._replica.optimizer.state.get(parameter, {})
            for name, values in zip(self._rule.names, found, strict=True):
                if isinstance(own.get(name), Tensor):
                    values[start : start + parameter.numel()].copy_(own[name].reshape(-1))
        return found

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """Everything that is needed to go on; a copy."""
        return {
            "sum": self.sum.detach().cpu().clone(),
            "steps": self._steps,
            "weight": self._weight,
            "seen": list(self._seen),
            "shares": self._shares.tree(),
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Goes on from what was saved."""
        self.sum.copy_(tree["sum"])
        self._steps, self._weight = int(tree["steps"]), float(tree["weight"])
        self._seen = [int(step) for step in tree["seen"]]
        self._shares.load(tree["shares"])


def _short(value: float) -> float:
    """A positive number to four digits: notes are sent in every round.

    >>> _short(0.00782968383282423)
    0.00783
    """
    return min(HUGE, float(f"{value:.4g}"))


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return [float(each) for each in value] if isinstance(value, list | tuple) else float(value)
