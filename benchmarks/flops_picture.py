"""Draws the README's picture from the figures of ``flops_accuracy.py``.

python benchmarks/flops_picture.py results/flops-2026-12-01.json ../docs/flops.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

WIDTH, LEFT, TOP, ROW = 790, 130, 66, 34
COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
TOP_RATIO = 10_000


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["conventions"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    shapes = list(dict.fromkeys((row["prompt"], row["response"]) for row in rows))
    height = TOP + ROW * len(models) + 40
    scale = (WIDTH - LEFT - 40) / math.log10(TOP_RATIO)
    size = f'width="{WIDTH}" height="{height}"'
    title = "FLOPs of a PPO step: counted by parameters ÷ what the models execute"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
        f'<text x="10" y="20" font-size="14">{title}</text>',
    ]
    for index, (shape, colour) in enumerate(zip(shapes, COLOURS, strict=True)):
        x = LEFT + 158 * index
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="42">{shape[0]} + {shape[1]} tokens</text>')
    for power in range(int(math.log10(TOP_RATIO)) + 1):
        x = LEFT + scale * power
        bottom = height - 30
        parts.append(f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}" stroke="#ccc"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{10**power:,} ×</text>')
    for number, model in enumerate(models):
        y = TOP + ROW * number
        parts.append(f'<text x="{LEFT - 8}" y="{y + 18}" text-anchor="end">{model}</text>')
        ratios = [row["step_by_parameters"] for row in rows if row["model"] == model]
        for index, (ratio, colour) in enumerate(zip(ratios, COLOURS, strict=True)):
            width = scale * math.log10(ratio)
            top = y + 7 * index
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="6" fill="{colour}"/>'
            )
    Path(sys.argv[2]).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
