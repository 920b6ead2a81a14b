"""Online-DPO's and PPO's phases, which no method marks: the models' forwards tell them apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from coati_perf.flops.skeleton import unwrap
from coati_perf.seen import Generation
from coati_perf_trl import seams

if TYPE_CHECKING:
    from coati_perf_trl.callback import CoatiPerfCallback


class ByForwards:
    """``generate`` is the policy's method of this name, ``score`` each forward without a gradient.

    The first forward with one begins ``learn``, where the trainer has no ``training_step`` for it.
    """

    def __init__(self, callback: CoatiPerfCallback, models: Mapping[str, Any]) -> None:
        self._callback = callback
        self._policy = cast("Any", unwrap(models["actor"]))
        self._learned_before: list[bool] = []
        generate = self._policy.generate

        @functools.wraps(generate)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            return self._generate(generate, *arguments, **options)

        self._policy.generate = wrapped
        self._handles: list[Any] = []
        for model in models.values():
            if isinstance(model, nn.Module):
                module = seams.forward_of(callback._trainer, unwrap(model))
                self._handles.append(module.register_forward_pre_hook(self._before))
                self._handles.append(module.register_forward_hook(self._after))

    def stop(self) -> None:
        """Leave the models as they were."""
        vars(self._policy).pop("generate", None)
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, arguments: Any) -> None:
        callback = self._callback
        if callback._forwards.purpose != "measure":
            return
        if torch.is_grad_enabled():
            callback._learning.on()
        else:
            self._learned_before.append(callback._learning.is_on)
            callback._learning.off()
            callback.evaluator.phase("score").__enter__()

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._learned_before and not torch.is_grad_enabled():
            self._callback.evaluator.phase("score").__exit__(None, None, None)
            if self._learned_before.pop():
                self._callback._learning.on()

    def _generate(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        callback = self._callback
        if callback._forwards.purpose != "measure":
            return original(*arguments, **options)
        learned_before = callback._learning.is_on
        callback._learning.off()
        with callback.evaluator.phase("generate"), callback._forwards.are("generate"):
            result = original(*arguments, **options)
        if learned_before:
            callback._learning.on()
        try:
            self._count(getattr(result, "sequences", result), arguments, options)
        except Exception as error:  # noqa: BLE001 - training goes on
            callback.evaluator.fault("what the policy generated", error)
        return result

    def _count(
        self, sequences: torch.Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        ids = arguments[0] if arguments else options["input_ids"]
        mask = options.get("attention_mask")
        prompts = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.sum(-1)
        config = options.get("generation_config") or self._policy.generation_config
        ends = config.eos_token_id
        if ends is None:
            ends = self._policy.generation_config.eos_token_id
        responses = _up_to(sequences[:, ids.shape[1] :], ends)
        runs = self._callback._forwards.take_generation()
        generation = Generation(self._callback._actor, runs, sequences.numel())
        self._callback.evaluator.defer(generation.generated, prompts, responses)


def _up_to(tokens: torch.Tensor, ends: int | list[int] | None) -> torch.Tensor:
    """Launch the count of each row's tokens (B, L) up to the first of ``ends``, itself included."""
    if ends is None:
        return torch.full((len(tokens),), tokens.shape[1])
    is_end = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device))
    ended_before = is_end.cumsum(-1) - is_end.long()
    return (ended_before == 0).sum(-1)
