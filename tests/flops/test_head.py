"""Logits at the last positions alone, against what a real model executes."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from coati_perf import CostModel
from independent_count import executed_flop

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def llama(*, tied=False):
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    # torch's counter does not know the fused attention of a CPU.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def lora(*targets):
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=list(targets)))


MODELS = {
    "plain": llama,
    "tied": lambda: llama(tied=True),
    "LoRA below a frozen head": lambda: lora("q_proj", "down_proj"),
    "LoRA on the head too": lambda: lora("q_proj", "lm_head"),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_last_positions_cost_what_a_real_model_executes(name):
    model = MODELS[name]()
    ids = torch.randint(300, (3, 20))
    cost = CostModel.traced(model, attention="full")

    def forward():
        return model(input_ids=ids, use_cache=False, logits_to_keep=7).logits

    with torch.no_grad():
        assert cost.forward([20] * 3, logits=7).sum() == executed_flop(forward)
    learned = cost.forward_backward([20] * 3, logits=7).sum()
    assert learned == executed_flop(lambda: forward().sum().backward())


def test_a_forward_that_was_put_in_the_place_of_the_models_own_is_not_traced():
    model = llama()
    expected = CostModel.traced(model).forward(50)
    own = model.forward

    def forward(**options):
        return own(**options)

    model.forward = forward  # as Accelerate does
    assert CostModel.traced(model).forward(50) == expected
