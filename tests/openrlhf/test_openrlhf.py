"""Steps of OpenRLHF's trainers as records, by its own code where it is installed."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
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
from coati_perf_openrlhf import measure

DOUBLE = Path(__file__).parent / "double"
README = Path(__file__).parents[2] / "integrations/coati_perf_openrlhf/README.md"
CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
MODELS = dict.fromkeys(("actor", "critic", "initial", "reward"), CONFIG)
# Tokens of each sample, and which of them the model sampled: the third has a tool's in between.
TOTALS, SAMPLED = [8, 6, 12, 6], [[(5, 8)], [(5, 6)], [(4, 8), (10, 12)], [(4, 6)]]
PROMPTS, RESPONSES = [5, 5, 6, 4], [3, 1, 6, 2]
# What each part of a step takes; "decode" is in no stopwatch, "get" is the wait for a rollout.
SECONDS = {
    "generate": 4.0, "score": 1.0, "decode": 0.25, "fit": 1.5, "broadcast_to_vllm": 0.5,
    "save_checkpoint": 3.0, "get": 2.0,
}  # fmt: skip
# Arguments of the command: in groups, and flat as before 0.10; None is with _ for the dot.
ARGUMENTS = {
    "actor.model_name_or_path": "pretrain", "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "train.max_epochs": "max_epochs", "critic.freezing_steps": "freezing_actor_steps",
    "train.async_enable": "async_train", "vllm.num_engines": "vllm_num_engines",
    "vllm.enable_prefix_caching": "enable_prefix_caching", "ckpt.save_steps": "save_steps",
    "train.colocate_all": "colocate_all_models", "reward.model_name_or_path": "reward_pretrain",
    "train.colocate_actor_ref": "colocate_actor_ref", "actor.num_gpus_per_node": None,
    "ref.num_gpus_per_node": None, "critic.num_gpus_per_node": None,
    "reward.num_gpus_per_node": None, "train.colocate_critic_reward": "colocate_critic_reward",
}  # fmt: skip


class LocalActor:
    """Ray's actor class, in this process."""

    def __init__(self, trainer):
        modified = type(trainer.__name__, (trainer,), {"__ray_actor_class__": trainer})
        self.__ray_metadata__ = SimpleNamespace(modified_class=modified)

    def remote(self, *args, **kwargs):
        instance = self.__ray_metadata__.modified_class(*args, **kwargs)
        return LocalHandle(instance)


class LocalHandle:
    def __init__(self, instance):
        self.instance = instance

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.instance, name))


def ray_functions():
    return {
        "remote": lambda *args, **kwargs: LocalActor(args[0]) if args else LocalActor,
        "get": lambda found: found,
        "is_initialized": lambda: True,
    }


def stub(monkeypatch, name, **attributes):
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def double(monkeypatch):
    """Put modules of OpenRLHF's names in its place, and of Ray's; return how samples are made."""
    stub(monkeypatch, "ray", **ray_functions())
    monkeypatch.syspath_prepend(str(DOUBLE))
    return importlib.import_module("openrlhf.trainer.ppo_trainer").process_response_into_experience


