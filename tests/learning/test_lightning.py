"""Lightning's real trainer, beside torch's own count of FLOP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")

from coati_perf import CostModel, read_journal  # noqa: E402
from coati_perf_lightning import CoatiPerfCallback  # noqa: E402
from independent_count import executed_flop  # noqa: E402

BATCH, LENGTH, REAL = 2, 12, 9  # as in conftest.py

# Lightning warns of small data, absent loggers and its own use of torch.
pytestmark = pytest.mark.filterwarnings("default")


class Module(lightning.LightningModule):
    def __init__(self, model, *, manual=False):
        super().__init__()
        self.model = model
        self.automatic_optimization = not manual

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch, index):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def settings(tmp_path):
    def settings(**more):
        return {
            "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "default_root_dir": str(tmp_path),
            "log_every_n_steps": 1, **more,
        }  # fmt: skip

    return settings


def loader(batches):
    return torch.utils.data.DataLoader(batches, batch_size=None)


def total(segment, name):
    return sum(record.metrics.get(name, 0.0) for record in segment.episodes)


CASES = {
    "as it comes": ({}, {}, 6),
    "accumulation, which the last batch cuts short": ({"accumulate_grad_batches": 4}, {}, 2),
    "manual optimisation": ({}, {"manual": True}, 6),
    "four steps an episode": ({"log_every_n_steps": 4}, {}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fit_is_measured_as_torch_has_it(case, model, batches, settings, tmp_path):
    trainer_options, module_options, episodes = CASES[case]
    callback = CoatiPerfCallback(attention="full", run_dir=tmp_path / "run", peak_tflops=1.0)
    trainer = lightning.Trainer(callbacks=[callback], **settings(**trainer_options))
    module = Module(model, **module_options)
    CostModel.traced(model, attention="full")  # from the cache later, or torch would count it too
    flop = executed_flop(lambda: trainer.fit(module, loader(batches)))
    segment = read_journal(tmp_path / "run").segments[-1]
    assert [record.episode for record in segment.episodes] == list(range(episodes))
    assert total(segment, "perf/flops/learn_executed") == flop
    assert total(segment, "perf/tokens/learned") == 6 * (REAL + LENGTH)
    assert total(segment, "perf/samples/learned") == 6 * BATCH
    assert not any(record.faults for record in segment.episodes)
    assert segment.summary.status == "finished"


def test_a_validation_is_no_learning(model, batches, settings, tmp_path):
    callback = CoatiPerfCallback(run_dir=tmp_path / "run", steps_per_episode=6)
    trainer = lightning.Trainer(callbacks=[callback], **settings(val_check_interval=3))
    trainer.fit(Module(model), loader(batches), loader(batches))
    (record,) = read_journal(tmp_path / "run").segments[-1].episodes
    assert record.metrics["perf/samples/learned"] == 6 * BATCH
    assert "perf/flops/score" not in record.metrics


def test_a_fit_that_fails_is_a_failed_run(model, batches, settings, tmp_path):
    class Failing(Module):
        def training_step(self, batch, index):
            if index == 2:
                message = "no more"
                raise RuntimeError(message)
            return super().training_step(batch, index)

    callback = CoatiPerfCallback(run_dir=tmp_path / "run")
    trainer = lightning.Trainer(callbacks=[callback], **settings())
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(Failing(model), loader(batches))
    segment = read_journal(tmp_path / "run").segments[-1]
    assert len(segment.episodes) == 2
    assert segment.summary.status == "failed"
    assert not model._forward_pre_hooks


def test_the_trainers_tensorboard_folder_is_joined(model, batches, settings, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = lightning.loggers.TensorBoardLogger(str(tmp_path / "logs"))
    callback = CoatiPerfCallback(run_dir=tmp_path / "run")
    trainer = lightning.Trainer(callbacks=[callback], **settings(logger=logger))
    trainer.fit(Module(model), loader(batches))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Scalars("perf/samples/learned")] == list(range(6))


def test_the_trainers_wandb_run_is_joined(model, batches, settings, tmp_path, offline_wandb):
    logger = lightning.loggers.WandbLogger(save_dir=str(tmp_path), offline=True)
    callback = CoatiPerfCallback(run_dir=tmp_path / "run")
    trainer = lightning.Trainer(callbacks=[callback], **settings(logger=logger))
    trainer.fit(Module(model), loader(batches))
    rows = offline_wandb()
    assert [row["perf/episode"] for row in rows if "perf/episode" in row] == list(range(6))


def test_a_module_with_several_children_needs_a_name(model, batches, settings, tmp_path):
    class Two(Module):
        def __init__(self, model):
            super().__init__(model)
            self.other = torch.nn.Linear(1, 1)

    trainer = lightning.Trainer(callbacks=[CoatiPerfCallback()], **settings())
    with pytest.raises(ValueError, match=r"Two has 2 children \(model, other\); expected the lang"):
        trainer.fit(Two(model), loader(batches))
    callback = CoatiPerfCallback(model="model", run_dir=tmp_path / "run")
    lightning.Trainer(callbacks=[callback], **settings()).fit(Two(model), loader(batches))
    assert len(read_journal(tmp_path / "run").segments[-1].episodes) == 6


def test_the_readme_works_as_it_stands(model, batches, settings, tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "integrations/coati_perf_lightning/README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"settings": settings(), "module": Module(model), "batches": loader(batches)}
    exec(compile(example, str(readme), "exec"), names)
    assert "Performance summary" in (tmp_path / "report.txt").read_text()
