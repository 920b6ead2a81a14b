"""The trainer's exceptions, as seen from a hook called in its ``finally`` block."""

from __future__ import annotations

import sys

from coati_perf.redaction import mask_text

_MAX_LENGTH = 500


def current_error_id() -> int:
    """Return an id of the exception being handled by the callers, 0 where there is none."""
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def error_since(before: int) -> BaseException | None:
    """Return the exception being handled by the callers, unless its id is ``before``.

    A trainer may be run inside an ``except`` block; that exception is not one of its own.
    """
    error = sys.exc_info()[1]
    return None if error is None or id(error) == before else error


def describe_error(error: BaseException) -> str:
    """Return the type and the first line of an exception, secrets masked; never raises."""
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - someone else's __str__
        text = ""
    name = type(error).__name__
    return f"{name}: {mask_text(text.splitlines()[0])[:_MAX_LENGTH]}" if text else name
