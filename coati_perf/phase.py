"""The context manager that times a phase, and the handles of an evaluator by name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from coati_perf import catalogue

if TYPE_CHECKING:
    from coati_perf.hooks import Hooks

# A trainer that makes up phase names without end must not eat memory.
MAX_PHASES = 128

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Phase:
    """Times one phase: a block, or each call of a function; see ``PerformanceEvaluator.phase``."""

    __slots__ = ("_evaluator", "name")

    def __init__(self, evaluator: Hooks, name: str) -> None:
        self._evaluator = evaluator
        self.name = name

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function so that each call of it is this phase: a decorator."""

        @functools.wraps(function)
        def measured(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self:
                return function(*args, **kwargs)

        return measured

    def __enter__(self) -> None:
        evaluator = self._evaluator
        if evaluator._ignoring:
            return
        tally = evaluator._tally
        if tally is None:
            evaluator.fault(f"phase {self.name!r} outside an episode")
            return
        try:
            clock = evaluator.clock
            entered = clock()
            tally.open = node = tally.open.children[self.name]
            node.marked = True
            node.started = now = clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - a phase never raises
            evaluator.fault(f"phase {self.name!r}", error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        evaluator = self._evaluator
        tally = evaluator._tally
        if tally is None:
            return
        try:
            clock = evaluator.clock
            now = clock()
            node = tally.open
            if node.name is self.name:
                tally.open = node.parent
                node.marked = False
                node.seconds += now - node.started
            elif not tally.leave(self.name, now):
                evaluator.fault(f"phase {self.name!r} ended out of order")
            tally.overhead_s += clock() - now
        except Exception as fault:  # noqa: BLE001 - a phase never raises
            evaluator.fault(f"phase {self.name!r}", fault)


class PhaseSwitch:
    """A phase that is entered and left at places that do not know of each other."""

    def __init__(self, phase: Phase) -> None:
        self.is_on = False
        self._phase = phase

    def on(self) -> None:
        """Enter the phase, where it is not entered."""
        if not self.is_on:
            self.is_on = True
            self._phase.__enter__()

    def off(self) -> None:
        """Leave the phase, where it is entered."""
        if self.is_on:
            self.is_on = False
            self._phase.__exit__(None, None, None)


class Phases(dict[str, Phase]):
    """The phases of one evaluator by the name asked for; a new name makes its own."""

    def __init__(self, evaluator: Hooks) -> None:
        super().__init__()
        self._evaluator = evaluator
        self.kind: Callable[[Hooks, str], Phase] = Phase

    def __missing__(self, asked: str) -> Phase:
        evaluator = self._evaluator
        if len(self) >= MAX_PHASES:
            evaluator.fault(f"more than {MAX_PHASES} phases; the rest are named 'more'")
            return self.kind(evaluator, "more")
        name = sys.intern(str(asked))
        if not catalogue.is_phase_name(name):
            name = sys.intern(catalogue.to_phase_name(name))
            evaluator.warn_once(
                f"phase {str(asked)[:80]!r} is shown as {name!r}: a name has letters, digits, _, -"
                f" and ., and {', '.join(sorted(catalogue.RESERVED_PHASE_NAMES))} are taken"
            )
        phase = self[asked] = self.kind(evaluator, name)
        return phase
