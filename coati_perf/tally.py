"""What one rank has measured of the current episode."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TypeVar

import torch

from coati_perf import catalogue
from coati_perf.cost import Amounts, Workload
from coati_perf.flops.lengths import to_tensor
from coati_perf.lengths import LengthLog, generated_amounts, learned_amounts, made_amounts
from coati_perf.phases import Node
from coati_perf.row import Row

# Beyond so many distinct batch shapes in one episode they are folded into the sums early.
_MAX_SHAPES = 256

Shape = tuple[int, ...]
Key = TypeVar("Key")


class BatchKind:
    """How often batches of one shape came, and what one such batch amounts to."""

    __slots__ = ("amounts", "calls")

    def __init__(self, amounts: Amounts) -> None:
        self.calls = 0
        self.amounts = amounts


class LearnBatches(dict[Shape, BatchKind]):
    """Batches learned from, by the shape of ``sequences``; ``masked`` ones have real lengths."""

    def __init__(self, tally: Tally, *, masked: bool) -> None:
        super().__init__()
        self._tally = tally
        self._masked = masked

    def __missing__(self, shape: Shape) -> BatchKind:
        batch, length = _two_dimensions("sequences", shape)
        workload = self._tally.workload
        amounts = {
            catalogue.LEARNED: batch,
            catalogue.LEARN_BATCHES: 1,
            catalogue.LEARN_PADDED: batch * length,
            **workload.padded_learning(batch, length),
        }
        if self._masked:
            amounts[catalogue.LEARN_PADDING] = batch * length  # the real tokens are taken off
        else:
            amounts[catalogue.UNMASKED_BATCHES] = 1
            amounts |= learned_amounts(workload, _each(batch, length))
            del amounts[catalogue.LEARN_PADDING]
        return self._tally.new_kind(self, shape, amounts)


class ExperienceBatches(dict[tuple[Shape, Shape], BatchKind]):
    """Experience made, by the shapes of ``sequences`` and ``action_mask``."""

    def __init__(self, tally: Tally, *, masked: bool) -> None:
        super().__init__()
        self._tally = tally
        self._masked = masked

    def __missing__(self, shapes: tuple[Shape, Shape]) -> BatchKind:
        batch, length = _two_dimensions("sequences", shapes[0])
        _, response = _two_dimensions("action_mask", shapes[1])
        prompt = length - response
        if prompt < 0:
            message = f"action_mask has {response} actions, more than the {length} of sequences"
            raise ValueError(message)
        workload = self._tally.workload
        amounts = {
            **experience_amounts(batch, length),
            **workload.padded_generation(batch, prompt, response),
            **workload.padded_scoring(batch, length),
        }
        if self._masked:
            amounts[catalogue.PADDING] = batch * length  # the real tokens are taken off
        else:
            amounts[catalogue.UNMASKED_BATCHES] = 1
            amounts |= made_amounts(workload, _each(batch, prompt), _each(batch, response))
            del amounts[catalogue.PADDING]
        return self._tally.new_kind(self, shapes, amounts)


def _each(batch: int, length: int) -> torch.Tensor:
    return torch.full((batch,), float(length), dtype=torch.float64)


def _two_dimensions(name: str, shape: Shape) -> tuple[int, int]:
    if len(shape) == 2:  # noqa: PLR2004 - batch and length
        return shape[0], shape[1]
    message = f"{name} has shape {tuple(shape)}; expected (batch, length)"
    raise ValueError(message)


def experience_amounts(batch: int, length: int) -> Amounts:
    """Return what a (batch, length) tensor of experience amounts to, FLOP apart."""
    return {
        catalogue.GENERATED: batch,
        catalogue.COLLECT_STEPS: 1,
        catalogue.MAKE_EXPERIENCE_PADDED: batch * length,
    }


def recorded_amounts(
    workload: Workload, phase: str, prompts: Sequence[int], responses: Sequence[int]
) -> Amounts:
    """Return what real prompt and response lengths of one phase amount to, without padding.

    ``generate`` counts tokens and generation, ``score`` the scoring forwards,
    ``make_experience`` both, ``learn`` the learning; any other phase nothing.
    """
    amounts: Amounts = {}
    pairs = collections.Counter(zip(prompts, responses, strict=True))
    prompt, response = to_tensor(prompts), to_tensor(responses)
    if phase in ("generate", "make_experience"):
        catalogue.merge(amounts, generated_amounts(workload, prompt, response))
        for pair, count in pairs.items():
            padded = workload.padded_generation(1, *pair)
            padded.pop(catalogue.GENERATE_BYTES, None)  # they depend on the batch, not known here
            catalogue.merge(amounts, padded, count)
    if phase in ("score", "make_experience"):
        catalogue.merge(amounts, workload.real_scoring(prompt + response))
        for pair, count in pairs.items():
            catalogue.merge(amounts, workload.padded_scoring(1, sum(pair)), count)
    if phase == "learn":
        learned = learned_amounts(workload, prompt + response)
        learned.pop(catalogue.LEARN_PADDING)
        catalogue.merge(amounts, learned)
        for pair, count in pairs.items():
            catalogue.merge(amounts, workload.padded_learning(1, sum(pair)), count)
    return amounts


class Tally:
    """Clock stamps and counts of one episode, on the training thread; reused for the next one.

    The hooks read and write the public attributes directly: a method call would cost as much as
    the whole measurement.
    """

    __slots__ = (
        "_amounts",
        "episode",
        "episode_s",
        "experiences",
        "faults",
        "learn_kind",
        "learn_shape",
        "learned",
        "lengths",
        "masked_experiences",
        "masked_learned",
        "open",
        "overhead_s",
        "root",
        "started",
        "workload",
    )

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.root = Node("", None)
        self.open = self.root
        self.experiences = ExperienceBatches(self, masked=False)
        self.learned = LearnBatches(self, masked=False)
        self.masked_experiences = ExperienceBatches(self, masked=True)
        self.masked_learned = LearnBatches(self, masked=True)
        self.lengths = LengthLog()
        # The shape of the last batch and its kind: most batches have the shape of the last one.
        self.learn_shape: Shape | None = None
        self.learn_kind = BatchKind({})
        self.overhead_s = 0.0
        self.faults: dict[str, int] = collections.defaultdict(int)
        self._amounts: Amounts = {}
        self.episode = 0
        self.started = 0.0
        self.episode_s: float | None = None

    def start(self, episode: int) -> None:
        """Begin an episode; whatever was left of an earlier one is forgotten."""
        self._clear()
        self.episode = episode

    def add(self, amounts: Amounts, calls: int = 1) -> None:
        """Add ``calls`` times ``amounts`` to the episode's sums."""
        catalogue.merge(self._amounts, amounts, calls)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add time that someone else measured to a phase of the episode itself."""
        self.root.children[phase].seconds += seconds

    def leave(self, name: str, now: float) -> bool:
        """Leave the phase ``name``, dropping open ones inside it; say whether it was on top."""
        node = self.open
        while node is not self.root and node.name != name:
            node = node.parent
        if node is self.root:
            return False
        clean = node is self.open
        node.marked = False
        node.seconds += now - node.started
        self.open = node.parent
        return clean

    def leave_all(self, now: float) -> None:
        """Leave every open phase."""
        while self.open is not self.root:
            self.leave(self.open.name, now)

    def new_kind(self, kinds: dict[Key, BatchKind], key: Key, amounts: Amounts) -> BatchKind:
        """Remember a new shape of batch."""
        if len(kinds) >= _MAX_SHAPES:
            self._fold(kinds)
            kinds.clear()
        kind = kinds[key] = BatchKind(amounts)
        return kind

    def row(self, rank: int, sequence: int, now: float) -> Row:
        """Return the finished episode as a row."""
        self._fold_all()
        return Row(
            rank=rank,
            sequence=sequence,
            episode=self.episode,
            episode_s=float(now - self.started if self.episode_s is None else self.episode_s),
            seconds={node.path: float(node.seconds) for node in self.root.walk() if node.seconds},
            amounts={
                **{name: float(amount) for name, amount in self._amounts.items()},
                catalogue.TRAINING_THREAD_S: self.overhead_s,
                catalogue.HOOK_FAULTS: float(sum(self.faults.values())),
            },
            faults=dict(self.faults),
        )

    def _fold_all(self) -> None:
        self._fold(self.experiences)
        self._fold(self.learned)
        self._fold(self.masked_experiences)
        self._fold(self.masked_learned)

    def _fold(self, kinds: dict[Key, BatchKind]) -> None:
        for kind in kinds.values():
            if kind.calls:
                self.add(kind.amounts, kind.calls)
                kind.calls = 0

    def _clear(self) -> None:
        for node in self.root.walk():
            node.seconds = 0.0
            node.marked = False
        self.open = self.root
        self._fold_all()
        self._amounts.clear()
        self.lengths.clear()
        self.faults.clear()
        self.overhead_s = 0.0
        self.episode_s = None
