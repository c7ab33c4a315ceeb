"""A run that is stopped in the middle and goes on: it ends where an unbroken run ends, bit for bit."""

import tempfile

import torch

import thinwire as tw
from thinwire.events import Evaluated, Event


def fit(**changes: object) -> tw.Result:
    return tw.fit(
        "mlp",
        "digits",
        inputs=["pixels"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        strategy=tw.SparkNet(period=5),
        cluster=tw.Local(workers=2),
        epochs=8,
        batch_size=32,
        validation=0.2,
        progress=False,
        **changes,
    )


def enough_for_today(event: Event) -> bool:
    """A callback that returns True stops the run at its next round and leaves a checkpoint, as Ctrl-C does."""
    return isinstance(event, Evaluated) and event.number == 3


with tempfile.TemporaryDirectory() as folder:
    whole = fit()
    cut = fit(out=f"{folder}/run", callbacks=[enough_for_today])
    resumed = fit(resume=f"{folder}/run")

states = [result.model.state_dict().values() for result in (whole, resumed)]
same = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
print(f"stopped after {cut.summary['epochs']:.1f} epochs, resumed to {resumed.summary['epochs']:.1f}")
print(f"accuracy {whole.summary['val_accuracy']:.1%} unbroken, {resumed.summary['val_accuracy']:.1%} in two parts")
print(f"parameters equal bit for bit: {'yes' if same else 'no'}")
