"""Checks of what users give: each names the argument, what it is and what was expected."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from torch import nn

from coati_perf.flops import CostModel


def count(name: str, value: SupportsIndex) -> int:
    """Return a number of things as an int, or raise TypeError or ValueError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        message = f"{name} is {value!r} ({type(value).__name__}); expected an integer"
        raise TypeError(message)
    if number < 0:
        message = f"{name} is {number}; expected an integer of at least 0"
        raise ValueError(message)
    return number


def positive(name: str, value: float) -> float:
    """Return a finite number above 0 as a float, or raise ValueError."""
    if isinstance(value, (int, float)) and 0 < value < math.inf:
        return float(value)
    message = f"{name} is {value!r}; expected a finite number above 0"
    raise ValueError(message)


def positive_or_none(name: str, value: float | None) -> float | None:
    """Return a finite number above 0 as a float, None as None, or raise ValueError."""
    return None if value is None else positive(name, value)


def number_or_none(name: str, value: SupportsIndex | None) -> int | None:
    """Return a number of things of which there is one at least, None as None, or raise."""
    number = None if value is None else count(name, value)
    if number == 0:
        message = f"{name} is 0; expected an integer of at least 1, or None"
        raise ValueError(message)
    return number


def size_or_none(name: str, value: Any) -> int | None:
    """Return a number, or the size of a process group or device mesh; None as None, or raise."""
    if hasattr(value, "size"):
        value = value.size()
    return number_or_none(name, value)


def cost_models(
    name: str, value: Mapping[str, Any], *, gradient_checkpointing: bool
) -> dict[str, CostModel]:
    """Return a cost model for each role that has a model, or raise.

    ``gradient_checkpointing`` is that of models given as configs.

    Raises:
        TypeError: it is no mapping, or a model is of no kind that ``CostModel.traced`` takes.
        UntraceableModelError: a model can't be counted.
    """

    def cost_model(model: Any) -> CostModel:
        if isinstance(model, CostModel):
            return model
        of_its_own = isinstance(model, nn.Module)
        checkpointing = None if of_its_own else gradient_checkpointing
        return CostModel.traced(model, gradient_checkpointing=checkpointing)

    return {
        role: cost_model(model) for role, model in mapping(name, value).items() if model is not None
    }


def path_or_none(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    """Return a path, or raise TypeError."""
    if value is None:
        return None
    try:
        return Path(value)
    except TypeError:
        message = f"{name} is {value!r}; expected a path"
        raise TypeError(message) from None


def mapping(name: str, value: Mapping[Any, Any] | None) -> Mapping[Any, Any]:
    """Return a mapping, an empty one for None, or raise TypeError."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    message = (
        f"{name} is a {type(value).__name__}; expected a mapping such as a dict: "
        "for a dataclass pass dataclasses.asdict(it), for a Namespace vars(it)"
    )
    raise TypeError(message)


def keys_or_none(name: str, value: bool | Iterable[str]) -> tuple[str, ...] | None:  # noqa: FBT001
    """Return names of keys: none for True, None for False; or raise TypeError."""
    if isinstance(value, bool):
        return () if value else None
    keys = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if keys is None or not all(isinstance(key, str) for key in keys):
        message = f"{name} is {value!r}; expected True, False or names of keys"
        raise TypeError(message)
    return keys


def clock_function(name: str, value: Callable[[], float]) -> Callable[[], float]:
    """Return a callable, or raise TypeError."""
    if callable(value):
        return value
    message = f"{name} is {value!r}; expected a callable that returns seconds"
    raise TypeError(message)
