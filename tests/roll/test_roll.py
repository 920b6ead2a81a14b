"""Steps of ROLL's pipelines as records, by its own functions where its sources are at hand."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import re
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig

from coati_perf import CostModel, PerformanceEvaluator, read_journal
from coati_perf_roll import attach

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
# Two samples of each of two prompts; of the second response two tokens are a tool's.
PROMPTS, RESPONSES, TOOL = [3, 3, 5, 5], [4, 6, 2, 5], [0, 2, 0, 0]
GIVEN = [p + t for p, t in zip(PROMPTS, TOOL, strict=True)]
SAMPLED = [r - t for r, t in zip(RESPONSES, TOOL, strict=True)]
LENGTHS = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
STEPS = 3

RLVR = {
    "time/step_stop_server": 0.125, "time/step_model_update": 0.5, "time/val_step": 1.0,
    "time/step_generate": 4.0, "time/ref_log_probs_values": 0.75, "time/old_log_probs": 0.25,
    "time/step_train": 3.0, "math/time/compute_advantage": 0.25, "code/time/compute_advantage": 0.5,
    "time/get_sample_level_mask": 0.25, "time/actor_train/train_step": 2.5,
    "math/time/step_train": 9.0, "time/step_total": 99.0,
}  # fmt: skip
AGENTIC = {
    "time/step_model_update": 0.5, "time/step_rollout": 4.0, "time/get_batch_cost_train": 0.1,
    "time/step_val": 2.0, "time/step_ref_log_probs_values_reward": 0.75, "time/step_log": 0.125,
    "time/step_old_log_probs_values": 0.25, "time/step_cal_token_reward": 0.5,
    "time/step_adv": 0.5, "time/step_train": 3.0, "time/step_total": 12.0,
}  # fmt: skip
TIMES = {"generate": 4.0, "score": 1.0, "learn": 3.0, "weight_sync": 0.5, "reward": 1.0}
RLVR_TIMES = {**TIMES, "stop_server": 0.125, "validation": 1.0, "episode": 12.0}
AGENTIC_TIMES = {**TIMES, "log": 0.125, "episode": 12.0}


def settings():
    """Return what a pipeline gives its tracker, of which only this is looked at."""
    return {
        "adv_estimator": "gae", "enable_reference": True, "enable_old_logprobs_recompute": True,
        "critic_warmup": 1, "ppo_epochs": 2, "num_return_sequences_in_group": 2,
        "actor_train": {"device_mapping": [0, 1, 2, 3]}, "critic": {"device_mapping": [4, 5]},
        "actor_infer": {"device_mapping": list(range(6))},
    }  # fmt: skip


def batch(step):
    """Return a batch of ROLL's shape: prompts padded on the left, responses on the right."""

    def mask(begins, ends):
        columns = torch.arange(5 + 6)
        return torch.stack(
            [(columns >= 5 + b) & (columns < 5 + e) for b, e in zip(begins, ends, strict=True)]
        )

    zeros = [0] * 4
    starts = [-p for p in PROMPTS]
    response = mask(zeros, RESPONSES) & ~mask(zeros, TOOL)
    per_token = ("token_level_rewards", "advantages", "raw_advantages", "returns")
    return {
        "attention_mask": mask(starts, RESPONSES).long(), "response_mask": response.long(),
        "prompt_mask": mask(starts, zeros).long(), "final_response_mask": response[:, 1:].long(),
        "responses": torch.zeros(4, 6), "scores": torch.tensor([1.0, 0.0, 0.5, 1.0]),
        **{name: torch.rand(4, 10) for name in per_token},
    }, {"global_step": step}  # fmt: skip


class Kept:
    """A tracker that keeps what it is given."""

    made = []

    def __init__(self, config, **options):
        self.config, self.options, self.logged, self.finished = config, options, [], False
        config["actor_train"] = str(config["actor_train"])  # as ROLL's for TensorBoard does
        Kept.made.append(self)

    def log(self, values, step, **options):
        self.logged.append((dict(values), step))

    def finish(self):
        self.finished = True


