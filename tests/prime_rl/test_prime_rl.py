"""Steps of prime-rl as records, by its own monitors where there is a checkout of it."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
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

import pydantic
from transformers import LlamaConfig

from coati_perf import CostModel, PerformanceEvaluator, read_journal
from coati_perf_prime_rl import attach, share_lengths

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
)
TIMES = {
    "time/step": 10.0, "time/wait_for_batch": 4.0, "time/load_data": 0.25,
    "time/broadcast_weights": 0.5, "time/save_ckpt": 0.125, "time/forward_backward": 3.0, "step": 1,
}  # fmt: skip


def node(sampled, tokens):
    return SimpleNamespace(sampled=sampled, mask=[sampled] * tokens)


def trace(*branches):
    """Return a trace of branches, each of nodes and of the tokens in it that a sample learns."""
    made = []
    for nodes, trained in branches:
        mask = [token for one in nodes for token in one.mask]
        first = len(mask) - trained  # of the double: where the last turn begins
        made.append(SimpleNamespace(nodes=nodes, trained=[i >= first for i in range(len(mask))]))
    return SimpleNamespace(branches=made)


# A prompt of 3 with 6 tokens; then a prompt of 4 with 2 tokens, from which two turns fork: a tool's
# 3 tokens and 5 of the model, and 1 and 2; and a branch of which nothing was sampled. The shared
# turn is learned from once, so that the second sample has a prompt of 4 + 2 + 1.
SHARED = [node(sampled=False, tokens=4), node(sampled=True, tokens=2)]
FIRST = [*SHARED, node(sampled=True, tokens=5)]
SECOND = [*SHARED, node(sampled=False, tokens=1), node(sampled=True, tokens=2)]
PROMPTS, RESPONSES = [3, 4, 7], [6, 7, 2]
TOTALS = [9, 11, 9]


def episodes():
    traces = [
        trace(([node(sampled=False, tokens=3), node(sampled=True, tokens=6)], 6)),
        trace((FIRST, 7), (SECOND, 2), ([node(sampled=False, tokens=9)], 0)),
    ]
    return [SimpleNamespace(traces=[one], to_record=dict) for one in traces]


def module(monkeypatch, name, **contents):
    """Put a module in the place of one that is not there."""
    made = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__path__ = []
    made.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], own, made, raising=False)
    return made


class File:
    """The monitor that writes files."""

    def __init__(self, output_dir):
        self.file = (output_dir / "metrics.jsonl").open("a", buffering=1)

    async def log(self, data, step, kind, subset):
        if isinstance(data, dict):
            self.file.write(json.dumps({"step": step, "time": 0.0, **data}) + "\n")

    async def finalize(self):
        pass


def iter_trainable_branches(trace):
    for branch in trace.branches:
        if any(branch.trained):
            yield branch, branch.trained


def double(monkeypatch):
    """Put modules of prime-rl's names in its place, with functions as prime-rl 0.8 has them."""
    monitors = []

    async def setup(wandb=None, prime=None, file=None, *, output_dir, run_config=None):
        if os.environ.get("RANK", "0") == "0":
            monitors.append(File(output_dir))

    async def log(data, step, kind="train", subset="effective"):
        for monitor in monitors:
            await monitor.log(data, step=step, kind=kind, subset=subset)

    async def finalize():
        for monitor in monitors:
            await monitor.finalize()

    for name in ("prime_rl", "prime_rl.orchestrator"):
        module(monkeypatch, name)
    module(
        monkeypatch,
        "prime_rl.orchestrator.trajectories",
        iter_trainable_branches=iter_trainable_branches,
    )
    return module(
        monkeypatch, "prime_rl.monitors", setup=setup, log=log, finalize=finalize, MONITORS=monitors
    )


