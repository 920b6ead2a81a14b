"""The command ``coati-perf flops``: what a model's phases cost, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coati_perf.cost import ParamCount
from coati_perf.flops import CostModel
from coati_perf.flops.model import num_params
from coati_perf.report import readable


class ConfigError(ValueError):
    """What was given is no Hugging Face config, or one that transformers doesn't know."""


def load_config(path: Path) -> Any:
    """Return the Hugging Face config in a file, or in the ``config.json`` of a folder.

    Raises:
        ConfigError: there is none, or transformers doesn't know its ``model_type``.
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - heavy, and optional

    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**fields)
    except (OSError, ValueError, TypeError) as error:
        message = (
            f"{file} is no Hugging Face config ({type(error).__name__}: {error}); expected a"
            " config.json with a model_type, or the folder of a model"
        )
        raise ConfigError(message) from error


def flops_table(config: Any, prompt: int, response: int, batch: int) -> str:
    """Return the phases with their FLOP and bytes, the formula, and the parameter count's figures.

    The parameter count's are ColossalChat's: no attention, and generation without a KV cache.
    """
    cost = CostModel.traced(config)
    title = (
        f"{num_params(config):,} parameters; {batch} × ({prompt} prompt + {response} response"
        " tokens), bfloat16, causal attention"
    )
    rows = _rows(cost, config, prompt, response, batch)
    return "\n".join((title, "", *rows, "", str(cost)))


def _rows(cost: CostModel, config: Any, prompt: int, response: int, batch: int) -> Iterator[str]:
    count = ParamCount(num_params(config), 0, 0, 0)
    length = prompt + response
    prompts, responses, lengths = [prompt] * batch, [response] * batch, [length] * batch
    phases = (
        ("prefill", cost.prefill(prompts), cost.prefill_bytes(prompts), count.score(batch, prompt)),
        (
            "generate",
            cost.generate(prompts, responses),
            cost.generate_bytes(prompts, responses),
            count.generate(batch, prompt, response),
        ),
        ("score", cost.forward(lengths), cost.forward_bytes(lengths), count.score(batch, length)),
        (
            "learn",
            cost.forward_backward(lengths),
            cost.forward_backward_bytes(lengths),
            count.learn(batch, length),
        ),
    )
    titles = "".join(f"{title:>14}" for title in ("TFLOP", "GB moved", "FLOP/byte"))
    yield f"{'':<10}{titles}{'by parameters':>16}{'ratio':>10}"
    for name, flops, moved, counted in phases:
        flop = float(torch.as_tensor(flops).sum())
        figures = (flop / 1e12, moved / 1e9, flop / moved, counted / 1e12)
        cells = "".join(f"{readable(figure):>14}" for figure in figures[:3])
        yield f"{name:<10}{cells}{readable(figures[3]):>16}{readable(counted / flop):>10}"
