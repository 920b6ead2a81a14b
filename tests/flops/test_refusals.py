"""What can't be counted is refused by name, never guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coati_perf.flops import BytesUnknownError, CostModel, NotGenerativeError, UntraceableModelError


@torch.library.custom_op("coati_perf_tests::secret_product", mutates_args=())
def secret_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


@secret_product.register_fake
def _(left, right):
    return left.new_empty(*left.shape[:-1], right.shape[-1])


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids):
        return self.head(self.mix(self.embedding(input_ids)))

    def mix(self, hidden):
        return hidden


class Secret(Embedded):
    def __init__(self):
        super().__init__()
        self.inner = SecretLayer()

    def mix(self, hidden):
        return self.inner(hidden)


class SecretLayer(nn.Module):
    def forward(self, hidden):
        return secret_product(hidden, hidden.transpose(1, 2)) @ hidden


class Distances(Embedded):
    """An operator of torch's own that does matrix work and has no formula."""

    def mix(self, hidden):
        return torch.cdist(hidden, hidden) @ hidden


class DataDependent(Embedded):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def mix(self, hidden):
        return self.gate(hidden)


class Gate(nn.Module):
    def forward(self, hidden):
        return hidden * 2 if hidden.mean() > 0 else hidden


class Logarithmic(Embedded):
    """A product with as many columns as the length has bits."""

    def mix(self, hidden):
        columns = hidden.shape[1].bit_length()
        return (
            hidden
            @ torch.ones(8, columns, device=hidden.device)
            @ torch.ones(columns, 8, device=hidden.device)
        )


ALTERNATIVES = r"Give CostModel\.custom\(forward=…, …\) or CostModel\.from_num_params\(n\) instead"


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Secret, r"Secret\.inner: the operator coati_perf_tests\.secret_product may multiply"),
        (Distances, r"Distances: the operator aten\.\w*(cdist|euclidean)\w* may multiply"),
        (DataDependent, r"DataDependent\.gate: it cannot be run without data"),
        (Logarithmic, r"Logarithmic: the FLOP of aten\.mm are no polynomial"),
    ],
)
def test_what_stops_a_trace_is_named(module, named):
    with pytest.raises(UntraceableModelError, match=named) as caught:
        CostModel.traced(module())
    assert caught.match(ALTERNATIVES)


def test_a_fallback_is_a_warning_that_stays_with_the_figures():
    cost = CostModel.traced(Secret(), fallback="num_params")
    assert cost.convention == "num_params"
    assert cost.forward(10) == 2 * (10 * 8 + 8 * 4 + 4) * 10
    assert "secret_product" in cost.warnings[0]
    assert cost.describe()["warnings"] == list(cost.warnings)


def test_a_model_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match=r"got str; expected a Hugging Face config or a torch"):
        CostModel.traced("meta-llama/Llama-3-8B")


def test_checkpointing_cannot_be_switched_on_in_any_module():
    with pytest.raises(UntraceableModelError, match=r"Embedded is no Hugging Face model"):
        CostModel.traced(Embedded(), gradient_checkpointing=True)


def test_a_model_without_a_cache_has_no_cost_of_generation():
    cost = CostModel.traced(Embedded())
    assert cost.forward(10) == 2 * 10 * 8 * 4
    with pytest.raises(NotGenerativeError, match="Embedded cannot generate"):
        cost.generate(5, 5)


def test_a_parameter_count_knows_no_bytes():
    with pytest.raises(BytesUnknownError, match=r"CostModel\.traced"):
        CostModel.from_num_params(10).decode_bytes(5, 5)


def test_custom_functions_are_taken_as_they_are():
    cost = CostModel.custom(
        forward=lambda length: 2 * length**2,
        decode=lambda context, new_tokens: context * new_tokens,
        source="my notebook",
    )
    assert cost.forward(3) == 18
    assert cost.forward_backward(3) == 54
    assert cost.generate(3, 5) == 18 + 3 * 4
    assert cost.convention == "custom"
    only_backward = CostModel.custom(forward=lambda n: n, backward=lambda n: 5 * n)
    assert only_backward.forward_backward(2) == 12
    with pytest.raises(NotGenerativeError, match=r"CostModel\.custom\(decode="):
        only_backward.decode(3, 4)