def real(monkeypatch):
    if "COATI_PRIME_RL" not in os.environ:
        pytest.skip("COATI_PRIME_RL names no checkout of prime-rl, which is on no package index")
    checkout = Path(os.environ["COATI_PRIME_RL"])
    monkeypatch.syspath_prepend(checkout / "packages/prime-rl-configs/src")
    monkeypatch.syspath_prepend(checkout / "src")
    module(monkeypatch, "pydantic_config", BaseConfig=pydantic.BaseModel, cli=None)
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils", "prime_cli", "prime_cli.core"):
        module(monkeypatch, name)
    module(monkeypatch, "verifiers.v1.utils.platform", build_samples=None)
    module(monkeypatch, "prime_cli.core.config", Config=None)
    for name in ("", ".reports", ".reports.v2", ".workspaces"):
        module(monkeypatch, f"wandb_workspaces{name}")
    module(monkeypatch, "wandb_gql", gql=None)
    for name in ("zmq", "zmq.asyncio"):
        module(monkeypatch, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "prime_rl"]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wandb's and others', at import
        monitors = importlib.import_module("prime_rl.monitors")
        importlib.import_module("prime_rl.orchestrator.trajectories")
    logger = importlib.import_module("prime_rl.utils.logger")
    monkeypatch.setattr(logger, "_LOGGER", logging.getLogger("prime_rl"))
    return monitors


class Run:
    """Plays prime-rl's two processes, one after the other."""

    def __init__(self, monitors, folder):
        self.monitors = monitors
        self.folder = folder

    def start(self):
        config = sys.modules.get("prime_rl.configs.monitors")
        file = config and config.FileMonitorConfig()
        asyncio.run(self.monitors.setup(file=file, output_dir=self.folder))

    def log(self, *logged):
        for one in logged:
            asyncio.run(self.monitors.log(*one))

    def stop(self):
        asyncio.run(self.monitors.finalize())
        for monitor in self.monitors.MONITORS:
            if hasattr(monitor, "file"):
                monitor.file.close()
        self.monitors.MONITORS.clear()

    def process(self, *logged):
        self.start()
        self.log(*logged)
        self.stop()

    def orchestrator(self, *steps):
        detach = share_lengths()
        self.start()
        for step in steps:
            self.log((episodes()[:1], step, "train", "all"))
            self.log((episodes(), step, "train", "effective"))
            self.log((episodes()[:1], step, "eval", "effective"))
            self.log(({"time/step": 9.0}, step))
        self.stop()
        detach()

    def take_written(self):
        """Return the metrics that are written to the file, and remove it."""
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return [{name: value for name, value in row.items() if name != "time"} for row in rows]


