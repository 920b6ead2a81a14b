"""From a model without memory to the closed forms of what its passes cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from coati_perf.flops.fit import UnfittedError, fit_pass, fit_step
from coati_perf.flops.head import Head, head_of
from coati_perf.flops.memory import Memory
from coati_perf.flops.memory_layout import memory_of
from coati_perf.flops.operators import UnknownOperatorError
from coati_perf.flops.passes import Passes
from coati_perf.flops.skeleton import ALTERNATIVES, UntraceableModelError, config_fields
from coati_perf.flops.work import Work

# Any length will do to look for a fault, or at what the cache holds.
_SOME_LENGTH = 128


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's passes cost: see ``Work``. Without a KV cache there is no generation."""

    forward: Work
    forward_backward: Work
    prefill: Work | None
    decode: Work | None
    memory: Memory
    head: Head


def trace(model: nn.Module) -> Trace:
    """Trace a model without memory, as ``skeleton_of`` returns it.

    Raises:
        UntraceableModelError: an operator with matrix work that is not known, control flow that
            depends on data, or FLOP that follow no form known here; names the operator or module.
    """
    chunk_sizes = tuple(_chunk_sizes(model))
    passes = Passes(model)
    with _explained(model, passes):
        forward = fit_pass(lambda *point: passes.training(*point)[0], chunk_sizes)
        both = fit_pass(lambda *point: passes.training(*point)[1], chunk_sizes)
        prefill = decode = cache = None
        if _can_generate(model):
            prefill = fit_pass(lambda *point: passes.generation(*point).prefill, chunk_sizes)
            decode = fit_step(lambda *point: passes.generation(*point).decode)
            cache = passes.generation(1, _SOME_LENGTH).cache
        counter = passes.training(1, _SOME_LENGTH)[0]
        memory = memory_of(model, counter, cache, _SOME_LENGTH)
    return Trace(
        forward=forward,
        forward_backward=both,
        prefill=prefill,
        decode=decode,
        memory=memory,
        head=head_of(model),
    )


def trace_training(model: nn.Module) -> Work:
    """Trace the forward with backward alone; raises as ``trace`` does."""
    passes = Passes(model)
    with _explained(model, passes):
        return fit_pass(lambda *point: passes.training(*point)[1], _chunk_sizes(model))


def _can_generate(model: nn.Module) -> bool:
    can_generate = getattr(model, "can_generate", None)
    return can_generate is not None and bool(can_generate())


def _chunk_sizes(model: nn.Module) -> Iterator[int]:
    """Yield the chunk sizes that a Hugging Face config names."""
    for name, value in config_fields(model).items():
        if name.endswith("chunk_size") and isinstance(value, int) and value > 1:
            yield value


@contextlib.contextmanager
def _explained(model: nn.Module, passes: Passes) -> Iterator[None]:
    """Turn what stops a trace into an error that says what it was, and in which module."""
    kind = type(model).__name__
    try:
        yield
    except UnfittedError as error:
        message = (
            f"{kind}: the FLOP of {error} are no polynomial of the length, nor of the length in"
            f" chunks, so that what other lengths cost is unknown. {ALTERNATIVES}"
        )
        raise UntraceableModelError(message) from error
    except UnknownOperatorError as error:
        message = (
            f"{_place(passes, kind)}: the operator {error} may multiply matrices, and its FLOP are"
            f" not known. {ALTERNATIVES}"
        )
        raise UntraceableModelError(message) from error
    except Exception as error:
        message = (
            f"{_place(passes, kind)}: it cannot be run without data"
            f" ({type(error).__name__}: {error}). {ALTERNATIVES}"
        )
        raise UntraceableModelError(message) from error


def _place(passes: Passes, kind: str) -> str:
    """Name the module in which a pass stops: runs it once more to find out."""
    with ModuleTracker() as tracker:
        try:
            passes.training(1, _SOME_LENGTH + 1)
            passes.generation(1, _SOME_LENGTH + 1)
        except Exception:  # noqa: BLE001 - the same one
            return max(tracker.parents - {"Global"}, key=len, default=kind)
    return kind
