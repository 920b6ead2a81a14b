"""An attention for Hugging Face models that is counted and never run.

Transformers lets a model use any registered attention function. Ours passes query, key and value
to one operator, with the keys that a query may see. So the attention of a trace is counted apart
from the weights, layer by layer, under the window of each, and no mask is ever built.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from coati_perf.flops.visibility import Visibility

NAME = "coati_perf"


@torch.library.custom_op("coati_perf::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: str, size: int
) -> torch.Tensor:
    """Stand for softmax(q·kᵀ)·v; query, key and value are (batch, heads, length, dim)."""
    raise NotImplementedError


@attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: str, size: int
) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op("coati_perf::attention_backward", mutates_args=())
def attention_backward(  # noqa: PLR0913, PLR0917 - an operator's arguments are flat
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: str,
    size: int,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand for the gradients of query, key and value, where ``needed``."""
    raise NotImplementedError


@attention_backward.register_fake
def _(  # noqa: PLR0913, PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: str,
    size: int,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.kind, ctx.size = inputs
    ctx.save_for_backward(query, key, value)


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    needed = list(ctx.needs_input_grad[:3])
    gradients = attention_backward(*ctx.saved_tensors, ctx.kind, ctx.size, needed)
    return (
        *(grad if need else None for grad, need in zip(gradients, needed, strict=True)),
        None,
        None,
    )


attention.register_autograd(_backward, setup_context=_setup_context)


def backward_products(needed: list[bool]) -> tuple[int, int]:
    """Return how many products of q·kᵀ's size and of p·v's size the gradients take.

    Of p·v: one for v, and one for the probabilities if query or key need a gradient; of q·kᵀ: one
    for each of these two.
    """
    query, key, value = needed
    return query + key, value + (query or key)


@functools.cache
def register() -> None:
    """Make the attention known to transformers under ``NAME``."""
    from transformers import AttentionInterface  # noqa: PLC0415 - heavy, and optional

    AttentionInterface.register(NAME, _interface)


def _interface(  # noqa: PLR0913 - transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    visibility = _visibility(module, sliding_window)
    output = attention(query, key, value, visibility.kind, visibility.size)
    return output.transpose(1, 2), None


def _visibility(module: torch.nn.Module, sliding_window: int | None) -> Visibility:
    if sliding_window is not None:
        return Visibility("sliding", sliding_window)
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if layer_types is not None and layer is not None and layer_types[layer] == "chunked_attention":
        return Visibility("chunked", config.attention_chunk_size)
    return Visibility("all")
