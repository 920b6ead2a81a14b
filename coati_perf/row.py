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
    """A row that will not come: that of an episode which failed, or any more of an ended fit.

    ``sequence`` is that of the failed episode, or of the next row of a fit that has ended
    (``final``): every row that was sent before is in the store before this is.
    """

    rank: int
    sequence: int
    episode: int | None = None
    error: str | None = None
    final: bool = False


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
