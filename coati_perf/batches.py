"""What an episode's batches amount to, worked out on a background thread.

The hooks count shapes and launch sums of masks. What that comes to in tokens and FLOP is computed
when the episode is over and the device is done, away from the training thread.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from coati_perf import catalogue
from coati_perf.cost import Amounts, Workload

Shape = tuple[int, ...]

# A trainer whose batches have ever new shapes must not eat memory over the episodes.
_MAX_SHAPES = 256


class BatchCount:
    """How often batches of one shape came; the hooks count it up themselves."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class LearnCounts(dict[Shape, BatchCount]):
    """Batches learned from whose real lengths are not known, by the shape of ``sequences``."""

    def __missing__(self, shape: Shape) -> BatchCount:
        two_dimensions("sequences", shape)
        count = self[shape] = BatchCount()
        return count


class ExperienceCounts(dict[tuple[Shape, Shape], BatchCount]):
    """Experience made, likewise, by the shapes of ``sequences`` and ``action_mask``."""

    def __missing__(self, shapes: tuple[Shape, Shape]) -> BatchCount:
        experience_shape(*shapes)
        count = self[shapes] = BatchCount()
        return count


def two_dimensions(name: str, shape: Shape) -> tuple[int, int]:
    """Return batch and length, or raise ValueError."""
    if len(shape) == 2:  # noqa: PLR2004 - batch and length
        return shape[0], shape[1]
    message = f"{name} has shape {tuple(shape)}; expected (batch, length)"
    raise ValueError(message)


def experience_shape(sequences: Shape, action_mask: Shape) -> tuple[int, int, int]:
    """Return batch, prompt and response in padded positions, or raise ValueError."""
    batch, length = two_dimensions("sequences", sequences)
    _, response = two_dimensions("action_mask", action_mask)
    if response > length:
        message = f"action_mask has {response} actions, more than the {length} of sequences"
        raise ValueError(message)
    return batch, length - response, response


class BatchLog:
    """The batches of an episode, on the training thread. Adding waits for no device."""

    __slots__ = ("_deferred", "_learned_from", "_made", "experiences", "learned")

    def __init__(self) -> None:
        self.experiences = ExperienceCounts()
        self.learned = LearnCounts()
        self._made: list[Made] = []
        self._learned_from: list[LearnedFrom] = []
        self._deferred: list[Deferred] = []

    def add_made(
        self, sequences: Shape, action_mask: Shape, prompts: torch.Tensor, responses: torch.Tensor
    ) -> None:
        """Note experience by its shapes, and the tokens (B,) of prompts and of responses."""
        self._made.append((experience_shape(sequences, action_mask), prompts, responses))

    def add_learned(self, sequences: Shape, total: torch.Tensor) -> None:
        """Note a batch learned from by its shape, and the tokens (B,) of its sequences."""
        self._learned_from.append((two_dimensions("sequences", sequences), total))

    def add_deferred(
        self, amounts: Callable[..., Amounts], lengths: Sequence[torch.Tensor]
    ) -> None:
        """Note what is to be called with the lengths, once they are on the host."""
        self._deferred.append((amounts, lengths))

    def take(self) -> Batches:
        """Start copying lengths to the host, and return all that was noted and forget it."""
        lengths = [tensor for _, *tensors in self._made for tensor in tensors]
        lengths += [tensor for _, tensor in self._learned_from]
        lengths += [tensor for _, tensors in self._deferred for tensor in tensors]
        batches = Batches(
            experiences=[
                (experience_shape(*shapes), count.calls)
                for shapes, count in self.experiences.items()
                if count.calls
            ],
            learned=[
                (two_dimensions("sequences", shape), count.calls)
                for shape, count in self.learned.items()
                if count.calls
            ],
            made=[(shape, _to_host(one), _to_host(other)) for shape, one, other in self._made],
            learned_from=[(shape, _to_host(total)) for shape, total in self._learned_from],
            deferred=[
                (amounts, [_to_host(tensor) for tensor in tensors])
                for amounts, tensors in self._deferred
            ],
            events=_events(lengths),
        )
        self.clear()
        return batches

    def clear(self) -> None:
        """Forget what was noted."""
        self._made.clear()
        self._learned_from.clear()
        self._deferred.clear()
        for counts in (self.experiences, self.learned):
            if len(counts) > _MAX_SHAPES:
                counts.clear()
            for count in counts.values():
                count.calls = 0


