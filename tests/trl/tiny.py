"""Tiny models from configs, a tokenizer in memory, and data for the installed TRL's trainers."""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = 200


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS - 3))]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _config(**more):
    return LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        **more,
    )  # fmt: skip


# torch's counter does not know the fused attention of a CPU.
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(_config(), attn_implementation="eager")


def reward_model():
    torch.manual_seed(1)
    config = _config(num_labels=1)
    return LlamaForSequenceClassification._from_config(config, attn_implementation="eager")


def words(number, start=0):
    return " ".join(f"w{(start + 7 * index) % 190}" for index in range(number))


def prompts():
    return Dataset.from_list([{"prompt": words(2 + row % 5, row)} for row in range(64)])


def texts():
    return Dataset.from_list([{"text": words(5 + row % 6, row)} for row in range(64)])


def preferences():
    rows = [
        {"prompt": "w1 w2", "chosen": words(3 + row % 4), "rejected": words(2, row)}
        for row in range(64)
    ]
    return Dataset.from_list(rows)


def reward_of_length(completions, **_):
    return [float(len(completion)) for completion in completions]
