"""Upstream's real trainers, where a checkout of ColossalAI is at hand.

``COATI_UPSTREAM`` names its ``applications/ColossalChat``; ``COATI_PACKAGES`` folders with what it
needs beside our own (colons between them): colossalai 0.5.0, loralib, jsonlines, attrs, einops,
galore_torch and bitsandbytes, each installed with ``pip install --no-deps --target``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coati_perf import read_journal

UPSTREAM = os.environ.get("COATI_UPSTREAM")
pytestmark = pytest.mark.skipif(
    UPSTREAM is None, reason="COATI_UPSTREAM names no checkout of applications/ColossalChat"
)
HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path):
    """Return a runner of a script on ranks of its own: the journal's segment, each rank's JSON."""

    def run(script, *arguments, ranks):
        launch = [sys.executable]
        if ranks > 1:
            launch += [
                "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)
            ]  # fmt: skip
        path = [os.environ.get("COATI_PACKAGES", ""), str(UPSTREAM)]
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OMP_NUM_THREADS": "1",
            "COATI_PERF_CACHE": str(tmp_path / "cache"),
        }
        subprocess.run(
            [*launch, str(HERE / script), str(tmp_path), *arguments],
            env=os.environ | environment, check=True, timeout=200, cwd=tmp_path,
        )  # fmt: skip
        segment = read_journal(tmp_path / "run").segments[-1]
        return segment, [json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")]

    return run


def total(segment, name):
    return sum(record.metrics.get(name, 0.0) for record in segment.episodes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_loop_gives_the_counts_of_its_own_evaluator(run, ranks):
    segment, counted = run("real_loop.py", ranks=ranks)
    assert len(counted) == ranks
    assert total(segment, "perf/samples/generated") == sum(rank["samples"] for rank in counted)
    assert total(segment, "perf/samples/learned") == sum(rank["learned"] for rank in counted)
    made = total(segment, "perf/flops/make_experience")
    assert made == sum(rank["make_experience_flop"] for rank in counted)
    assert total(segment, "perf/flops/learn") == sum(rank["learn_flop"] for rank in counted)
    assert not any(record.faults for record in segment.episodes)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_its_trainers_execute_what_we_say(run, kind, ranks):
    """The FLOP of all ranks as torch counts them; with a KV cache or without, as it happens."""
    segment, counted = run("real_trainer.py", kind, ranks=ranks)
    assert len(counted) == ranks
    executed = sum(
        total(segment, f"perf/flops/{phase}_executed") for phase in ("generate", "score", "learn")
    )
    assert executed == sum(rank["flop"] for rank in counted)
    # 3 episodes of 2 collect steps with 4 prompts, twice as many responses in GRPO.
    samples = ranks * 3 * 2 * 4 * (2 if kind == "grpo" else 1)
    assert total(segment, "perf/samples/generated") == samples
    assert total(segment, "perf/samples/learned") == samples
    # Row i of a batch of prompts has i + 1 positions of padding, of 12.
    assert total(segment, "perf/tokens/prompt") == samples * (11 + 10 + 9 + 8) / 4
    assert not any(record.faults for record in segment.episodes)
