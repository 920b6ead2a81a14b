"""What ``import coati_perf`` brings in."""

from __future__ import annotations

import subprocess
import sys


def test_importing_brings_in_nothing_heavy():
    """Reads the same list as ``python -X importtime -c "import coati_perf"``."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import coati_perf"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert {"coati_perf", "torch", "msgspec"} <= imported
    assert not imported & {"wandb", "tensorboard", "transformers", "coati_perf_wandb"}
