"""Cost models against real models, and against sums written out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The benchmark's tiny models and its independent count serve the tests too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Keep the traces of a test to itself."""
    monkeypatch.setenv("COATI_PERF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
