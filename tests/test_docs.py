"""What the documents say is what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_table_of_metrics_is_generated_from_the_catalogue():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.TARGET.read_text(encoding="utf-8") == generate.render()


@pytest.mark.parametrize("document", ["README.md"])
def test_the_python_examples_run_as_they_stand(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, document, "exec"), {})
    assert list(tmp_path.glob("coati_perf_runs/*/journal.jsonl"))
