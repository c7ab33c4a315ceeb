"""The README's example: handwritten digits, two worker processes, thinwire's own strategy. A few seconds."""

import torch

import thinwire as tw

result = tw.fit(
    "cnn8",  # or your own nn.Module, or a function that makes one
    "digits",  # or Parquet files, arrays, an Arrow table, a DataFrame
    inputs=["pixels"],
    label="label",
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    strategy=tw.Relay(),
    cluster=tw.Local(workers=2),
    epochs=15,
    batch_size=32,
    validation=0.2,
)
print(result.summary["val_accuracy"], result.summary["bytes_sent"])
