"""Every sink of ours against the suite that we publish for all."""

from __future__ import annotations

import collections
import csv

import numpy as np
import pytest

pytest.importorskip("wandb")

from coati_perf.names import NAMES
from coati_perf.testing import SinkConformance, some_metrics


class TestCsv(SinkConformance):
    sink = "csv:{folder}/metrics.csv"

    def read(self, folder, run_id):
        with (folder / "metrics.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["run_id"] == run_id]
        episodes = {int(row["episode"]): row for row in rows}
        assert len(episodes) == len(rows)
        return {
            number: {name: float(text) for name, text in row.items() if "/" in name and text}
            for number, row in episodes.items()
        }


class TestTensorBoard(SinkConformance):
    sink = "tensorboard:{folder}/runs"

    def held(self, value):
        with np.errstate(over="ignore"):
            return float(np.float32(value))

    def read(self, folder, run_id):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "runs" / run_id), size_guidance={"scalars": 0})
        events.Reload()
        episodes = collections.defaultdict(dict)
        for name in events.Tags()["scalars"]:
            for point in events.Scalars(name):
                assert name not in episodes[point.step]
                episodes[point.step][name] = float(point.value)
        return episodes


class TestUnderOtherNames(TestTensorBoard):
    sink = "as:verl:tensorboard:{folder}/runs"

    def read(self, folder, run_id):
        theirs = NAMES["verl"]
        return {
            episode: {name: value for name, value in metrics.items() if name not in theirs}
            for episode, metrics in super().read(folder, run_id).items()
        }


class TestWandb(SinkConformance):
    sink = "wandb:project"
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": "{folder}"}
    kills = 2

    def held(self, value):
        return value + 0.0  # JSON without the sign of a zero

    @pytest.fixture(autouse=True)
    def _reader(self, load_offline_run, monkeypatch):
        self.load = load_offline_run
        # A process that was killed takes its service along, where it is not that of this one.
        monkeypatch.delenv("WANDB_SERVICE", raising=False)

    def read(self, folder, run_id):
        (path,) = folder.glob(f"wandb/offline-run-*-{run_id}")
        rows = [row for row in self.load(path).history() if "perf/episode" in row]
        episodes = {row["perf/episode"]: row for row in rows}
        assert len(episodes) == len(rows)
        return {
            number: {name: float(value) for name, value in row.items() if name.startswith("perf/")}
            for number, row in episodes.items()
        }


class TestMlflow(SinkConformance):
    sink = "mlflow:experiment"
    environment = {"MLFLOW_TRACKING_URI": "sqlite:///{folder}/mlflow.db"}
    kills = 2

    def held(self, value):
        return value + 0.0  # a database without the sign of a zero

    def read(self, folder, run_id):
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        experiment = client.get_experiment_by_name("experiment")
        filtered = f"tags.`coati_perf.run_id` = '{run_id}'"
        (run,) = client.search_runs([experiment.experiment_id], filtered)
        episodes = collections.defaultdict(dict)
        for name in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, name):
                assert name not in episodes[point.step]
                episodes[point.step][name] = point.value
        return dict(sorted(episodes.items()))

    def _replay(self, folder, kill_after_s=None):
        # There is a store, as a server has one: that MLflow sets one up does not survive a kill.
        from mlflow import MlflowClient

        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return super()._replay(folder, kill_after_s)


class TestPrometheus(SinkConformance):
    sink = "prometheus:{folder}/coati.prom"
    keeps = "last"

    def read(self, folder, run_id):
        from prometheus_client.parser import text_string_to_metric_families

        text = (folder / "coati.prom").read_text(encoding="utf-8")
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels["run"] == run_id
        }
        names = [*some_metrics(0), "perf/episode"]
        metrics = {name: values.get("coati_" + name.translate(_TO_UNDERSCORE)) for name in names}
        return {int(metrics["perf/episode"]): metrics}


_TO_UNDERSCORE = str.maketrans("/-.", "___")


class TestText(SinkConformance):
    """The report holds sums over the run; here each is recognised by its line of samples."""

    sink = "text:{folder}/report.txt"

    test_every_float_is_held = None

    def read(self, folder, run_id):
        text = (folder / "report.txt").read_text(encoding="utf-8")
        assert text.count(f", run {run_id}: ") == 1
        return text

    def _check(self, folder, run_id, episodes):
        text = self.read(folder, run_id)
        part = text[text.index(f"run {run_id}: ") :]
        learned = sum(some_metrics(number)["perf/samples/learned"] for number in range(episodes))
        assert f"{episodes} episodes (0 to {episodes - 1}) on 1 rank" in part
        assert f"Train {learned:.0f} samples" in text
