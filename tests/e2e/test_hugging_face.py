"""Models of transformers fine-tuned on texts: by names, by their own loss or a given one, padded by batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import thinwire as tw
from thinwire.cli.main import main
from thinwire.errors import ConfigError, DataError
from thinwire.run.arguments import checked

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'thinwire[hf]'")

from tests.hugging import bert, texts, tokenizer  # noqa: E402


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def fit(data: Any = None, model: Any = bert, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "inputs": ["text"], "transform": tw.Tokenize(tokenizer(), "text"), "optimizer": adam, "epochs": 12,
        "strategy": tw.SparkNet(period=3), "cluster": tw.Simulated(workers=2), "batch_size": 16, "progress": False,
    }  # fmt: skip
    return tw.fit(model, texts() if data is None else data, **asked | given)


def encoded(rows: int = 96, **given: Any) -> dict[str, Any]:
    """Texts as ragged lists of token ids, as `datasets.map` leaves them."""
    found, made = texts(rows), tokenizer()
    ids = [made(text)["input_ids"] for text in found["text"]]
    column = np.empty(rows, object)
    column[:] = [np.array(each) for each in ids]
    return {"input_ids": column, "labels": found["label"]} | given


def test_a_model_of_transformers_learns_from_a_column_of_text() -> None:
    found = fit(validation=0.25)
    assert found.summary["val_accuracy"] > 0.9
    assert type(found.model).__name__ == "BertForSequenceClassification"
    output = found.model(**tokenizer()(["the film was good"], return_tensors="pt"))
    assert output.logits.argmax().item() == 1


@pytest.mark.processes
def test_processes_train_it_as_well() -> None:
    found = fit(validation=0.25, cluster=tw.Local(workers=2), strategy=tw.Synchronous())
    assert found.summary["complete"]
    assert found.summary["val_accuracy"] > 0.9


def test_one_worker_does_what_a_loop_of_transformers_does() -> None:
    """Also in its arithmetic: each batch is padded to its own longest text, and no further."""
    data, made = texts(16), tokenizer()
    torch.manual_seed(5)
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    found = fit(data, model, epochs=3, cluster=tw.Simulated(workers=1), strategy=tw.Synchronous(), batch_size=16)
    plain = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    plain.load_state_dict(initial)
    optimizer = adam(plain.parameters())
    batch = made(data["text"], padding="longest", return_tensors="pt")
    for _ in range(3):
        optimizer.zero_grad()
        output = plain(batch["input_ids"], batch["attention_mask"], labels=torch.from_numpy(data["label"]))
        output.loss.backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_inputs_may_also_be_named_as_the_network_names_them_in_any_order() -> None:
    by_text = fit(epochs=1, seed=3)
    by_name = fit(epochs=1, seed=3, inputs=["token_type_ids", "attention_mask", "input_ids"])
    for one, other in zip(by_text.model.parameters(), by_name.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_network_s_own_loss_is_taken_where_labels_are_inputs() -> None:
    data = texts()
    data["labels"] = data.pop("label")
    inputs = ["text", "labels"]
    own = fit(data, inputs=inputs, label=None, epochs=2)
    given = fit(data, inputs=["text"], label="labels", epochs=2)
    both = fit(data, inputs=inputs, label="labels", metrics=["accuracy"], validation=0.25)
    assert own.summary["train_loss"] == pytest.approx(given.summary["train_loss"], rel=1e-4)
    assert both.summary["val_accuracy"] > 0.9


@pytest.mark.parametrize(
    "loss",
    [
        "cross_entropy",
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        lambda output, label: F.cross_entropy(output.logits, label),
    ],
)
def test_a_given_loss_is_of_the_logits_and_a_function_gets_the_whole_output(loss: Any) -> None:
    metrics = {"right": lambda output, label: (output.logits.argmax(1) == label).float()}
    found = fit(loss=loss, metrics=metrics, validation=0.25)
    assert found.summary["val_right"] > 0.9


def test_a_regression_of_one_logit_compares_with_numbers() -> None:
    data = texts()
    data["label"] = data["label"].astype(np.float64) * 2.0 - 1.0
    found = fit(data, model=lambda: bert(1), loss="mse", metrics=["mae"], validation=0.25)
    assert found.summary["val_mae"] < 0.5


def test_the_own_loss_of_a_network_that_has_none_is_refused_before_a_worker_starts() -> None:
    with pytest.raises(ConfigError, match="give the labels among the inputs"):
        fit(label=None)
    rows = {"x": np.ones((8, 3), np.float32)}
    with pytest.raises(ConfigError, match="loss = 'own'"):
        tw.fit(nn.Linear(3, 2), rows, label=None, cluster=tw.Simulated(workers=2), progress=False)


def test_a_data_collator_of_transformers_is_a_transform() -> None:
    collator = transformers.DataCollatorWithPadding(tokenizer())
    found = fit(
        encoded(), inputs=["input_ids", "attention_mask", "labels"], label="labels", transform=collator,
        metrics=["accuracy"], validation=0.25,
    )  # fmt: skip
    assert found.summary["val_accuracy"] > 0.9


def test_a_collator_that_masks_words_trains_a_language_model_by_its_own_loss() -> None:
    from transformers import BertConfig, BertForMaskedLM

    special = tokenizer(mask_token="[UNK]")
    collator = transformers.DataCollatorForLanguageModeling(special, mlm_probability=0.3)
    data = encoded()
    del data["labels"]

    def model() -> Any:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return BertForMaskedLM(BertConfig(vocab_size=len(special), max_position_embeddings=32, **sizes))

    found = fit(data, model, inputs=["input_ids", "labels"], label=None, transform=collator, epochs=4)
    assert found.summary["train_loss"] < np.log(len(special))


def test_a_collate_function_of_one_s_own_gets_a_list_of_rows() -> None:
    made = tokenizer()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(made([row["text"] for row in rows], padding=True, return_tensors="pt")) | {
            "label": torch.tensor([row["label"] for row in rows])
        }

    found = fit(inputs=["input_ids", "attention_mask"], transform=tw.Collate(collate), validation=0.25)
    assert found.summary["val_accuracy"] > 0.9


def test_tied_weights_come_back_as_the_joint_model_has_them() -> None:
    """A language model's last layer is its embedding: the state has the tensor under both names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made = tokenizer()
    data = {"text": texts()["text"]}

    def model() -> Any:
        return GPT2LMHeadModel(GPT2Config(vocab_size=len(made), n_positions=32, n_embd=16, n_layer=1, n_head=2))

    def with_labels(columns: dict[str, Any]) -> dict[str, Any]:
        columns = tw.Tokenize(made)(columns)
        return columns | {"labels": columns["input_ids"].masked_fill(columns["attention_mask"] == 0, -100)}

    found = fit(
        data, model, inputs=["input_ids", "attention_mask", "labels"], label=None, transform=with_labels, epochs=4,
        validation=0.25,
    )  # fmt: skip
    batch = with_labels({"text": texts(64, seed=9)["text"]})
    state = found.model.state_dict()
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    with torch.no_grad():
        loss = found.model(**{k: v for k, v in batch.items() if k != "text"}).loss
    assert loss < np.log(len(made))


