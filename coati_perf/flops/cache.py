"""Traces kept on disk, so that they are made once per machine and not by each rank and run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import filelock
import msgspec
import platformdirs
from torch import nn

from coati_perf._version import __version__
from coati_perf.flops.skeleton import config_fields

_logger = logging.getLogger(__name__)

# Another rank is tracing meanwhile; the largest model takes 10 s.
_LOCK_TIMEOUT_S = 60.0
# The code of these is known by their version; anyone else's may change without a trace.
_VERSIONED = frozenset({"torch", "transformers", "peft", "accelerate", "trl"})

Kept = TypeVar("Kept", bound=msgspec.Struct)


def folder() -> Path:
    """Return where the traces are kept: ``$COATI_PERF_CACHE``, or the user's cache directory."""
    chosen = os.environ.get("COATI_PERF_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("coati_perf"))


def key_of(model: Any, **options: Any) -> str | None:
    """Return the name of a model's traces: a hash of all that they depend on.

    None, for no caching, where the model has code that no version stands for.
    """
    description = (
        _describe_module(model) if isinstance(model, nn.Module) else _describe_config(model)
    )
    if description is None:
        return None
    versions = {name: _version(name) for name in sorted(_VERSIONED)}
    everything = [description, options, versions, __version__]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=repr).encode()).hexdigest()


def get_or_make(key: str | None, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
    """Return what is kept under ``key``, or make and keep it; of several processes one makes it."""
    if key is None:
        return make()
    path = folder() / f"{key}.json"
    kept = _read(path, kind)
    if kept is not None:
        return kept
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT_S):
            kept = _read(path, kind)
            if kept is None:
                kept = make()
                _write(path, kept)
            return kept
    except (OSError, filelock.Timeout) as error:
        _logger.warning("the cache %s cannot be used: %s; tracing without it", path.parent, error)
        return make() if kept is None else kept


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, kept: msgspec.Struct) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.encode(kept))
    Path(file.name).replace(path)


def _describe_config(config: Any) -> Any:
    fields = config.to_dict()
    return None if "auto_map" in fields else [type(config).__name__, fields]


def _describe_module(module: nn.Module) -> Any:
    kinds = {type(child) for child in module.modules()}
    if any(kind.__module__.partition(".")[0] not in _VERSIONED for kind in kinds):
        return None
    fields = config_fields(module)
    parameters = [
        [name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for name, parameter in module.named_parameters()
    ]
    return [type(module).__name__, repr(module), fields, parameters]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
