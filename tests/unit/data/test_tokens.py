"""Tokenizers as transforms: what they make, how they pad, and that they travel as plain values."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigError, DataError

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'thinwire[hf]'")

from tests.hugging import VOCABULARY, bare_tokenizer  # noqa: E402

PAD, CLS, SEP = (VOCABULARY[token] for token in ("[PAD]", "[CLS]", "[SEP]"))


def ids(*words: str) -> list[int]:
    return [CLS, *(VOCABULARY[word] for word in words), SEP]


def test_texts_are_padded_to_the_longest_of_their_batch() -> None:
    made = tw.Tokenize(bare_tokenizer(), "text")({"text": ["good", "the film was bad"], "label": 3})
    assert made["input_ids"].tolist() == [[*ids("good"), PAD, PAD, PAD], ids("the", "film", "was", "bad")]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert made["label"] == 3
    assert not made["token_type_ids"].any()
    assert made["input_ids"].dtype == torch.int64


def test_a_length_cuts_and_may_be_what_all_are_padded_to() -> None:
    cut = tw.Tokenize(bare_tokenizer(), max_length=4)({"text": ["the film was bad"]})
    assert cut["input_ids"].tolist() == [ids("the", "film")]
    fixed = tw.Tokenize(bare_tokenizer(), max_length=5, padding="max_length")({"text": ["good"]})
    assert fixed["input_ids"].tolist() == [[*ids("good"), PAD, PAD]]
    with pytest.raises(ConfigError, match="needs a length"):
        tw.Tokenize(bare_tokenizer(), padding="max_length")


def test_padding_on_the_left_is_on_the_left() -> None:
    left = bare_tokenizer()
    left.enable_padding(direction="left", pad_id=PAD, pad_token="[PAD]")
    made = tw.Tokenize(left)({"text": ["good", "the film"]})
    assert made["input_ids"].tolist() == [[PAD, *ids("good")], ids("the", "film")]
    assert made["attention_mask"].tolist() == [[0, 1, 1, 1], [1] * 4]


def test_two_columns_are_pairs() -> None:
    made = tw.Tokenize(bare_tokenizer(), ["text", "plot"])({"text": ["good"], "plot": ["long"]})
    assert made["input_ids"].tolist() == [[*ids("good"), VOCABULARY["long"], SEP]]
    assert made["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_no_rows_make_no_rows() -> None:
    assert tw.Tokenize(bare_tokenizer())({"text": []})["input_ids"].shape == (0, 0)


def test_inputs_may_name_the_text_or_what_is_made_of_it() -> None:
    made = tw.Tokenize(bare_tokenizer(), "text")
    assert made.given(["age", "text"]) == ("age", "input_ids", "attention_mask")
    assert made.given(["attention_mask"]) == ("attention_mask",)
    assert made.reads(["age", "text"]) == made.reads(["age", "input_ids", "attention_mask"]) == ("age", "text")


@pytest.mark.parametrize("travel", [pickle, cloudpickle])
def test_it_travels_as_plain_values(travel: Any) -> None:
    made = tw.Tokenize(bare_tokenizer(), max_length=6)
    made({"text": ["good"]})
    arrived = travel.loads(travel.dumps(made))
    assert arrived.settings == made.settings == json.loads(json.dumps(made.settings))
    assert arrived({"text": ["bad film"]})["input_ids"].tolist() == [ids("bad", "film")]


def test_files_are_read_as_data(tmp_path: Path) -> None:
    bare_tokenizer().save(str(tmp_path / "tokenizer.json"))
    told = {"pad_token": {"content": "[SEP]"}, "model_max_length": 5, "auto_map": {"AutoTokenizer": "evil.Evil"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    made = tw.Tokenize(tmp_path)({"text": ["good", "the film was bad"]})
    assert made["input_ids"].tolist() == [[*ids("good"), SEP, SEP], ids("the", "film", "was")]
    assert tw.Tokenize(str(tmp_path / "tokenizer.json")).makes == ("input_ids", "attention_mask")


def test_a_tokenizer_without_a_token_to_pad_with_says_so_when_it_must_pad() -> None:
    without = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    without.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = tw.Tokenize(without)
    assert made({"text": ["a b", "b b"]})["input_ids"].tolist() == [[0, 1], [1, 1]]
    with pytest.raises(DataError, match="give it one: tokenizer"):
        made({"text": ["a b", "b"]})


@pytest.mark.parametrize("given", [object(), 3, lambda text: text, len])
def test_what_cannot_travel_as_data_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="cannot travel as data"):
        tw.Tokenize(given)


@pytest.mark.parametrize(
    "change",
    [
        {"json": 3},
        {"json": "{}"},
        {"columns": "text"},
        {"columns": ["a", "b", "c"]},
        {"columns": [["text"]]},
        {"makes": ["__class__"]},
        {"makes": []},
        {"max_length": -1},
        {"max_length": 2**40},
        {"padding": "all"},
        {"side": "up"},
        {"pad_id": "0"},
        {"pad_id": -1},
        {"pad_type_id": None},
        {"more": 1},
    ],
)
def test_settings_of_another_form_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        tw.Tokenize.of(tw.Tokenize(bare_tokenizer()).settings | change)
