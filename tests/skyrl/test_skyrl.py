"""Steps of SkyRL's trainer as records, by its own loop where its package is installed."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import re
import sys
import types
import typing
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import typing_extensions

pytest.importorskip("transformers")

from transformers import LlamaConfig

from coati_perf import CostModel, PerformanceEvaluator, read_journal
from coati_perf_skyrl import CoatiPerfCallback

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
# Two samples of each of two prompts. The second has two tokens of the environment among its
# response, the third is filtered out of the loss.
PROMPTS, RESPONSES = [3, 3, 5, 5], [4, 6, 2, 5]
LOSS_MASKS = [[1] * 4, [1, 1, 0, 0, 1, 1], [0] * 2, [1] * 5]
GIVEN, SAMPLED = [3, 5, 5, 5], [4, 4, 2, 5]
PAD_ROWS = 2
# Two epochs of two models learn, three models score; what one call takes is in the last column.
FORWARD_S, LEARN_S = 0.5, 0.75
TIMES = {"generate": 4.0, "score": 3 * FORWARD_S, "learn": 2 * 2 * LEARN_S, "weight_sync": 0.25,
         "postprocess_generator_output": 0.125, "save_checkpoints": 1.0}  # fmt: skip
BESIDE_S, EVAL_S = 0.5, 7.0
STEP_S = sum(TIMES.values()) + BESIDE_S
STEPS = 3

ABSENT = (
    "ray", "ray.actor", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies",
    "ray.util.queue", "ray.runtime_env", "loguru", "jaxtyping", "torchdata",
    "torchdata.stateful_dataloader", "tensordict", "fsspec", "httpx", "aiohttp", "yaml",
    "cloudpickle",
)  # fmt: skip


def config(nodes=SimpleNamespace):
    """Set of SkyRL's settings what is looked at, in a tree of namespaces or in the real one."""
    tree = nodes()
    if nodes is SimpleNamespace:
        tree.trainer = nodes(placement=nodes(), critic=nodes(model=nodes()))
        tree.generator = nodes(inference_engine=nodes(), step_wise_trajectories=False)
    tree.trainer.critic.model.path = "critic"
    tree.trainer.update_epochs_per_batch = 2
    tree.generator.n_samples_per_prompt = 2
    for name in ("policy", "critic"):
        setattr(tree.trainer.placement, f"{name}_num_nodes", 2)
        setattr(tree.trainer.placement, f"{name}_num_gpus_per_node", 4)
    tree.trainer.placement.colocate_all = True
    sizes = {"num_engines": 2, "tensor_parallel_size": 4, "pipeline_parallel_size": 1,
             "data_parallel_size": 1}  # fmt: skip
    for name, size in sizes.items():
        setattr(tree.generator.inference_engine, name, size)
    return tree


class Double:
    """A trainer that fires the events of SkyRL 0.3 with batches and logs of its shape."""

    def __init__(self):
        self.cfg, self.has_critic, self.logged, self.callbacks = config(), True, [], []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def fire(self, event, **fields):
        fields = {"batch": None, "metrics": None, "logs": None, "ckpt_path": None} | fields
        for callback in self.callbacks:
            getattr(callback, event)(self, SimpleNamespace(**fields), SimpleNamespace())

    def run(self):
        self.fire("on_train_start")
        self.fire("on_eval_start")
        self.fire("on_log", logs={"eval/score": 0.5})
        self.fire("on_epoch_start")
        for _ in range(STEPS):
            self.fire("on_step_start")
            self.fire("on_step_end", batch=batch())
            self.fire("on_save", ckpt_path="there")
            self.fire("on_log", logs={"eval/score": 0.5})
            inner = {"critic_train": 1.5, "policy_train": 1.5, "cleanup_old_checkpoints": 1.0}
            names = {"score": "fwd_logprobs_values_reward", "learn": "train_critic_and_policy",
                     "weight_sync": "sync_weights"}  # fmt: skip
            times = {names.get(phase, phase): seconds for phase, seconds in TIMES.items()}
            times |= {"step": STEP_S, "eval": EVAL_S, **inner}
            logs = {f"timing/{name}": seconds for name, seconds in times.items()}
            self.fire("on_log", logs=logs)
            self.logged.append(logs)
        self.fire("on_epoch_end")
        self.fire("on_train_end")


