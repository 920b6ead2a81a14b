"""Which exchange a fit gets."""

from __future__ import annotations

import itertools
import logging
import os

import torch.distributed as dist

from coati_perf.exchange.base import Exchange
from coati_perf.exchange.none import NoExchange
from coati_perf.exchange.store import StoreExchange

_logger = logging.getLogger(__name__)
# Ranks begin their fits in the same order, so that equal numbers meet behind one prefix.
_fit_numbers = itertools.count()


def choose_exchange() -> Exchange:
    """Return ``store`` where a process group of several ranks exists by now, else ``none``.

    Never waits for another rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return NoExchange()
    # Imports private parts of torch, and only where they are there.
    from coati_perf.exchange import torch_store  # noqa: PLC0415

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # torchrun keeps one store over its restarts, with the keys of the attempt that failed.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"coati_perf/{attempt}/{next(_fit_numbers)}"
    try:
        job = torch_store.job_store()
        if torch_store.is_tcp(job):
            client = torch_store.connect_to_job(job, prefix)
        elif rank == 0:
            client = torch_store.serve(job, prefix)
        else:
            client = torch_store.connect_to_served(job, prefix)
    except Exception as error:  # noqa: BLE001 - whatever torch makes of a private call
        _logger.warning(
            "this process group has no store that can be used (%s): the record holds the figures "
            "of rank 0 alone",
            error,
        )
        return NoExchange(rank)
    return StoreExchange(rank, world_size, client)
