"""Tiny models and tokenizers of Hugging Face's libraries, made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")
OTHERS = ("the", "film", "was", "and", "a", "plot", "very", "long")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = {word: number for number, word in enumerate((*SPECIAL, *GOOD, *BAD, *OTHERS))}


def bare_tokenizer() -> Any:
    """A tokenizer of whole words, of the library tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])],
    )
    return made


def tokenizer(**more: Any) -> Any:
    """The same as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=bare_tokenizer(), **names | {"model_max_length": 32} | more)


def bert(classes: int = 2, **more: Any) -> Any:
    """A BERT of one small layer that tells classes of texts apart."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=32, num_labels=classes, **{**sizes, **more})
    return BertForSequenceClassification(config)


def adapted(**more: Any) -> Any:
    """The same with LoRA's adapters, which alone are trained beside the last layer; the base is always the same."""
    from peft import LoraConfig, TaskType, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = bert(**{"initializer_range": 0.1, **more})
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, lora_alpha=8, target_modules=["query", "value"])
    return get_peft_model(base, config)


def texts(rows: int = 96, seed: int = 0) -> dict[str, Any]:
    """Texts of three to nine words, of which one tells the label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    found = []
    for label in labels:
        words = [str(word) for word in rng.choice(OTHERS, rng.integers(2, 9))]
        words.insert(int(rng.integers(0, len(words))), str(rng.choice(GOOD if label else BAD)))
        found.append(" ".join(words))
    return {"text": found, "label": labels.astype(np.int64)}
