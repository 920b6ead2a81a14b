"""Reads off a traced model what it keeps in device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coati_perf.flops.counter import OperatorCounter
from coati_perf.flops.memory import Experts, Memory
from coati_perf.flops.visibility import Visibility


def memory_of(model: nn.Module, counter: OperatorCounter, cache: Any, length: int) -> Memory:
    """Return the layout, from a forward over ``length`` tokens and the cache after one more."""
    experts = tuple(
        Experts(number, rows // length, elements)
        for (number, rows), elements in counter.experts.items()
    )
    parameters = {id(tensor): tensor.numel() for tensor in model.parameters()}
    if (embedding := _embedding_only_looked_up(model)) is not None:
        parameters.pop(id(embedding), None)
    trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
    positions, state = _cache_layout(cache, length + 1)
    return Memory(
        weights=sum(parameters.values()) - sum(expert.elements for expert in experts),
        experts=experts,
        trained=trained,
        cache=tuple(positions.items()),
        state=state,
    )


def _embedding_only_looked_up(model: nn.Module) -> torch.Tensor | None:
    """Return an input embedding that is not the output's matrix too."""
    try:
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(inputs, "weight", None)
    return None if weight is getattr(outputs, "weight", None) else weight


def _cache_layout(cache: Any, positions: int) -> tuple[dict[Visibility, int], int]:
    """Return the elements per position, by visibility, and those of recurrent states."""
    elements: dict[Visibility, int] = {}
    state = 0
    for layer in getattr(cache, "layers", ()):
        for name, tensor in _tensors(layer):
            if name in ("keys", "values"):
                sliding = getattr(layer, "is_sliding", False)
                seen = Visibility("sliding", layer.sliding_window) if sliding else Visibility()
                held = tensor.shape[-2]
                assert held == positions or sliding
                elements[seen] = elements.get(seen, 0) + tensor.numel() // held
            else:
                state += tensor.numel()
    return elements, state


def _tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(layer).items():
        parts = value.values() if isinstance(value, dict) else [value]
        for part in parts:
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                yield name, part
