"""Real TRL trainers on the CPU, beside TRL's own figures and torch's own count of FLOP."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from tiny import llama, preferences, prompts, reward_model, reward_of_length, texts, tokenizer
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from coati_perf import CostModel, read_journal
from coati_perf_trl import CoatiPerfCallback, seams
from independent_count import executed_flop

TRL = Version(version("trl"))
PHASES = ("generate", "score", "learn")


@pytest.fixture
def measure(tmp_path):
    """Return a function that trains with the callback: (journal's last segment, torch's FLOP)."""

    def measure(trainer, **options):
        options = {"attention": "full", "run_dir": tmp_path / "run", "peak_tflops": 1.0} | options
        trainer.add_callback(CoatiPerfCallback(trainer, **options))
        flop = executed_flop(trainer.train)
        return read_journal(tmp_path / "run").segments[-1], flop

    return measure


def total(segment, name):
    return sum(record.metrics.get(name, 0.0) for record in segment.episodes)


def executed(segment):
    return sum(total(segment, f"perf/flops/{phase}_executed") for phase in PHASES)


LORA = {"peft": LoraConfig(r=4, target_modules=["q_proj", "down_proj"])}
CASES = {
    "as TRL sets it up": {},
    "without checkpoints": {"gradient_checkpointing": False},
    "with checkpoints": {"gradient_checkpointing": True},
    "two iterations": {"num_iterations": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation, two steps a rollout": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "LoRA": {**LORA, "gradient_checkpointing": False},
    "LoRA with checkpoints": {**LORA, "gradient_checkpointing": True},
    "LoRA with its base as reference": {**LORA, "beta": 0.1, "gradient_checkpointing": False},
    "a reward model": {"rewards": "model"},
}
STEPS_PER_EPISODE = {"two iterations": 2, "accumulation, two steps a rollout": 2}


@pytest.mark.parametrize("case", CASES)
def test_grpo_is_measured_as_trl_and_torch_have_it(case, online, measure):
    """FLOP as torch counts them, tokens and times as TRL does."""
    options = dict(CASES[case])
    if options.pop("rewards", None):
        options["rewards"] = [reward_of_length, reward_model()]
    trainer = online(**options)
    segment, flop = measure(trainer)

    assert executed(segment) == flop
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    tokens = total(segment, "perf/tokens/prompt") + total(segment, "perf/tokens/response")
    assert tokens == [log["num_tokens"] for log in logs if "num_tokens" in log][-1]
    seconds = sum(
        record.phases["make_experience"] + record.phases["learn"] - record.phases["learn/optimizer"]
        for record in segment.episodes
    )
    assert seconds == pytest.approx(sum(log["step_time"] for log in logs), rel=0.02)

    steps = STEPS_PER_EPISODE.get(case, 1)
    assert [record.episode for record in segment.episodes] == list(range(4 // steps))
    assert all(record.metrics["perf/steps/make_experience"] == 1 for record in segment.episodes)
    assert not any(record.faults for record in segment.episodes)
    assert total(segment, "perf/flops/learn") < total(segment, "perf/flops/learn_executed")


def test_two_ranks_are_summed_as_torch_and_trl_have_them(tmp_path):
    """Each rank counts its own FLOP with torch's counter; TRL counts the tokens of both."""
    script = Path(__file__).parent / "two_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", str(script), str(tmp_path)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    segment = read_journal(tmp_path / "run").segments[-1]
    assert executed(segment) == sum(rank["flop"] for rank in ranks)
    tokens = total(segment, "perf/tokens/prompt") + total(segment, "perf/tokens/response")
    assert tokens == ranks[0]["num_tokens"]
    assert [record.ranks for record in segment.episodes] == [2] * 4
    assert not any(record.faults for record in segment.episodes)


def test_rloo_is_measured_alike(online, measure):
    trainer = online(RLOOTrainer, RLOOConfig, beta=0.0)
    segment, flop = measure(trainer)
    assert executed(segment) == flop
    assert set(segment.episodes[0].phases) >= {"make_experience/generate", "make_experience/score"}


