"""Sees what the models run, by hooks that torch calls before each forward."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Literal

import torch
from torch import nn

from coati_perf import CostModel, PerformanceEvaluator
from coati_perf_trl.costs import Forward, Run

Purpose = Literal["generate", "measured", "ignored"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_NONE = torch.zeros(0)


class Forwards:
    """Counts each forward of the models by what it is for.

    ``purpose`` says what forwards are for at the moment: those of ``generate`` are kept for the
    caller to take; those ``measured`` are learning where they have a gradient, else scoring.
    """

    def __init__(self, evaluator: PerformanceEvaluator) -> None:
        self.purpose: Purpose = "ignored"
        self.learned = False
        self._evaluator = evaluator
        self._runs: list[Run] = []
        self._handles: list[Any] = []

    def watch(self, module: nn.Module, cost: CostModel, without_adapters: CostModel | None) -> None:
        """See the forwards of a module; with its adapters switched off it has a cost of its own."""
        if hasattr(module, "get_base_model"):  # PEFT's generate goes past its own forward
            module = module.get_base_model()
        adapters = (  # PEFT's layers have a flag of this name, Transformers' models a method
            child
            for child in module.modules()
            if isinstance(getattr(child, "disable_adapters", None), bool)
        )
        adapter = next(adapters, None)
        hook = functools.partial(self._before_forward, cost, adapter, without_adapters)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def take_generation(self) -> list[Run]:
        """Return the forwards of the generation that has just ended."""
        taken, self._runs = self._runs, []
        return taken

    def stop(self) -> None:
        """See no more."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(  # noqa: PLR0913, PLR0917 - the last three are torch's
        self,
        cost: CostModel,
        adapter: Any,
        without_adapters: CostModel | None,
        module: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        if self.purpose == "ignored":
            return
        try:
            ids = options.get("input_ids")
            if ids is None:
                ids = options.get("inputs_embeds") if not arguments else arguments[0]
            batch, length = ids.shape[:2]
            if self.purpose == "generate":
                last = self._runs[-1] if self._runs else None
                if last is not None and (last.batch, last.positions) == (batch, length) == (batch, 1):
                    last.steps += 1
                else:
                    self._runs.append(Run(batch, length))
                return
            if without_adapters is not None and adapter is not None and adapter.disable_adapters:
                cost = without_adapters
            logits, fused, real_logits = _logits(options, batch, length)
            real = _real(options, batch, length, ids.device)
            forward = Forward(cost, batch, length, logits, fused)
            learning = torch.is_grad_enabled()
            self.learned = self.learned or learning
            amounts = forward.learned if learning else forward.scored
            self._evaluator.defer(amounts, real, real_logits)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._evaluator._fault("a forward that was not understood", error)


def _real(options: dict[str, Any], batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Launch the sums of real positions (B,), or return the positions (1, L) of a packed row."""
    mask = options.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == (batch, length):
        return mask.sum(-1)
    positions = options.get("position_ids")
    if batch == 1 and isinstance(positions, torch.Tensor) and positions.shape == (1, length):
        return positions
    return torch.full((batch,), length, device=device)


def _logits(
    options: dict[str, Any], batch: int, length: int
) -> tuple[int | None, bool, torch.Tensor]:
    """Return at how many positions logits are computed, whether fused, and the real ones (B,).

    Fused, those of the labels alone are on a GPU, which is None here, and all but the last
    elsewhere.
    """
    labels = options.get("labels")
    if options.get("fused_lm_head") and isinstance(labels, torch.Tensor):
        of_labels = _HAS_TRITON and labels.device.type in ("cuda", "xpu")
        real = (labels[:, 1:] != -100).sum(-1)  # noqa: PLR2004 - what PyTorch ignores
        return None if of_labels else length - 1, True, real
    keep = options.get("logits_to_keep")
    if not isinstance(keep, int) or keep == 0:
        return None, False, _NONE
    mask = options.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == (batch, length):
        return keep, False, mask[:, -keep:].sum(-1)
    return keep, False, torch.full((batch,), keep)
