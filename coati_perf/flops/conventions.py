"""What other projects report for the same work, so that figures can be compared.

Each formula is derived anew from the project's documents or source, and covers the architectures
that it covers there. All give the FLOP of learning, forward and backward; a forward is a third of
it. Only ``coati`` counts generation. How far each is from what a model executes: ``docs/flops.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from coati_perf.flops.model import (
    Amount,
    CostModel,
    Lengths,
    NotGenerativeError,
    ParamCountCost,
    answer,
    num_params,
)


class ConventionError(ValueError):
    """A convention that there is not, or that does not cover an architecture."""


@dataclasses.dataclass(frozen=True)
class FormulaCost(CostModel):
    """Learning costs ``per_token`` · L + ``per_square`` · L² + Σ windowed · L · min(L, window)."""

    name: str
    source: str
    per_token: float
    per_square: float
    windowed: tuple[tuple[int, float], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def convention(self) -> str:
        return self.name

    def _forward(self, length: torch.Tensor) -> torch.Tensor:
        return self._forward_backward(length) / 3

    def _forward_backward(self, length: torch.Tensor) -> torch.Tensor:
        flop = self.per_token * length + self.per_square * length**2
        for window, factor in self.windowed:
            flop = flop + factor * length * length.clamp(max=window)
        return flop

    def _decode(self, context: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        message = (
            f"the convention {self.name!r} does not say what generation costs; take the exact"
            " cost: CostModel.traced(…)"
        )
        raise NotGenerativeError(message)

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CoatiCost(ParamCountCost):
    """As ColossalChat: every new token runs over the whole prefix, as if without a KV cache."""

    @property
    def convention(self) -> str:
        return "coati"

    def generate(
        self,
        prompt: Lengths,
        response: Lengths,
        *,
        shared_prompt: int = 1,
        cached: Lengths = 0,
        executed: bool = False,
    ) -> Amount:
        def generate(prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
            return self.num_params * (2 * prompts + responses - 1) * responses

        return answer(generate, prompt, response, executed=executed)


def by_convention(name: str, config: Any) -> CostModel:
    """Return what a convention reports of the model of a Hugging Face config.

    Args:
        name: ``exact``, ``coati``, ``palm``, ``megatron``, ``verl`` or ``nemo_rl``.
        config: a ``transformers.PretrainedConfig``.

    Raises:
        ConventionError: there is no such convention, or it doesn't cover this ``model_type``.
    """
    if name == "exact":
        return CostModel.traced(config)
    formula = _FORMULAS.get(name)
    if formula is None:
        known = ", ".join(["exact", *_FORMULAS])
        message = f"there is no convention {name!r}; expected one of {known}"
        raise ConventionError(message)
    return formula(config)


def _coati(config: Any) -> CostModel:
    """2 FLOP per parameter and token, 6 in learning; see ``ParamCount``."""
    return CoatiCost(num_params(config))


def _palm(config: Any) -> CostModel:
    """6N + 12·L·H·Q·T per token: all pairs of positions, embeddings counted as matrix work.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B: N parameters, L layers, H
    heads of dimension Q, T tokens.
    """
    _refuse_unless("palm", config, _DENSE)
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * _head_dim(config)
    return FormulaCost("palm", _name(config), 6 * num_params(config), attention)


def _megatron(config: Any) -> CostModel:
    """Matrix products of the layers and the logits; causal attention is half of the square.

    The router and the embedding are left out; the norms of MLA's low ranks count 1 a position.
    Source: Megatron-LM, ``megatron/training/training.py``, num_floating_point_operations.
    """
    _refuse_unless("megatron", config, (*_DENSE, *_MOE, *_MLA))
    layers = config.num_hidden_layers
    projections, products = _attention(config)
    if config.model_type in _MLA:
        projections += config.kv_lora_rank + (config.q_lora_rank or 0)
    head = config.hidden_size * config.vocab_size
    weights = layers * projections + _mlp(config, router=False) + head
    return FormulaCost("megatron", _name(config), 6 * weights, 6 * layers * products / 2)


def _verl(config: Any) -> CostModel:
    """As Megatron, but with router, and the embedding as well as the logits.

    Sliding windows are counted without the triangle at their start.
    Source: verl 0.9.1, ``verl/utils/flops_counter.py``.
    """
    covered = ("llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
    _refuse_unless("verl", config, (*covered, "gemma3_text", "gpt_oss"))
    layers = config.num_hidden_layers
    projections, products = _attention(config)
    embeddings = 2 * config.hidden_size * config.vocab_size
    weights = layers * projections + _mlp(config, router=True) + embeddings
    per_layer = 6 * products / 2
    sliding = 0
    if config.model_type in ("gemma3_text", "gpt_oss"):
        sliding = sum(kind == "sliding_attention" for kind in config.layer_types)
    windowed = ((config.sliding_window, sliding * per_layer),) if sliding else ()
    return FormulaCost("verl", _name(config), 6 * weights, (layers - sliding) * per_layer, windowed)


def _nemo_rl(config: Any) -> CostModel:
    """Matrix products with heads of hidden ÷ heads; Qwen2 as if without grouped queries.

    Source: NeMo-RL, ``nemo_rl/utils/flops_formulas.py`` (llama, qwen2, qwen3, deepseekv3).
    """
    _refuse_unless("nemo_rl", config, ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"))
    hidden, layers = config.hidden_size, config.num_hidden_layers
    if config.model_type in _MLA:
        projections, products = _attention(config)
    else:
        heads = config.num_attention_heads
        groups = heads if config.model_type == "qwen2" else config.num_key_value_heads
        projections, products = hidden * hidden * (2 + 2 * groups / heads), 2 * hidden
    weights = layers * projections + _mlp(config, router=False) + hidden * config.vocab_size
    return FormulaCost("nemo_rl", _name(config), 6 * weights, 6 * layers * products / 2)


_FORMULAS: Mapping[str, Callable[[Any], CostModel]] = {
    "coati": _coati,
    "palm": _palm,
    "megatron": _megatron,
    "verl": _verl,
    "nemo_rl": _nemo_rl,
}
# Decoders with a gated MLP, as all these formulas have it.
_DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
_MOE = ("mixtral", "qwen2_moe", "qwen3_moe")
_MLA = ("deepseek_v3",)


def _refuse_unless(name: str, config: Any, covered: tuple[str, ...]) -> None:
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in covered:
        message = (
            f"the convention {name!r} does not cover {kind!r}; it does {', '.join(covered)}. Take"
            " the exact cost: CostModel.traced(config)"
        )
        raise ConventionError(message)


def _name(config: Any) -> str:
    return type(config).__name__


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


def _attention(config: Any) -> tuple[float, float]:
    """Return a layer's weights of projections, and its products for each pair of positions."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.model_type not in _MLA:
        head_dim = _head_dim(config)
        weights = hidden * head_dim * (2 * heads + 2 * config.num_key_value_heads)
        return weights, 2 * heads * head_dim
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    value_dim = config.v_head_dim
    rank = config.q_lora_rank
    query = hidden * heads * key_dim if rank is None else rank * (hidden + heads * key_dim)
    compressed = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    expanded = config.kv_lora_rank * heads * (config.qk_nope_head_dim + value_dim)
    output = heads * value_dim * hidden
    return query + compressed + expanded + output, heads * (key_dim + value_dim)


def _mlp(config: Any, *, router: bool) -> int:
    """Return the gated MLP's weights that a token meets, over all layers."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    experts = _experts(config)
    if experts is None:
        return int(layers * 3 * hidden * config.intermediate_size)
    number, active, width, dense_layers = experts
    sparse = 3 * hidden * width * active + (hidden * number if router else 0)
    dense = 3 * hidden * config.intermediate_size
    return int((layers - dense_layers) * sparse + dense_layers * dense)


def _experts(config: Any) -> tuple[int, int, int, int] | None:
    """Return the experts, those a token meets, their width, and the layers without experts."""
    active: Any = getattr(config, "num_experts_per_tok", None)
    if config.model_type in _MLA:
        shared = config.n_shared_experts
        return (
            config.n_routed_experts,
            active + shared,
            config.moe_intermediate_size,
            config.first_k_dense_replace,
        )
    if config.model_type in ("mixtral", "gpt_oss"):
        return config.num_local_experts, active, config.intermediate_size, 0
    if config.model_type in _MOE:
        return config.num_experts, active, config.moe_intermediate_size, 0
    return None
