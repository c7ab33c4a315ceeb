"""LoRA by peft: adapters alone are exchanged, kept in checkpoints and handed back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.checkpoint import CheckpointStore

pytest.importorskip("peft", reason="peft is not installed: pip install 'thinwire[hf]'")

from tests.hugging import adapted, bert, texts, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # peft of transformers, in the versions of the day


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def fit(model: Any = adapted, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "inputs": ["text"], "transform": tw.Tokenize(tokenizer(), "text"), "optimizer": adam, "epochs": 25,
        "strategy": tw.SparkNet(period=3), "cluster": tw.Simulated(workers=2), "batch_size": 16, "progress": False,
    }  # fmt: skip
    return tw.fit(model, texts(), **asked | given)


def test_adapters_learn_and_the_base_stays() -> None:
    found = fit()
    assert found.summary["train_loss"] < 0.55, "which is 0.69 for a coin"
    before, after = adapted(), found.model
    for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert one.requires_grad or torch.equal(one, other), name
    moved = [
        n
        for (n, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert any("lora_A" in name for name in moved)
    assert any("classifier" in name for name in moved)


def test_adapters_alone_are_sent() -> None:
    trained = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    whole = sum(p.numel() for p in bert().parameters())
    assert trained < whole / 5
    lora, full = fit(epochs=2), fit(bert, epochs=2)
    assert lora.summary["rounds"] == full.summary["rounds"]
    assert lora.summary["bytes_sent"] < full.summary["bytes_sent"] / 2


def test_checkpoints_hold_adapters_alone(tmp_path: Path) -> None:
    fit(epochs=2, out=str(tmp_path), checkpoint_every=3)
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    manifest, _ = store.newest_whole(lambda manifest: "")
    assert manifest is not None
    joint: Any = store.read_part(manifest, "joint")
    trained = {name for name, p in adapted().named_parameters() if p.requires_grad}
    assert {name for name in joint["model"] if "position_ids" not in name} == trained


def test_what_comes_back_is_saved_by_peft_as_an_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    found = fit(epochs=3)
    found.model.save_pretrained(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = bert(initializer_range=0.1)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    batch = tokenizer()(["the film was good", "awful"], return_tensors="pt", padding=True)
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, found.model(**batch).logits)
