"""Your own columns: Parquet files with two inputs, a string, row weights, a transform and early stopping."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import thinwire as tw

CITIES = ("Ghent", "Lagos", "Osaka", "Quito")
PRICES = {"Ghent": 2.0, "Lagos": -1.0, "Osaka": 3.0, "Quito": 0.5}


def write_rows(folder: str, rows: int = 4000) -> None:
    """Two files of flats; a twentieth of the prices is nonsense and has a weight of zero."""
    random = np.random.default_rng(0)
    size = random.uniform(20, 200, rows)
    location = random.standard_normal((rows, 3)).astype("f4")
    city = random.choice(CITIES, rows)
    price = 0.05 * size + location @ np.array([1.0, -2.0, 0.5]) + [PRICES[c] for c in city]
    trusted = random.uniform(size=rows) > 0.05
    table = pa.table(
        {
            "size_m2": size,
            "location": list(location),
            "city": city,
            "price": np.where(trusted, price, 1000.0).astype("f4"),
            "trusted": trusted.astype("f4"),
        }
    )
    pq.write_table(table.slice(0, rows // 2), Path(folder) / "part-0.parquet")
    pq.write_table(table.slice(rows // 2), Path(folder) / "part-1.parquet")


def prepare(columns: dict[str, Any]) -> dict[str, Any]:
    """Runs on the workers, once a batch: every column of the file is in `columns`, strings as NumPy arrays."""
    numbers = [CITIES.index(city) for city in columns["city"]]
    return {**columns, "size": (columns["size_m2"] / 100 - 1)[:, None], "city": torch.tensor(numbers)}


class Price(nn.Module):
    """Called with the inputs in their order: model(size, location, city)."""

    def __init__(self) -> None:
        super().__init__()
        self.city = nn.Embedding(len(CITIES), 4)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, size: torch.Tensor, location: torch.Tensor, city: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([size.float(), location, self.city(city)], dim=1))[:, 0]


with tempfile.TemporaryDirectory() as folder:
    write_rows(folder)
    result = tw.fit(
        Price,
        f"{folder}/*.parquet",
        inputs=["size", "location", "city"],
        label="price",
        weight="trusted",
        transform=prepare,
        loss="mse",
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        strategy=tw.SparkNet(period=10),
        cluster=tw.Local(workers=2),
        epochs=40,
        batch_size=64,
        validation=0.2,
        stop=tw.EarlyStopping(patience=4, metric="val_loss", min_delta=0.001),
        progress=False,
    )

print(f"stopped after {result.summary['epochs']:g} epochs: {result.summary['reason']}")
for row in result.history[::5]:
    print(f"epoch {row['epoch']:>4g}   squared error {row['val_loss']:.4f}")
with torch.no_grad():
    price = result.model(torch.tensor([[0.0]]), torch.zeros(1, 3), torch.tensor([CITIES.index("Osaka")]))
print(f"100 m² in the middle of Osaka: {price.item():.2f} (the rule behind the data says 8.00)")
