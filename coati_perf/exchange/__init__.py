"""The way of rows from every rank to rank 0."""

from coati_perf.exchange.base import Exchange
from coati_perf.exchange.choose import choose_exchange
from coati_perf.exchange.none import NoExchange
from coati_perf.exchange.store import StoreExchange

__all__ = ["Exchange", "NoExchange", "StoreExchange", "choose_exchange"]