def online_dpo(settings, **more):
    module = pytest.importorskip("trl.experimental.online_dpo")
    rewards = more.pop("rewards", [reward_of_length])
    peft = more.pop("peft", None)
    return module.OnlineDPOTrainer(
        model=llama(),
        ref_model=None if peft else llama(),
        reward_funcs=rewards,
        reward_processing_classes=[tokenizer() for _ in rewards],
        args=settings(module.OnlineDPOConfig, max_new_tokens=8, **more),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        peft_config=peft,
    )


ONLINE_DPO = {
    "as TRL sets it up": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "without checkpoints": {"gradient_checkpointing": False},
    "LoRA": {**LORA, "gradient_checkpointing": False},
    "a reward model": {"rewards": "model"},
}


@pytest.mark.parametrize("case", ONLINE_DPO)
@pytest.mark.filterwarnings("default")  # TRL warns that it is experimental
def test_online_dpo_is_told_apart_by_its_forwards(case, settings, measure):
    options = dict(ONLINE_DPO[case])
    if options.pop("rewards", None):
        options["rewards"] = [reward_of_length, reward_model()]
    trainer = online_dpo(settings, **options)
    segment, flop = measure(trainer)
    assert executed(segment) == flop
    assert [record.episode for record in segment.episodes] == list(range(4))
    micro_batches = 4 * options.get("gradient_accumulation_steps", 1)
    # Two completions of each of 4 prompts.
    assert total(segment, "perf/samples/generated") == 2 * 4 * micro_batches
    assert total(segment, "perf/samples/learned") == 2 * 4 * micro_batches
    for record in segment.episodes:
        assert not record.faults
        assert set(record.phases) >= {"generate", "score", "learn", "learn/optimizer"}
        named = sum(record.phases[name] for name in ("generate", "score", "learn"))
        assert named <= record.metrics["perf/time/episode_s"]
        # Responses that ended early are padded for learning.
        assert (
            record.metrics["perf/tokens/response"] <= 8 * record.metrics["perf/samples/generated"]
        )


def ppo(settings, **more):
    module = pytest.importorskip(
        "trl.experimental.ppo", reason="this version of TRL has no PPO: up to 1.12"
    )
    config = settings(
        module.PPOConfig, total_episodes=32, response_length=8, num_ppo_epochs=2,
        num_mini_batches=2, local_rollout_forward_batch_size=4, max_steps=-1,
        gradient_accumulation_steps=2, per_device_train_batch_size=4, stop_token="eos",
        **more,
    )  # fmt: skip
    tokens = tokenizer()
    rows = [tokens(row["prompt"])["input_ids"] for row in prompts()]
    return module.PPOTrainer(
        args=config,
        processing_class=tokens,
        model=llama(),
        ref_model=llama(),
        reward_model=reward_model(),
        value_model=reward_model(),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        eval_dataset=Dataset.from_list([{"input_ids": row} for row in rows[:16]]),
        data_collator=DataCollatorWithPadding(tokens),
    )


@pytest.mark.filterwarnings("default")
def test_ppo_is_told_apart_by_its_forwards(settings, measure):
    """The samples that it generates to be looked at are in torch's count and not in ours."""
    trainer = ppo(settings, num_sample_generations=0)
    segment, flop = measure(trainer)
    assert executed(segment) == flop
    updates = trainer.args.num_total_batches
    assert [record.episode for record in segment.episodes] == list(range(updates))
    assert updates > 1
    batch = trainer.args.batch_size
    for record in segment.episodes:
        assert not record.faults
        assert record.metrics["perf/samples/generated"] == batch
        assert record.metrics["perf/samples/learned"] == 2 * batch  # epochs
        assert set(record.phases) == {"generate", "score", "learn"}
        assert record.metrics["perf/tokens/response"] <= 8 * batch


