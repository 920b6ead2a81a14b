"""What one rank has measured of the current episode."""

from __future__ import annotations

import collections

from coati_perf import catalogue
from coati_perf.batches import BatchCount, BatchLog, Shape
from coati_perf.cost import Amounts
from coati_perf.phases import Node
from coati_perf.row import Row


class Tally:
    """Clock stamps and counts of one episode, on the training thread; reused for the next one.

    The hooks read and write the public attributes directly: a method call would cost as much as
    the whole measurement.
    """

    __slots__ = (
        "_amounts",
        "batches",
        "episode",
        "episode_s",
        "faults",
        "learn_count",
        "learn_shape",
        "open",
        "overhead_s",
        "root",
        "started",
    )

    def __init__(self) -> None:
        self.root = Node("", None)
        self.open = self.root
        self.batches = BatchLog()
        # The shape of the last batch and its count: most batches have the shape of the last one.
        self.learn_shape: Shape | None = None
        self.learn_count = BatchCount()
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

    def add(self, amounts: Amounts) -> None:
        """Add ``amounts`` to the episode's sums."""
        catalogue.merge(self._amounts, amounts)

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

    def row(self, rank: int, sequence: int, now: float) -> Row:
        """Return the finished episode as a row, what its batches amount to apart."""
        return Row(
            rank=rank,
            sequence=sequence,
            episode=self.episode,
            episode_s=float(now - self.started if self.episode_s is None else self.episode_s),
            seconds={node.path: float(node.seconds) for node in self.root.walk() if node.seconds},
            amounts={
                **self._amounts,
                catalogue.TRAINING_THREAD_S: self.overhead_s,
                catalogue.HOOK_FAULTS: float(sum(self.faults.values())),
            },
            faults=dict(self.faults),
        )

    def _clear(self) -> None:
        for node in self.root.walk():
            node.seconds = 0.0
            node.marked = False
        self.open = self.root
        self._amounts.clear()
        self.batches.clear()
        self.learn_shape = None
        self.faults.clear()
        self.overhead_s = 0.0
        self.episode_s = None
