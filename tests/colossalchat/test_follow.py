"""A trainer with ColossalChat's call order and attributes, over real models."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from peft import LoraConfig, get_peft_model
from torch.utils.tensorboard import SummaryWriter
from transformers import LlamaConfig, LlamaForCausalLM

from coati_perf import read_journal
from coati_perf_colossalchat import (
    ExperienceMakerPerformanceEvaluator,
    PerformanceEvaluator,
    TrainerPerformanceEvaluator,
)
from independent_count import executed_flop

PROMPT, RESPONSE = 5, 6
PROMPT_LENGTHS, RESPONSE_LENGTHS = [5, 3], [6, 2]


def llama():
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    # torch's counter does not know the fused attention of a CPU.
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


class Critic(nn.Module):
    """A body with a value head, as ColossalChat's."""

    def __init__(self):
        super().__init__()
        self.model = llama().model
        self.value_head = nn.Linear(32, 1)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.value_head(hidden).squeeze(-1)


class Trainer:
    """Calls models and hooks in the order of upstream's PPO trainer, the PTX loss included."""

    use_tp = False

    def __init__(self, evaluator, *, cached=True, actor=None, writer=None):
        self.actor = llama() if actor is None else actor
        self.critic = Critic()
        self.experience_maker = SimpleNamespace(
            initial_model=llama(), reward_model=lambda **_: torch.zeros(2)
        )
        self.writer = writer
        self._cached = cached
        self._evaluator = evaluator

    def fit(self, episodes=2):
        self._evaluator.on_fit_start()
        for episode in range(episodes):
            self._evaluator.on_episode_start(episode)
            self._evaluator.on_make_experience_start()
            experience = self._make()
            self._evaluator.on_make_experience_end(experience)
            self._evaluator.on_learn_batch_start()
            self._learn(experience)
            self._evaluator.on_learn_batch_end(experience)
            self._evaluator.on_episode_end(episode)
        self._evaluator.on_fit_end()

    @torch.no_grad()
    def _make(self):
        ids, cache = torch.randint(3, 50, (2, PROMPT)), None
        for step in range(RESPONSE):
            new = ids[:, -1:] if self._cached and step else ids
            options = {"past_key_values": cache} if self._cached else {}
            output = self.actor(input_ids=new, use_cache=self._cached or None, **options)
            cache = output.past_key_values
            ids = torch.cat([ids, output.logits[:, -1].argmax(-1, keepdim=True)], 1)
        columns = torch.arange(PROMPT + RESPONSE)
        lengths = zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)
        mask = torch.stack([(columns >= PROMPT - p) & (columns < PROMPT + r) for p, r in lengths])
        self.actor(input_ids=ids, attention_mask=mask, use_cache=False)
        self.experience_maker.initial_model(input_ids=ids, attention_mask=mask, use_cache=False)
        self.experience_maker.reward_model(input_ids=ids)
        self.critic(input_ids=ids, attention_mask=mask)
        return SimpleNamespace(
            sequences=ids, attention_mask=mask, action_mask=mask[:, PROMPT:].clone()
        )

    def _learn(self, experience):
        inputs = experience.sequences, experience.attention_mask
        self.actor(input_ids=inputs[0], attention_mask=inputs[1]).logits.sum().backward()
        self.actor(torch.ones(3, 9, dtype=torch.long)).logits.sum().backward()  # the PTX loss
        self.critic(input_ids=inputs[0], attention_mask=inputs[1]).sum().backward()


@pytest.fixture
def evaluator(tmp_path, monkeypatch):

    def make(**options):
        return PerformanceEvaluator(
            10, 10, 10, 0, run_dir=tmp_path / "run", peak_tflops=1.0, **options
        )

    return make


@pytest.fixture
def segment(tmp_path):
    return lambda: read_journal(tmp_path / "run").segments[-1]


def total(segment, name):
    return sum(record.metrics.get(name, 0.0) for record in segment.episodes)


LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("lora", [False, True], ids=["", "LoRA"])
def test_what_its_models_execute_is_counted_as_torch_does(cached, lora, evaluator, segment):
    ours = evaluator()
    actor = get_peft_model(llama(), LORA) if lora else None
    trainer = Trainer(ours, cached=cached, actor=actor)
    ours.follow(trainer, attention="full")
    flop = executed_flop(trainer.fit)
    run = segment()
    phases = ("generate", "score", "learn")
    assert sum(total(run, f"perf/flops/{phase}_executed") for phase in phases) == flop
    assert not any(record.faults for record in run.episodes)
    assert total(run, "perf/tokens/prompt") == 2 * sum(PROMPT_LENGTHS)
    assert total(run, "perf/tokens/response") == 2 * sum(RESPONSE_LENGTHS)
    # The useful work is that of a cache and of no padding, whatever happened.
    assert total(run, "perf/flops/generate") < total(run, "perf/flops/generate_executed")


