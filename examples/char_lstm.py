"""A character LSTM that learns to write as a text does, on two workers; then it writes.

python examples/char_lstm.py                                     # Python's own manual, which every Python has
python examples/char_lstm.py --text shakespeare.txt --steps 2000
"""

import argparse
import tempfile
from pathlib import Path

import torch

import thinwire as tw

options = argparse.ArgumentParser(description="Train a character LSTM and let it write.")
options.add_argument("--text", help="a file; Python's manual unless given")
options.add_argument("--steps", type=int, default=150)
chosen = options.parse_args()

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
    )
for row in result.history:
    print(f"{row['steps']:6} steps  {row['val_loss']:.3f} nats a character")

written = list(b"The ")
torch.manual_seed(0)
with torch.no_grad():
    for _ in range(200):
        window = torch.tensor([written[-64:]])
        following = result.model(window)[0, :, -1] / 0.7
        written.append(int(torch.multinomial(torch.softmax(following, 0), 1)))
print(bytes(written).decode("ascii", errors="replace"))
