"""Sees what models run, by hooks that torch calls before each forward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from coati_perf.flops import CostModel
from coati_perf.flops.passes import CACHE_NAMES
from coati_perf.flops.skeleton import unwrap
from coati_perf.seen import Forward, Logits, Run

if TYPE_CHECKING:
    from coati_perf.evaluator import PerformanceEvaluator

Purpose = Literal["generate", "make", "measure", "ignore"]


class Forwards:
    """Counts each forward of the models by what it is for.

    Those to ``generate`` are kept for the caller to take. Those to ``make`` experience are
    generation or scoring; those to ``measure`` are learning where they have a gradient, else
    scoring.

    Args:
        evaluator: what is told of them.
        counted: they are all that is known of samples and tokens.
        logits: says of the keyword arguments of a forward over (batch, length) positions where it
            computes logits, if it knows more than ``logits_kept`` does.
    """

    def __init__(
        self,
        evaluator: PerformanceEvaluator,
        *,
        counted: bool,
        logits: Callable[[Mapping[str, Any], int, int], Logits | None] = lambda *_: None,
    ) -> None:
        self.purpose: Purpose = "ignore"
        self._evaluator = evaluator
        self._counted = counted
        self._logits = logits
        self._runs: list[Run] = []
        self._handles: list[Any] = []

    @contextlib.contextmanager
    def are(self, purpose: Purpose) -> Iterator[None]:
        """Say what the forwards inside are for."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def watch(
        self,
        module: nn.Module,
        cost: CostModel,
        without_adapters: CostModel | None = None,
        *,
        generates: bool = False,
        counted: bool = True,
    ) -> None:
        """See the forwards of a module; with PEFT's adapters off it may have a cost of its own.

        One that is not ``counted`` learns from samples that another model has been counted with.
        """
        module = unwrap(module)
        # PEFT's generate goes past its own forward.
        module = getattr(module, "get_base_model", lambda: module)()
        counted = counted and self._counted
        watched = _Watched(self, cost, without_adapters, _adapter(module), generates, counted)
        handle = module.register_forward_pre_hook(watched.before_forward, with_kwargs=True)
        self._handles.append(handle)

    def take_generation(self) -> list[Run]:
        """Return the forwards of the generation that has just ended."""
        taken, self._runs = self._runs, []
        return taken

    def stop(self) -> None:
        """See no more."""
        for handle in self._handles:
            handle.remove()

    def _saw_generation(self, ids: torch.Tensor, options: dict[str, Any]) -> None:
        batch, length = ids.shape[:2]
        last = self._runs[-1] if self._runs else None
        if length == 1 and last is not None and (last.batch, last.positions) == (batch, 1):
            last.steps += 1
            return
        keep = options.get("logits_to_keep")
        logits = keep if isinstance(keep, int) and keep else None
        self._runs.append(Run(batch, length, logits, _cached(options)))

    def _saw(
        self, cost: CostModel, ids: torch.Tensor, options: dict[str, Any], *, counted: bool
    ) -> None:
        batch, length = ids.shape[:2]
        logits = self._logits(options, batch, length) or logits_kept(options, batch, length)
        forward = Forward(cost, batch, length, dataclasses.replace(logits, real=None))
        lengths = [_real(options, batch, length, ids.device)]
        if logits.real is not None:
            lengths.append(logits.real)
        learned = forward.learned if counted else forward.learning
        self._evaluator.defer(learned if torch.is_grad_enabled() else forward.scored, *lengths)


@dataclasses.dataclass(frozen=True)
class _Watched:
    forwards: Forwards
    cost: CostModel
    without_adapters: CostModel | None
    adapter: Any
    generates: bool
    counted: bool

    def before_forward(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        forwards = self.forwards
        if forwards.purpose == "ignore":
            return
        try:
            off = self.adapter is not None and self.adapter.disable_adapters
            cost = self.cost if self.without_adapters is None or not off else self.without_adapters
            ids = arguments[0] if arguments else options.get("input_ids")
            ids = options["inputs_embeds"] if ids is None else ids
            # A forward that must not use a cache is no step of a generation.
            to_make = forwards.purpose == "make" and options.get("use_cache") is not False
            if forwards.purpose == "generate" or (self.generates and to_make):
                forwards._saw_generation(ids, options)
            else:
                forwards._saw(cost, ids, options, counted=self.counted)
        except Exception as error:  # noqa: BLE001 - training goes on
            forwards._evaluator.fault("a forward that was not understood", error)


def logits_kept(options: Mapping[str, Any], batch: int, length: int) -> Logits:
    """Return where a Hugging Face model computes logits, by its ``logits_to_keep``."""
    keep = options.get("logits_to_keep")
    if not isinstance(keep, int) or keep == 0:
        return Logits(length)
    mask = _mask(options, batch, length)
    return Logits(keep, torch.full((batch,), keep) if mask is None else mask[:, -keep:].sum(-1))


def _real(
    options: Mapping[str, Any], batch: int, length: int, device: torch.device
) -> torch.Tensor:
    """Launch the sums of real positions (B,), or return the positions (1, L) of a packed row."""
    mask = _mask(options, batch, length)
    if mask is not None:
        return mask.sum(-1)
    positions = options.get("position_ids")
    if batch == 1 and isinstance(positions, torch.Tensor) and positions.shape == (1, length):
        return positions
    return torch.full((batch,), length, device=device)


def _mask(options: Mapping[str, Any], batch: int, length: int) -> torch.Tensor | None:
    mask = options.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.shape == (batch, length) else None


def _cached(options: Mapping[str, Any]) -> int:
    """Return how many keys are cached, where to ask does not wait for the device."""
    caches = (options.get(name) for name in CACHE_NAMES)
    dynamic: list[Any] = [cache for cache in caches if type(cache).__name__ == "DynamicCache"]
    return dynamic[0].get_seq_length() if dynamic else 0


def _adapter(module: nn.Module) -> Any:
    """Return one of PEFT's layers, which says whether adapters are off; None without any.

    Transformers' models have a method of the flag's name.
    """
    return next(
        (
            child
            for child in module.modules()
            if isinstance(getattr(child, "disable_adapters", None), bool)
        ),
        None,
    )
