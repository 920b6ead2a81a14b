"""The coati convention by hand (tests/test_golden.py checks it against upstream's outputs)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coati_perf.cost import CostModel, ParamCount

if TYPE_CHECKING:
    _: CostModel = ParamCount(1, 1, 1, 1)


def test_generation_runs_over_every_prefix():
    """2 FLOP a parameter and token: prefixes of 5, 6 and 7 tokens, twice, with 3 parameters."""
    assert ParamCount(3, 0, 0, 0).generate(2, 5, 3) == 2 * 3 * 2 * (5 + 6 + 7)


def test_all_four_models_score():
    assert ParamCount(1, 10, 100, 1000).score(2, 8) == 2 * 1111 * 2 * 8


def test_checkpointing_adds_a_forward_to_learning():
    assert ParamCount(1, 10, 100, 1000).learn(2, 8) == 2 * 3 * 11 * 2 * 8
    assert ParamCount(1, 10, 100, 1000, grad_checkpoint=True).learn(2, 8) == 2 * 4 * 11 * 2 * 8


def test_figures_are_exact_integers_at_any_size():
    assert ParamCount(10**13, 0, 0, 0).learn(10**4, 10**6) == 6 * 10**23