@pytest.mark.filterwarnings("default")
def test_ppos_samples_to_look_at_are_no_training(settings, measure):
    plain, _ = measure(ppo(settings, num_sample_generations=0))
    trainer = ppo(settings, num_sample_generations=2, eval_strategy="steps", eval_steps=1)
    looked, flop = measure(trainer)
    assert executed(looked) < flop
    for name in ("perf/samples/generated", "perf/tokens/prompt", "perf/flops/learn_executed"):
        assert total(looked, name) == total(plain, name)


def sft(settings, **more):
    return SFTTrainer(
        model=llama(),
        args=settings(SFTConfig, max_length=16, **more),
        train_dataset=texts(),
        processing_class=tokenizer(),
    )


def dpo(settings):
    return DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=settings(DPOConfig, max_length=16),
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )


def rewards(settings):
    return RewardTrainer(
        model=reward_model(),
        args=settings(RewardConfig, max_length=16),
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )


def transformers_own(settings):
    rows = [{"input_ids": row, "labels": row} for row in [[5, 6, 7], [8, 9, 10]] * 16]
    return Trainer(model=llama(), args=settings(TrainingArguments), train_dataset=rows)


LEARN_ONLY = {
    "SFT": sft,
    "SFT, packed": lambda settings: sft(settings, packing=True, padding_free=False),
    "DPO": dpo,
    "reward": rewards,
    "Transformers": transformers_own,
}


@pytest.mark.parametrize("kind", LEARN_ONLY)
def test_a_trainer_that_only_learns_is_measured_so(kind, settings, measure):
    trainer = LEARN_ONLY[kind](settings)
    segment, flop = measure(trainer, steps_per_episode=2)
    # The loss of SFT in TRL 1.0 to 1.14 computes logits twice, out of our sight.
    blurred = kind.startswith("SFT") and Version("1") <= TRL < Version("1.15")
    assert executed(segment) == pytest.approx(flop, rel=0.05 if blurred else 0, abs=0)
    assert len(segment.episodes) == 2
    assert total(segment, "perf/flops/generate") == 0
    assert set(segment.episodes[0].phases) == {"learn", "learn/optimizer"}
    # A row of DPO and of reward learning is a pair.
    assert total(segment, "perf/samples/learned") >= 4 * 4
    assert not any(record.faults for record in segment.episodes)


def test_training_is_the_same_with_the_callback(online, tmp_path):
    """Losses, gradients and rewards, step by step and to the last bit."""

    def history(with_callback):
        torch.manual_seed(3)
        trainer = online(gradient_accumulation_steps=2, learning_rate=1e-2)
        if with_callback:
            trainer.add_callback(CoatiPerfCallback(trainer, run_dir=tmp_path, peak_tflops=1.0))
        trainer.train()
        names = ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens")
        return [
            {name: log[name] for name in names}
            for log in trainer.state.log_history
            if "loss" in log
        ]

    with_callback = history(with_callback=True)
    assert len(with_callback) == 4
    assert with_callback == history(with_callback=False)


def test_an_evaluation_is_no_part_of_an_episode(online, measure):
    trainer = online(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    segment, _ = measure(trainer)
    assert any("eval_loss" in log for log in trainer.state.log_history)
    assert total(segment, "perf/samples/generated") == 4 * 4
    assert not any(record.faults for record in segment.episodes)


def test_a_version_without_our_seams_is_warned_of_once_and_measured_as_learning(
    online, measure, monkeypatch, caplog
):
    for name in ("ROLLOUT", "GENERATE", "REWARDS"):
        monkeypatch.setattr(seams, name, "_named_otherwise")
    monkeypatch.setattr(seams, "LOG_PROBS", ("_named_otherwise",))
    with caplog.at_level(logging.WARNING, "coati_perf_trl"):
        segment, _ = measure(online())
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("coati_perf_trl")]
    assert warning.startswith("GRPOTrainer of trl ")
    assert "make_experience, generate, score, reward" in warning
    assert len(segment.episodes) == 4
    assert total(segment, "perf/samples/learned") == 4 * 4
    assert total(segment, "perf/time/learn_s") > 0
    assert "make_experience" not in segment.episodes[0].phases