def real(monkeypatch):
    """Import the real modules without what needs a GPU; return how samples are made."""
    pytest.importorskip("openrlhf", reason="not installed: tox run -e openrlhf-0.11.2")
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    nothing = object
    stub(monkeypatch, "vllm", SamplingParams=nothing)
    stub(monkeypatch, "openrlhf.utils.deepspeed", DeepspeedStrategy=nothing)
    stub(monkeypatch, "openrlhf.trainer.ppo_utils.experience_maker", RemoteExperienceMaker=nothing)
    names = ("create_vllm_engines", "batch_vllm_engine_call")
    engines = {name: lambda *args, **kwargs: [] for name in names}
    stub(monkeypatch, "openrlhf.trainer.ray", **engines)
    stub(monkeypatch, "openrlhf.trainer.ray.vllm_engine", **engines)
    stub(monkeypatch, "openrlhf.trainer.ray.ppo_actor", PolicyModelActor=nothing)
    stub(monkeypatch, "openrlhf.trainer.ray.ppo_critic", CriticModelActor=nothing)
    stub(
        monkeypatch, "openrlhf.trainer.ray.launcher",
        RayActorGroup=nothing, ReferenceModelActor=nothing, RewardModelActor=nothing,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's and others', at import
        placement = importlib.import_module("ray.util.placement_group")
        import openrlhf.utils
        from openrlhf.trainer import ppo_trainer, ppo_trainer_async
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    for name, function in ray_functions().items():
        monkeypatch.setattr(ray, name, function)
    placed = SimpleNamespace(ready=lambda: None)
    monkeypatch.setattr(placement, "placement_group", lambda *a, **k: placed)
    strategy = lambda args: SimpleNamespace(args=args, print=lambda *args: None)  # noqa: E731
    monkeypatch.setattr(openrlhf.utils, "get_strategy", strategy)
    for module, name in (
        (ppo_trainer, "PPOTrainer"),
        (ppo_trainer_async, "PPOTrainerAsync"),
        (ppo_trainer_async, "TrainingActor"),
    ):
        original = getattr(module, name).__ray_metadata__.modified_class.__ray_actor_class__
        monkeypatch.setattr(module, name, LocalActor(original))
    generator = SamplesGenerator.__new__(SamplesGenerator)
    return generator._process_response_into_experience


class OpenRLHF:
    """OpenRLHF's command, run in this process; with collaborators that take ``SECONDS``."""

    def __init__(self, monkeypatch, clock, make_sample):
        self.clock, self.monkeypatch = clock, monkeypatch
        self.make_sample, self.reward, self.steps = make_sample, 1.0, 2
        self.sync = importlib.import_module("openrlhf.trainer.ppo_trainer")
        self.asynchronous = importlib.import_module("openrlhf.trainer.ppo_trainer_async")
        self.statuses = []
        # Restored at the end, whatever ``measure`` put there.
        monkeypatch.setattr(self.sync, "PPOTrainer", self.sync.PPOTrainer)
        trainer = self.asynchronous.TrainingActor
        monkeypatch.setattr(self.asynchronous, "TrainingActor", trainer)
        for module in (self.sync, self.asynchronous):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=clock))
            monkeypatch.setattr(module, "get_tokenizer", lambda *args, **kwargs: self)
        monkeypatch.setattr(self.sync, "prepare_datasets", lambda *args: (Loader(), None, 2))
        monkeypatch.setattr(self.sync, "SamplesGenerator", lambda **kwargs: self)
        monkeypatch.setattr(self.sync, "RemoteExperienceMaker", lambda *args, **kwargs: self)
        monkeypatch.setattr(self.asynchronous, "Queue", lambda maxsize: self)
        launcher = importlib.import_module("openrlhf.trainer.ray.launcher")
        monkeypatch.setattr(launcher, "RayActorGroup", lambda *args, **kwargs: self)
        if hasattr(self.asynchronous, "VLLMLock"):
            local = SimpleNamespace(remote=lambda *args, **kwargs: LocalHandle(self))
            monkeypatch.setattr(self.asynchronous, "VLLMLock", local)
            monkeypatch.setattr(self.asynchronous, "GenerateSamplesActor", local)

        base = self.sync.BasePPOTrainer
        original = base.save_logs_and_checkpoints

        def save(trainer, global_step, logs_dict=None, client_states=None):
            self.statuses.append((global_step, dict(logs_dict)))
            return original(trainer, global_step, logs_dict, client_states)

        monkeypatch.setattr(base, "save_logs_and_checkpoints", save)

    def give(self, grouped, **arguments):
        """Set the command line; arguments by their names in groups, ``__`` for the dot."""
        words = ["train_ppo_ray"]
        for key, value in arguments.items():
            name = key.replace("__", ".")
            flat = ARGUMENTS[name] or name.replace(".", "_")
            words += [f"--{name if grouped else flat}"] + ([] if value is True else [str(value)])
        self.monkeypatch.setattr(sys, "argv", words)

    def run(self, grouped, **arguments):
        self.give(grouped, **arguments)
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

    def spend(self, what):
        self.clock.advance(SECONDS.get(what, 0.0))

    # As the generator of samples, and the queue that brings them.
    def generate_samples(self, **kwargs):
        self.spend("generate")
        if not self.steps:
            return [], None, 0, True
        self.steps -= 1
        return self.samples(), None, 2, False

    def get(self, block):
        self.spend("get")
        self.steps -= 1
        return "done" if self.steps < 0 else (self.samples(), {}, None, 9.0)

    def put(self, item, block):
        pass

    def samples(self):
        return [
            self.make_sample(
                {
                    "observation_tokens": list(range(total)), "action_ranges": sampled,
                    "rollout_log_probs": None, "prompt": "", "label": "", "reward": self.reward,
                }
            )
            for total, sampled in zip(TOTALS, SAMPLED, strict=True)
        ]  # fmt: skip

    # As the maker of experience and the tokenizer.
    def make_experience_batch(self, samples):
        self.spend("score")
        for sample in samples:
            sample.rewards = sample.info["reward"] = torch.ones(1)
        return samples

    def decode(self, *args, **kwargs):
        self.spend("decode")
        return ["text"]

    batch_decode = decode

    # As the groups of models.
    def async_run_method(self, method_name, **kwargs):
        self.spend(method_name)
        return [{"loss": 0.5}] if method_name == "fit" else []

    def async_run_method_batch(self, *args, **kwargs):
        return []

    async_init_model_from_pretrained = async_save_model = async_run_method_batch

    # As the lock, and as the actor that generates.
    def nothing(self, *args, **kwargs):
        return 0

    acquire = release = fit = get_max_steps = nothing


