"""How far the cost model is from what real models execute, and peers' formulas from it.

First table: tiny real models of many architectures run on the CPU under an independent count; the
cost model is traced from their config alone. Relative errors. Second table: published models, with
what others report of the same work, as ratios to the exact count.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from coati_perf.cost import ParamCount
from coati_perf.flops import ConventionError, CostModel
from coati_perf.flops.model import num_params
from independent_count import executed_flop
from published_configs import published_configs
from tiny_models import configs

BATCH = 2
PROMPT, RESPONSE = 75, 41  # lengths that no trace has seen; neither is a multiple of a chunk
LIMIT = 1e-9
WORK = (
    "prefill",
    "generate",
    "scoring",
    "full fine-tuning",
    "LoRA",
    "half frozen",
    "checkpointed",
)


def build(config: Any) -> torch.nn.Module:
    """Return a real model with eager attention and experts: plain matrix products throughout."""
    torch.manual_seed(0)
    options = {"attn_implementation": "eager"}
    try:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), experts_implementation="eager", **options
        )
    except (TypeError, ValueError):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 130, (BATCH, length))


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """Put adapters on every projection, routers and heads left out."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and name.rpartition(".")[2] not in ("gate", "router", "lm_head", "embed_out", "out_proj")
    ]
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, fan_in_fan_out=transposed))


def half_frozen(model: torch.nn.Module) -> torch.nn.Module:
    """Freeze the embedding and the first half of the parameters, in the order of the layers."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad = False
    return model


def checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def train(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model.train()
    model(input_ids=ids, use_cache=False).logits.sum().backward()


@torch.no_grad()
def prefill(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model.eval()
    try:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
    except TypeError:  # it has no such option
        model(input_ids=ids, use_cache=True)


@torch.no_grad()
def score(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model.eval()
    model(input_ids=ids, use_cache=False)


@torch.no_grad()
def generate(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model.eval()
    model.generation_config.eos_token_id = None
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=RESPONSE,
        max_new_tokens=RESPONSE,
    )


def errors(config: Any) -> Iterator[tuple[str, float]]:
    """Yield each kind of work with the relative error of the cost model."""
    length = PROMPT + RESPONSE
    lengths = [length] * BATCH
    plain = CostModel.traced(config, attention="full")
    ids = tokens(length)
    prompt = ids[:, :PROMPT]
    model = build(config)
    prompts, responses = [PROMPT] * BATCH, [RESPONSE] * BATCH

    def error(ours: torch.Tensor, work: Callable[..., None], *args: Any) -> float:
        real = executed_flop(lambda: work(*args))
        return abs(float(ours.sum()) - real) / real

    yield "prefill", error(plain.prefill(prompts), prefill, model, prompt)
    yield "generate", error(plain.generate(prompts, responses), generate, model, prompt)
    yield "scoring", error(plain.forward(lengths), score, model, ids)
    yield "full fine-tuning", error(plain.forward_backward(lengths), train, model, ids)
    for name, change in (
        ("LoRA", with_lora),
        ("half frozen", half_frozen),
        ("checkpointed", checkpointed),
    ):
        changed = change(build(config))
        traced = CostModel.traced(changed, attention="full")
        ours = traced.forward_backward(lengths, executed=True)
        yield name, error(ours, train, changed, ids)


SHAPES = ((512, 512), (1024, 4096), (2048, 16384), (512, 32768))
CONVENTIONS = ("palm", "megatron", "verl", "nemo_rl")


def peers(name: str, config: Any) -> Iterator[dict[str, Any]]:
    """Yield, for each shape, the exact cost and the others' figures as ratios to it.

    A PPO step is generation, scoring by four such models, and learning of two, batch size 1.
    """
    exact = CostModel.traced(config)
    count = ParamCount(*4 * [num_params(config)])
    for prompt, response in SHAPES:
        length = prompt + response
        learn = exact.forward_backward(length)
        step = exact.generate(prompt, response) + 4 * exact.forward(length) + 2 * learn
        counted = (
            count.generate(1, prompt, response) + count.score(1, length) + count.learn(1, length)
        )
        row = {
            "model": name,
            "prompt": prompt,
            "response": response,
            "learn_tflop": learn / 1e12,
            "parameters": count.learn(1, length) / 2 / learn,
            "step_tflop": step / 1e12,
            "step_by_parameters": counted / step,
        }
        for convention in CONVENTIONS:
            theirs = reported(convention, config, length)
            row[convention] = None if theirs is None else theirs / learn
        yield row


def reported(convention: str, config: Any, length: int) -> float | None:
    try:
        return CostModel.by_convention(convention, config).forward_backward(length)
    except ConventionError:
        return None


def compare_peers() -> list[dict[str, Any]]:
    columns = ("parameters", *CONVENTIONS)
    print("\n| model | prompt + response | learn, TFLOP |" + "".join(f" {c} |" for c in columns))
    print("|---|---|---|" + "---|" * len(columns))
    rows = [row for name, config in published_configs().items() for row in peers(name, config)]
    for row in rows:
        ratios = ["—" if row[c] is None else f"{row[c]:.2f}" for c in columns]
        print(
            f"| {row['model']} | {row['prompt']} + {row['response']} | {row['learn_tflop']:,.0f} |"
            + "".join(f" {ratio} |" for ratio in ratios)
        )
    print("\n| PPO step by parameters ÷ exact |" + "".join(f" {p} + {r} |" for p, r in SHAPES))
    print("|---|" + "---|" * len(SHAPES))
    for name in published_configs():
        ratios = [row["step_by_parameters"] for row in rows if row["model"] == name]
        print(f"| {name} |" + "".join(f" {ratio:,.0f} |" for ratio in ratios))
    return rows


def compare_executions(only: str | None) -> tuple[float, dict[str, dict[str, float]]]:
    rows = {}
    print("| architecture |" + "".join(f" {work} |" for work in WORK))
    print("|---|" + "---|" * len(WORK))
    for name, config in configs().items():
        if only and only not in name:
            continue
        rows[name] = dict(errors(config))
        print(f"| {name} |" + "".join(f" {rows[name][work]:.1e} |" for work in WORK), flush=True)
    worst = max(error for row in rows.values() for error in row.values())
    print(f"\nworst relative error {worst:.1e} over {len(rows)} architectures × {len(WORK)}")
    return worst, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of an architecture's name; no second table")
    parser.add_argument("--peers", action="store_true", help="the second table alone")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    worst, executions, conventions = 0.0, {}, []
    if not options.peers:
        worst, executions = compare_executions(options.only)
    if not options.only:
        conventions = compare_peers()
    if options.output:
        figures = {"worst": worst, "errors": executions, "conventions": conventions}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
