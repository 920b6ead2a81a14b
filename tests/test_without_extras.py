"""The core without any optional package (``tox run -e minimal`` runs this in such a place)."""

from __future__ import annotations

import importlib.util

import pytest

from coati_perf import PerformanceEvaluator, SinkError, read_journal
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


@pytest.mark.skipif(bool(importlib.util.find_spec("transformers")), reason="transformers is here")
def test_the_demo_names_its_extra(capsys):
    assert main(["demo"]) == 2
    assert "pip install 'coati-perf[demo]'" in capsys.readouterr().err
