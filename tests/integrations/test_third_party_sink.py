"""A package of a third party: installed from its wheel, found by name, put through our suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coati_perf.testing import SinkConformance

PROJECT = Path(__file__).parent.parent / "third_party_sink"


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, str(PROJECT)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class TestTinySink(SinkConformance):
    sink = "tiny:{folder}/lines"

    @pytest.fixture(autouse=True)
    def _installed(self, installed, monkeypatch):
        monkeypatch.syspath_prepend(installed)
        monkeypatch.setenv("PYTHONPATH", str(installed))

    def read(self, folder, run_id):
        lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
        episodes = {episode: metrics for run, episode, metrics in lines if run == run_id}
        assert len(episodes) == sum(run == run_id for run, *_ in lines)
        return episodes
