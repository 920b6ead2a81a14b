"""Any configuration as plain data: what JSON can hold and a later run can compare."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import torch

_MAX_DEPTH = 20
# A header is one line of the journal: what is beyond these is left out, and said to be.
MAX_VALUES = 10_000
MAX_TEXT = 10_000
# Of an array the values are kept up to so many, and the shape alone beyond.
_MAX_ELEMENTS = 64


def as_mapping(value: Any) -> Mapping[Any, Any] | None:  # noqa: PLR0911 - one a kind
    """Return a configuration as a mapping, or None where it is none.

    Takes mappings (OmegaConf's too), dataclasses, ``argparse`` and simple namespaces, named
    tuples, msgspec structs, and what has ``model_dump`` (pydantic) or ``to_dict`` (Hugging Face).
    May raise what these do.
    """
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    for method in ("model_dump", "to_dict", "_asdict"):
        convert = getattr(value, method, None)
        if callable(convert):
            converted = convert()
            return converted if isinstance(converted, Mapping) else None
    return None


def plain(value: object) -> Any:
    """Return ``value`` with every container copied and every object in it made plain.

    Numbers, strings, booleans and None stay; what ``as_mapping`` takes becomes dicts with string
    keys, sequences and sets lists; small arrays and tensors on the CPU their values; paths,
    dtypes, devices and enums their text; functions and classes their names. Anything else becomes
    the name of its type, since its text may hold a memory address, which differs from run to run.
    Beyond ``MAX_VALUES`` values, and ``MAX_TEXT`` characters of one, it says what is left out.
    Never raises.
    """
    return _Walk().plain(value)


class _Walk:
    """One walk through a configuration, with what is left of its allowance."""

    def __init__(self) -> None:
        self._left = MAX_VALUES
        self._around: set[int] = set()  # the containers that we are inside of

    def plain(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return _within_json(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if id(value) in self._around:
            return "<cycle>"
        if len(self._around) >= _MAX_DEPTH:
            return f"<nested more than {_MAX_DEPTH} deep>"
        self._around.add(id(value))
        try:
            return self._object(value)
        except Exception:  # noqa: BLE001 - someone else's __str__ or items()
            return _type_name(value)
        finally:
            self._around.discard(id(value))

    def _object(self, value: Any) -> Any:  # noqa: PLR0911 - one a kind of value
        if (array := _array(value)) is not None:
            return array if isinstance(array, str) else self.plain(array)
        if (mapping := as_mapping(value)) is not None:
            return self._mapping(mapping)
        if isinstance(value, (bytes, bytearray)):
            return _within_json(value.decode("ascii")) if value.isascii() else f"<{len(value)} B>"
        if isinstance(value, AbstractSet):
            return sorted(self._items(value), key=repr)
        if isinstance(value, Sequence):
            return list(self._items(value))
        if inspect.isroutine(value) or isinstance(value, (type, types.ModuleType)):
            return _name(value)
        text = str(value)
        return _type_name(value) if " at 0x" in text else _within_json(text)

    def _mapping(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for key in mapping:
            if self._left <= 0:
                copied["…"] = f"<{len(mapping) - len(copied)} more>"
                break
            self._left -= 1
            name = _key(key)
            try:
                item = mapping[key]
            except Exception as error:  # noqa: BLE001 - OmegaConf's missing values raise
                copied[name] = f"<{type(error).__name__}>"
            else:
                copied[name] = self.plain(item)
        return copied

    def _items(self, values: Sequence[Any] | AbstractSet[Any]) -> Iterator[Any]:
        for number, value in enumerate(values):
            if self._left <= 0:
                yield f"<{len(values) - number} more>"
                return
            self._left -= 1
            yield self.plain(value)


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


def _array(value: Any) -> Any:
    """Return the values of a small array or tensor, the description of another, None for none."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or not hasattr(value, "tolist"):
        return None
    on_cpu = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    if on_cpu and math.prod(shape) <= _MAX_ELEMENTS:
        return value.tolist()
    return f"<{type(value).__name__} {dtype} {tuple(shape)}>"


def _key(key: object) -> str:
    try:
        return str(_within_json(str(key)))
    except Exception:  # noqa: BLE001 - someone else's __str__
        return _type_name(key)


def _within_json(value: int | str | None) -> int | str | None:
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
        more = len(text) - MAX_TEXT
        return text if more <= 0 else f"{text[:MAX_TEXT]}… <{more} more characters>"
    if value is None or isinstance(value, bool):
        return value
    # Members of an IntEnum become plain integers.
    return int(value) if -(2**63) <= value < 2**64 else str(value)


def _name(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"<{value.__name__}>" if name is None else f"<{module}.{name}>"


def _type_name(value: object) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
