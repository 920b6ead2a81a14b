"""Runs the passes of a model without memory, and counts each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from coati_perf.flops.counter import OperatorCounter
from coati_perf.flops.operators import UnknownOperatorError

# How transformers names the cache in outputs and arguments: now, before 5.24, and for Mamba.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


Pass = Callable[..., Any]


class Generation(msgspec.Struct, frozen=True):
    """A prefill that keeps the last token's logits, one decode step after it, and the cache."""

    prefill: OperatorCounter
    decode: OperatorCounter
    cache: Any


class Passes:
    """The passes of a model without memory, each run once per batch size and length."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("meta"))
        self._masked: dict[Pass, bool] = {}
        self.training = functools.cache(functools.partial(self._run, self._training))
        self.generation = functools.cache(functools.partial(self._run, self._generation))

    def _run(self, work: Pass, batch: int, length: int) -> Any:
        """Run a pass without a mask, or with one where the model needs it.

        Where there is none, some models look into the positions for packed sequences or into the
        tokens for padding; where there is one, others look into that. None of it can be done
        without data.
        """
        if work not in self._masked:
            try:
                counted = work(batch, length, masked=False)
            except UnknownOperatorError:
                raise
            except Exception:  # noqa: BLE001 - a fault of the model's own shows again
                self._masked[work] = bool(self._accepted(attention_mask=None))
            else:
                self._masked[work] = False
                return counted
        return work(batch, length, masked=self._masked[work])

    def _training(
        self, batch: int, length: int, *, masked: bool
    ) -> tuple[OperatorCounter, OperatorCounter]:
        """Count a forward, and a forward with the backward of what is not frozen."""
        model = self._model
        trains = any(parameter.requires_grad for parameter in model.parameters())
        model.train(trains)  # gradient checkpointing works in training mode alone
        options = self._accepted(use_cache=False) | self._mask(batch, length, masked=masked)
        with OperatorCounter() as forward, torch.set_grad_enabled(trains):
            output = model(input_ids=self._ones(batch, length), **options)
        with OperatorCounter() as backward:
            if trains:
                torch.stack([tensor.sum() for tensor in _with_gradient(output)]).sum().backward()
        model.zero_grad(set_to_none=True)
        return forward, forward + backward

    def _generation(self, batch: int, length: int, *, masked: bool) -> Generation:
        model = self._model.eval()
        options = self._accepted(use_cache=True, logits_to_keep=1)
        with torch.no_grad():
            with OperatorCounter() as prefill:
                output = model(
                    input_ids=self._ones(batch, length),
                    **options,
                    **self._mask(batch, length, masked=masked),
                )
            name = next(name for name in CACHE_NAMES if name in output)
            options[name] = output[name]
            with OperatorCounter() as decode:
                model(
                    input_ids=self._ones(batch, 1),
                    **options,
                    **self._mask(batch, length + 1, masked=masked),
                )
        return Generation(prefill, decode, options[name])

    def _ones(self, batch: int, length: int) -> torch.Tensor:
        return torch.ones(batch, length, dtype=torch.long, device=self._device)

    def _mask(self, batch: int, length: int, *, masked: bool) -> dict[str, torch.Tensor]:
        return {"attention_mask": self._ones(batch, length)} if masked else {}

    def _accepted(self, **options: Any) -> dict[str, Any]:
        """Return those of the options that the model's forward takes."""
        base = getattr(self._model, "get_base_model", None)  # PEFT passes all on to it
        inner = self._model if base is None else base()
        parameters = inspect.signature(inner.forward).parameters
        return {name: value for name, value in options.items() if name in parameters}


def _with_gradient(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output that have a gradient."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        yield from _with_gradient(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _with_gradient(part)
