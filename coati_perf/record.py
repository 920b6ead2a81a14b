"""The lines of a journal: immutable, plain, versioned data.

Every line is one JSON object with ``kind`` (header, episode, failure or summary) and ``schema``
(the version of this format). A reader meets unknown fields with silence and a newer schema with
an error. Metric values are finite floats; an undefined value is absent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from coati_perf.machine import Machine
from coati_perf.provenance import Commit

SCHEMA = 1


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every line has. ``run_id`` names one fit; ``at`` is Unix time in seconds."""

    run_id: str
    at: float
    schema: int = SCHEMA


class Header(Line, frozen=True, kw_only=True, tag="header"):
    """First line of a segment: what was run, where, and how its figures are to be read.

    A journal that is opened again gets a new segment, numbered by ``segment`` from 0.
    ``train_config`` holds plain data only, with ``***`` for the secrets at the paths ``masked``;
    ``seed_config_line`` is its values as ColossalChat's report prints them. ``convention`` names
    the FLOP convention, ``cost_model`` its inputs, ``warnings`` what is to be known of the
    figures, ``machine`` the devices and their peaks. ``command`` is the command line, with its
    secrets masked, ``commit`` that of the code in the working directory.
    """

    segment: int
    run_dir: str
    train_config: dict[str, Any]
    seed_config_line: str
    masked: list[str] = []
    convention: str
    cost_model: dict[str, Any]
    ignore_episodes: int
    world_size: int
    exchange: str
    device: str
    host: str
    pid: int
    versions: dict[str, str]
    machine: Machine
    warnings: list[str] = []
    command: list[str] = []
    commit: Commit | None = None


class Impossible(msgspec.Struct, frozen=True):
    """A figure that no device could reach, kept out of the metrics. Same unit for both."""

    value: float
    limit: float
    reason: str


class Slowest(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that held the others up, in which phase: its seconds and the mean over ranks."""

    rank: int
    phase: str
    seconds: float
    mean_s: float


class EpisodeRecord(Line, frozen=True, kw_only=True, tag="episode"):
    """One finished episode, reduced over ranks.

    ``metrics`` maps names of the catalogue to values. ``phases`` maps the path of each phase to
    its mean seconds over ranks, enclosed phases included. ``ranks_missing`` sent nothing in time:
    sums are without them. ``faults`` counts hook calls that could not be measured as they came.
    ``warnings`` are the header's.
    """

    episode: int
    convention: str
    metrics: dict[str, float]
    phases: dict[str, float]
    ranks: int
    ranks_missing: list[int] = []
    slowest: Slowest | None = None
    impossible: dict[str, Impossible] = {}
    faults: dict[str, int] = {}
    warnings: list[str] = []


class Failure(Line, frozen=True, kw_only=True, tag="failure"):
    """An exception left an episode (``episode``), or the fit outside one (None), on ``rank``."""

    rank: int
    error: str
    episode: int | None = None


class Summary(Line, frozen=True, kw_only=True, tag="summary"):
    """Last line of a segment. ``status`` is ``finished`` or ``failed``; with the reason.

    A sink gets one of status ``killed`` for a segment that has none.

    ``failures`` holds the first of the exceptions that left an episode or the fit, those after
    which training went on too.
    """

    status: str
    episodes: int
    last_episode: int | None = None
    error: str | None = None
    failures: list[str] = []


JournalLine = Header | EpisodeRecord | Failure | Summary
