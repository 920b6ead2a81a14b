"""MLflow behind a real server, OpenTelemetry's own reader, Trackio's own database, Prometheus."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from coati_perf import SinkError
from coati_perf.sinks.registry import parse_sinks
from coati_perf_opentelemetry import OpenTelemetrySink


@pytest.fixture
def mlflow_server(tmp_path, monkeypatch):
    """Run ``mlflow server`` on the loopback and return its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen([*command, *store], cwd=tmp_path, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def test_mlflow_gets_every_figure_through_a_server(mlflow_server, fit):
    from mlflow import MlflowClient

    run = fit("mlflow:my-experiment")
    client = MlflowClient(mlflow_server)
    experiment = client.get_experiment_by_name("my-experiment")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.header.run_id, "FINISHED")
    assert found.data.params["nested.layers.0"] == "1"
    assert found.data.params["lr"] == "1e-05"
    for name in run.episodes[0].metrics:
        points = client.get_metric_history(found.info.run_id, name)
        assert {point.step: point.value for point in points} == {
            record.episode: record.metrics[name]
            for record in run.episodes
            if name in record.metrics
        }
    assert "Where the time went" in found.data.tags["mlflow.note.content"]


def test_opentelemetry_has_a_gauge_for_every_metric(fit):
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    run = fit(OpenTelemetrySink(MeterProvider([reader])))
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    gauges = {metric.name: metric for metric in scope.metrics}
    last = run.episodes[-1]
    assert {name: gauge.data.data_points[0].value for name, gauge in gauges.items()} == {
        "perf/episode": last.episode,
        **{name.lower(): value for name, value in last.metrics.items()},  # as the SDK has them
    }
    assert gauges["perf/time/learn_s"].unit == "s"
    attributes = gauges["perf/time/learn_s"].data.data_points[0].attributes
    assert attributes["run_id"] == run.header.run_id


TRACKIO = """
import json
from conftest import CONFIG, train
from coati_perf import PerformanceEvaluator
evaluator = PerformanceEvaluator(
    1, 1, 1, 1, train_config=CONFIG, run_dir="run", sinks=["accelerate:trackio:project"]
)
train(evaluator)
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("project")
rows, config = SQLiteStorage.get_logs("project", run), SQLiteStorage.get_run_config("project", run)
print("READ BACK", json.dumps([rows, config]))
"""


def test_trackio_gets_every_figure_through_accelerate(tmp_path, monkeypatch, read_run):
    """In a process of its own: Trackio reads where it writes when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, config = json.loads(done.stdout.partition("READ BACK ")[2])
    run = read_run()
    assert [row["step"] for row in rows] == [record.episode for record in run.episodes]
    for row, record in zip(rows, run.episodes, strict=True):
        assert {name: row[name] for name in record.metrics} == record.metrics
    assert config["nested.layers.1"] == 2
    assert config["coati_perf/run_id"] == run.header.run_id


def test_prometheus_says_what_state_the_run_is_in(fit, tmp_path):
    fit(f"prometheus:{tmp_path}/node/coati.prom")
    text = (tmp_path / "node" / "coati.prom").read_text(encoding="utf-8")
    assert 'state="finished"} 1.0' in text
    assert 'state="running"} 0.0' in text
    assert "# HELP coati_perf_time_learn_s seconds in learning from batches" in text
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["coati.prom"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accelerate", "needs a tracker, such as 'accelerate:trackio'"),
        ("accelerate:nonsense", "accelerate has no tracker 'nonsense'; it has: aim, "),
        ("opentelemetry:x", "takes no argument, and got 'x'"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(name, message):
    with pytest.raises(SinkError, match=message):
        parse_sinks([name])


def test_accelerates_state_never_joins_a_process_group(monkeypatch, tmp_path):
    from coati_perf.testing import make_header

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group to come first"):
        parse_sinks(["accelerate:trackio"])[0].make().open(make_header("run", tmp_path))
