"""Validation rows that no worker evaluated at the end of a run, since their workers were gone: the driver does."""

from __future__ import annotations

import dataclasses
import itertools
import logging

from torch import nn

from thinwire.cluster.base import Dealt
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.data.feeds import Beside
from thinwire.placement.deferred import kept_generators
from thinwire.replicas import TorchReplica
from thinwire.run.job import Job, ShardBatches
from thinwire.run.networks import copied

_log = logging.getLogger("thinwire.run")


def evaluate_left_out(outcome: Outcome, module: nn.Module, job: Job, dealt: Dealt, policy: Policy) -> None:
    """Measures the trained model on all validation rows where the last evaluation left some out.

    The driver has them where it has dealt them out, and not where workers hold partitions of a DataFrame. The model
    must be the one that was evaluated: nothing is done where the best one is given back.

    Args:
        outcome: of the run; its metrics, and the counts of rows, become those of all rows.
        module: the trained model.
        job: how it was trained.
        dealt: where the rows are.
        policy: which metrics are computed from sums.
    """
    best = job.plan.keeps_best and outcome.best_evaluation is not None
    held = dealt.feed.files if isinstance(dealt.feed, Beside) else dealt.server.files if dealt.server else ()
    lacks = max(outcome.left_out, outcome.warned_of) or not outcome.metrics
    if best or not lacks or not any(each.num_validation_rows for each in held):
        return
    spec = dataclasses.replace(job.spec, device="cpu", compile=False)
    try:
        with kept_generators():
            replica = TorchReplica(copied(module), spec)
            buffers = replica.buffers.named(replica.buffers.vector(), replica.buffers.counts())
            shards = (ShardBatches(each, job, worker, replica.device) for worker, each in enumerate(held))
            batches = itertools.chain.from_iterable(shard.validation() for shard in shards)
            sums, weights, rows = replica.evaluate(batches, replica.vector, buffers)
    except Exception as error:  # a transform that needs what only workers have, say
        _log.warning(
            "%s validation rows are left out of the last evaluation, and the driver could not evaluate them: %s: %s",
            max(outcome.left_out, outcome.warned_of), type(error).__name__, error,
        )  # fmt: skip
        return
    metrics = {name: total / weights[name] for name, total in sums.items() if weights.get(name, 0.0) > 0}
    metrics |= policy.compute({name: total for name, total in sums.items() if name not in weights})
    _log.warning("the driver has evaluated all %s validation rows: workers that held some of them were gone", rows)
    outcome.metrics, outcome.validation_rows, outcome.left_out = metrics, rows, 0
