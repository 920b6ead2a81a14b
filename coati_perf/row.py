"""What one rank says of one episode: the data that crosses from the ranks to rank 0."""

from __future__ import annotations

import msgspec


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One finished episode of one rank.

    ``sequence`` counts the measured episodes of this fit on this rank from 0; it pairs the rows
    of the ranks, whatever the trainer's own ``episode`` numbers are. ``seconds`` maps each
    phase's path (``make_experience/generate``) to its seconds, enclosed phases included;
    ``amounts`` maps names of measured metrics to values; ``faults`` maps a fault to its count.
    """

    rank: int
    sequence: int
    episode: int
    episode_s: float
    seconds: dict[str, float]
    amounts: dict[str, float]
    faults: dict[str, int]


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """A rank that sends no more rows: its fit has ended, or (with ``error``) an episode failed."""

    rank: int
    rows_sent: int
    episode: int | None = None
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(Row)
_departure_decoder = msgspec.msgpack.Decoder(Departure)


def encode(message: Row | Departure) -> bytes:
    """Pack a message; every float stays the float64 that it is."""
    return _encoder.encode(message)


def decode_row(packed: bytes) -> Row:
    """Unpack what ``encode`` made of a row."""
    return _row_decoder.decode(packed)


def decode_departure(packed: bytes) -> Departure:
    """Unpack what ``encode`` made of a departure."""
    return _departure_decoder.decode(packed)
