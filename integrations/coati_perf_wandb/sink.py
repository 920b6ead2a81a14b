"""The Weights & Biases sink."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_perf.provenance import command_line
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import Sink

if TYPE_CHECKING:
    import wandb

EPISODE = "perf/episode"

# In seconds, where the user has set none: an unreachable server would hold up wandb.init for 100,
# and one that died the interpreter's exit for minutes.
_LIMITS = {"init_timeout": 30.0, "finish_timeout": 20.0, "finish_timeout_raises": True}


class WandbSink:
    """Logs every metric against ``perf/episode``, in a run of its own or in the one that is open.

    Without an open run, one is started with ``train_config`` as its config and finished at the
    end; wandb's own settings (``WANDB_MODE`` and the like) hold. Its id is that of our run, and
    each episode has a step of its own: where wandb lost the last rows of a killed process (it
    keeps some 32 KiB in memory), or its server was away, the run is handed over again, and wandb
    takes what it has not got. An offline folder that was cut off is renamed ``cut-off-…`` then.

    An open run (``wandb.run``) is joined and never finished. wandb drops whatever is logged at a
    step below the run's current one, so that a log of ours that moves the step on could cost its
    owner, who may log with explicit steps, his next rows. Therefore no log of ours moves it:
    each record joins the row of the owner's current step, at most one record per step, and those
    that come faster wait for the owner's next step. What still waits at the end is written in
    rows of its own, which moves the step by as many.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        """Log to ``project``; ``options`` go to ``wandb.init``, such as ``group``, ``id``.

        With an ``id`` of one's own rows are added to that run, and are never handed over again.
        """
        self._options = {"project": project, **options}
        self.needs_whole_run = self._own_id = "id" not in options
        self._step = 0
        self._episode: int | None = None
        self._given_up: Exception | None = None
        self._run: wandb.Run | None = None
        self._joined = False
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._used_step: int | None = None
        self._defined: set[str] = set()

    def open(self, header: Header) -> None:
        import wandb

        self._joined = wandb.run is not None
        self.needs_whole_run = self._own_id and not self._joined
        self._waiting.clear()
        self._defined.clear()
        self._used_step = self._given_up = self._episode = None
        self._step = 0
        if wandb.run is None:
            self._run = wandb.init(**self._init_options(header))
        else:
            self._run = wandb.run
            known = set(dict(self._run.config))
            ours = {key: value for key, value in header.train_config.items() if key not in known}
            self._run.config.update({**ours, "coati_perf": _about(header)}, allow_val_change=True)
        self._run.define_metric(EPISODE)
        self._run.define_metric("perf/*", step_metric=EPISODE)

    def write(self, record: EpisodeRecord) -> None:
        row: dict[str, Any] = {EPISODE: record.episode, **record.metrics}
        run = self._opened()
        if record.episode == self._episode:
            return  # a call may come twice
        for name in record.metrics:
            if not name.startswith("perf/") and name not in self._defined:  # another trainer's
                run.define_metric(name, step_metric=EPISODE)
                self._defined.add(name)
        if not self._joined:
            if not self._own_id:
                run.log(row)
            elif self._step >= run.starting_step:
                run.log(row, step=self._step)
            self._step += 1
            self._episode = record.episode
            return
        self._waiting.append(row)
        self._episode = record.episode
        if run.step != self._used_step:
            self._used_step = run.step
            run.log(self._waiting[0], commit=False)
            self._waiting.popleft()

    def close(self, summary: Summary) -> None:
        if self._run is None:
            return
        run = self._opened()
        if self._joined and self._waiting:
            run.log({}, commit=True)  # closes the row that the last record joined
        while self._waiting:
            run.log(self._waiting[0], commit=True)
            self._waiting.popleft()
        run.summary.update({"coati_perf/status": summary.status, "coati_perf/error": summary.error})
        if not self._joined:
            try:
                run.finish(exit_code=0 if summary.status == "finished" else 1)
            except TimeoutError as error:
                self._given_up = error
                raise
        self._run = None

    def abandon(self) -> None:
        """End wandb's own process, which the interpreter would wait for at its exit, for minutes.

        Only while no run of someone else's needs it. What it has not sent is handed over again.
        """
        import wandb

        if not self._joined and wandb.run in (None, self._run):
            for pid in _services():
                os.kill(pid, signal.SIGKILL)

    def _init_options(self, header: Header) -> dict[str, Any]:
        """Return the arguments of ``wandb.init`` for a run of our own."""
        import wandb

        options = {
            "id": header.run_id,
            "name": header.run_id,
            "dir": header.run_dir,
            "config": {**header.train_config, "coati_perf": _about(header)},
            **self._options,
        }
        limits: dict[str, Any] = {
            name: value
            for name, value in _LIMITS.items()
            if f"WANDB_{name.upper()}" not in os.environ
        }
        if header.pid == os.getpid() and header.command != command_line():
            limits["x_disable_meta"] = True  # wandb would write the command line with its secrets
        options["settings"] = wandb.Settings(**{**limits, **options.get("settings", {})})
        mode = options.get("mode") or wandb.setup().settings.mode
        if mode == "online":
            options.setdefault("resume", "allow")
        elif self._own_id:
            _set_aside(Path(options["dir"]) / "wandb", options["id"])
        return options

    def _opened(self) -> wandb.Run:
        import wandb

        if self._given_up is not None:
            raise self._given_up
        if self._run is None:
            message = "the wandb run is not open"
            raise RuntimeError(message)
        if self._joined and wandb.run is not self._run:  # logging to it would block for ever
            message = "the wandb run that was joined has been finished by its owner"
            raise RuntimeError(message)
        return self._run


def _services() -> Iterator[int]:
    """Yield the process ids of wandb's services that this process started (Linux)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, name, _, parent = status.read_text().split()[:4]
            if name == "(wandb-core)" and int(parent) == os.getpid():
                yield int(pid)


def _set_aside(folder: Path, run_id: str) -> None:
    """Rename what an earlier process left of an offline run: it is handed over again, whole."""
    for left in folder.glob(f"offline-run-*-{run_id}"):
        earlier = len([*folder.glob(f"cut-off-*{left.name}")])
        left.rename(left.with_name(f"cut-off-{earlier}-{left.name}"))


def _about(header: Header) -> dict[str, Any]:
    return {
        "run_id": header.run_id,
        "run_dir": header.run_dir,
        "convention": header.convention,
        "cost_model": header.cost_model,
        "world_size": header.world_size,
        "device": header.device,
        "versions": header.versions,
        "command": header.command,
    }


if TYPE_CHECKING:
    _: Sink = WandbSink()
