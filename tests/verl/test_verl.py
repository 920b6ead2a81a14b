"""Steps of verl's controller as records, by verl's own functions where it is installed."""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig

from coati_perf import CostModel, PerformanceEvaluator, read_journal
from coati_perf_verl import attach

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
PROMPTS, RESPONSES = [3, 5, 2, 4], [6, 1, 4, 6]
TIMINGS = {
    "start_profile": 0.1, "step": 10.0, "gen": 4.0, "reward": 0.25, "old_log_prob": 0.5,
    "ref": 0.75, "adv": 0.125, "update_actor": 3.0, "update_weights": 0.5, "testing": 7.0,
    "generate_sequences": 3.5,
}  # fmt: skip
GPUS = 8


def mask():
    columns = torch.arange(5 + 6)
    lengths = zip(PROMPTS, RESPONSES, strict=True)
    return torch.stack([(columns >= 5 - p) & (columns < 5 + r) for p, r in lengths]).long()


def double(monkeypatch):
    """Put modules of verl's names in the place of verl, with a function as verl 0.9.1 has it."""

    def compute_throughout_metrics(batch, timing_raw, n_gpus):
        tokens = sum(batch.meta_info["global_token_num"])
        return {"perf/throughput": tokens / (timing_raw["step"] * n_gpus)}

    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.ray_trainer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules["verl.trainer.ppo.ray_trainer"]
    module.compute_throughout_metrics = compute_throughout_metrics

    class Batch(dict):
        __contains__ = None  # as of a TensorDict, which compares tensors

    batch = Batch(responses=torch.zeros(4, 6), attention_mask=mask())
    return module, SimpleNamespace(batch=batch, meta_info={})


def real(monkeypatch):
    pytest.importorskip("verl", reason="verl is not installed: tox run -e verl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's and others', at import
        from verl import DataProto
        from verl.trainer.ppo import ray_trainer

    return ray_trainer, DataProto.from_dict(
        {"responses": torch.zeros(4, 6), "attention_mask": mask()}
    )


@pytest.fixture(params=[double, real])
def verl(request, monkeypatch, tmp_path):
    """Return the trainer's module and a batch; real ones, and ones of their shape."""
    module, batch = request.param(monkeypatch)
    total = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    batch.meta_info["global_token_num"] = total
    return module, batch


def test_a_step_becomes_a_record_and_verls_metrics_stay(verl, tmp_path):
    module, batch = verl
    arguments = {"batch": batch, "timing_raw": TIMINGS, "n_gpus": GPUS}
    expected = module.compute_throughout_metrics(**arguments)
    evaluator = PerformanceEvaluator(
        0, 0, 0, 0, models={"actor": CONFIG, "initial": CONFIG}, run_dir=tmp_path, peak_tflops=1.0
    )
    detach = attach(evaluator, epochs=2, responses_per_prompt=2)
    for _ in range(3):
        assert module.compute_throughout_metrics(**arguments) == expected
    detach()
    module.compute_throughout_metrics(**arguments)
    evaluator.close()

    records = read_journal(tmp_path).segments[-1].episodes
    assert [record.episode for record in records] == [0, 1, 2]
    metrics = records[1].metrics
    assert not records[1].faults
    times = {
        "episode": 10.0, "generate": 4.0, "score": 1.25, "learn": 3.0, "weight_sync": 0.5,
        "reward": 0.25, "adv": 0.125,
    }  # fmt: skip
    assert {name: metrics[f"perf/time/{name}_s"] for name in times} == times
    assert metrics["perf/time/other_s"] == 10 - (4 + 1.25 + 3 + 0.5 + 0.25 + 0.125)
    assert metrics["perf/tokens/prompt"] == sum(PROMPTS)
    assert metrics["perf/tokens/response"] == sum(RESPONSES)
    assert metrics["perf/samples/learned"] == 2 * 4

    actor = CostModel.traced(CONFIG)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    generate = actor.generate(PROMPTS, RESPONSES, shared_prompt=2).sum()
    learn = 2 * actor.forward_backward(lengths).sum()
    assert metrics["perf/flops/generate"] == pytest.approx(float(generate))
    assert metrics["perf/flops/score"] == pytest.approx(2 * float(actor.forward(lengths).sum()))
    assert metrics["perf/flops/learn"] == pytest.approx(float(learn))
    # Per device, of which there are as many as verl says.
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(
        float(learn) / 3.0 / GPUS / 1e12
    )


def test_a_step_that_is_not_understood_is_a_fault_and_verl_goes_on(verl, tmp_path):
    module, batch = verl
    evaluator = PerformanceEvaluator(0, 0, 0, 0, models={"actor": CONFIG}, run_dir=tmp_path)
    detach = attach(evaluator)
    arguments = {"batch": batch, "timing_raw": TIMINGS, "n_gpus": GPUS}
    module.compute_throughout_metrics(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "episode", None)
        assert module.compute_throughout_metrics(**arguments)
    module.compute_throughout_metrics(**arguments)
    detach()
    evaluator.close()
    assert len(read_journal(tmp_path).segments[-1].episodes) == 2


def test_a_version_without_the_function_is_named(monkeypatch, tmp_path):
    module, _ = double(monkeypatch)
    del module.compute_throughout_metrics
    evaluator = PerformanceEvaluator(0, 0, 0, 0, models={"actor": CONFIG}, run_dir=tmp_path)
    with pytest.raises(RuntimeError, match="verl of no known version has no compute_throughout_me"):
        attach(evaluator)


def test_bad_numbers_are_named_at_once(monkeypatch, tmp_path):
    double(monkeypatch)
    evaluator = PerformanceEvaluator(0, 0, 0, 0, models={"actor": CONFIG}, run_dir=tmp_path)
    with pytest.raises(ValueError, match="responses_per_prompt is 0"):
        attach(evaluator, responses_per_prompt=0)


def test_the_readme_works_as_it_stands(verl, tmp_path, monkeypatch):
    module, batch = verl
    readme = Path(__file__).parents[2] / "integrations/coati_perf_verl/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "compute_throughout_metrics", module.compute_throughout_metrics)
    namespace = {"config": CONFIG}
    exec(compile(example, str(readme), "exec"), namespace)
    module.compute_throughout_metrics(batch=batch, timing_raw=TIMINGS, n_gpus=GPUS)
    namespace["evaluator"].close()
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
