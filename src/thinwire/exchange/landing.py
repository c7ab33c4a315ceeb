"""How rounds that are summed come into the joint state of a mesh, in the order of their numbers."""

from __future__ import annotations

import math

from torch import Tensor

from thinwire.exchange.ledger import RoundState
from thinwire.exchange.notes import taken_of
from thinwire.exchange.round import Completed
from thinwire.exchange.signals import Landed, LeftOut
from thinwire.exchange.station import Station
from thinwire.protocol.observation import Merged
from thinwire.rules.stillness import common


class Landing:
    """Merges means, and tells the stepping thread of each."""

    def __init__(self, station: Station) -> None:
        self._station, self._joint = station, station.joint

    def land_all(self) -> None:
        """Merges all rounds whose turn has come."""
        rounds = self._station.rounds
        while not self._station.standing.needs_state:
            record = rounds.ledger.find(f"train:{self._joint.landed}")
            if record is None or record.state is not RoundState.SUMMED or record.done is None:
                return
            self._land(self._joint.landed, record.done, own=record.contributes)

    def _land(self, round: int, done: Completed, *, own: bool) -> None:
        joint, signals = self._joint, self._station.signals
        snapshot = None if own else joint.old_model(done.fragment)
        reply = self._merge(round, done)
        kept = () if joint.strategy.joint_optimizer is None else tuple(joint.state[1:])
        joint.observe(Merged(self._station.rounds.generation, joint.landed, reply, joint.model, kept))
        self._station.rounds.land(done.key)
        publish = save = False
        for note in done.notes.values():
            if "setting" in note:
                joint.change(note["setting"], int(note["since"]))
            publish |= "publish" in note
            save |= "save" in note
        model = joint.model
        if self._station.worker in done.dropped and own:
            signals.put(LeftOut(round, 0, True))
        signals.put(
            Landed(
                round=round,
                fragment=done.fragment,
                reply=reply,
                snapshot=snapshot,
                notes=done.notes,
                model=model.clone() if publish and model is not None else None,
                joint=joint.tree() if save else None,
                seconds=done.seconds,
                size_bytes=done.size_bytes,
                empty=done.empty,
            )
        )

    def _merge(self, round: int, done: Completed) -> Tensor:
        """Merges a round into the joint state; returns the reply, where the mean was."""
        if self._joint.strategy.joint_optimizer is None:
            self._keep_still(done)
            return self._joint.land(round, done.fragment, done.mean, out=done.mean)
        given = {worker: note for worker, note in done.notes.items() if worker not in done.dropped}
        taken = None if done.empty else taken_of(given, done.fragment)
        squares = [float(note["square"]) for note in given.values() if "square" in note]
        square = math.fsum(squares) / len(squares) if squares else None
        return self._joint.land_steps(round, done.fragment, done.mean, taken, out=done.mean, square=square)

    def _keep_still(self, done: Completed) -> None:
        """What no contributor has moved stays: a codec of signs makes something of every zero."""
        given = [n["still"] for worker, n in done.notes.items() if "still" in n and worker not in done.dropped]
        for start, stop in common(given):
            done.mean[max(0, start - done.fragment.start) : max(0, stop - done.fragment.start)] = 0.0
