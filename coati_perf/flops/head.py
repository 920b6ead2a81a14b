"""What the output head of a language model costs for one position: the logits over its words."""

from __future__ import annotations

import msgspec
from torch import nn


class Head(msgspec.Struct, frozen=True):
    """FLOP per position of the matrices that make the logits; 0 where there is no such head."""

    forward: float = 0.0
    backward: float = 0.0


def head_of(model: nn.Module) -> Head:
    """Return what the output embeddings of a Hugging Face model cost, adapters included."""
    try:
        module = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return Head()
    if not isinstance(module, nn.Module):
        return Head()
    matrices = [weight for weight in module.parameters() if weight.dim() == 2]  # noqa: PLR2004
    own = {id(weight) for weight in matrices}
    # The gradient goes on into what is below the head where any of that is trained.
    below = any(p.requires_grad and id(p) not in own for p in model.parameters())
    forward = backward = 0.0
    for weight in matrices:
        flop = 2.0 * weight.numel()
        forward += flop
        backward += flop * (below + weight.requires_grad)
    return Head(forward, backward)
