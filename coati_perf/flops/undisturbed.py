"""Leaves the process as it was while a model is traced."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep random numbers and warnings as they were; no logs, and no garbage collection.

    Transformers logs and warns of models that are built for their shapes alone; collecting
    garbage would take a tenth of the time.
    """
    collecting = gc.isenabled()
    logger = logging.getLogger("transformers")
    level = logger.level
    gc.disable()
    logger.setLevel(logging.ERROR)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(mode=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()