class Loader(list):
    def state_dict(self):
        return {}


@pytest.fixture(params=[double, real])
def openrlhf(request, monkeypatch, tmp_path, clock):
    """OpenRLHF's command and trainers; real ones, and ones of their shape."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        monkeypatch.delitem(sys.modules, name)
    yield OpenRLHF(monkeypatch, clock, request.param(monkeypatch))
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        sys.modules.pop(name)


@pytest.fixture(params=["groups", "flat"])
def grouped(request, openrlhf):
    """Whether arguments are in groups, as since 0.10; a real version has the one or the other."""
    own = "args.rollout." in Path(openrlhf.sync.__file__).read_text()
    if "double" not in openrlhf.sync.__file__ and own != (request.param == "groups"):
        pytest.skip("this version has the other arguments")
    return request.param == "groups"


def records(run_dir):
    return read_journal(run_dir).segments[-1].episodes


SIZES = {
    "actor__num_gpus_per_node": 4, "ref__num_gpus_per_node": 4, "critic__num_gpus_per_node": 2,
    "reward__num_gpus_per_node": 1,
}  # fmt: skip


def test_steps_become_records(openrlhf, grouped, tmp_path, clock):
    openrlhf.reward = None
    measure(models=MODELS, run_dir=tmp_path / "run", clock=clock, peak_tflops=1.0)
    openrlhf.run(
        grouped, actor__model_name_or_path="x", reward__model_name_or_path="x", vllm__num_engines=3,
        rollout__n_samples_per_prompt=2, vllm__enable_prefix_caching=True, train__max_epochs=2,
        critic__freezing_steps=0, ckpt__save_steps=1, **SIZES,
    )  # fmt: skip
    first, second = records(tmp_path / "run")
    assert (first.episode, second.episode) == (0, 1)
    assert not first.faults
    assert not second.faults
    # The actor is frozen in the first; the second begins with the first one's checkpoint, which
    # has two models.
    times = {"generate": 4.0, "score": 1.0, "weight_sync": 0.5}
    for record, learn, other in ((first, 1.5, 0.25), (second, 3.0, 6.25)):
        metrics = record.metrics
        found = {name: metrics[f"perf/time/{name}_s"] for name in times}
        assert found == times
        assert metrics["perf/time/learn_s"] == learn
        assert metrics["perf/time/other_s"] == other
        assert metrics["perf/time/episode_s"] == 5.5 + learn + other
        assert metrics["perf/tokens/prompt"] == sum(PROMPTS)
        assert metrics["perf/tokens/response"] == sum(RESPONSES)
        assert metrics["perf/samples/learned"] == 2 * 4

    cost = CostModel.traced(CONFIG)
    generate = float(cost.generate(PROMPTS, RESPONSES, shared_prompt=2).sum())
    forward = float(cost.forward(TOTALS).sum())
    learn = 2 * float(cost.forward_backward(TOTALS).sum())
    assert first.metrics["perf/flops/learn"] == pytest.approx(learn)
    assert metrics["perf/flops/learn"] == pytest.approx(2 * learn)
    assert metrics["perf/flops/score"] == pytest.approx(4 * forward)
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    # Trainers: 4 of the actor, 4 of the reference, 2 of the critic, 1 of the reward model.
    per_device = {"learn": 2 * learn / 3.0 / 11, "generate": generate / 4.0 / 3}
    for phase, expected in per_device.items():
        found = metrics[f"perf/tflops/{phase}_per_device"]
        assert found == pytest.approx(expected / 1e12)


def test_an_asynchronous_step_lasts_what_openrlhf_says(openrlhf, grouped, tmp_path, clock):
    measure(models=MODELS, run_dir=tmp_path / "run", clock=clock)
    openrlhf.run(
        grouped, actor__model_name_or_path="x", reward__model_name_or_path="x",
        train__async_enable=True, vllm__num_engines=2, rollout__n_samples_per_prompt=2,
        train__colocate_all=True, **SIZES | {"critic__num_gpus_per_node": 4},
    )  # fmt: skip
    first, _ = records(tmp_path / "run")
    assert not first.faults
    metrics = first.metrics
    assert metrics["perf/time/episode_s"] == 2 + 1 + 0.25 + 3 + 0.5
    assert metrics["perf/time/generate_s"] == 9.0
    assert metrics["perf/time/overlap_s"] == (9 + 1 + 3 + 0.5) - 6.75
    cost = CostModel.traced(CONFIG)
    # No prefix cache: each sample prefills its prompt. The rewards came with the samples.
    generate = float(cost.generate(PROMPTS, RESPONSES).sum())
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    forward = float(cost.forward(TOTALS).sum())
    assert metrics["perf/flops/score"] == pytest.approx(3 * forward)
    # Only the models that train are on the same GPUs.
    learn = 2 * float(cost.forward_backward(TOTALS).sum())
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(learn / 3 / 4 / 1e12)
    per_device = metrics["perf/tflops/generate_per_device"]
    assert per_device == pytest.approx(generate / 9 / 2 / 1e12)


COLOCATED = [
    (("all",), 4, 3.0, None),
    (("all", "critic_reward"), 6, 3.0, None),  # which get GPUs of their own even so
    (("actor_ref", "critic_reward"), 6, 3.0, 4),
    (("actor_ref",), 8, 3.0, 4),
    ((), 12, 3.0, 4),
]


@pytest.mark.parametrize(("colocated", "trainers", "seconds", "rollout"), COLOCATED)
def test_gpus_are_counted_as_the_models_are_placed(
    openrlhf, grouped, tmp_path, clock, colocated, trainers, seconds, rollout
):
    measure(models=MODELS, run_dir=tmp_path / "run", clock=clock)
    sizes = SIZES | {"reward__num_gpus_per_node": 2}
    openrlhf.run(
        grouped, actor__model_name_or_path="x", reward__model_name_or_path="x", vllm__num_engines=4,
        rollout__n_samples_per_prompt=2, **sizes,
        **{f"train__colocate_{which}": True for which in colocated},
    )  # fmt: skip
    metrics = records(tmp_path / "run")[0].metrics
    cost = CostModel.traced(CONFIG)
    learn = 2 * float(cost.forward_backward(TOTALS).sum())
    found = metrics["perf/tflops/learn_per_device"]
    assert found == pytest.approx(learn / seconds / trainers / 1e12)
    generate = float(cost.generate(PROMPTS, RESPONSES).sum())
    found = metrics["perf/tflops/generate_per_device"]
    assert found == pytest.approx(generate / 4 / (rollout or trainers) / 1e12)


@pytest.mark.parametrize("broken", ["sample", "record_step"])
def test_openrlhf_logs_the_same_and_a_fault_inside_goes_on(
    openrlhf, grouped, tmp_path, clock, monkeypatch, broken
):
    arguments = {"actor__model_name_or_path": "x", "reward__model_name_or_path": "x"}
    openrlhf.run(grouped, **arguments, rollout__n_samples_per_prompt=2, vllm__num_engines=1)
    expected, openrlhf.statuses = openrlhf.statuses, []
    assert [step for step, _ in expected] == [1, 2]

    restore = measure(models=MODELS, run_dir=tmp_path / "run", clock=clock)
    openrlhf.steps, calls = 2, []

    def break_first(function):
        def broken_once(*args):
            calls.append(args)
            if broken == "record_step" and len(calls) == 1:
                raise RuntimeError("a defect of ours")
            result = function(*args)
            if broken == "sample" and len(calls) == 1:
                result.total_length = "eight"
            return result

        return broken_once

    if broken == "sample":
        openrlhf.make_sample = break_first(openrlhf.make_sample)
    else:
        original = PerformanceEvaluator.record_step
        monkeypatch.setattr(PerformanceEvaluator, "record_step", break_first(original))
    openrlhf.run(grouped, **arguments, rollout__n_samples_per_prompt=2, vllm__num_engines=1)
    assert openrlhf.statuses == expected
    (second,) = records(tmp_path / "run")
    assert second.metrics["perf/time/other_s"] == 0.25

    restore()
    openrlhf.steps = 2
    openrlhf.run(grouped, **arguments, rollout__n_samples_per_prompt=2, vllm__num_engines=1)
    assert len(records(tmp_path / "run")) == 1


def test_a_failure_of_training_stays_what_it_is_and_ends_the_record(
    openrlhf, grouped, tmp_path, clock
):
    measure(models=MODELS, run_dir=tmp_path / "run", clock=clock)

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    save = openrlhf.sync.BasePPOTrainer.save_logs_and_checkpoints

    def save_then_break(*args, **kwargs):
        save(*args, **kwargs)
        openrlhf.make_experience_batch = broken

    openrlhf.monkeypatch.setattr(
        openrlhf.sync.BasePPOTrainer, "save_logs_and_checkpoints", save_then_break
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        openrlhf.run(
            grouped, actor__model_name_or_path="x", reward__model_name_or_path="x",
            rollout__n_samples_per_prompt=2, vllm__num_engines=1,
        )  # fmt: skip
    assert len(records(tmp_path / "run")) == 1


@pytest.mark.parametrize("missing", ["train_step", "save_logs_and_checkpoints"])
def test_a_version_without_a_method_is_named(openrlhf, monkeypatch, missing):
    original = openrlhf.sync.PPOTrainer
    monkeypatch.delattr(openrlhf.sync.BasePPOTrainer, missing)
    message = rf"openrlhf .* has no PPOTrainer\.{missing} in openrlhf\.trainer\.ppo_trainer"
    with pytest.raises(RuntimeError, match=message):
        measure(models=MODELS)
    assert openrlhf.sync.PPOTrainer is original


def test_a_version_without_a_trainer_is_named_and_nothing_replaced(openrlhf, monkeypatch):
    original = openrlhf.sync.PPOTrainer
    monkeypatch.delattr(openrlhf.asynchronous, "TrainingActor")
    with pytest.raises(RuntimeError, match="has no Ray actor TrainingActor in openrlhf"):
        measure(models=MODELS)
    assert openrlhf.sync.PPOTrainer is original


def test_bad_options_are_named_where_training_is_launched(openrlhf):
    with pytest.raises(ValueError, match="peak_tflops is 0"):
        measure(models=MODELS, peak_tflops=0)


def example():
    (found,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return found


def test_the_readme_works_as_it_stands(openrlhf, grouped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    openrlhf.give(
        grouped, actor__model_name_or_path="x", reward__model_name_or_path="x",
        rollout__n_samples_per_prompt=2, vllm__num_engines=1,
    )  # fmt: skip
    exec(compile(example(), str(README), "exec"), {"config": CONFIG})
    assert "Performance summary" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("arguments", [[], ["--train.async_enable"]])
def test_the_record_is_written_in_rays_actor(tmp_path, arguments):
    pytest.importorskip("ray", reason="Ray is not installed")
    config = f"from transformers import LlamaConfig\nconfig = LlamaConfig(**{CONFIG.to_dict()!r})"
    (tmp_path / "launch.py").write_text(f"{config}\n{example()}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(DOUBLE), os.environ.get("PYTHONPATH", "")]),
        "COATI_PERF_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "launch.py", "--rollout.n_samples_per_prompt", "2", *arguments]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=240)
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
    (run,) = (tmp_path / "coati_perf_runs").iterdir()
    records = read_journal(run).segments[-1].episodes
    assert [record.metrics["perf/tokens/response"] for record in records] == [6, 6]
    assert not any(record.faults for record in records)
