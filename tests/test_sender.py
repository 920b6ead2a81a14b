"""The thread that sends a rank's rows."""

from __future__ import annotations

import os
import time

import pytest

from coati_perf.batches import BatchLog
from coati_perf.cost import ParamCount
from coati_perf.row import Departure, Row, decode_departure, decode_row
from coati_perf.sender import Sender
from coati_perf.unresolved import UnresolvedRow


class Exchange:
    """Keeps what it is given; fails to send the rows whose numbers are in ``fails``."""

    def __init__(self, fails=()):
        self.sent = []
        self._fails = fails

    def send(self, sequence, packed_row):
        if sequence in self._fails:
            raise ConnectionError("gone")
        self.sent.append(decode_row(packed_row).sequence)

    def depart(self, packed_departure, *, failed):
        self.sent.append(decode_departure(packed_departure))


class Slow(ParamCount):
    def padded_learning(self, batch, length):
        time.sleep(0.05)
        return super().padded_learning(batch, length)


COUNT = ParamCount(1, 1, 1, 1)


def row(sequence, workload=COUNT):
    batches = BatchLog()
    batches.learned[4, 8].calls += 1
    return UnresolvedRow(Row(1, sequence, sequence, 1.0, {}, {}, {}), batches.take(), workload)


@pytest.fixture
def exchange():
    return Exchange()


LAST = Departure(1, 3, final=True)


def test_rows_are_sent_in_order_and_before_the_departure(exchange):
    sender = Sender(exchange)
    for sequence in range(3):
        sender.send(row(sequence, Slow(1, 1, 1, 1)))
    assert exchange.sent == []
    sender.depart(LAST, failed=False, timeout=10)
    assert exchange.sent == [0, 1, 2, LAST]


def test_a_departure_does_not_wait_for_ever(exchange):
    class Stuck(ParamCount):
        def padded_learning(self, batch, length):
            time.sleep(60)

    sender = Sender(exchange)
    sender.send(row(0, Stuck(1, 1, 1, 1)))
    started = time.monotonic()
    sender.depart(LAST, failed=True, timeout=0.1)
    assert time.monotonic() - started < 10
    assert exchange.sent == [LAST]


def test_a_row_that_cannot_be_sent_holds_up_no_other(caplog):
    exchange = Exchange(fails=[0])
    sender = Sender(exchange)
    sender.send(row(0))
    sender.send(row(1))
    sender.depart(LAST, failed=False, timeout=10)
    assert exchange.sent == [1, LAST]
    assert "a row was not sent (gone); training goes on" in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what is tested
def test_a_child_process_waits_for_no_thread_that_it_has_not(exchange):
    sender = Sender(exchange)
    sender.send(row(0))
    sender._drain(10)
    pid = os.fork()
    if pid == 0:
        started = time.monotonic()
        sender._drain(10)
        os._exit(time.monotonic() - started > 5)
    assert os.waitpid(pid, 0)[1] == 0
