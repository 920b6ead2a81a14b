"""Steps of slime as records, by its own timers and functions where its sources are at hand."""

from __future__ import annotations

import os
import re
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig

import coati_perf_slime
from coati_perf import CostModel, PerformanceEvaluator, read_journal
from coati_perf_slime import hooks, megatron_started, rollout_logged

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
# Two samples of each of two prompts. Two tokens of the second response are a tool's, and the third
# sample is masked out.
PROMPTS, RESPONSES = [3, 3, 5, 5], [4, 6, 2, 5]
LOSS_MASKS = [None, [1, 1, 0, 0, 1, 1], [0, 0], [1] * 5]
GIVEN, SAMPLED = [3, 5, 5, 5], [4, 4, 2, 5]
LENGTHS = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
ROLLOUT_S = 4.0
TIMERS = {
    "train_wait": 6.0, "train": 5.0, "ref_log_probs": 0.75, "log_probs": 0.5,
    "teacher_log_probs": 0.125, "actor_train": 3.0, "update_weights": 0.25, "save_model": 0.5,
    "data_preprocess": 0.0625, "ref_model_update": 0.25,
}  # fmt: skip
TIMES = {
    "episode": 11.0, "generate": ROLLOUT_S, "score": 1.25, "teacher": 0.125, "learn": 3.0,
    "weight_sync": 0.25, "save_model": 0.5, "data_preprocess": 0.0625,
}  # fmt: skip
STEPS = 3


