"""Cost models against real models, and against sums written out."""

from __future__ import annotations

import sys
from pathlib import Path

# The benchmark's tiny models and its independent count serve the tests too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
