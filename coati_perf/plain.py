"""Any configuration as plain data: what JSON can hold and a later run can compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 20


def plain(value: object, _depth: int = 0) -> Any:  # noqa: PLR0911 - one a kind of value
    """Return ``value`` with every container copied and every object in it made plain.

    Numbers, strings, booleans and None stay; mappings become dicts with string keys, sequences
    and sets lists; paths, dtypes, devices and enums their text. Anything else becomes the name
    of its type, since its text may hold a memory address, which differs from run to run. Never
    raises.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return _within_json(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if _depth >= _MAX_DEPTH:
        return f"<nested more than {_MAX_DEPTH} deep>"
    try:
        if isinstance(value, Mapping):
            return {str(key): plain(item, _depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, _depth + 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted((plain(item, _depth + 1) for item in value), key=repr)
        text = str(value)
    except Exception:  # noqa: BLE001 - someone else's __str__ or items()
        return _type_name(value)
    return _type_name(value) if " at 0x" in text else text


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return plain data as one level of ``a.b.0`` keys, for trackers that hold no nested values."""
    flat: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        elif isinstance(value, list) and value:
            items = {str(index): item for index, item in enumerate(value)}
            flat.update(flatten(items, f"{name}."))
        elif isinstance(value, (bool, int, float, str)):
            flat[name] = value
        else:
            flat[name] = str(value)
    return flat


def _within_json(value: int | str | None) -> int | str | None:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
    if value is None or isinstance(value, bool):
        return value
    # Members of an IntEnum become plain integers.
    return int(value) if -(2**63) <= value < 2**64 else str(value)


def _type_name(value: object) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