def batch():
    """Return what SkyRL 0.3 makes of the samples, padded at the end by copies of the first."""
    rows = [*range(4), *[0] * PAD_ROWS]

    def right_aligned(lists, width):
        padded = torch.tensor([[0] * (width - len(values)) + values for values in lists])
        return padded[rows]

    totals = zip(PROMPTS, RESPONSES, strict=True)
    tensors = {
        "attention_mask": right_aligned([[1] * (p + r) for p, r in totals], 10),
        "response_mask": right_aligned([[1] * r for r in RESPONSES], 6),
        "loss_mask": right_aligned(LOSS_MASKS, 6).float(),
        "rollout_logprobs": None,
        **dict.fromkeys(("action_log_probs", "base_action_log_probs", "values"), torch.zeros(6, 6)),
    }
    tensors["loss_mask"][4:] = 0

    class Batch(dict):
        batch_size = 6
        metadata = {"pad_size": PAD_ROWS}

    return Batch(tensors)


def double(monkeypatch):
    return Double()


def real(monkeypatch):
    """Return SkyRL's own trainer and loop, of which Ray, engine and models are doubles."""
    pytest.importorskip("skyrl", reason="SkyRL is not installed: tox run -e skyrl-0.3.0")
    stub_what_is_absent(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # others', at import
        from skyrl.train import trainer as module
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.utils import utils

    cfg = config(SkyRLTrainConfig)
    settings = {"train_batch_size": 2, "policy_mini_batch_size": 2, "critic_mini_batch_size": 2,
                "ckpt_interval": 1, "eval_interval": 1, "print_example_interval": -1,
                "recompute_old_logprobs_per_minibatch": False, "resume_mode": "none"}  # fmt: skip
    for name, value in settings.items():
        setattr(cfg.trainer, name, value)
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.trainer.enable_ray_gpu_monitor = False
    cfg.environment.env_class = "none"
    monkeypatch.setattr(module, "configure_ray_worker_logging", lambda: None)
    now = [0.0]
    monkeypatch.setattr(utils, "time", SimpleNamespace(time=lambda: now[0]))

    def pass_time(seconds):
        now[0] += seconds

    logged = []
    tracker = SimpleNamespace(
        log=lambda logs, **_: logged.append(logs) if "timing/step" in logs else None,
        finish=lambda: None,
    )
    engine = SimpleNamespace()
    generator, dispatch = generator_and_dispatch(pass_time)
    tokenizer = SimpleNamespace(pad_token_id=0)
    make = trainer_class(module, pass_time)
    trainer = make(cfg, tracker, tokenizer, None, engine, generator)
    engine.sleep = trainer.sleep
    trainer.logged, trainer.dispatch, trainer.ref_model = logged, dispatch, object()
    return trainer


def generator_and_dispatch(pass_time):
    class Generator:
        async def generate(self, prompts):
            pass_time(TIMES["generate"])
            return {
                "prompt_token_ids": [[1] * p for p in PROMPTS],
                "response_ids": [[2] * r for r in RESPONSES],
                "rewards": [1.0, 0.0, 1.0, 0.0], "loss_masks": LOSS_MASKS, "stop_reasons": None,
                "rollout_metrics": None, "rollout_logprobs": None,
            }  # fmt: skip

    class Dispatch:
        def get_lcm_dp_size(self):
            return 3  # which pads the four samples by two

        def forward(self, model, data):
            pass_time(FORWARD_S)
            row = {"logprobs": [0.0] * 6, "values": [0.0] * 6}
            return SimpleNamespace(loss_fn_outputs=[row] * len(data))

        def stage_data(self, model, data, boundaries):
            return list(boundaries)

        def forward_backward_from_staged(self, model, chunk):
            pass_time(LEARN_S)
            return SimpleNamespace(metrics={})

        def optim_step(self, model):
            return 1.0

        def empty_cache(self, *model):
            pass

        async def save_weights_for_sampler(self):
            pass_time(TIMES["weight_sync"])

    return Generator(), Dispatch()


def trainer_class(module, pass_time):
    class Trainer(module.RayPPOTrainer):
        def _build_train_dataloader_and_compute_training_steps(self):
            row = {"prompt": [], "env_class": None, "env_extras": {}}
            self.train_dataloader = [[row | {"uid": "a"}, row | {"uid": "b"}]] * STEPS
            self.total_training_steps = STEPS

        def init_weight_sync_state(self):
            pass

        def _remove_tail_data(self, entries):
            return entries  # or the batch would never need rows that pad

        def postprocess_generator_output(self, *output):
            pass_time(TIMES["postprocess_generator_output"])
            return super().postprocess_generator_output(*output)

        def save_checkpoints(self):
            with module.Timer("cleanup_old_checkpoints", self.all_timings):
                pass_time(TIMES["save_checkpoints"])

        async def eval(self, **_):
            pass_time(EVAL_S)
            return {"eval/score": 0.5}

        def _profiler_step(self):
            pass

        async def sleep(self):  # its engine's
            pass_time(BESIDE_S)

        def run(self):
            asyncio.run(self.train())

    return Trainer


def stub_what_is_absent(monkeypatch):
    class Anything:
        def __class_getitem__(cls, _):
            return cls

    class Module(types.ModuleType):
        __path__ = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything

    for name in ABSENT:
        parent, _, child = name.rpartition(".")
        stubbed = isinstance(sys.modules.get(parent), Module)
        if not stubbed and importlib.util.find_spec(name) is not None:
            continue
        module = Module(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        if stubbed:
            setattr(sys.modules[parent], child, module)
    if isinstance(sys.modules.get("ray"), Module):
        sys.modules["ray"].remote = lambda *given, **_: given[0] if given else lambda it: it
        sys.modules["ray"].is_initialized = lambda: False
    if isinstance(sys.modules.get("loguru"), Module):
        sys.modules["loguru"].logger = MagicMock()
    # SkyRL is for a Python that has a generic TypedDict.
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)


@pytest.fixture(params=[double, real])
def trainer(request, monkeypatch, tmp_path):
    return request.param(monkeypatch)


def make_evaluator(tmp_path):
    models = {"actor": CONFIG, "initial": CONFIG, "critic": CONFIG}
    return PerformanceEvaluator(0, 0, 0, 0, models=models, run_dir=tmp_path, peak_tflops=1.0)


def records(tmp_path):
    return read_journal(tmp_path).segments[-1].episodes


def test_a_step_becomes_a_record_and_what_is_logged_stays(trainer, tmp_path):
    trainer.add_callback(CoatiPerfCallback(make_evaluator(tmp_path)))
    trainer.run()

    assert len(trainer.logged) == STEPS
    assert trainer.logged[1]["timing/step"] == STEP_S
    assert not [name for name in trainer.logged[1] if "perf/" in name]
    assert [record.episode for record in records(tmp_path)] == [0, 1, 2]
    record = records(tmp_path)[1]
    metrics = record.metrics
    assert not record.faults
    times = {f"perf/time/{phase}_s": seconds for phase, seconds in TIMES.items()}
    times |= {"perf/time/episode_s": STEP_S, "perf/time/other_s": BESIDE_S}
    found = {name: metrics[name] for name in metrics if re.match(r"perf/time/[^/]*_s$", name)}
    assert {name: seconds for name, seconds in found.items() if seconds} == times
    assert metrics["perf/tokens/prompt"] == sum(GIVEN)
    assert metrics["perf/tokens/response"] == sum(SAMPLED)
    assert metrics["perf/samples/learned"] == 2 * 4

    model = CostModel.traced(CONFIG)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    generate = float(model.generate(GIVEN, SAMPLED, shared_prompt=2).sum())
    learn = 2 * 2 * float(model.forward_backward(lengths).sum())
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    assert metrics["perf/flops/score"] == pytest.approx(3 * float(model.forward(lengths).sum()))
    assert metrics["perf/flops/learn"] == pytest.approx(learn)
    per_device = learn / TIMES["learn"] / 8 / 1e12  # two nodes of four
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(per_device)


def test_without_colocation_the_critic_and_the_engines_have_devices_of_their_own(trainer, tmp_path):
    trainer.cfg.trainer.placement.colocate_all = trainer.colocate_all = False
    trainer.cfg.generator.inference_engine.num_engines = 3
    trainer.add_callback(CoatiPerfCallback(make_evaluator(tmp_path)))
    trainer.run()
    metrics = records(tmp_path)[0].metrics
    flops = {phase: metrics[f"perf/flops/{phase}"] for phase in ("generate", "learn")}
    devices = {"generate": 3 * 4, "learn": 8 + 8}
    for phase, number in devices.items():
        assert metrics[f"perf/tflops/{phase}_per_device"] == pytest.approx(
            flops[phase] / TIMES[phase] / number / 1e12
        )


def test_a_model_that_did_not_score_is_not_counted(tmp_path):
    trainer = Double()
    trainer.has_critic = False
    evaluator = make_evaluator(tmp_path)
    callback = CoatiPerfCallback(evaluator)
    found = batch()
    found["action_log_probs"] = found["values"] = None
    callback.on_step_end(trainer, SimpleNamespace(batch=found), None)
    logs = {"timing/step": 10.0, "timing/train_critic_and_policy": 3.0}
    callback.on_log(trainer, SimpleNamespace(logs=logs), None)
    evaluator.close()
    metrics = records(tmp_path)[0].metrics
    model = CostModel.traced(CONFIG)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert metrics["perf/flops/score"] == pytest.approx(float(model.forward(lengths).sum()))
    learn = 2 * float(model.forward_backward(lengths).sum())
    assert metrics["perf/flops/learn"] == pytest.approx(learn)


@pytest.mark.parametrize("broken", ["declare_devices", "record_step"])
def test_a_step_that_is_not_understood_is_a_fault_and_training_goes_on(
    trainer, tmp_path, broken, monkeypatch, caplog
):
    evaluator = make_evaluator(tmp_path)
    monkeypatch.setattr(evaluator, broken, None)
    trainer.add_callback(CoatiPerfCallback(evaluator))
    trainer.run()
    assert len(trainer.logged) == STEPS
    assert "a step of SkyRL: TypeError" in caplog.text


def test_a_step_whose_times_are_not_logged_is_named(tmp_path, caplog):
    trainer, callback = Double(), CoatiPerfCallback(make_evaluator(tmp_path))
    for _ in range(2):
        callback.on_step_end(trainer, SimpleNamespace(batch=batch()), None)
    assert "SkyRL did not log 'timing/step' of a step" in caplog.text


def test_an_event_of_a_later_version_is_ignored(tmp_path):
    callback = CoatiPerfCallback(make_evaluator(tmp_path))
    callback.on_something_new(None, None, None)
    with pytest.raises(AttributeError, match="no attribute 'no_event'"):
        callback.no_event  # noqa: B018


def test_what_is_no_evaluator_is_named_at_once():
    with pytest.raises(TypeError, match="evaluator is 3; expected a PerformanceEvaluator"):
        CoatiPerfCallback(3)


def test_the_readme_works_as_it_stands(trainer, tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_skyrl/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(readme), "exec"), {"config": CONFIG, "trainer": trainer})
    trainer.run()
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
