"""Steps that NeMo-RL logs as records, by its own logger where there is a checkout of it."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from transformers import LlamaConfig

from coati_perf import CostModel, PerformanceEvaluator, read_journal
from coati_perf_nemo_rl import attach

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
MODELS = {"actor": CONFIG, "initial": CONFIG, "critic": CONFIG}
# Four samples, each row ending in padding; in the second a tool spoke between two turns.
MASKS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 0],
    [0, 0, 1, 1, 0, 0, 1, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 0, 0, 0, 0],
    [0, 0, 1, 1, 1, 1, 1, 0, 0, 0],
]
TOTALS = [9, 7, 6, 7]
PROMPTS, RESPONSES = [3, 4, 4, 2], [6, 3, 2, 5]
# What grpo_train times; then what lies inside these, and what the async one has in their place.
SYNC = {
    "data_processing": 0.25, "prepare_for_generation/total": 0.5, "generation": 4.0,
    "reward_calculation": 0.125, "logprob_inference_prep": 0.25,
    "policy_and_reference_logprobs": 1.0, "advantage_calculation": 0.0625, "training_prep": 0.5,
    "policy_training": 2.0, "checkpointing": 0.25, "total_step_time": 10.0,
}  # fmt: skip
NESTED = {
    "prepare_for_generation/transfer_and_update_weights": 0.375, "dynamic_sampling": 0.0625,
    "get_logprobs/shard_data": 0.25, "policy_training/shard_data": 0.5, "init/total": 60.0,
    "idle/refit_bubble": 3.0, "idle/buffer_starvation": 0.5,
}  # fmt: skip
ASYNC = {
    "exposed_generation": 1.5, "weight_sync": 0.25, "idle/validation": 2.0,
    "offload_before_refit": 0.125, "policy_and_reference_logprobs": 1.0, "policy_training": 3.0,
    "total_step_time": 10.0,
}  # fmt: skip
PPO = {
    "value_inference": 0.5, "value_training_prep": 0.25, "value_training": 1.0,
    "policy_and_reference_logprobs": 1.0, "generation": 4.0, "total_step_time": 10.0,
}  # fmt: skip


class LoggerDouble:
    """The methods of NeMo-RL 0.6's ``Logger`` that matter here."""

    def __init__(self, cfg):
        self.loggers = []
        self.base_log_dir = cfg["log_dir"]

    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False):
        for logger in self.loggers:
            logger.log_metrics(metrics, step, prefix, step_metric, step_finished)

    def log_hyperparams(self, params):
        for logger in self.loggers:
            logger.log_hyperparams(params)

    def log_histogram(self, histogram, step, name):
        for logger in self.loggers:
            logger.log_histogram(histogram, step, name)

    def log_plot(self, figure, step, name):
        for logger in self.loggers:
            logger.log_plot(figure, step, name)

    def log_batched_dict_as_jsonl(self, to_log, filename):
        rows = [dict(zip(to_log, row, strict=True)) for row in zip(*to_log.values(), strict=True)]
        lines = [json.dumps({**row, "idx": i}) + "\n" for i, row in enumerate(rows)]
        (Path(self.base_log_dir) / filename).write_text("".join(lines))


class TimerDouble:
    def __init__(self):
        self.timings = {}

    def record(self, label, elapsed):
        self.timings[label] = self.timings.get(label, 0.0) + elapsed

    def get_timing_metrics(self, reduction_op):
        return self.timings


def double(monkeypatch):
    return SimpleNamespace(Logger=LoggerDouble, Timer=TimerDouble)