def test_results_of_a_seam_that_are_not_as_they_were_are_a_fault_and_no_crash(
    online, measure, monkeypatch
):
    monkeypatch.setattr(CoatiPerfCallback, "_count_generation", lambda *_: 1 / 0)
    segment, _ = measure(online())
    assert len(segment.episodes) == 4
    (fault,) = segment.episodes[0].faults
    assert "division by zero" in fault


def test_a_failing_reward_function_is_seen_as_it_is_and_recorded(online, tmp_path):
    def broken(completions, **_):
        message = "no reward today"
        raise RuntimeError(message)

    trainer = online(rewards=[broken])
    callback = CoatiPerfCallback(trainer, run_dir=tmp_path / "run", peak_tflops=1.0)
    trainer.add_callback(callback)
    with pytest.raises(RuntimeError, match="no reward today"):
        trainer.train()
    callback.evaluator.close()
    summary = read_journal(tmp_path / "run").segments[-1].summary
    assert "no reward today" in str(summary)


def test_an_untraceable_model_is_counted_by_its_parameters(online, measure, monkeypatch):
    from coati_perf.flops import traced
    from coati_perf.flops.skeleton import UntraceableModelError

    def refuse(*_, **__):
        raise UntraceableModelError("it is of no kind known")

    monkeypatch.setattr(traced, "_trace", refuse)
    segment, _ = measure(online())
    assert any("parameters counted" in warning for warning in segment.header.warnings)
    assert total(segment, "perf/flops/learn") > 0


def test_detached_the_trainer_is_as_it_was(online, tmp_path):
    trainer = online()
    before = dict(vars(trainer))
    callback = CoatiPerfCallback(trainer, run_dir=tmp_path / "run")
    assert "training_step" in vars(trainer)
    callback.detach()
    assert dict(vars(trainer)) == before
    assert not trainer.model._forward_pre_hooks


def test_the_trackers_of_report_to_are_joined(online, tmp_path, offline_wandb):
    trainer = online(report_to=["wandb"])
    callback = CoatiPerfCallback(trainer, run_dir=tmp_path / "run", peak_tflops=1.0)
    trainer.add_callback(callback)
    trainer.train()
    rows = offline_wandb()
    ours = [row["perf/episode"] for row in rows if "perf/episode" in row]
    theirs = [row["train/global_step"] for row in rows if "train/reward" in row]
    assert ours == [0, 1, 2, 3]
    assert theirs == [1, 2, 3, 4]


def test_a_fit_after_one_that_failed_is_measured_whole(online, measure):
    failures = iter([RuntimeError("once")])

    def fails_once(completions, **_):
        for failure in failures:
            raise failure
        return reward_of_length(completions)

    trainer = online(rewards=[fails_once])
    with pytest.raises(RuntimeError, match="once"):
        measure(trainer)
    trainer.train()
    callback = trainer.callback_handler.callbacks[-1]
    segment = read_journal(callback.evaluator.run_dir).segments[-1]
    assert len(segment.episodes) == 4
    assert all(record.phases["learn/optimizer"] > 0 for record in segment.episodes)
    assert not any(record.faults for record in segment.episodes)


def test_an_instance_by_role(online):
    """The models that are found, each at its own cost."""
    trainer = online(rewards=[reward_of_length, reward_model()])
    callback = CoatiPerfCallback(trainer)
    settings = callback.evaluator._settings.workload.describe()
    assert set(settings) == {"actor", "reward 0"}
    actor = CostModel.traced(llama()).forward(10)
    assert callback._actor.forward(10) == actor


def test_bad_arguments_are_named_at_once(online):
    trainer = online()
    with pytest.raises(ValueError, match="steps_per_episode is 0"):
        CoatiPerfCallback(trainer, steps_per_episode=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sink'"):
        CoatiPerfCallback(trainer, sink=["wandb"])


def test_the_readme_works_as_it_stands(online, tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_trl/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(readme), "exec"), {"trainer": online()})
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
