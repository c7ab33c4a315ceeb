"""`TorchEstimator` with a model of transformers: text in, predictions out, saved and loaded as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.errors import CheckpointError
from thinwire.spark import TorchEstimator, TorchModel

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'thinwire[hf]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'thinwire[hf]'")

from tests.hugging import adapted, bert, texts, tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*:FutureWarning")]  # of peft, by transformers


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


@pytest.fixture
def frame(spark: Any) -> Any:
    data = texts()
    rows = [(text, float(label)) for text, label in zip(data["text"], data["label"], strict=True)]
    return spark.createDataFrame(rows, "text string, label double")


def estimator(model: Any, **given: Any) -> TorchEstimator:
    asked: dict[str, Any] = {
        "input_cols": ["text"], "transform": tw.Tokenize(tokenizer(), "text"), "optimizer": adam, "epochs": 12,
        "strategy": tw.SparkNet(period=3), "num_workers": 2, "batch_size": 16, "progress": False,
    }  # fmt: skip
    return TorchEstimator(model, **asked | given)


def right(model: Any, frame: Any) -> float:
    rows = model.transform(frame).select("label", "prediction").collect()
    return sum(row["label"] == row["prediction"] for row in rows) / len(rows)


def test_a_column_of_text_is_classified_and_the_tokenizer_is_saved_as_data(frame: Any, tmp_path: Path) -> None:
    fitted = estimator(bert).fit(frame)
    assert right(fitted, frame) > 0.9
    place = str(tmp_path / "model")
    fitted.save(place)
    again = TorchModel.load(place, modules=["tests"])
    assert right(again, frame) == right(fitted, frame)
    assert "pickle" not in "".join(file.read_text() for file in Path(place, "metadata").glob("part-*"))


def test_a_transform_that_is_no_data_is_refused_on_load(frame: Any, tmp_path: Path) -> None:
    made = tokenizer()

    def tokenized(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"text": made(list(columns["text"]), padding=True, return_tensors="pt")["input_ids"]}

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.bert(ids).logits

    fitted = estimator(Positional, transform=tokenized, epochs=1).fit(frame)
    place = str(tmp_path / "model")
    fitted.save(place)
    with pytest.raises(CheckpointError, match="transform"):
        TorchModel.load(place, model=Positional)


def test_adapters_alone_are_saved_where_the_base_is_made_with_the_network(frame: Any, tmp_path: Path) -> None:
    fitted = estimator(adapted, epochs=1).fit(frame)
    trained = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert len(fitted._weights) < trained * 4 + 10_000
    place = str(tmp_path / "model")
    fitted.save(place)
    again = TorchModel.load(place, modules=["tests"])
    assert right(again, frame) == right(fitted, frame)