def double(monkeypatch, tmp_path):
    """Put modules of ROLL's names in its place, with what is watched as of 0.3."""
    names = ["roll.utils.tracking", "roll.utils.metrics.metrics_manager",
             "roll.pipeline.agentic.agentic_pipeline"]  # fmt: skip
    packages = {name.rsplit(".", n)[0] for name in names for n in range(1, 4)}
    for name in [*packages, *names]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    tracking, manager, agentic = (sys.modules[name] for name in names)
    tracking.tracker_registry = {}
    tracking.BaseTracker = type("BaseTracker", (), {"log": lambda self, values, step: None})

    def create_tracker(tracker_name, config, **options):
        return tracking.tracker_registry[tracker_name](config, **options)

    class MetricsManager:
        def __init__(self):
            self.metrics = {}

        def clear_metrics(self):
            self.metrics = {}

        def add_all_metrics(self, global_step, batch, n_sample=-1, resource_manager=None,
                            actor_infer=None, actor_train=None):  # fmt: skip
            self.metrics["system/global_step"] = global_step

    tracking.create_tracker = create_tracker
    manager.MetricsManager = MetricsManager
    agentic.compute_train_data_metrics = lambda batch: {"tokens/response_length/max": 5.0}

    def data(tensors, meta_info):
        return SimpleNamespace(batch=tensors, meta_info=meta_info)

    return SimpleNamespace(tracking=tracking, manager=manager, agentic=agentic, data=data)


