"""What one rank has measured of the current episode."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TypeVar

from coati_perf import catalogue
from coati_perf.cost import CostModel
from coati_perf.phases import Node
from coati_perf.row import Row

# Beyond so many distinct batch shapes in one episode they are folded into the sums early.
_MAX_SHAPES = 256

Shape = tuple[int, ...]
Key = TypeVar("Key")


class BatchKind:
    """How often batches of one shape came, and what one such batch amounts to."""

    __slots__ = ("amounts", "calls")

    def __init__(self, amounts: dict[str, float]) -> None:
        self.calls = 0
        self.amounts = amounts


class LearnBatches(dict[Shape, BatchKind]):
    """Batches learned from, by the shape of ``sequences``."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __missing__(self, shape: Shape) -> BatchKind:
        batch, length = _two_dimensions("sequences", shape)
        return self._tally.new_kind(
            self, shape, learn_amounts(self._tally.cost_model, batch, length)
        )


class ExperienceBatches(dict[tuple[Shape, Shape], BatchKind]):
    """Experience made, by the shapes of ``sequences`` and ``action_mask``."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __missing__(self, shapes: tuple[Shape, Shape]) -> BatchKind:
        batch, length = _two_dimensions("sequences", shapes[0])
        _, response = _two_dimensions("action_mask", shapes[1])
        if response > length:
            message = f"action_mask has {response} actions, more than the {length} of sequences"
            raise ValueError(message)
        return self._tally.new_kind(
            self,
            shapes,
            {
                **experience_amounts(batch, length),
                **generate_amounts(self._tally.cost_model, batch, length - response, response),
                catalogue.SCORE_FLOP: self._tally.cost_model.score(batch, length),
            },
        )


def _two_dimensions(name: str, shape: Shape) -> tuple[int, int]:
    if len(shape) == 2:  # noqa: PLR2004 - batch and length
        return shape[0], shape[1]
    message = f"{name} has shape {tuple(shape)}; expected (batch, length)"
    raise ValueError(message)


def learn_amounts(cost_model: CostModel, batch: int, length: int) -> dict[str, float]:
    """Return what learning from a (batch, length) tensor amounts to."""
    return {
        catalogue.LEARNED: batch,
        catalogue.LEARN_BATCHES: 1,
        catalogue.LEARN_PADDED: batch * length,
        catalogue.LEARN_FLOP: cost_model.learn(batch, length),
    }


def experience_amounts(batch: int, length: int) -> dict[str, float]:
    """Return what a (batch, length) tensor of experience amounts to, FLOP apart."""
    return {
        catalogue.GENERATED: batch,
        catalogue.COLLECT_STEPS: 1,
        catalogue.MAKE_EXPERIENCE_PADDED: batch * length,
    }


def generate_amounts(
    cost_model: CostModel, batch: int, prompt: int, response: int
) -> dict[str, float]:
    """Return the cost of generating ``response`` tokens after each of ``batch`` prompts."""
    return {catalogue.GENERATE_FLOP: cost_model.generate(batch, prompt, response)}


def recorded_amounts(
    cost_model: CostModel, phase: str, prompts: Sequence[int], responses: Sequence[int]
) -> dict[str, float]:
    """Return what real prompt and response lengths of one phase amount to, sample by sample.

    ``generate`` counts tokens and generation, ``score`` the scoring forwards,
    ``make_experience`` both, ``learn`` the learning; any other phase nothing.
    """
    amounts: dict[str, float] = collections.defaultdict(int)
    pairs = list(zip(prompts, responses, strict=True))
    if phase in ("generate", "make_experience"):
        amounts[catalogue.PROMPT_TOKENS] += sum(prompts)
        amounts[catalogue.RESPONSE_TOKENS] += sum(responses)
        amounts[catalogue.GENERATE_FLOP] += sum(
            cost_model.generate(1, prompt, response) for prompt, response in pairs
        )
    if phase in ("score", "make_experience"):
        amounts[catalogue.SCORE_FLOP] += sum(cost_model.score(1, sum(pair)) for pair in pairs)
    if phase == "learn":
        amounts[catalogue.LEARN_TOKENS] += sum(prompts) + sum(responses)
        amounts[catalogue.LEARN_FLOP] += sum(cost_model.learn(1, sum(pair)) for pair in pairs)
    return amounts


class Tally:
    """Clock stamps and counts of one episode, on the training thread; reused for the next one.

    The hooks read and write the public attributes directly: a method call would cost as much as
    the whole measurement.
    """

    __slots__ = (
        "_amounts",
        "cost_model",
        "episode",
        "episode_s",
        "experiences",
        "faults",
        "learn_kind",
        "learn_shape",
        "learned",
        "open",
        "overhead_s",
        "root",
        "started",
    )

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self.root = Node("", None)
        self.open = self.root
        self.experiences = ExperienceBatches(self)
        self.learned = LearnBatches(self)
        # The shape of the last batch and its kind: most batches have the shape of the last one.
        self.learn_shape: Shape | None = None
        self.learn_kind = BatchKind({})
        self.overhead_s = 0.0
        self.faults: dict[str, int] = collections.defaultdict(int)
        self._amounts: dict[str, float] = collections.defaultdict(int)
        self.episode = 0
        self.started = 0.0
        self.episode_s: float | None = None

    def start(self, episode: int) -> None:
        """Begin an episode; whatever was left of an earlier one is forgotten."""
        self._clear()
        self.episode = episode

    def add(self, amounts: dict[str, float], calls: int = 1) -> None:
        """Add ``calls`` times ``amounts`` to the episode's sums."""
        for name, amount in amounts.items():
            self._amounts[name] += calls * amount

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

    def new_kind(
        self, kinds: dict[Key, BatchKind], key: Key, amounts: dict[str, float]
    ) -> BatchKind:
        """Remember a new shape of batch."""
        if len(kinds) >= _MAX_SHAPES:
            self._fold(kinds)
            kinds.clear()
        kind = kinds[key] = BatchKind(amounts)
        return kind

    def row(self, rank: int, sequence: int, now: float) -> Row:
        """Return the finished episode as a row."""
        self._fold(self.experiences)
        self._fold(self.learned)
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
        self._fold(self.experiences)
        self._fold(self.learned)
        self._amounts.clear()
        self.faults.clear()
        self.overhead_s = 0.0
        self.episode_s = None