def test_a_placement_of_such_a_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="passed by name"):
        fit(placement=tw.Planned(group_size=2))


def test_the_command_line_tokenizes_by_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer().save_pretrained(tmp_path / "tokenizer")
    pq.write_table(pa.table(texts()), tmp_path / "rows.parquet")
    (tmp_path / "run.toml").write_text(
        f"""
        [model]
        factory = "tests.hugging:bert"
        [data]
        source = "{tmp_path}/rows.parquet"
        inputs = ["text"]
        validation = 0.25
        transform = {{ name = "tokenize", tokenizer = "{tmp_path}/tokenizer", columns = "text", max_length = 16 }}
        [train]
        epochs = 12
        batch_size = 16
        optimizer = {{ name = "adam", lr = 0.01 }}
        [strategy]
        name = "sparknet"
        period = 3
        [cluster]
        kind = "simulated"
        """
    )
    assert main(["train", str(tmp_path / "run.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["val_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "tokenise", "tokenizer": "t"}, "tokenize"),
        ({"name": "tokenize"}, "transform.tokenizer is missing"),
        ({"name": "tokenize", "tokenizer": "no such folder"}, "Nothing is downloaded"),
        ({"name": "tokenize", "tokenizer": "t", "colums": "text"}, "columns"),
    ],
)
def test_a_form_of_a_tokenizer_that_cannot_be_is_refused_by_its_key(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        checked({"transform": given})


def test_a_column_that_holds_no_text_is_refused_before_a_worker_starts() -> None:
    data = texts() | {"number": np.arange(96)}
    with pytest.raises(DataError, match="'number' holds '0'"):
        fit(data, inputs=["number"], transform=tw.Tokenize(tokenizer(), "number"))