def real(monkeypatch, tmp_path):
    """Return ROLL's own modules, without what of others' cannot be installed here."""
    sources = os.environ.get("COATI_ROLL")
    if not sources:
        pytest.skip("COATI_ROLL names no folder with ROLL's sources, which are on no registry")
    tensordict = pytest.importorskip("tensordict", reason="ROLL needs tensordict")
    pytest.importorskip("ray", reason="ROLL needs Ray")
    monkeypatch.syspath_prepend(sources)
    monkeypatch.setenv("ROLL_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's and others', at import
        tracking, manager, agentic = (
            import_without_the_absent(monkeypatch, name)
            for name in ("roll.utils.tracking", "roll.utils.metrics.metrics_manager",
                         "roll.pipeline.agentic.agentic_pipeline")
        )  # fmt: skip
    registry = dict(tracking.tracker_registry)
    monkeypatch.setattr(tracking, "tracker_registry", registry)

    def data(tensors, meta_info):
        beside = {
            "traj_id": np.array([*"aabb"], dtype=object),
            "episode_scores": np.ones(4, dtype=object),
        }
        tensors = tensordict.TensorDict(tensors, batch_size=[4])
        return agentic.DataProto(batch=tensors, non_tensor_batch=beside, meta_info=meta_info)

    return SimpleNamespace(tracking=tracking, manager=manager, agentic=agentic, data=data)


def import_without_the_absent(monkeypatch, name):
    class Absent(types.ModuleType):
        __path__ = []

        def __getattr__(self, attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return type(attribute, (), {})

    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            module = Absent(error.name)
            module.__spec__ = importlib.machinery.ModuleSpec(error.name, None, is_package=True)
            monkeypatch.setitem(sys.modules, error.name, module)


@pytest.fixture(params=[double, real])
def roll(request, monkeypatch, tmp_path):
    monkeypatch.setattr(Kept, "made", [])
    found = request.param(monkeypatch, tmp_path)
    for owner, name in ((found.manager.MetricsManager, "clear_metrics"),
                        (found.manager.MetricsManager, "add_all_metrics"),
                        (found.agentic, "compute_train_data_metrics")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored where a test leaves it
    found.tracking.tracker_registry["kept"] = Kept
    found.tracking.tracker_registry["stdout"] = Kept
    return found


def run_rlvr(roll, clock, tracker, steps=range(STEPS), *, skipped=()):
    """Go through the steps as ``RLVRPipeline.run`` does; return what is logged."""
    manager = roll.manager.MetricsManager()
    for step in steps:
        manager.clear_metrics()
        clock.advance(12.0)
        manager.metrics.update(RLVR)
        if step not in skipped:
            manager.add_all_metrics(
                step, roll.data(*batch(step)), resource_manager=None, actor_infer=None
            )
            manager.metrics["time/step_train"] = 3.0
        tracker.log(values=manager.metrics, step=step)
        clock.advance(100.0)
    return manager.metrics


def run_agentic(roll, tracker):
    """Go through the steps as ``AgenticPipeline.run`` does."""
    for step in range(STEPS):
        found = roll.agentic.compute_train_data_metrics(batch=roll.data(*batch(step)))
        assert found["tokens/response_length/max"] == max(SAMPLED)
        tracker.log(values={**AGENTIC, **found}, step=step)


def make_evaluator(tmp_path, **options):
    models = {"actor": CONFIG, "initial": CONFIG, "critic": CONFIG}
    options = {"models": models, "run_dir": tmp_path / "run", "peak_tflops": 1.0, **options}
    return PerformanceEvaluator(0, 0, 0, 0, **options)


def records(tmp_path):
    return read_journal(tmp_path / "run").segments[-1].episodes


def times(metrics):
    return {
        name[10:-2]: seconds
        for name, seconds in metrics.items()
        if re.fullmatch(r"perf/time/[^/]*_s", name) and seconds
    }


def check_counts(metrics, *, shared_prompt):
    model = CostModel.traced(CONFIG)
    generate = float(model.generate(GIVEN, SAMPLED, shared_prompt=shared_prompt).sum())
    learn = 2 * 2 * float(model.forward_backward(LENGTHS).sum())  # two epochs of two models
    assert metrics["perf/tokens/prompt"] == sum(GIVEN)
    assert metrics["perf/tokens/response"] == sum(SAMPLED)
    assert metrics["perf/samples/learned"] == 2 * 4
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    assert metrics["perf/flops/score"] == pytest.approx(3 * float(model.forward(LENGTHS).sum()))
    assert metrics["perf/flops/learn"] == pytest.approx(learn)
    # Six devices, that is those of the actor and the critic, which generate too.
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(learn / 3.0 / 6 / 1e12)
    assert metrics["perf/tflops/generate_per_device"] == pytest.approx(generate / 4.0 / 6 / 1e12)


def test_a_step_of_rlvr_becomes_a_record_and_the_tracker_stays(roll, tmp_path, clock):
    detach = attach(make_evaluator(tmp_path, clock=clock), track_with="kept")
    tracker = roll.tracking.create_tracker("kept", settings(), project="p")
    run_rlvr(roll, clock, tracker)
    (inner,) = Kept.made
    assert inner.options == {"project": "p"}
    assert tracker.options is inner.options  # what else it has is there
    assert [step for _, step in inner.logged] == [0, 1, 2]
    assert inner.logged[1][0]["time/step_total"] == 99.0
    assert inner.logged[1][0]["system/global_step"] == 1
    tracker.finish()
    assert inner.finished
    detach()
    assert roll.tracking.tracker_registry["kept"] is Kept

    assert [record.episode for record in records(tmp_path)] == [0, 1, 2]
    assert not any(record.faults for record in records(tmp_path))
    metrics = records(tmp_path)[1].metrics
    other = 12 - sum(RLVR_TIMES.values()) + 12
    assert times(metrics) == {**RLVR_TIMES, "other": other}
    check_counts(metrics, shared_prompt=2)
    # The actor learns from the second step on, for the critic warms up in the first.
    learn = 2 * float(CostModel.traced(CONFIG).forward_backward(LENGTHS).sum())
    assert records(tmp_path)[0].metrics["perf/flops/learn"] == pytest.approx(learn)


def test_a_step_of_the_agentic_pipeline_becomes_a_record(roll, tmp_path):
    evaluator = make_evaluator(tmp_path)
    original = roll.agentic.compute_train_data_metrics
    detach = attach(evaluator, track_with="kept")
    config = settings()
    del config["num_return_sequences_in_group"]
    run_agentic(roll, roll.tracking.create_tracker("kept", config))
    detach()
    assert roll.agentic.compute_train_data_metrics is original
    evaluator.close()
    assert len(records(tmp_path)) == STEPS
    metrics = records(tmp_path)[1].metrics
    assert not records(tmp_path)[1].faults
    other = 12 - sum(AGENTIC_TIMES.values()) + 12
    assert times(metrics) == {**AGENTIC_TIMES, "other": other}
    check_counts(metrics, shared_prompt=1)


def test_engines_of_their_own_and_models_that_do_not_run(roll, tmp_path, clock):
    evaluator = make_evaluator(tmp_path, clock=clock)
    attach(evaluator, track_with="kept")
    config = settings() | {
        "adv_estimator": "grpo", "enable_old_logprobs_recompute": False,
        "actor_infer": {"device_mapping": [8, 9, 10]},
    }  # fmt: skip
    run_rlvr(roll, clock, roll.tracking.create_tracker("kept", config))
    evaluator.close()
    metrics = records(tmp_path)[1].metrics
    model = CostModel.traced(CONFIG)
    assert metrics["perf/flops/score"] == pytest.approx(float(model.forward(LENGTHS).sum()))
    for phase, devices, seconds in (("generate", 3, 4.0), ("learn", 4, 3.0)):
        assert metrics[f"perf/tflops/{phase}_per_device"] == pytest.approx(
            metrics[f"perf/flops/{phase}"] / seconds / devices / 1e12
        )
    assert metrics["perf/samples/learned"] == 2 * 4


def test_what_a_resume_replays_and_what_roll_skips_is_no_record(roll, tmp_path, clock):
    evaluator = make_evaluator(tmp_path, clock=clock)
    attach(evaluator, track_with="kept")
    tracker = roll.tracking.create_tracker("kept", settings())
    replayed = {**RLVR, "time/step_generate": 5.0, "system/step": 7}
    inner_log = Kept.made[0].log

    def log(values, step):
        inner_log(values, step)
        if step == 8:  # while a step is on, whose batch has been seen
            tracker._recorder.logged(replayed, 7)

    tracker.log(values=replayed, step=6)
    Kept.made[0].log = log
    run_rlvr(roll, clock, tracker, steps=(8, 9, 10), skipped=(9,))
    evaluator.close()
    assert [record.episode for record in records(tmp_path)] == [0, 1]
    for phase, seconds in (("episode", 12), ("generate", 4)):
        found = [record.metrics[f"perf/time/{phase}_s"] for record in records(tmp_path)]
        assert found == [seconds, seconds]
    assert [step for _, step in Kept.made[0].logged] == [6, 8, 9, 10]


@pytest.mark.parametrize("config", [{}, settings() | {"ppo_epochs": None}])
def test_a_step_that_is_not_understood_is_a_fault_and_roll_goes_on(roll, tmp_path, clock, config):
    evaluator = make_evaluator(tmp_path, clock=clock)
    attach(evaluator, track_with="kept")
    tracker = roll.tracking.create_tracker("kept", {"actor_train": None, **config})
    run_rlvr(roll, clock, tracker)
    assert len(Kept.made[0].logged) == STEPS
    assert any("a step of ROLL" in warning for warning in evaluator._warned)


def test_a_batch_that_is_not_understood_is_a_fault_and_roll_goes_on(monkeypatch, tmp_path):
    roll = double(monkeypatch, tmp_path)
    evaluator = make_evaluator(tmp_path)
    roll.tracking.tracker_registry["kept"] = Kept
    attach(evaluator, track_with="kept")
    manager = roll.manager.MetricsManager()
    manager.add_all_metrics(global_step=0, batch=None)
    assert manager.metrics == {"system/global_step": 0}
    assert any("a batch of ROLL" in warning for warning in evaluator._warned)


def test_a_config_without_a_tracker_gets_one(roll, tmp_path, clock):
    evaluator = make_evaluator(tmp_path, clock=clock)
    detach = attach(evaluator, track_with=None)
    run_rlvr(roll, clock, roll.tracking.create_tracker("coati_perf", settings()))
    detach()
    assert "coati_perf" not in roll.tracking.tracker_registry
    evaluator.close()
    assert len(records(tmp_path)) == STEPS


def test_a_version_without_the_method_and_an_unknown_tracker_are_named(monkeypatch, tmp_path):
    roll = double(monkeypatch, tmp_path)
    roll.tracking.tracker_registry["kept"] = Kept
    evaluator = make_evaluator(tmp_path)
    with pytest.raises(ValueError, match=r"track_with is 'wandb'; expected one of .* 'kept'"):
        attach(evaluator)
    del roll.manager.MetricsManager.add_all_metrics
    with pytest.raises(RuntimeError, match=r"has no roll.*MetricsManager.add_all_metrics"):
        attach(evaluator, track_with="kept")


def test_the_readme_works_as_it_stands(roll, tmp_path, clock, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_roll/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    namespace = {"config": CONFIG}
    exec(compile(example, str(readme), "exec"), namespace)
    run_rlvr(roll, clock, roll.tracking.create_tracker("stdout", settings()))
    namespace["evaluator"].close()
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
