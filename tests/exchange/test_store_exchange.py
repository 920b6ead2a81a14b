"""The contract of an exchange (``exchange/base.py``), kept by StoreExchange over a TCPStore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import DistNetworkError, TCPStore

from coati_perf.exchange import NoExchange, StoreExchange, choose_exchange
from coati_perf.exchange.torch_store import connect_to_job

RANKS = 3


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def exchanges(server):
    """Return the exchanges of three ranks, with a client each, as in three processes."""
    made = []
    for rank in range(RANKS):
        client = connect_to_job(server, "fit")
        client.flush(20)
        made.append(StoreExchange(rank, RANKS, client))
    yield made
    for exchange in made:
        exchange.close()


def until(condition):
    """A ``set`` does not wait for the server, so that what it wrote is there a moment later."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_rows_come_once_those_of_all_ranks_are_there(exchanges):
    first, *others = exchanges
    others[0].send(0, b"row of 1")
    until(lambda: first.collect(0, [1], partial=False))
    assert first.collect(0, [1, 2], partial=False) == {}
    assert first.collect(0, [1, 2], partial=True) == {1: b"row of 1"}
    others[1].send(0, b"row \x00\xff of 2")
    until(lambda: first.collect(0, [1, 2], partial=False))
    assert first.collect(0, [1, 2], partial=False) == {1: b"row of 1", 2: b"row \x00\xff of 2"}


@pytest.mark.parametrize("partial", [False, True])
def test_nothing_is_collected_from_no_rank(exchanges, partial):
    assert exchanges[0].collect(0, [], partial=partial) == {}


def test_collecting_does_not_wait(exchanges):
    began = time.monotonic()
    assert exchanges[0].collect(0, [1, 2], partial=True) == {}
    assert exchanges[0].departures([1, 2]) == {}
    assert not exchanges[0].any_failure()
    assert time.monotonic() - began < 0.5


def test_episodes_do_not_mix(exchanges):
    first, sender, _ = exchanges
    for sequence in (1, 0):
        sender.send(sequence, b"row %d" % sequence)
    until(lambda: first.collect(0, [1], partial=False))
    assert first.collect(0, [1], partial=False) == {1: b"row 0"}
    assert first.collect(1, [1], partial=False) == {1: b"row 1"}


def test_departures_come_as_they_are_there(exchanges):
    first, sender, _ = exchanges
    sender.depart(b"gone", failed=False)
    until(lambda: first.departures([1, 2]))
    assert first.departures([1, 2]) == {1: b"gone"}
    assert not first.any_failure()


def test_a_failure_is_seen_without_asking_each_rank_and_its_departure_is_there(exchanges):
    first, sender, _ = exchanges
    sender.depart(b"boom", failed=True)
    until(first.any_failure)
    assert first.departures([1, 2]) == {1: b"boom"}


def test_discarding_frees_what_an_episode_took_up(exchanges, server):
    first, *others = exchanges
    before = server.num_keys()
    for sequence in range(10):
        for sender in others:
            sender.send(sequence, b"row")
        until(lambda sequence=sequence: first.collect(sequence, [1, 2], partial=False))
        first.discard(sequence, [1, 2])
        assert server.num_keys() == before
    others[0].send(10, b"row")
    until(lambda: first.collect(10, [1], partial=False))
    first.discard(10, [1, 2])  # rank 2 never sent its row
    assert server.num_keys() == before


def test_two_fits_do_not_mix(exchanges, server):
    client = connect_to_job(server, "another fit")
    StoreExchange(1, RANKS, client).send(0, b"row of another fit")
    until(server.num_keys)
    assert exchanges[0].collect(0, [1], partial=True) == {}


def test_a_closed_exchange_says_so(exchanges):
    for exchange in exchanges:
        exchange.close()
        exchange.close()
        for call in (
            lambda exchange=exchange: exchange.send(0, b""),
            lambda exchange=exchange: exchange.depart(b"", failed=False),
            lambda exchange=exchange: exchange.collect(0, [1], partial=True),
            lambda exchange=exchange: exchange.departures([1]),
            exchange.any_failure,
            lambda exchange=exchange: exchange.discard(0, [1]),
        ):
            with pytest.raises(ConnectionError):
                call()


def test_what_is_sent_after_the_server_died_raises_at_once():
    """The first sends may still reach a socket's buffer; after one has failed all fail at once."""
    serve = (
        "import sys, time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE) as server:
        try:
            job = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
            client = connect_to_job(job, "fit")
            client.flush(20)
            exchange = StoreExchange(1, RANKS, client)
            exchange.send(0, b"row")
        finally:
            os.kill(server.pid, signal.SIGKILL)
    began = time.monotonic()

    def send_until_it_fails():
        for sequence in range(1, 100):
            exchange.send(sequence, b"row")

    with pytest.raises((ConnectionError, DistNetworkError)):
        send_until_it_fails()
    assert time.monotonic() - began < 2
    began = time.monotonic()
    for sequence in range(100, 200):
        with pytest.raises(ConnectionError, match="the store of the exchange is gone"):
            exchange.send(sequence, b"row")
    with pytest.raises(ConnectionError, match="the store of the exchange is gone"):
        exchange.depart(b"gone", failed=True)
    assert time.monotonic() - began < 0.1


def test_one_process_without_a_group_exchanges_nothing():
    exchange = choose_exchange()
    assert isinstance(exchange, NoExchange)
    assert (exchange.rank, exchange.world_size) == (0, 1)
