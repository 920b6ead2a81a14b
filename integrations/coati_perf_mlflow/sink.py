"""The MLflow sink."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from coati_perf.machine import Machine
from coati_perf.plain import flatten
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.report import render_run
from coati_perf.sinks import Sink
from coati_perf.totals import RunTotals

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_TAG = "coati_perf.run_id"
# What MLflow takes in one call, and in one parameter.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_LENGTH = 500
_MAX_KEY = 250
_STATES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowSink:
    """Logs every metric at step = episode to a run of its own, with ``train_config`` as params.

    Where the run is kept is MLflow's own affair (``MLFLOW_TRACKING_URI``). It is found again by the
    tag ``coati_perf.run_id``, and MLflow stores a point once however often it comes, so that
    nothing is there twice. An active run of the user's is left alone.
    """

    needs_whole_run = True  # for the report

    def __init__(self, experiment: str = "coati_perf") -> None:
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._run = ""
        self._header: Header | None = None
        self._totals = RunTotals(Machine(ranks=1))

    def open(self, header: Header) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient()
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        known = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{header.run_id}'")
        if known:
            self._run = known[0].info.run_id
        else:
            tags = {_RUN_TAG: header.run_id, "coati_perf.convention": header.convention}
            run = client.create_run(experiment_id, run_name=header.run_id, tags=tags)
            self._run = run.info.run_id
        there = client.get_run(self._run).data.params
        params = [Param(key, value) for key, value in _params(header).items() if key not in there]
        for start in range(0, len(params), _MAX_PARAMS):
            client.log_batch(self._run, params=params[start : start + _MAX_PARAMS])
        self._header, self._totals = header, RunTotals(header.machine)
        self._client = client

    def write(self, record: EpisodeRecord) -> None:
        from mlflow.entities import Metric

        client = self._opened()
        at = int(record.at * 1000)
        points = [Metric(name, value, at, record.episode) for name, value in record.metrics.items()]
        for start in range(0, len(points), _MAX_METRICS):
            client.log_batch(self._run, metrics=points[start : start + _MAX_METRICS])
        if record.episode != self._totals.last_episode:  # a call may come twice
            self._totals.add(record)

    def close(self, summary: Summary) -> None:
        if self._client is None:
            return
        assert self._header is not None
        client = self._opened()
        report = render_run(self._header, self._totals, summary)
        client.set_tag(self._run, "mlflow.note.content", f"```\n{report}```"[:_MAX_NOTE])
        client.set_terminated(self._run, _STATES[summary.status])
        self._client = None

    def _opened(self) -> MlflowClient:
        if self._client is None:
            message = "the MLflow run is not open"
            raise RuntimeError(message)
        return self._client


# MLflow's limit on the value of a tag.
_MAX_NOTE = 8000


def _params(header: Header) -> dict[str, str]:
    """Return ``train_config`` with keys and values that MLflow takes."""
    flat = {**flatten(header.train_config), "coati_perf.convention": header.convention}
    return {_key(key)[:_MAX_KEY]: str(value)[:_MAX_LENGTH] for key, value in flat.items()}


def _key(key: str) -> str:
    """Return a key with MLflow's letters alone, that is no path upwards."""
    return re.sub(r"[^A-Za-z0-9_. -]", "_", key).strip(". ") or "_"


if TYPE_CHECKING:
    _: Sink = MlflowSink()
