"""The cost model against what real models execute, counted by torch's own counter."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from flops_accuracy import LIMIT, WORK, errors
from tiny_models import configs

CONFIGS = configs()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_kind_of_work_costs_what_a_real_model_executes(architecture):
    """Relative errors at lengths that no trace has seen; see benchmarks/flops_accuracy.py."""
    found = dict(errors(CONFIGS[architecture]))
    assert tuple(found) == WORK
    assert {work: error for work, error in found.items() if error > LIMIT} == {}
