"""Which layers a phase of a network has, and what connects them: plain values, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.caffe.prototxt import Definition
from thinwire.errors import ConfigError, nearest


@dataclass(frozen=True)
class Spec:
    """What a ParamSpec says of one parameter blob; None where it leaves it open."""

    name: str = ""
    lr_mult: float | None = None
    decay_mult: float | None = None
    permissive: bool = False


@dataclass(frozen=True)
class Node:
    """One layer in a phase. `index` is its place in the file's list of layers."""

    index: int
    name: str
    type: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    loss_weights: tuple[float, ...]
    specs: tuple[Spec, ...]
    propagates: tuple[bool, ...]

    def loss_weight(self, top: int, is_loss: bool) -> float:
        """What a top counts in the whole loss."""
        if self.loss_weights:
            return self.loss_weights[top] if top < len(self.loss_weights) else 0.0
        return 1.0 if is_loss and top == 0 else 0.0

    def spec(self, blob: int) -> Spec:
        return self.specs[blob] if blob < len(self.specs) else Spec()


def rules_met(spec: Any, phase: str, stages: Sequence[str], level: int) -> bool:
    """Whether a layer is part of a net in this state."""
    if spec.include and spec.exclude:
        raise ConfigError("it has include and exclude rules; give one kind")
    met = any(_meets(rule, phase, stages, level) for rule in (spec.include or spec.exclude))
    if spec.include:
        return met
    return not (spec.exclude and met)


def _meets(rule: Any, phase: str, stages: Sequence[str], level: int) -> bool:
    if rule.HasField("phase") and ("TRAIN", "TEST")[rule.phase] != phase:
        return False
    if rule.HasField("min_level") and level < rule.min_level:
        return False
    if rule.HasField("max_level") and level > rule.max_level:
        return False
    return all(stage in stages for stage in rule.stage) and not any(stage in stages for stage in rule.not_stage)


def nodes_of(described: Definition, chosen: Sequence[int]) -> list[Node]:
    """The chosen layers as nodes; every bottom must be some earlier layer's top, and no top be made twice."""
    made: set[str] = set()
    found = []
    for index in chosen:
        spec = described.net.layer[index]
        for bottom in spec.bottom:
            if bottom not in made:
                raise described.error(
                    index, f"its bottom {bottom!r} is no top of an earlier layer. {nearest(bottom, made)}"
                )
        own: set[str] = set()
        for top in spec.top:
            if (top in made and top not in spec.bottom) or top in own:
                raise described.error(index, f"its top {top!r} is already made by another layer; name it otherwise")
            own.add(top)
        made |= own
        if spec.propagate_down and len(spec.propagate_down) != len(spec.bottom):
            raise described.error(index, "propagate_down is given for some bottoms only; give it for each, or for none")
        found.append(
            Node(
                index=index,
                name=spec.name,
                type=spec.type,
                bottoms=tuple(spec.bottom),
                tops=tuple(spec.top),
                loss_weights=tuple(spec.loss_weight),
                specs=tuple(_spec(p) for p in spec.param),
                propagates=tuple(spec.propagate_down) or (True,) * len(spec.bottom),
            )
        )
    return found


def _spec(given: Any) -> Spec:
    return Spec(
        name=given.name,
        lr_mult=given.lr_mult if given.HasField("lr_mult") else None,
        decay_mult=given.decay_mult if given.HasField("decay_mult") else None,
        permissive=given.share_mode == 1,
    )


def shared_keys(phases: dict[str, list[Node]]) -> dict[int, str | None]:
    """For each layer the name under which it shares all its blobs with others, if any.

    Layers of one name that never meet in a phase are the same layer in two phases.
    """
    nodes = {node.index: node for phase in phases.values() for node in phase}
    groups: dict[str, list[int]] = {}
    for index in sorted(nodes):
        groups.setdefault(nodes[index].name, []).append(index)
    present = {name: {node.index for node in phase} for name, phase in phases.items()}
    found: dict[int, str | None] = dict.fromkeys(nodes)
    for name, members in groups.items():
        apart = all(sum(index in held for index in members) <= 1 for held in present.values())
        if len(members) > 1 and apart:
            found.update(dict.fromkeys(members, name))
    return found