Made = tuple[tuple[int, int, int], torch.Tensor, torch.Tensor]
LearnedFrom = tuple[tuple[int, int], torch.Tensor]
Deferred = tuple[Callable[..., Amounts], Sequence[torch.Tensor]]


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """The batches of a finished episode; lengths are there once the ``events`` have come."""

    experiences: list[tuple[tuple[int, int, int], int]]
    learned: list[tuple[tuple[int, int], int]]
    made: list[Made]
    learned_from: list[LearnedFrom]
    deferred: list[Deferred] = []
    events: list[torch.Event] = []

    def wait(self) -> None:
        """Wait until the lengths are on the host."""
        for event in self.events:
            event.synchronize()

    def add_counts(self, amounts: Amounts) -> None:
        """Add samples, steps and tokens; of batches without lengths the padded ones."""
        for (batch, prompt, response), calls in self.experiences:
            real = token_counts(_each(batch, prompt), _each(batch, response))
            known = {**experience_counts(batch, prompt + response), catalogue.UNMASKED_BATCHES: 1}
            catalogue.merge(amounts, known | real, calls)
        for (batch, length), calls in self.learned:
            known = {catalogue.LEARN_TOKENS: batch * length, catalogue.UNMASKED_BATCHES: 1}
            catalogue.merge(amounts, _learning_counts(batch, length) | known, calls)
        for (batch, prompt, response), prompts, responses in self._real_experience():
            positions = batch * (prompt + response)
            padding = {catalogue.PADDING: positions - float((prompts + responses).sum())}
            catalogue.merge(amounts, experience_counts(batch, prompt + response) | padding)
            catalogue.merge(amounts, token_counts(prompts, responses))
        for (batch, length), lengths in self.learned_from:
            tokens = float(lengths.sum())
            known = {
                catalogue.LEARN_TOKENS: tokens,
                catalogue.LEARN_PADDING: batch * length - tokens,
            }
            catalogue.merge(amounts, _learning_counts(batch, length) | known)

    def add_costs(self, amounts: Amounts, workload: Workload) -> None:
        """Add FLOP and bytes; raises what the workload raises, with what was added before kept."""
        for (batch, prompt, response), calls in self.experiences:
            catalogue.merge(amounts, _padded_experience(workload, batch, prompt, response), calls)
            real = _real_experience(workload, _each(batch, prompt), _each(batch, response))
            catalogue.merge(amounts, real, calls)
        for shape, calls in collections.Counter(shape for shape, *_ in self.made).items():
            catalogue.merge(amounts, _padded_experience(workload, *shape), calls)
        for _, prompts, responses in self._real_experience():
            catalogue.merge(amounts, _real_experience(workload, prompts, responses))
        for (batch, length), calls in self.learned:
            catalogue.merge(amounts, workload.padded_learning(batch, length), calls)
            catalogue.merge(amounts, workload.real_learning(_each(batch, length)), calls)
        for (batch, length), calls in collections.Counter(
            shape for shape, _ in self.learned_from
        ).items():
            catalogue.merge(amounts, workload.padded_learning(batch, length), calls)
        for _, lengths in self.learned_from:
            catalogue.merge(amounts, workload.real_learning(lengths.to(torch.float64)))
        for deferred, tensors in self.deferred:
            catalogue.merge(amounts, deferred(*tensors))

    def _real_experience(
        self,
    ) -> Iterator[tuple[tuple[int, int, int], torch.Tensor, torch.Tensor]]:
        for shape, prompts, responses in self.made:
            yield shape, prompts.to(torch.float64), responses.to(torch.float64)


def token_counts(prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
    """Return what there is to count of generated sequences of those lengths, float64."""
    return {
        catalogue.PROMPT_TOKENS: float(prompts.sum()),
        catalogue.RESPONSE_TOKENS: float(responses.sum()),
        catalogue.RESPONSES: float(len(responses)),
        catalogue.RESPONSE_MAX: float(responses.max()) if len(responses) else 0.0,
    }


def experience_counts(batch: int, length: int) -> Amounts:
    """Return what there is to count of a (batch, length) tensor of experience."""
    return {
        catalogue.GENERATED: batch,
        catalogue.COLLECT_STEPS: 1,
        catalogue.MAKE_EXPERIENCE_PADDED: batch * length,
    }


def _learning_counts(batch: int, length: int) -> Amounts:
    return {
        catalogue.LEARNED: batch,
        catalogue.LEARN_BATCHES: 1,
        catalogue.LEARN_PADDED: batch * length,
    }


def _padded_experience(workload: Workload, batch: int, prompt: int, response: int) -> Amounts:
    return {
        **workload.padded_generation(batch, prompt, response),
        **workload.generation_bytes(_each(batch, prompt), _each(batch, response)),
        **workload.padded_scoring(batch, prompt + response),
    }


def _real_experience(workload: Workload, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
    return {
        **workload.real_generation(prompts, responses),
        **workload.real_scoring(prompts + responses),
    }


def mask_lengths(
    name: str, mask: torch.Tensor, shape: Sequence[int], end: int | None = None
) -> torch.Tensor:
    """Launch the sums of a mask (B, L) of ``sequences`` of that shape, or raise ValueError.

    ``end`` is where to stop, by default at the sequences' end.
    """
    if mask.shape != shape:
        message = (
            f"{name} has shape {tuple(mask.shape)}; expected that of sequences, {tuple(shape)}"
        )
        raise ValueError(message)
    return (mask if end is None else mask[:, :end]).sum(-1)


def given_lengths(name: str, lengths: Sequence[int] | Any, batch: int) -> torch.Tensor:
    """Return lengths that a trainer gives as a tensor, or raise ValueError."""
    tensor = torch.as_tensor(lengths)
    if tensor.shape != (batch,):
        message = f"{name} has shape {tuple(tensor.shape)}; expected one for each of {batch}"
        raise ValueError(message)
    return tensor


def _each(batch: int, length: int) -> torch.Tensor:
    return torch.full((batch,), float(length), dtype=torch.float64)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


def _events(tensors: Iterable[torch.Tensor]) -> list[torch.Event]:
    """Record, on each device's current stream, an event that comes after the copies."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    events = [torch.Event(device) for device in devices]
    for event in events:
        event.record()
    return events