def test_following_again_counts_once_and_unfollowing_leaves_the_models(evaluator, segment):
    ours = evaluator()
    other = Trainer(ours)
    ours.follow(other, attention="full")
    trainer = Trainer(ours)
    ours.follow(trainer, attention="full")
    assert not other.actor._forward_pre_hooks
    flop = executed_flop(trainer.fit)
    phases = ("generate", "score", "learn")
    assert sum(total(segment(), f"perf/flops/{phase}_executed") for phase in phases) == flop
    ours.unfollow()
    assert not trainer.actor._forward_pre_hooks
    assert "_trainer" not in vars(ours)
    ours.unfollow()


def test_an_ignored_episode_counts_nothing(evaluator, segment):
    ours = evaluator(ignore_episodes=1)
    trainer = Trainer(ours)
    ours.follow(trainer)
    trainer.fit(episodes=2)
    (record,) = segment().episodes
    assert record.episode == 1
    assert not record.faults


def test_an_end_of_sequence_that_is_the_padding_is_no_prompt_token(evaluator, segment):
    """Upstream's mask is sequences ≠ padding; its action mask includes the end of sequence."""
    ours = evaluator()
    attention = torch.tensor([[0, 1, 1, 1, 0, 0]])  # a prompt of 2, one token, an end
    made = SimpleNamespace(
        sequences=torch.ones(1, 6),
        attention_mask=attention,
        action_mask=torch.tensor([[1, 1, 0]]),
    )
    with ours.episode(0):
        ours.on_make_experience_start()
        ours.on_make_experience_end(made)
    ours.close()
    (record,) = segment().episodes
    assert record.metrics["perf/tokens/prompt"] == 2
    assert record.metrics["perf/tokens/response"] == 2


def test_its_tensorboard_run_gets_our_figures(evaluator, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ours = evaluator()
    writer = SummaryWriter(str(tmp_path / "logs"))
    trainer = Trainer(ours, writer=writer)
    ours.follow(trainer)
    writer.add_scalar("train/actor_loss", 0.5, 0)
    trainer.fit()
    writer.close()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert {"train/actor_loss", "perf/time/learn_s"} <= set(events.Tags()["scalars"])
    assert [point.step for point in events.Scalars("perf/time/learn_s")] == [0, 1]


def test_split_models_are_refused_with_what_to_do_instead(evaluator):
    ours = evaluator()
    trainer = Trainer(ours)
    trainer.use_tp = True
    with pytest.raises(ValueError, match=r"Trainer has no actor that is whole.*data_parallel_size"):
        ours.follow(trainer)


def test_the_readme_works_as_it_stands(evaluator, tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_colossalchat/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(None)
    namespace = {"trainer": trainer}
    exec(compile(example, str(readme), "exec"), namespace)
    trainer._evaluator = namespace["evaluator"]
    trainer.fit()
    assert "Performance summary" in (tmp_path / "report.txt").read_text()


def test_without_following_it_is_the_evaluator_that_it_was(evaluator, segment):
    trainer = Trainer(evaluator())
    trainer.fit()
    assert segment().header.convention == "coati"


def test_the_evaluators_of_ray_take_upstreams_hooks(tmp_path):
    made = SimpleNamespace(
        sequences=torch.zeros(2, 6), attention_mask=None, action_mask=torch.ones(2, 4)
    )
    maker = ExperienceMakerPerformanceEvaluator(1, 2, 3, 4, run_dir=tmp_path / "maker")
    maker.on_loop_start()
    for _ in range(2):
        maker.on_batch_start()
        maker.on_make_experience_start()
        maker.on_make_experience_end(made)
        maker.on_send_start()
        maker.on_send_end()
        maker.on_batch_end()
    maker.on_loop_end()
    run = read_journal(tmp_path / "maker").segments[-1]
    # 2 FLOP for each parameter and position: 2 samples, prefixes of 2, 3, 4 and 5, then 6.
    flop = 2 * 2 * (1 * (2 + 3 + 4 + 5) + (1 + 2 + 3 + 4) * 6)
    assert [r.metrics["perf/flops/make_experience"] for r in run.episodes] == [flop, flop]
    assert "send" in run.episodes[0].phases

    trainer = TrainerPerformanceEvaluator(1, 2, ignore_first_episodes=1, run_dir=tmp_path / "fit")
    trainer.on_fit_start()
    for episode in range(2):
        trainer.on_episode_start(episode)
        trainer.on_epoch_start(0)
        trainer.on_batch_start()
        trainer.on_batch_end({}, made)
        trainer.on_epoch_end(0)
        trainer.on_update_start()
        trainer.on_update_end()
        trainer.on_episode_end(episode)
    trainer.on_fit_end()
    (record,) = read_journal(tmp_path / "fit").segments[-1].episodes
    assert record.episode == 1
    assert record.metrics["perf/flops/learn"] == 2 * 2 * 6 * (1 + 2) * 3
    assert "weight_sync" in record.phases