def real(monkeypatch):
    if "COATI_NEMO_RL" not in os.environ:
        pytest.skip("COATI_NEMO_RL names no checkout of NeMo-RL, which is on no package index")
    monkeypatch.syspath_prepend(os.environ["COATI_NEMO_RL"])
    for name in ("ray", "swanlab"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's and others', at import
        logger = importlib.import_module("nemo_rl.utils.logger")
        timer = importlib.import_module("nemo_rl.utils.timer")
    return SimpleNamespace(Logger=logger.Logger, Timer=timer.Timer)


class Backend:
    """Another backend of the logger: keeps what it is given."""

    def __init__(self):
        self.given = []

    def log_metrics(self, *arguments):
        self.given.append(arguments)

    log_hyperparams = log_histogram = log_plot = log_metrics


class Trainer:
    """Logs a step as grpo_train does."""

    def __init__(self, nemo_rl, folder):
        off = ("wandb", "swanlab", "tensorboard", "mlflow")
        config = {"log_dir": str(folder), "monitor_gpus": False}
        self.logger = nemo_rl.Logger(config | {f"{name}_enabled": False for name in off})
        self.timer = nemo_rl.Timer
        self.other = Backend()
        self.logger.loggers.append(self.other)

    def step(self, number=1, timings=SYNC, *, samples=True, tokens=None):
        rollout = {"mean_gen_tokens_per_sample": 4.0}
        totals = {"total_num_tokens": 29 if tokens is None else tokens, "mean_prompt_length": 2.5}
        self.logger.log_metrics(rollout, number, prefix="train")
        self.logger.log_batched_dict_as_jsonl({"rewards": [1.0]}, f"val_data_step{number}.jsonl")
        self.logger.log_metrics({"total_validation_time": 9.0}, number, prefix="timing/validation")
        if samples:
            self.logger.log_batched_dict_as_jsonl(
                {"rewards": [0.5] * 4, "input_lengths": TOTALS, "token_loss_mask": MASKS},
                f"train_data_step{number}.jsonl",
            )
        timer = self.timer()
        for label, elapsed in timings.items():
            timer.record(label, elapsed)
        metrics = timer.get_timing_metrics(reduction_op="sum")
        metrics["valid_tokens_per_sec_per_gpu"] = 1000.0
        self.logger.log_histogram([1, 2], number, "histogram")
        self.logger.log_metrics(totals | rollout, number, prefix="train")
        self.logger.log_metrics({"flops": 1.0}, number, prefix="performance")
        self.logger.log_metrics(metrics, number, prefix="timing/train", step_finished=True)


@pytest.fixture(params=[double, real])
def trainer(request, monkeypatch, tmp_path):
    """Return what logs as NeMo-RL does: by its own logger and timer, and by ones of their shape."""
    (tmp_path / "logs").mkdir()
    return Trainer(request.param(monkeypatch), tmp_path / "logs")


@pytest.fixture
def evaluator(tmp_path):
    return PerformanceEvaluator(0, 0, 0, 0, models=MODELS, run_dir=tmp_path / "run", peak_tflops=1)


def read(evaluator):
    evaluator.close()
    return read_journal(evaluator.run_dir).segments[-1].episodes


def times(metrics):
    found = (re.fullmatch("perf/time/(.*)_s", name) for name in metrics)
    return {match[1]: metrics[match[0]] for match in found if match}


def test_a_step_becomes_a_record_and_the_rest_stays(trainer, evaluator, tmp_path, caplog):
    trainer.step()
    written = (tmp_path / "logs/train_data_step1.jsonl").read_text()
    given, trainer.other.given = trainer.other.given, []
    detach = attach(
        trainer.logger, evaluator, trainer_devices=4, rollout_devices=2, responses_per_prompt=2
    )
    trainer.logger.log_hyperparams({"seed": 1})
    trainer.logger.log_metrics({"worker_init": 5.0}, 0, prefix="timing/setup")
    trainer.other.given = []
    trainer.step(1, SYNC | NESTED)
    assert (tmp_path / "logs/train_data_step1.jsonl").read_text() == written
    assert trainer.other.given[:-1] == given[:-1]  # of the last, the nested times are more
    trainer.step(2)
    detach()
    trainer.step(3)

    records = read(evaluator)
    assert [record.episode for record in records] == [0, 1]
    assert "not measured" not in caplog.text
    assert not records[0].faults
    assert times(records[0].metrics) == times(records[1].metrics) == {
        "episode": 10.0, "generate": 4.0, "score": 1.25, "learn": 2.5, "weight_sync": 0.5,
        "reward": 0.125, "data_processing": 0.25, "advantage_calculation": 0.0625,
        "checkpointing": 0.25, "other": 10 - (4 + 1.25 + 2.5 + 0.5 + 0.125 + 0.25 + 0.0625 + 0.25),
    }  # fmt: skip
    metrics = records[0].metrics
    assert metrics["perf/tokens/prompt"] == sum(PROMPTS)
    assert metrics["perf/tokens/response"] == sum(RESPONSES)
    assert metrics["perf/samples/learned"] == 4

    actor = CostModel.traced(CONFIG)
    generate = float(actor.generate(PROMPTS, RESPONSES, shared_prompt=2).sum())
    learn = float(actor.forward_backward(TOTALS).sum())
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    assert metrics["perf/flops/score"] == pytest.approx(2 * float(actor.forward(TOTALS).sum()))
    assert metrics["perf/flops/learn"] == pytest.approx(learn)
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(learn / 2.5 / 4 / 1e12)
    assert metrics["perf/tflops/generate_per_device"] == pytest.approx(generate / 4.0 / 2 / 1e12)


def test_generation_beside_training_has_flop_and_no_rate(trainer, evaluator):
    attach(trainer.logger, evaluator, trainer_devices=4, rollout_devices=2, scored=())
    trainer.step(1, ASYNC | NESTED)
    (record,) = read(evaluator)
    assert times(record.metrics) == {
        "episode": 10.0, "score": 1.0, "learn": 3.0, "weight_sync": 0.25, "validation": 2.0,
        "exposed_generation": 1.5, "offload_before_refit": 0.125,
        "other": 10 - (1 + 3 + 0.25 + 2 + 1.5 + 0.125),
    }  # fmt: skip
    assert record.metrics["perf/flops/generate"] > 0
    assert "perf/tflops/generate_per_device" not in record.metrics
    assert "perf/flops/score" not in record.metrics


def test_a_critic_scores_and_learns_and_an_actor_may_wait(trainer, evaluator):
    attach(trainer.logger, evaluator, trainer_devices=4, scored=["actor"], epochs=3)
    trainer.step(1, PPO)
    (record,) = read(evaluator)
    assert record.metrics["perf/time/score_s"] == 1.5
    assert record.metrics["perf/time/learn_s"] == 1.25
    model = CostModel.traced(CONFIG)
    assert record.metrics["perf/flops/score"] == pytest.approx(2 * model.forward(TOTALS).sum())
    learn = 3 * model.forward_backward(TOTALS).sum()  # of the critic alone
    assert record.metrics["perf/flops/learn"] == pytest.approx(learn)


def test_without_samples_their_totals_count_as_equal_lengths(trainer, evaluator, caplog):
    attach(trainer.logger, evaluator, trainer_devices=4, samples_per_step=4)
    trainer.step(1)
    trainer.step(2, samples=False, tokens=30)
    first, second = (record.metrics for record in read(evaluator))
    assert first["perf/tokens/response_max"] == max(RESPONSES)
    assert second["perf/tokens/response"] == 4 * 4.0
    assert second["perf/tokens/prompt"] == 30 - 16
    learn = CostModel.traced(CONFIG).forward_backward([8, 8, 7, 7]).sum()
    assert second["perf/flops/learn"] == pytest.approx(float(learn))
    assert "count as equally long" in caplog.text


def test_without_lengths_there_are_times_alone_and_a_fault(trainer, evaluator):
    attach(trainer.logger, evaluator, trainer_devices=4)
    trainer.step(1, samples=False)
    (record,) = read(evaluator)
    assert list(record.faults) == ["record_step without lengths: tokens and FLOP are left out"]
    assert record.metrics["perf/time/learn_s"] == 2.5
    assert record.metrics["perf/time/episode_s"] == 10.0
    assert not [name for name in record.metrics if "flops" in name or "tokens" in name]


def test_what_is_not_understood_is_a_fault_and_nemo_rl_goes_on(trainer, evaluator, caplog):
    attach(trainer.logger, evaluator, trainer_devices=4)
    trainer.step(1, {"generation": 4.0})
    trainer.logger.log_batched_dict_as_jsonl({"rewards": [0.5]}, "train_data_step2.jsonl")
    trainer.step(2, samples=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "episode", None)
        trainer.step(3)
    trainer.step(4)
    assert len(read(evaluator)) == 2
    assert "KeyError: 'total_step_time'" in caplog.text
    assert "KeyError: 'token_loss_mask'" in caplog.text
    assert (Path(trainer.logger.base_log_dir) / "train_data_step2.jsonl").exists()


@pytest.mark.parametrize("missing", ["loggers", "log_batched_dict_as_jsonl"])
def test_a_logger_without_the_seam_is_named(missing, evaluator, monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_rl", SimpleNamespace(__version__="0.1.0"))
    seam = {"loggers": [], "log_batched_dict_as_jsonl": print}
    del seam[missing]
    with pytest.raises(RuntimeError, match=rf"has no {missing}; .* this is NeMo-RL 0\.1\.0"):
        attach(SimpleNamespace(**seam), evaluator, trainer_devices=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trainer_devices", 0), ("rollout_devices", 0), ("epochs", 0), ("responses_per_prompt", 0),
        ("samples_per_step", 0), ("scored", "actor"), ("scored", ["critic"]),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_at_once(name, value, evaluator, tmp_path):
    logger = LoggerDouble({"log_dir": tmp_path})
    with pytest.raises(ValueError, match=f"{name} is "):
        attach(logger, evaluator, **{"trainer_devices": 4, name: value})
    with pytest.raises(TypeError, match="expected a PerformanceEvaluator"):
        attach(logger, None, trainer_devices=4)
    assert not logger.loggers


def test_the_readme_works_as_it_stands(trainer, tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_nemo_rl/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    namespace = {"config": CONFIG, "logger": trainer.logger}
    exec(compile(example, str(readme), "exec"), namespace)
    trainer.step()
    namespace["evaluator"].close()
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
