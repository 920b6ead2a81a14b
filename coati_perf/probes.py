"""What is read off the accelerator at the borders of phases, beside the host's clock.

The hooks of an evaluator without probes know nothing of them: they are wrapped, on that evaluator
alone, where there is a probe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from coati_perf.phase import Phase

if TYPE_CHECKING:
    from types import TracebackType

    from coati_perf.hooks import Hooks

_HOOKS = ("make_experience", "learn_batch")


class Probe(Protocol):
    """Sees phases begin and end on the training thread; must not wait for the device.

    ``path`` is where a phase is in the tree, such as ``make_experience/generate``. Phases nest.
    """

    def enter(self, path: str) -> None:
        """A phase has begun."""
        ...

    def leave(self, path: str) -> None:
        """A phase is about to end, and all that are still open inside it."""
        ...

    def clear(self) -> None:
        """Forget everything: an episode begins."""
        ...


def attach(evaluator: Hooks, probes: Iterable[Probe]) -> None:
    """Let the probes see each phase of an evaluator, from its hooks and from ``phase()``.

    A probe that raises is a fault, and sees nothing more.
    """
    probes = list(probes)
    for hook in _HOOKS:
        start, end = f"on_{hook}_start", f"on_{hook}_end"
        setattr(evaluator, start, _entering(evaluator, getattr(evaluator, start), probes))
        setattr(evaluator, end, _leaving(evaluator, getattr(evaluator, end), probes))
    evaluator._phases.kind = functools.partial(ProbedPhase, probes=probes)


class ProbedPhase(Phase):
    """A phase that probes see."""

    __slots__ = ("_probes",)

    def __init__(self, evaluator: Hooks, name: str, *, probes: list[Probe]) -> None:
        super().__init__(evaluator, name)
        self._probes = probes

    def __enter__(self) -> None:
        super().__enter__()
        _tell(self._evaluator, self._probes, "enter")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _tell(self._evaluator, self._probes, "leave")
        super().__exit__(kind, error, traceback)


def _entering(
    evaluator: Hooks, hook: Callable[..., None], probes: list[Probe]
) -> Callable[..., None]:
    @functools.wraps(hook)
    def probed(*args: Any, **options: Any) -> None:
        hook(*args, **options)
        _tell(evaluator, probes, "enter")

    return probed


def _leaving(
    evaluator: Hooks, hook: Callable[..., None], probes: list[Probe]
) -> Callable[..., None]:
    @functools.wraps(hook)
    def probed(*args: Any, **options: Any) -> None:
        _tell(evaluator, probes, "leave")
        hook(*args, **options)

    return probed


def _tell(evaluator: Hooks, probes: list[Probe], what: str) -> None:
    """Tell the probes of the innermost open phase; never raises."""
    tally = evaluator._tally
    if tally is None or tally.open is tally.root:
        return
    for probe in tuple(probes):
        try:
            getattr(probe, what)(tally.open.path)
        except Exception as error:  # noqa: BLE001, PERF203 - someone's device
            probes.remove(probe)
            evaluator.fault(type(probe).__name__, error)
