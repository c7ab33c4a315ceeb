"""Searches for a learning rate with Optuna, several trials at a time on one Spark cluster.

The cluster's slots are shared out: SLOTS // WORKERS trials run side by side, each a job of WORKERS tasks. A trial that
is behind the others at its evaluations is ended early, and its slots are free for the next one. Install Optuna first:
`pip install optuna`.
"""

import optuna
import torch

import thinwire as tw
from thinwire.cluster.sessions import start_session
from thinwire.data import open_source
from thinwire.events import Evaluated

SLOTS, WORKERS, TRIALS = 4, 2, 6


class Pruned:
    """A callback of `fit`: tells Optuna of each evaluation, and ends a run that is not worth going on with."""

    def __init__(self, trial):
        self.trial, self.stopped = trial, False

    def __call__(self, event):
        if isinstance(event, Evaluated) and "val_loss" in event.metrics:
            self.trial.report(event.metrics["val_loss"], event.number)
            self.stopped = self.stopped or self.trial.should_prune()
        return self.stopped


def search(frame):
    def objective(trial):
        rate, momentum = trial.suggest_float("rate", 1e-3, 1.0, log=True), trial.suggest_float("momentum", 0.0, 0.95)
        pruned = Pruned(trial)
        result = tw.fit(
            "mlp",
            frame,
            inputs=["pixels"],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum),
            cluster=tw.Spark(workers=WORKERS),
            epochs=3,
            batch_size=32,
            validation=0.2,
            callbacks=[pruned],
            progress=False,
        )
        if pruned.stopped:
            raise optuna.TrialPruned
        return result.summary["val_loss"]

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(2))
    study.optimize(objective, n_trials=TRIALS, n_jobs=SLOTS // WORKERS)
    return study


if __name__ == "__main__":
    spark = start_session(None, SLOTS)
    table = next(iter(open_source("digits").batches()))
    pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
    digits = spark.createDataFrame(list(zip(pixels, labels, strict=True)), "pixels array<float>, label int")
    found = search(digits)
    print(f"{len(found.trials)} trials; best validation loss {found.best_value:.3f} with {found.best_params}")
    spark.stop()
