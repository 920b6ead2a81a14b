"""The closed forms against sums written out position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_perf import CostModel
from coati_perf.flops.counter import OperatorCounter
from coati_perf.flops.fit import UnfittedError, fit_pass, fit_step, solve
from coati_perf.flops.head import Head
from coati_perf.flops.memory import Memory
from coati_perf.flops.model import TracedCost
from coati_perf.flops.trace import Trace
from coati_perf.flops.visibility import Visibility
from coati_perf.flops.work import Chunked, Work

VISIBILITIES = [Visibility(), Visibility("sliding", 7), Visibility("chunked", 7)]
lengths = st.integers(0, 60)


def keys_seen(visibility: Visibility, position: int) -> int:
    """Return how many keys the query at a position, counted from 1, sees by its definition."""
    if visibility.kind == "all":
        return position
    if visibility.kind == "sliding":
        return min(position, visibility.size)
    return (position - 1) % visibility.size + 1


def traced(attention="causal") -> TracedCost:
    work = Work(
        constant=3,
        per_token=5,
        per_call=11,
        pairs=tuple((visibility, 2.0) for visibility in VISIBILITIES),
        chunks=(Chunked(8, 13.0, 0.25),),
    )
    learning = Work(per_token=15, pairs=((Visibility(), 6.0),))
    executed = Work(per_token=20, pairs=((Visibility(), 8.0),))
    step = Work(constant=4, per_token=1, pairs=((Visibility("sliding", 7), 2.0),))
    return TracedCost(
        trace=Trace(
            forward=work,
            forward_backward=learning,
            prefill=Work(constant=100, per_token=4, pairs=((Visibility(), 2.0),)),
            decode=step,
            memory=Memory(weights=1),
            head=Head(forward=2.0, backward=6.0),
        ),
        executed_learning=executed,
        source="a test",
        attention=attention,
    )


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=str)
@given(length=lengths)
def test_pairs_are_the_keys_that_each_query_sees(visibility, length):
    pairs = visibility.causal_pairs(torch.tensor(float(length)))
    assert pairs == sum(keys_seen(visibility, position) for position in range(1, length + 1))


@given(length=st.integers(1, 60))
def test_a_pass_is_the_sum_of_its_terms(length):
    padded = -(-length // 8) * 8
    weights = 3 + 11 + 5 * length + 13 * padded + 0.25 * padded**2
    pairs = sum(
        keys_seen(visibility, position)
        for visibility in VISIBILITIES
        for position in range(1, length + 1)
    )
    assert traced().forward(length) == weights + 2 * pairs
    assert traced("full").forward(length) == weights + 2 * 3 * length**2


@given(length=st.integers(1, 60), logits=st.integers(1, 60))
def test_positions_without_logits_spare_the_head(length, logits):
    spared = length - min(logits, length)
    forward, both = traced().forward(length), traced().forward_backward(length)
    assert traced().forward(length, logits=length - spared) == forward - 2 * spared
    assert traced().forward_backward(length, logits=length - spared) == both - 8 * spared


@given(prompt=st.integers(1, 40), response=st.integers(1, 40))
def test_generation_is_a_prefill_and_a_step_for_each_further_token(prompt, response):
    prefill = 100 + 4 * prompt + prompt * (prompt + 1)
    steps = [4 + cached + 2 * min(cached + 1, 7) for cached in range(prompt, prompt + response - 1)]
    assert traced().generate(prompt, response) == prefill + sum(steps)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=8))
def test_a_ragged_batch_is_the_sum_of_its_rows(pairs):
    prompts, responses = map(list, zip(*pairs, strict=True))
    cost = traced()
    rows = [cost.generate(prompt, response) for prompt, response in pairs]
    assert cost.generate(prompts, responses).tolist() == rows
    rows = [cost.forward_backward(prompt) for prompt in prompts]
    assert cost.forward_backward(prompts).tolist() == rows


def test_what_a_call_takes_once_is_shared_by_its_batch():
    assert float(traced().forward([9, 9]).sum()) == 2 * traced().forward(9) - 11


@given(st.lists(lengths, min_size=1, max_size=8))
def test_executed_work_is_that_of_the_longest_and_of_recomputation(batch):
    cost = traced()
    longest = max(batch)
    expected = 20 * longest + 8 * longest * (longest + 1) / 2
    assert cost.forward_backward(batch, executed=True).tolist() == [expected] * len(batch)
    assert all(cost.forward_backward(batch) <= cost.forward_backward(batch, executed=True))


@given(short=lengths, more=st.integers(1, 20))
def test_costs_grow_with_the_length_and_with_full_attention(short, more):
    causal, full = traced(), traced("full")
    for work in ("forward", "forward_backward", "prefill"):
        assert getattr(causal, work)(short) < getattr(causal, work)(short + more)
        assert getattr(causal, work)(short) <= getattr(full, work)(short)
    assert causal.generate(short, 5) < causal.generate(short + more, 5)
    assert causal.generate(9, short + 1) < causal.generate(9, short + 1 + more)


def test_responses_to_one_prompt_share_its_prefill():
    cost = traced()
    alone = cost.generate([30] * 8, [5] * 8).sum()
    shared = cost.generate([30] * 8, [5] * 8, shared_prompt=8).sum()
    assert alone - shared == 7 * cost.prefill(30)


@pytest.mark.parametrize("name", ["Llama (GQA)", "Gemma 3 (alternating)", "Qwen3-MoE"])
def test_a_prefill_after_cached_tokens_is_what_decoding_the_rest_costs(name):
    """Decode steps were fitted apart from prefills; but each of them computes logits."""
    tiny_models = pytest.importorskip("tiny_models")
    cost = CostModel.traced(tiny_models.configs()[name])
    prompts, cached = [40, 40, 300, 7], [0, 39, 130, 3]
    rest = torch.tensor(prompts) - torch.tensor(cached)
    decoded = cost.decode(cached, rest) - (rest - 1) * cost.head.forward
    assert torch.equal(cost.prefill(prompts, cached=cached), decoded)
    saved = cost.generate(prompts, 9) - cost.generate(prompts, 9, cached=cached)
    assert torch.equal(saved, cost.prefill(prompts) - decoded)
    assert torch.equal(cost.generate(prompts, 9, cached=0), cost.generate(prompts, 9))


def test_cached_tokens_are_read_and_not_written():
    tiny_models = pytest.importorskip("tiny_models")
    cost = CostModel.traced(tiny_models.configs()["Llama (GQA)"])
    (_, per_position), *none = cost.memory.cache
    assert not none
    weights = 2 * cost.memory.weights
    assert cost.prefill_bytes([30, 50]) == weights + 2 * per_position * 80
    # 13 new positions are written, and the 67 of before read.
    assert cost.prefill_bytes([30, 50], cached=[20, 47]) == weights + 2 * per_position * (13 + 67)
    assert cost.generate_bytes([30], [1], cached=20) == cost.prefill_bytes(30, cached=20)


@pytest.mark.parametrize(
    ("given_", "message"),
    [([-1], "at least 0"), ([float("nan")], "finite"), ("many", "a number"), ([[1]], "shape")],
)
def test_a_bad_length_is_refused(given_, message):
    with pytest.raises((TypeError, ValueError), match=message):
        traced().forward(given_)


def counting(flop, attention=None):
    """Return a measure of one operator whose FLOP are a function of batch and length."""

    def measure(batch, length):
        counter = OperatorCounter()
        counter.by_operator["aten.mm"] = flop(batch, length)
        counter.attention = {k: batch * v for k, v in (attention or {}).items()}
        return counter

    return measure


@pytest.mark.parametrize(
    ("flop", "expected"),
    [
        (lambda b, n: b * (7 + 3 * n), Work(constant=7, per_token=3)),
        (lambda b, n: b * 3 * n + 9, Work(per_token=3, per_call=9)),
        (
            lambda b, n: b * 3 * n + 9 + 2 * n,
            Work(per_token=3, per_call=9, per_call_token=2),
        ),
        (lambda b, n: b * (n + 2 * n * n), Work(per_token=1, pairs=((Visibility(), 2.0),))),
        (
            lambda b, n: b * (n + 5 * -(-n // 256) * 256),
            Work(per_token=1, chunks=(Chunked(256, 5.0),)),
        ),
        (
            lambda b, n: b * (n + 5 * -(-n // 48) * 48 + (-(-n // 48) * 48) ** 2),
            Work(per_token=1, chunks=(Chunked(48, 5.0, 1.0),)),
        ),
    ],
    ids=["line", "per call", "per call and length", "square", "chunks", "chunks of the config"],
)
def test_a_form_is_found_from_its_counts(flop, expected):
    assert fit_pass(counting(flop), chunk_sizes=[48]) == expected


@pytest.mark.parametrize(
    "flop",
    [
        lambda b, n: b * n**3,
        lambda b, n: b * b * n,
        lambda b, n: b * n * (1 + (n > 600)),
        lambda b, n: b * n.bit_length(),
    ],
    ids=["cubic in the length", "square of the batch", "jump", "logarithm"],
)
def test_counts_of_no_known_form_are_refused_by_operator(flop):
    with pytest.raises(UnfittedError, match=r"aten\.mm"):
        fit_pass(counting(flop))
    with pytest.raises(UnfittedError, match=r"aten\.mm"):
        fit_step(counting(flop))


def test_products_that_change_operator_with_the_batch_are_fitted_together():
    """As the last token's logits in Mamba: 11 FLOP by bmm for one sequence, by mm for more."""

    def measure(batch, length):
        counter = OperatorCounter()
        counter.by_operator["aten.mm"] = batch * 5 * length + (11 * batch if batch > 1 else 0)
        counter.by_operator["aten.bmm"] = batch * 3 * length + (11 if batch == 1 else 0)
        return counter

    for fit in (fit_pass, fit_step):
        assert fit(measure) == Work(constant=11, per_token=8)


def test_attention_that_changes_with_the_length_is_refused():
    def measure(batch, length):
        return counting(lambda b, n: b, {Visibility(): length})(batch, length)

    with pytest.raises(UnfittedError, match="attention"):
        fit_pass(measure)


def test_a_fit_is_exact_or_none():
    terms = [lambda b, n: b, lambda b, n: b * n]
    assert solve(terms, {(1, 2): 10, (1, 4): 16, (2, 5): 38}) == [4, 3]
    assert solve(terms, {(1, 2): 10, (1, 4): 16, (2, 5): 39}) is None
