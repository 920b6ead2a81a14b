"""A model without memory: its modules over tensors without data, ready to be traced."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from coati_perf.flops import attention

# The one child of a wrapper: as torch.compile and FSDP name it in state dicts, and DDP in public.
_COMPILED, _FSDP, _DDP = "_orig_mod", "_fsdp_wrapped_module", "module"

ALTERNATIVES = "Give CostModel.custom(forward=…, …) or CostModel.from_num_params(n) instead"


class UntraceableModelError(ValueError):
    """A model of which no FLOP count can be had; says why and what to do instead."""


def skeleton_of(
    model: Any, *, gradient_checkpointing: bool | None = None, device: str = "meta"
) -> nn.Module:
    """Return a copy of a module, or a model built from a Hugging Face config, without data.

    The copy shares nothing with the original, and takes no memory whatever its size. What is
    frozen stays so. Wrappers of DDP, FSDP and ``torch.compile`` are taken off. The attention of
    Hugging Face models is replaced by one that is counted layer by layer, where they allow it.

    Args:
        model: a ``transformers.PretrainedConfig`` of a causal LM, or an ``nn.Module``.
        gradient_checkpointing: switch it on or off in Hugging Face models; None leaves it.
        device: ``meta``; or another one, inside of a ``FakeTensorMode``.

    Raises:
        UntraceableModelError: the model cannot be built or copied.
    """
    if isinstance(model, nn.Module):
        inner = unwrap(model)
        bare = _rebuilt(model, inner, device) if _is_sharded(model) else _copied(inner, device)
    else:
        bare = _built(model, device)
    _make_countable(bare)
    if gradient_checkpointing is not None:
        _switch_checkpointing(bare, on=gradient_checkpointing)
    return bare


def config_fields(model: Any) -> dict[str, Any]:
    """Return the fields of the Hugging Face config of a model; none where it has no config."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return {} if to_dict is None else to_dict()


def unwrap(module: nn.Module) -> nn.Module:
    """Take off DDP, FSDP and ``torch.compile``."""
    while len(children := dict(module.named_children())) == 1:
        ((name, child),) = children.items()
        # A model's own child may be called "module", but a model has a config.
        if name not in (_COMPILED, _FSDP) and (name != _DDP or hasattr(module, "config")):
            break
        module = child
    return module


def _built(config: Any, device: str) -> nn.Module:
    """Build a causal LM of this config, with our attention where its class takes any."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy, and optional

    attention.register()
    try:
        with torch.device(device):
            try:
                return _from_config(AutoModelForCausalLM, config, attention.NAME)
            except (KeyError, ValueError):  # the class has an attention of its own
                return _from_config(AutoModelForCausalLM, config, "eager")
    except Exception as error:
        message = (
            f"no causal LM can be built from {type(config).__name__}:"
            f" {type(error).__name__}: {error}. {ALTERNATIVES}"
        )
        raise UntraceableModelError(message) from error


def _from_config(maker: Any, config: Any, attention_name: str) -> nn.Module:
    # A copy: the model would write the attention's name into the caller's config.
    model: nn.Module = maker.from_config(
        copy.deepcopy(config), attn_implementation=attention_name, dtype=torch.bfloat16
    )
    return model


def _copied(module: nn.Module, device: str) -> nn.Module:
    """Copy the modules, with empty tensors in the place of each parameter and buffer."""
    # Grouped expert products want bfloat16; the count is the same in any type.
    shrink = any(_is_hugging_face(child) for child in module.modules())
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        dtype = torch.bfloat16 if shrink and tensor.dtype is torch.float32 else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        message = (
            f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}."
            f" {ALTERNATIVES}"
        )
        raise UntraceableModelError(message) from error
    for child in copied.modules():
        # Accelerate and TRL put a function of the original in the place of a model's forward.
        vars(child).pop("forward", None)
    return copied


def _is_sharded(module: nn.Module) -> bool:
    """Say whether a module is under FSDP, the first or the second."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters()) or any(
        _FSDP in name for name, _ in module.named_modules()
    )


def _rebuilt(sharded: nn.Module, inner: nn.Module, device: str) -> nn.Module:
    """Build a sharded Hugging Face model anew from its config; a shard has lost the shapes."""
    # FSDP's second version puts a class of its own in front of the model's.
    kind = next(kind for kind in type(inner).__mro__ if not kind.__name__.startswith("FSDP"))
    build = getattr(kind, "_from_config", None)
    if build is None:
        message = (
            f"{kind.__name__} is sharded, and is no Hugging Face model that could be built anew"
            " from its config. Make the cost model before you wrap the model in FSDP"
        )
        raise UntraceableModelError(message)
    attention.register()
    with torch.device(device):
        rebuilt: nn.Module = build(copy.deepcopy(inner.config), dtype=torch.bfloat16)
    frozen = {
        name.replace(f"{_FSDP}.", "").replace(f"{_COMPILED}.", "")
        for name, parameter in sharded.named_parameters()
        if not parameter.requires_grad
    }
    for name, parameter in rebuilt.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return rebuilt


def _is_hugging_face(module: nn.Module) -> bool:
    return hasattr(module, "set_attn_implementation") and hasattr(module, "config")


def _make_countable(module: nn.Module) -> None:
    """Choose attention and experts that run without data, where the model's classes allow it."""
    choices = {
        "set_attn_implementation": attention.NAME,
        "set_experts_implementation": "grouped_mm",
    }
    for child in module.modules():
        if _is_hugging_face(child):
            attention.register()
            for setter, choice in choices.items():
                with contextlib.suppress(AttributeError, ValueError):
                    getattr(child, setter)(choice)


def _switch_checkpointing(module: nn.Module, *, on: bool) -> None:
    action = "enable" if on else "disable"
    # The new name and the old one.
    switches = (f"activation_checkpointing_{action}", f"gradient_checkpointing_{action}")
    for child in module.modules():
        for switch in switches:
            if hasattr(child, switch):
                getattr(child, switch)()
                return
    if on:
        message = (
            f"{type(module).__name__} is no Hugging Face model: gradient_checkpointing=True cannot"
            " be switched on in it. Switch it on in the model itself and leave the argument out"
        )
        raise UntraceableModelError(message)
