"""The cost model against what real models execute, counted by torch's own counter."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model

from coati_perf import CostModel
from flops_accuracy import LIMIT, WORK, build, errors, tokens, train
from independent_count import executed_flop
from tiny_models import configs

CONFIGS = configs()


@pytest.mark.timeout(1200)  # linear attention takes 100 s of two idle cores
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_kind_of_work_costs_what_a_real_model_executes(architecture):
    """Relative errors at lengths that no trace has seen; see benchmarks/flops_accuracy.py."""
    found = dict(errors(CONFIGS[architecture]))
    assert tuple(found) == WORK
    assert {work: error for work, error in found.items() if error > LIMIT} == {}


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj"], ["v_proj"], ["q_proj", "v_proj"]])
def test_attention_computes_only_the_gradients_that_someone_needs(targets):
    """In the first layer nothing below the adapters trains, so that some products fall away."""
    model = get_peft_model(build(CONFIGS["Llama (GQA)"]), LoraConfig(r=4, target_modules=targets))
    ids = tokens(50)
    ours = CostModel.traced(model, attention="full").forward_backward([50] * len(ids))
    assert float(ours.sum()) == executed_flop(lambda: train(model, ids))