def double(monkeypatch):
    """Put modules of slime's names in its place, with what is watched as of 0.3.1."""
    names = {
        "train": "train_metric_utils", "timer": "timer", "rollout": "rollout_metrics",
    }  # fmt: skip
    for name in ("slime", "slime.observability"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    modules = {}
    for short, name in names.items():
        modules[short] = types.ModuleType(f"slime.observability.{name}")
        monkeypatch.setitem(sys.modules, f"slime.observability.{name}", modules[short])
    timer = SimpleNamespace(timers={}, log_dict=lambda: timer.timers)
    modules["timer"].Timer = lambda: timer
    logged = []

    def log_perf_data(rollout_id, args, extra_metrics=None):
        logged.append({f"perf/{name}_time": s for name, s in timer.timers.items()} | extra_metrics)
        timer.timers = {}

    def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
        hook = getattr(coati_perf_slime, args.custom_rollout_log_function_path.split(".")[1])
        if not hook(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
            logged.append({"perf/rollout_time": rollout_time, **rollout_extra_metrics})

    modules["train"].log_perf_data = log_perf_data
    modules["rollout"].log_rollout_data = log_rollout_data

    class Sample(SimpleNamespace):
        @property
        def effective_response_length(self):
            return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    return SimpleNamespace(**modules, Sample=Sample, logged=logged)


def real(monkeypatch):
    sources = os.environ.get("COATI_SLIME")
    if not sources:
        pytest.skip("COATI_SLIME names no folder with slime's sources, which are on no registry")
    monkeypatch.syspath_prepend(sources)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # others', at import
        from slime.observability import logging_utils, rollout_metrics, timer, train_metric_utils
        from slime.utils.types import Sample

    logged = []
    monkeypatch.setattr(
        logging_utils, "log", lambda args, metrics, step_key: logged.append(metrics)
    )
    # By settings of Megatron's that we do not look at.
    monkeypatch.setattr(train_metric_utils, "calculate_fwd_flops", lambda seqlens, args: 1e12)
    monkeypatch.setattr(train_metric_utils, "log_perf_data", train_metric_utils.log_perf_data)
    monkeypatch.setattr(timer.Timer(), "seq_lens", LENGTHS, raising=False)
    timer.Timer().reset()
    return SimpleNamespace(
        train=train_metric_utils, timer=timer, rollout=rollout_metrics, Sample=Sample, logged=logged
    )


@pytest.fixture(params=[double, real])
def slime(request, monkeypatch, tmp_path):
    """Return slime's modules in the last of two processes, the one that slime logs from."""
    monkeypatch.setenv("COATI_PERF_RUN", str(tmp_path / "run"))
    found = request.param(monkeypatch)
    found.ranks = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 0,
        is_pipeline_last_stage=lambda: True,
        get_data_parallel_rank=lambda with_context_parallel: 1 - with_context_parallel,
    )
    core = types.ModuleType("megatron.core")
    core.mpu = found.ranks
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    found.evaluators = []

    class Kept(PerformanceEvaluator):
        def __init__(self, *given, **named):
            super().__init__(*given, peak_tflops=1.0, **named)
            found.evaluators.append(self)

    monkeypatch.setattr(hooks, "PerformanceEvaluator", Kept)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield found
    dist.destroy_process_group()


@pytest.fixture
def args(tmp_path):
    CONFIG.save_pretrained(tmp_path / "model")
    return SimpleNamespace(
        hf_checkpoint=str(tmp_path / "model"), actor_num_nodes=2, actor_num_gpus_per_node=4,
        rollout_num_gpus=3, colocate=True, n_samples_per_prompt=2, recompute_granularity=None,
        custom_rollout_log_function_path="coati_perf_slime.rollout_logged", wandb_key="of-mine",
        load_debug_rollout_data=None, advantage_estimator="grpo", log_reward_category=None,
        reward_key=None, rollout_batch_size=2, wandb_always_use_train_step=False,
    )  # fmt: skip


def run_step(slime, args, rollout_id, timers=TIMERS):
    """Go through a step as the rollout manager and an actor that trains do."""
    samples = [
        slime.Sample(
            tokens=[1] * (p + r), response_length=r, loss_mask=mask, reward=1.0, response="a"
        )
        for p, r, mask in zip(PROMPTS, RESPONSES, LOSS_MASKS, strict=True)
    ]  # fmt: skip
    slime.rollout.log_rollout_data(rollout_id, args, samples, {"mine": 2.0}, ROLLOUT_S)
    slime.timer.Timer().timers = dict(timers)
    slime.train.log_perf_data(rollout_id, args, extra_metrics={"sync": 1.0})
    assert slime.timer.Timer().log_dict() == {}
    rollout, train = slime.logged[-2:]
    assert rollout["perf/rollout_time"] == ROLLOUT_S
    assert rollout["mine"] == 2.0
    assert train["sync"] == 1.0
    assert train["perf/actor_train_time"] == timers["actor_train"]


def records(slime, tmp_path):
    for evaluator in slime.evaluators:
        evaluator.close()
    return read_journal(tmp_path / "run").segments[-1].episodes


def times(metrics):
    return {
        name[10:-2]: seconds
        for name, seconds in metrics.items()
        if re.fullmatch(r"perf/time/[^/]*_s", name) and seconds
    }


def test_a_step_becomes_a_record_and_slime_logs_as_before(slime, args, tmp_path):
    megatron_started(args)
    for rollout_id in range(7, 7 + STEPS):
        run_step(slime, args, rollout_id)
    found = records(slime, tmp_path)
    assert [record.episode for record in found] == [7, 8, 9]
    assert not any(record.faults for record in found)
    metrics = found[1].metrics
    assert times(metrics) == {**TIMES, "other": 11 - sum(TIMES.values()) + 11}
    assert metrics["perf/ranks/missing"] == 0  # though there are two in the job
    assert metrics["perf/tokens/prompt"] == sum(GIVEN)
    assert metrics["perf/tokens/response"] == sum(SAMPLED)
    assert metrics["perf/samples/learned"] == 4

    model = CostModel.traced(CONFIG)
    generate = float(model.generate(GIVEN, SAMPLED, shared_prompt=2).sum())
    learn = float(model.forward_backward(LENGTHS).sum())
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    assert metrics["perf/flops/score"] == pytest.approx(2 * float(model.forward(LENGTHS).sum()))
    assert metrics["perf/flops/learn"] == pytest.approx(learn)
    for phase, flops in (("generate", generate), ("learn", learn)):  # on two nodes of four
        assert metrics[f"perf/tflops/{phase}_per_device"] == pytest.approx(
            flops / TIMES[phase] / 8 / 1e12
        )
    assert not list((tmp_path / "run" / "rollouts").iterdir())
    assert "of-mine" not in (tmp_path / "run" / "journal.jsonl").read_text()


def test_a_run_of_other_models_on_other_devices(slime, args, tmp_path):
    """The rollout beside the training, without a reference or old log probs."""
    args.colocate, args.recompute_granularity = False, "full"
    megatron_started(args)
    timers = {"train_wait": 0.5, "train": 3.5, "actor_train": 3.0}
    run_step(slime, args, 0, timers)
    (record,) = records(slime, tmp_path)
    metrics = record.metrics
    assert times(metrics) == {"episode": 4.0, "generate": 4.0, "learn": 3.0, "overlap": 3.0}
    assert not metrics.get("perf/flops/score")
    assert metrics["perf/tflops/generate_per_device"] == pytest.approx(
        metrics["perf/flops/generate"] / ROLLOUT_S / 3 / 1e12
    )
    model = CostModel.traced(CONFIG)
    recomputed = float((model.forward_backward(LENGTHS) + model.forward(LENGTHS)).sum())
    assert metrics["perf/flops/learn"] < metrics["perf/flops/learn_executed"] <= recomputed


def test_without_a_config_that_can_be_read_there_are_times_and_tokens(
    slime, args, tmp_path, caplog
):
    args.hf_checkpoint = str(tmp_path / "nothing")
    megatron_started(args)
    assert "no FLOP, for the model of args.hf_checkpoint cannot be read" in caplog.text
    run_step(slime, args, 0)
    (record,) = records(slime, tmp_path)
    assert record.metrics["perf/time/learn_s"] == 3.0
    assert record.metrics["perf/tokens/response"] == sum(SAMPLED)
    assert not record.metrics.get("perf/flops/learn")


@pytest.mark.parametrize(
    "rank", [{"get_tensor_model_parallel_rank": lambda: 1},
             {"is_pipeline_last_stage": lambda: False},
             {"get_data_parallel_rank": lambda with_context_parallel: 1}]
)  # fmt: skip
def test_another_rank_is_left_alone(slime, args, rank):
    vars(slime.ranks).update(rank)
    original = slime.train.log_perf_data
    megatron_started(args)
    assert slime.train.log_perf_data is original
    assert not slime.evaluators


def test_a_step_that_is_not_understood_is_a_fault_and_training_goes_on(slime, args, tmp_path):
    megatron_started(args)
    run_step(slime, args, 0, {"actor_train": 3.0})  # has no "train_wait"
    args.custom_rollout_log_function_path = "coati_perf_slime.rollout_logged"
    slime.timer.Timer().timers = dict(TIMERS)
    slime.train.log_perf_data(5, args, extra_metrics={})  # of which there is no rollout
    run_step(slime, args, 1)
    (evaluator,) = slime.evaluators
    assert [record.episode for record in records(slime, tmp_path)] == [1]
    warnings_ = " ".join(evaluator._warned)
    assert "a step of slime: KeyError: 'train_wait'" in warnings_
    assert "a step of slime: FileNotFoundError" in warnings_


def test_a_rollout_that_is_not_understood_is_said_and_goes_on(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("COATI_PERF_RUN", str(tmp_path))
    assert not rollout_logged(3, None, [None], None, 1.0)
    assert "rollout 3 is not measured: AttributeError" in caplog.text


def test_a_version_without_the_function_and_a_missing_folder_are_named(slime, args, monkeypatch):
    monkeypatch.delattr(slime.train, "log_perf_data")
    with pytest.raises(RuntimeError, match=r"has no slime\.observability\..*\.log_perf_data"):
        megatron_started(args)
    monkeypatch.delenv("COATI_PERF_RUN")
    with pytest.raises(ValueError, match="COATI_PERF_RUN is not set; expected a folder"):
        megatron_started(args)


def test_the_readme_works_as_it_stands(slime, args, tmp_path, capsys):
    readme = (Path(__file__).parents[2] / "integrations/coati_perf_slime/README.md").read_text()
    flags = dict(re.findall(r"(--custom-\S+) coati_perf_slime\.(\w+)", readme))
    assert flags == {
        "--custom-megatron-init-path": "megatron_started",
        "--custom-rollout-log-function-path": "rollout_logged",
    }
    megatron_started(args)
    run_step(slime, args, 0)
    records(slime, tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"folder": tmp_path / "run"})
    assert "0 4.0" in capsys.readouterr().out
