"""Checks of what users give: each names the argument, what it is and what was expected."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import nn

from coati_perf.cost import LEARNING_ROLES
from coati_perf.flops import CostModel
from coati_perf.plain import as_mapping


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


def models_by_role(name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the models that there are, one that learns among them; none for None.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no actor nor critic, or a role that is nearly one of these.
    """
    if value is None:
        return {}
    models = {role: model for role, model in mapping(name, value).items() if model is not None}
    mistaken = [
        role
        for role in models
        if role not in LEARNING_ROLES and difflib.get_close_matches(str(role), LEARNING_ROLES)
    ]
    if mistaken or not any(role in models for role in LEARNING_ROLES):
        message = (
            f"{name} has the roles {', '.join(map(repr, models)) or 'none'}; expected 'actor', "
            "which generates and learns, 'critic', which learns too, and any others, not of nearly "
            "these names, that score: such as 'initial' and 'reward'"
        )
        raise ValueError(message)
    return models


def model_dtype(model: Any) -> torch.dtype:
    """Return the type of a module's parameters, or what a config says; else bfloat16."""
    if isinstance(model, nn.Module):
        found = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    else:
        found = getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def cost_models(
    models: Mapping[str, Any], dtype: torch.dtype, *, gradient_checkpointing: bool
) -> dict[str, CostModel]:
    """Return the cost model of each model, or raise.

    ``gradient_checkpointing`` is that of models given as configs.

    Raises:
        TypeError: a model is of no kind that ``CostModel.traced`` takes.
        UntraceableModelError: a model can't be counted.
    """

    def cost_model(model: Any) -> CostModel:
        if isinstance(model, CostModel):
            return model
        of_its_own = isinstance(model, nn.Module)
        checkpointing = None if of_its_own else gradient_checkpointing
        return CostModel.traced(model, gradient_checkpointing=checkpointing, dtype=dtype)

    return {role: cost_model(model) for role, model in models.items()}


def dtype_or_none(name: str, value: torch.dtype | None) -> torch.dtype | None:
    """Return a dtype, None as None, or raise TypeError."""
    if value is None or isinstance(value, torch.dtype):
        return value
    message = f"{name} is {value!r}; expected a torch.dtype such as torch.bfloat16, or None"
    raise TypeError(message)


def path_or_none(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    """Return a path, or raise TypeError."""
    if value is None:
        return None
    try:
        return Path(value)
    except TypeError:
        message = f"{name} is {value!r}; expected a path"
        raise TypeError(message) from None


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """Return a mapping, an empty one for None, or raise TypeError; see ``plain.as_mapping``."""
    if value is None:
        return {}
    try:
        converted = as_mapping(value)
    except Exception as error:
        message = f"{name}, a {type(value).__name__}, cannot be read: {error!r}; expected a mapping"
        raise TypeError(message) from error
    if converted is not None:
        return converted
    message = (
        f"{name} is a {type(value).__name__}; expected a mapping such as a dict, a dataclass or"
        " another configuration object"
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
