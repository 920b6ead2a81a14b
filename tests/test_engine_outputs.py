"""Outputs of inference engines: lengths, prefix-cache hits, preemptions and the engine's clock.

The doubles have the fields of vLLM 0.34's and SGLang 0.5.23's classes. Where COATI_VLLM names the
folder of an unpacked wheel, vLLM's own classes are read too, loaded past the engine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("transformers")

from transformers import LlamaConfig

from coati_perf import CostModel, catalogue
from coati_perf.engine_outputs import read_outputs

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)


def doubles():
    return SimpleNamespace, SimpleNamespace, SimpleNamespace


def real(monkeypatch):
    """Return vLLM's classes; the modules that theirs import stand empty."""
    folder = os.environ.get("COATI_VLLM")
    if folder is None:
        pytest.skip("COATI_VLLM names no unpacked vLLM")

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, f"{folder}/vllm/{path}")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    for name in (
        "exceptions", "logger", "logprobs", "lora", "lora.request", "envs", "compilation", "v1",
        "compilation.cuda_graph", "v1.metrics", "v1.metrics.cache_hit_source", "v1.metrics.perf",
        "v1.spec_decode", "v1.spec_decode.metrics",
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"vllm.{name}", MagicMock())
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].envs = MagicMock()
    stats = load("vllm.v1.metrics.stats", "v1/metrics/stats.py")
    outputs = load("vllm.outputs", "outputs.py")
    return outputs.RequestOutput, outputs.CompletionOutput, stats.RequestStateStats


@pytest.fixture(params=["doubles", "real"])
def request_output(request, monkeypatch):
    """Return a maker of vLLM's outputs."""
    kinds = doubles() if request.param == "doubles" else real(monkeypatch)
    output_kind, completion_kind, stats_kind = kinds

    def make(prompt, responses, *, hits=0, preempted=0, times=None):
        start, end = times or (0.0, 0.0)
        return output_kind(
            request_id="0",
            prompt=None,
            prompt_token_ids=[1] * prompt,
            prompt_logprobs=None,
            outputs=[
                completion_kind(
                    index=i, text="", token_ids=[2] * n, cumulative_logprob=None, logprobs=None
                )
                for i, n in enumerate(responses)
            ],
            finished=True,
            num_cached_tokens=hits,
            metrics=None
            if times is None
            else stats_kind(num_preemptions=preempted, scheduled_ts=start, last_token_ts=end),
        )

    return make


def test_vllms_outputs_are_read(request_output):
    read = read_outputs(
        [
            request_output(7, [3], times=(100.5, 104.0)),
            request_output(9, [5], hits=8, preempted=2, times=(100.0, 103.0)),
        ]
    )
    assert (read.prompts, read.responses, read.cached) == ([7, 9], [3, 5], [0, 8])
    assert (read.preempted, read.seconds) == (1, 4.0)


def test_the_first_of_several_samples_of_a_request_is_computed(request_output):
    """vLLM keeps the hits of one sample alone: of three, two found what the first had computed."""
    read = read_outputs(request_output(40, [3, 4, 5], hits=32))
    assert (read.prompts, read.responses, read.cached) == ([40] * 3, [3, 4, 5], [0, 32, 32])
    assert (read.preempted, read.seconds) == (0, None)


def test_an_old_vllm_says_nothing_of_its_cache(request_output):
    assert read_outputs([request_output(7, [3], hits=None), request_output(7, [3])]).cached is None


def test_sglangs_outputs_are_read():
    def output(prompt, response, **info):
        sizes = {"prompt_tokens": prompt, "completion_tokens": response}
        return {"text": "", "output_ids": [], "meta_info": {"id": "0", **sizes, **info}}

    read = read_outputs(
        [
            output(7, 3, cached_tokens=0, e2e_latency=1.5, num_retractions=0),
            output(9, 5, cached_tokens=8, e2e_latency=2.5, num_retractions=3),
        ]
    )
    assert (read.prompts, read.responses, read.cached) == ([7, 9], [3, 5], [0, 8])
    assert (read.preempted, read.seconds) == (1, 2.5)
    assert read_outputs(output(7, 3)).prompts == [7]  # a single prompt gives no list


def test_what_a_prefix_cache_had_is_no_work(make_evaluator, read_run, request_output):
    evaluator = make_evaluator(models={"actor": CONFIG})
    with evaluator.episode(0):
        evaluator.record("episode", seconds=10.0)
        outputs = [
            request_output(70, [3], times=(100.5, 104.0)),
            request_output(90, [5], hits=64, preempted=1, times=(100.0, 103.0)),
        ]
        evaluator.record_outputs(outputs, seconds="engine")
    evaluator.close()
    record = read_run().episodes[0]
    metrics = record.metrics
    actor = CostModel.traced(CONFIG)
    assert not record.faults
    assert metrics[catalogue.GENERATE_FLOP] == actor.generate(70, 3) + actor.generate(
        90, 5, cached=64
    )
    assert metrics[catalogue.GENERATE_FLOP] < actor.generate([70, 90], [3, 5]).sum()
    assert metrics[catalogue.GENERATE_BYTES] == actor.generate_bytes(
        [70, 90], [3, 5], cached=[0, 64]
    )
    assert metrics[catalogue.PROMPT_TOKENS] == 160
    assert metrics[catalogue.RESPONSE_TOKENS] == 8
    assert metrics["perf/tokens/prompt_cached_fraction"] == 64 / 160
    assert metrics[catalogue.PREEMPTED] == 1
    assert metrics[catalogue.GENERATE_S] == 4.0


def test_the_coati_convention_knows_no_prefix_cache(make_evaluator, read_run, request_output):
    """10 parameters, 2 FLOP each; prefixes of 7, 8 and 9 tokens."""
    evaluator = make_evaluator()
    with evaluator.episode(0):
        evaluator.record_outputs([request_output(7, [3], hits=4)])
    evaluator.close()
    metrics = read_run().episodes[0].metrics
    assert metrics[catalogue.GENERATE_FLOP] == 2 * 10 * (7 + 8 + 9)


def test_what_is_not_understood_is_a_fault(make_evaluator, read_run, request_output):
    evaluator = make_evaluator(models={"actor": CONFIG})
    evaluator.record_outputs([request_output(7, [3])])
    with evaluator.episode(0):
        evaluator.record_outputs([SimpleNamespace(text="")])
        evaluator.record_outputs([request_output(7, [3])], seconds="engine")
    evaluator.close()
    record = read_run().episodes[0]
    assert len(record.faults) == 2
    assert "the engine's outputs have no times" in record.faults
    assert any("got SimpleNamespace; expected vLLM's RequestOutput" in f for f in record.faults)
    assert record.metrics[catalogue.GENERATED] == 1
