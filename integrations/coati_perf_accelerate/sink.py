"""The bridge to the trackers of Hugging Face accelerate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coati_perf.plain import flatten
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import Sink
from coati_perf.sinks.registry import SinkError


class AccelerateSink:
    """Logs every metric at step = episode through a tracker that accelerate knows.

    ``tracker`` is accelerate's name of it: ``comet_ml``, ``aim``, ``clearml``, ``swanlab``,
    ``trackio``, ``dvclive``, …; ``train_config`` goes with it, flattened. What a tracker had in
    memory when its process was killed is lost to it, and a replay after that may repeat an
    episode: these trackers can't say what they have.
    """

    def __init__(self, tracker: str, project: str = "coati_perf") -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        if tracker not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))
            message = f"accelerate has no tracker {tracker!r}; it has: {known}"
            raise SinkError(message)
        self._class = LOGGER_TYPE_TO_CLASS[tracker]
        self._project = project
        self._tracker: Any = None

    def open(self, header: Header) -> None:
        _ensure_state()
        folder = Path(header.run_dir) / "accelerate"
        place = [str(folder)] if self._class.requires_logging_directory else []
        tracker = self._class(self._project, *place)
        if hasattr(tracker, "start"):
            tracker.start()
        about = {"coati_perf/run_id": header.run_id, "coati_perf/convention": header.convention}
        tracker.store_init_configuration({**flatten(header.train_config), **about})
        self._tracker = tracker

    def write(self, record: EpisodeRecord) -> None:
        if self._tracker is None:
            message = "the tracker is not open"
            raise RuntimeError(message)
        self._tracker.log({"perf/episode": record.episode, **record.metrics}, step=record.episode)

    def close(self, summary: Summary) -> None:
        if self._tracker is not None:
            self._tracker.finish()
        self._tracker = None


def _ensure_state() -> None:
    """Make accelerate's state, which every tracker asks for the main process.

    It must not be what joins a process group: that would wait for all the other ranks.
    """
    from accelerate import PartialState

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
        message = "accelerate's trackers need torch.distributed.init_process_group to come first"
        raise RuntimeError(message)
    PartialState()


if TYPE_CHECKING:
    _: Sink = AccelerateSink("tensorboard")
