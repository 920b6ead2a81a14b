"""A tiny language model and batches for loops that learn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

BATCH, LENGTH, REAL = 2, 12, 9


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    # torch's counter does not know the fused attention of a CPU.
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


@pytest.fixture
def batches():
    """Return six batches of 2 sequences in 12 positions, 9 and 12 tokens long."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, REAL:] = 0
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return [batch] * 6
