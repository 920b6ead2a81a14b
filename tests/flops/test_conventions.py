"""What peers report, against figures that their own code gave (see tests/data/peer_flops.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from coati_perf.cost import ParamCount
from coati_perf.flops import ConventionError, CostModel, NotGenerativeError
from coati_perf.flops.model import num_params
from published_configs import published_configs
from tiny_models import configs

PEERS = json.loads((Path(__file__).parents[1] / "data" / "peer_flops.json").read_text())
PUBLISHED = published_configs()
CASES = [(name, model) for name, models in PEERS["learning_flop"].items() for model in models]


@pytest.mark.parametrize(("convention", "model"), CASES)
def test_a_convention_gives_what_its_project_does(convention, model):
    cost = CostModel.by_convention(convention, PUBLISHED[model])
    expected = PEERS["learning_flop"][convention][model]
    assert cost.forward_backward(PEERS["lengths"]).tolist() == pytest.approx(expected, rel=1e-12)
    assert cost.forward(1024) == pytest.approx(cost.forward_backward(1024) / 3)


def test_megatron_counts_products_of_layers_and_logits_with_half_of_the_square():
    """Llama-3 8B by hand: q and o of 4096, k and v of 1024, three MLP matrices, the head."""
    layer = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
    per_token = 6 * (32 * layer + 4096 * 128256)
    attention = 6 * 32 * 4096 * 1000 / 2 * 2
    cost = CostModel.by_convention("megatron", PUBLISHED["Llama-3 8B"])
    assert cost.forward_backward(1000) == 1000 * (per_token + attention)


def test_megatron_counts_the_experts_that_a_token_meets_and_no_router():
    layer = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336 * 2
    per_token = 6 * (32 * layer + 4096 * 32000)
    cost = CostModel.by_convention("megatron", PUBLISHED["Mixtral 8x7B"])
    assert cost.forward_backward(1000) == 1000 * (per_token + 6 * 32 * 4096 * 1000)


def test_palm_counts_all_parameters_and_all_pairs():
    """6N + 12·L·H·Q·T: Llama-3 8B has 8,030,261,248 parameters."""
    config = PUBLISHED["Llama-3 8B"]
    assert num_params(config) == 8_030_261_248
    cost = CostModel.by_convention("palm", config)
    assert cost.forward_backward(100) == 100 * (6 * 8_030_261_248 + 12 * 32 * 32 * 128 * 100)


def test_where_a_convention_is_right_it_agrees_with_the_exact_count():
    """Megatron's for Llama: the same weights, and L²/2 in the place of L(L+1)/2 pairs."""
    config = configs()["Llama (GQA)"]
    exact = CostModel.traced(config).forward_backward(1000)
    pairs = 6 * 4 * 4 * 2 * 20
    megatron = CostModel.by_convention("megatron", config).forward_backward(1000)
    assert exact - megatron == pairs * (1000 * 1001 - 1000**2) / 2


def test_coatis_convention_is_that_of_the_evaluators_parameter_counts():
    config = configs()["Llama (GQA)"]
    count = num_params(config)
    theirs, cost = ParamCount(count, 0, 0, 0), CostModel.by_convention("coati", config)
    assert cost.generate([5, 7], [3, 0]).tolist() == [theirs.generate(1, 5, 3), 0]
    assert cost.forward(9) == theirs.score(1, 9)
    assert cost.forward_backward(9) == theirs.learn(1, 9)


@pytest.mark.parametrize("convention", ["palm", "megatron", "verl", "nemo_rl"])
def test_what_a_convention_does_not_cover_is_refused(convention):
    with pytest.raises(ConventionError, match=f"'{convention}' does not cover 'mamba'; it does"):
        CostModel.by_convention(convention, configs()["Mamba"])
    with pytest.raises(NotGenerativeError, match="does not say what generation costs"):
        CostModel.by_convention(convention, PUBLISHED["Llama-3 8B"]).generate(5, 5)


def test_an_unknown_convention_is_refused_with_those_that_there_are():
    with pytest.raises(ConventionError, match="no convention 'mosaic'; expected one of exact,"):
        CostModel.by_convention("mosaic", PUBLISHED["Llama-3 8B"])
    exact = CostModel.by_convention("exact", configs()["Llama (GQA)"])
    assert exact.convention == "exact"
