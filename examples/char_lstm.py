"""A character LSTM that learns to write as a text does, on two workers; it writes after every evaluation.

python examples/char_lstm.py                                     # Python's own manual, which every Python has
python examples/char_lstm.py --text shakespeare.txt --steps 2000
"""

import argparse
import tempfile
from pathlib import Path

import torch

import thinwire as tw
from thinwire.events import Evaluated, Event
from thinwire.models.sequences import sample

options = argparse.ArgumentParser(description="Train a character LSTM and let it write.")
options.add_argument("--text", help="a file; Python's manual unless given")
options.add_argument("--steps", type=int, default=150)
chosen = options.parse_args()


class Writer:
    """Lets the joint model of each evaluation write a line, as Shrivastava et al. (2017) do after every epoch."""

    def __call__(self, event: Event) -> None:
        """Other events are of no interest here."""

    def on_model(self, model: torch.nn.Module, event: Evaluated) -> None:
        line = sample(model, "The ", 60, temperature=0.7).replace("\n", " ")
        print(f"{event.steps:6} steps  {event.metrics['val_loss']:.3f} nats a character  {line}", flush=True)


with tempfile.TemporaryDirectory() as folder:
    path = chosen.text
    if path is None:
        from pydoc_data.topics import topics

        path = str(Path(folder) / "manual.txt")
        Path(path).write_text("\n".join(topics.values()), encoding="ascii", errors="ignore")
    result = tw.fit(
        "char_lstm",
        f"text:{path}",
        inputs=["characters"],
        validation=f"text:{path}?split=test",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        clip_norm=1.0,
        cluster=tw.Local(workers=2),
        steps=chosen.steps,
        batch_size=32,
        evaluate_every=max(1, chosen.steps // 4),
        callbacks=[Writer()],
    )
print(f"{result.history[-1]['val_loss']:.3f} nats a character at the end")
