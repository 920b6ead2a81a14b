"""What the documents say is what the code does."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_table_of_metrics_is_generated_from_the_catalogue():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.TARGET.read_text(encoding="utf-8") == generate.render()


@pytest.mark.parametrize("document", ["README.md", "docs/flops.md", "docs/sinks.md"])
def test_the_python_examples_run_as_they_stand(document, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, document, "exec"), {})
    runs = list(tmp_path.glob("coati_perf_runs/*/journal.jsonl"))
    assert bool(runs) == (document != "docs/flops.md")


def test_the_tables_of_exactness_are_those_of_the_recorded_figures():
    figures = json.loads((ROOT / "benchmarks/results/flops-2026-12-01.json").read_text())
    text = (ROOT / "docs" / "flops.md").read_text(encoding="utf-8")
    assert figures["worst"] <= 1e-9
    assert len(figures["errors"]) >= 20
    for architecture, errors in figures["errors"].items():
        cells = "".join(f" {error:.0e} |" if error else " 0 |" for error in errors.values())
        assert f"| {architecture} |{cells}\n" in text
    for row in figures["conventions"]:
        start = (
            f"| {row['model']} | {row['prompt']} + {row['response']} | {row['learn_tflop']:,.0f} |"
        )
        assert f"{start} {row['parameters']:.2f} |" in text
