"""Which exchange a fit gets from a process group of an unusual kind."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from coati_perf.exchange import StoreExchange, choose_exchange, torch_store


@pytest.fixture
def two_ranks(monkeypatch):
    """Pretend to be rank 1 of 2 in a group whose store is the one given."""

    def pretend(store):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(torch_store, "job_store", store)

    return pretend


def test_a_group_without_a_store_leaves_each_rank_alone(two_ranks, caplog):
    def no_store():
        raise RuntimeError("none here")

    two_ranks(no_store)
    exchange = choose_exchange()
    assert (exchange.name, exchange.rank, exchange.world_size) == ("none", 1, 1)
    assert "no store that can be used (none here)" in caplog.text


def test_a_dead_store_holds_up_no_fit(two_ranks):
    """Connecting to a server that is gone takes minutes; it is not done on the training thread."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    two_ranks(lambda: job)
    began = time.monotonic()
    exchange = choose_exchange()
    exchange.send(0, b"row")
    assert time.monotonic() - began < 1
    assert isinstance(exchange, StoreExchange)
