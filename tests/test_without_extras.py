"""The core without any optional package (``tox run -e minimal`` runs this in such a place)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from coati_perf import CostModel, PerformanceEvaluator, SinkError, read_journal
from coati_perf.cli import main

needs_absence = pytest.mark.parametrize("package", ["tensorboard", "wandb"])


@needs_absence
def test_a_sink_whose_package_is_missing_names_the_extra(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(SinkError, match=rf"pip install 'coati-perf\[{package}\]'"):
        PerformanceEvaluator(1, 1, 1, 1, sinks=[package])


def test_a_run_works_with_journal_and_report_alone(tmp_path):
    evaluator = PerformanceEvaluator(
        1, 1, 1, 1, run_dir=tmp_path, save_path=tmp_path / "r.txt", sinks=[f"text:{tmp_path}/2.txt"]
    )
    with evaluator.episode(0):
        pass
    evaluator.close()
    assert len(read_journal(tmp_path).segments[0].episodes) == 1
    assert (tmp_path / "r.txt").read_bytes() == (tmp_path / "2.txt").read_bytes()


def test_a_plain_module_is_traced_without_transformers(tmp_path, monkeypatch):
    """An embedding looks up, the layer takes 2 · 8 · 4 FLOP a token."""
    monkeypatch.setenv("COATI_PERF_CACHE", str(tmp_path))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4)

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids))

    assert CostModel.traced(Model()).forward([5, 7]).tolist() == [5 * 64, 7 * 64]


@pytest.mark.skipif(bool(importlib.util.find_spec("transformers")), reason="transformers is here")
def test_the_flops_command_names_its_extra(tmp_path, capsys):
    assert main(["flops", str(tmp_path)]) == 2
    assert "pip install 'coati-perf[transformers]'" in capsys.readouterr().err


@pytest.mark.skipif(bool(importlib.util.find_spec("transformers")), reason="transformers is here")
def test_the_demo_names_its_extra(capsys):
    assert main(["demo"]) == 2
    assert "pip install 'coati-perf[demo]'" in capsys.readouterr().err
