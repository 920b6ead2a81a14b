"""Real lengths of sequences: summed from masks where these are, read when the device is done."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from coati_perf import catalogue
from coati_perf.cost import Amounts, Workload
from coati_perf.device_timer import Timing, device_seconds
from coati_perf.row import Row


class LengthLog:
    """The lengths of an episode's batches, each a tensor (B,) on whatever device its mask is on.

    Adding launches a sum on the device and waits for nothing.
    """

    __slots__ = ("_learned", "_made")

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._learned: list[torch.Tensor] = []

    def add_made(self, total: torch.Tensor, response: torch.Tensor) -> None:
        """Note a batch of experience, by the tokens of each sequence and of its response."""
        self._made.append((total, response))

    def add_learned(self, total: torch.Tensor) -> None:
        """Note a batch learned from, by the tokens of each sequence."""
        self._learned.append(total)

    def take(self) -> CapturedLengths | None:
        """Start copying to the host what was added, and forget it; None where there is nothing."""
        if not self._made and not self._learned:
            return None
        captured = CapturedLengths(
            made=[(_to_host(total), _to_host(response)) for total, response in self._made],
            learned=[_to_host(total) for total in self._learned],
            events=_events((*itertools.chain.from_iterable(self._made), *self._learned)),
        )
        self.clear()
        return captured

    def clear(self) -> None:
        """Forget what was added."""
        self._made.clear()
        self._learned.clear()


class CapturedLengths(msgspec.Struct, frozen=True):
    """Lengths on their way to the host, there once the ``events`` have come."""

    made: list[tuple[torch.Tensor, torch.Tensor]]
    learned: list[torch.Tensor]
    events: list[torch.Event]

    def amounts(self, workload: Workload) -> Amounts:
        """Wait for the device, and return what the real tokens amount to."""
        for event in self.events:
            event.synchronize()
        total: Amounts = collections.defaultdict(float)
        for tokens, response in self.made:
            responses = response.to(torch.float64)
            prompts = tokens.to(torch.float64) - responses
            catalogue.merge(total, made_amounts(workload, prompts, responses))
        for tokens in self.learned:
            catalogue.merge(total, learned_amounts(workload, tokens.to(torch.float64)))
        return total


class UnresolvedRow(msgspec.Struct, frozen=True):
    """A row whose real lengths and device times are yet to be read."""

    row: Row
    lengths: CapturedLengths | None
    workload: Workload
    timings: list[Timing] = []

    def resolve(self) -> Row:
        """Wait for the device, and return the whole row; a fault where that fails."""
        amounts, faults = dict(self.row.amounts), dict(self.row.faults)
        try:
            if self.lengths is not None:
                catalogue.merge(amounts, self.lengths.amounts(self.workload))
            amounts.update(device_seconds(self.timings))
        except Exception as error:  # noqa: BLE001 - someone's device, or cost function
            fault = f"lengths or device times could not be read: {type(error).__name__}: {error}"
            faults[fault] = faults.get(fault, 0) + 1
            amounts[catalogue.HOOK_FAULTS] = amounts.get(catalogue.HOOK_FAULTS, 0.0) + 1
        return msgspec.structs.replace(self.row, amounts=amounts, faults=faults)


def made_amounts(workload: Workload, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
    """Return what a batch of experience amounts to beyond its padded shape."""
    return {
        **generated_amounts(workload, prompts, responses),
        **workload.real_scoring(prompts + responses),
        catalogue.PADDING: -float((prompts + responses).sum()),
    }


def generated_amounts(
    workload: Workload, prompts: torch.Tensor, responses: torch.Tensor
) -> Amounts:
    """Return what generating the responses of a batch amounts to beyond its padded shape."""
    return {
        catalogue.PROMPT_TOKENS: float(prompts.sum()),
        catalogue.RESPONSE_TOKENS: float(responses.sum()),
        catalogue.RESPONSES: float(len(responses)),
        catalogue.RESPONSE_MAX: float(responses.max()) if len(responses) else 0.0,
        **workload.real_generation(prompts, responses),
    }


def learned_amounts(workload: Workload, lengths: torch.Tensor) -> Amounts:
    """Return what learning from a batch amounts to beyond its padded shape."""
    tokens = float(lengths.sum())
    return {
        catalogue.LEARN_TOKENS: tokens,
        catalogue.LEARN_PADDING: -tokens,
        **workload.real_learning(lengths),
    }


def mask_lengths(name: str, mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Launch the sums of a mask (B, L) of ``sequences`` of that shape, or raise ValueError."""
    if mask.shape != shape:
        message = (
            f"{name} has shape {tuple(mask.shape)}; expected that of sequences, {tuple(shape)}"
        )
        raise ValueError(message)
    return mask.sum(-1)


def given_lengths(name: str, lengths: Sequence[int] | Any, batch: int) -> torch.Tensor:
    """Return lengths that a trainer gives as a tensor, or raise ValueError."""
    tensor = torch.as_tensor(lengths)
    if tensor.shape != (batch,):
        message = f"{name} has shape {tuple(tensor.shape)}; expected one for each of {batch}"
        raise ValueError(message)
    return tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


def _events(tensors: Iterable[torch.Tensor]) -> list[torch.Event]:
    """Record, on each device's current stream, an event that comes after the copies."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    events = [torch.Event(device) for device in devices]
    for event in events:
        event.record()
    return events