@pytest.fixture(params=[double, real])
def run(request, monkeypatch, tmp_path):
    """Return prime-rl's processes, by its own monitors, and by ones of their shape."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "outputs").mkdir()
    return Run(request.param(monkeypatch), tmp_path / "outputs")


@pytest.fixture
def evaluator(tmp_path):
    return PerformanceEvaluator(
        0, 0, 0, 0, models={"actor": CONFIG}, run_dir=tmp_path / "run", peak_tflops=1
    )


def read(evaluator):
    return read_journal(evaluator.run_dir).segments[-1].episodes


def test_a_step_becomes_a_record_and_the_rest_stays(run, evaluator, caplog):
    setup = run.monitors.setup
    logged = [(TIMES, 7), ({"perf/mfu": 30.0}, 7), (TIMES, 8)]
    run.process(*logged)
    expected = run.take_written()

    run.orchestrator(7, 8)
    files = sorted(path.name for path in (run.folder / "coati_perf").iterdir())
    assert files == ["lengths-7.json", "lengths-8.json"]
    assert len(run.take_written()) == 2
    detach = attach(evaluator, rollout_devices=2, responses_per_prompt=2)
    run.start()
    assert evaluator.run_dir is not None  # the fit began before there could be a process group
    run.log(*logged)
    detach()
    run.log((TIMES, 9))
    run.stop()
    evaluator.close()
    assert run.monitors.setup is setup
    assert run.take_written() == [*expected, TIMES]
    assert not list((run.folder / "coati_perf").iterdir())

    assert "not measured" not in caplog.text
    assert "Failed to log" not in caplog.text
    records = read(evaluator)
    assert [record.episode for record in records] == [0, 1]
    metrics = records[1].metrics
    assert not records[1].faults
    times = {
        "episode": 10.0, "learn": 3.0, "weight_sync": 0.5, "wait_for_batch": 4.0, "load_data": 0.25,
        "save_ckpt": 0.125, "other": 10 - (3 + 0.5 + 4 + 0.25 + 0.125),
    }  # fmt: skip
    found = (re.fullmatch("perf/time/(.*)_s", name) for name in metrics)
    assert {match[1]: metrics[match[0]] for match in found if match} == times
    assert metrics["perf/tokens/prompt"] == sum(PROMPTS)
    assert metrics["perf/tokens/response"] == sum(RESPONSES)
    assert metrics["perf/samples/learned"] == 3

    actor = CostModel.traced(CONFIG)
    generate = float(actor.generate(PROMPTS, RESPONSES, shared_prompt=2).sum())
    learn = float(actor.forward_backward(TOTALS).sum())
    assert metrics["perf/flops/generate"] == pytest.approx(generate)
    assert metrics["perf/flops/learn"] == pytest.approx(learn)
    assert "perf/flops/score" not in metrics
    assert "perf/tflops/generate_per_device" not in metrics
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(learn / 3.0 / 4 / 1e12)
    overall = (generate + learn) / 10.0 / (4 + 2) / 1e12
    assert metrics["perf/tflops/overall_per_device"] == pytest.approx(overall)


def test_without_lengths_there_are_times_alone_and_a_fault(run, evaluator):
    attach(evaluator, rollout_devices=2)
    run.process((TIMES, 1))
    (record,) = read(evaluator)
    (fault,) = record.faults
    assert "record_step without lengths" in fault
    assert record.metrics["perf/time/learn_s"] == 3.0
    assert record.metrics["perf/time/episode_s"] == 10.0
    assert not [name for name in record.metrics if "flops" in name or "tokens" in name]


def test_other_ranks_record_nothing(run, evaluator, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    attach(evaluator, rollout_devices=2)
    run.process((TIMES, 1))
    assert evaluator.run_dir is None


def test_what_is_not_understood_is_a_fault_and_prime_rl_goes_on(run, evaluator, caplog):
    run.orchestrator(1, 2, 3)
    (run.folder / "coati_perf/lengths-1.json").write_text("[")
    attach(evaluator, rollout_devices=2)
    run.process((TIMES, 1), (TIMES | {"time/load_data": None}, 2), (TIMES, 3))
    assert len(run.take_written()) == 3 + 3
    assert len(read(evaluator)) == 1
    assert "a step of prime-rl: TypeError" in caplog.text
    assert "a step of prime-rl: JSONDecodeError" in caplog.text
    assert "Failed to log" not in caplog.text


def test_episodes_that_are_not_understood_are_a_warning(run, caplog):
    detach = share_lengths()
    run.process(([SimpleNamespace(traces=[None], to_record=dict)], 1, "train", "effective"))
    detach()
    assert "the trainer is not told the lengths of the samples: AttributeError" in caplog.text
    assert "Failed to log" not in caplog.text
    assert not (run.folder / "coati_perf/lengths-1.json").exists()


def test_a_folder_that_cannot_be_written_is_a_fault(run, tmp_path, caplog):
    (tmp_path / "file").touch()
    evaluator = PerformanceEvaluator(
        0, 0, 0, 0, models={"actor": CONFIG}, run_dir=tmp_path / "file/run", peak_tflops=1
    )
    attach(evaluator, rollout_devices=2)
    run.process((TIMES, 1))
    assert "prime-rl's monitors: OutputError" in caplog.text
    assert len(run.take_written()) == 1


@pytest.mark.parametrize("missing", ["setup", "MONITORS"])
def test_a_version_without_the_seam_is_named(missing, evaluator, monkeypatch):
    monkeypatch.delattr(double(monkeypatch), missing)
    named = f"prime-rl of no known version has no prime_rl.monitors.{missing}"
    with pytest.raises(RuntimeError, match=named):
        attach(evaluator, rollout_devices=2)
    with pytest.raises(RuntimeError, match=named):
        share_lengths()


def test_bad_arguments_are_named_at_once(evaluator, monkeypatch):
    double(monkeypatch)
    with pytest.raises(ValueError, match="rollout_devices is 0"):
        attach(evaluator, rollout_devices=0)
    with pytest.raises(ValueError, match="responses_per_prompt is 0"):
        attach(evaluator, rollout_devices=2, responses_per_prompt=0)
    with pytest.raises(TypeError, match="expected a PerformanceEvaluator"):
        attach(None, rollout_devices=2)


def test_the_readme_works_as_it_stands(run, tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_prime_rl/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(readme), "exec"), {"config": CONFIG})
    run.process((TIMES, 1))
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
