"""Configurations and figures of every kind through every sink: none raises, values come back."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("mlflow")

from coati_perf.plain import flatten, plain
from coati_perf.redaction import mask_secrets
from coati_perf.report import render_run
from coati_perf.run import _seed_config_line
from coati_perf.sinks.registry import parse_sinks
from coati_perf.testing import make_header, make_record, make_summary, some_metrics
from coati_perf.totals import RunTotals

NAME = "perf/samples/learned"

texts = st.text(max_size=30) | st.sampled_from(["a; b", "a\nb\r\nc", "🦝", "\x00", "%(x)s", "{x}"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.binary(max_size=8)
    | st.sampled_from([2**63, -(2**63) - 1, 1e308, -0.0, math.nan, math.inf, -math.inf, len, int])
)
configs = st.dictionaries(
    texts | st.integers(),
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(texts, inner, max_size=4)
            | st.sets(texts, max_size=3)
        ),
        max_leaves=12,
    ),
    max_size=6,
)
values = st.floats(allow_nan=False, allow_infinity=False)
# Each example has a file of its own, whatever its number.
examples = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=1000
)


def deliver(sink, folder, config, value, run_id="run"):
    (source,) = parse_sinks([sink])
    made = source.make()
    made.open(make_header(run_id, folder, config))
    made.write(make_record(run_id, 0, {**some_metrics(0), NAME: value}))
    made.close(make_summary(run_id, 1))


@examples
@given(config=configs, value=values)
def test_csv(config, value, tmp_path_factory):
    folder = tmp_path_factory.mktemp("csv")
    deliver(f"csv:{folder}/file.csv", folder, config, value)
    with (folder / "file.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert repr(float(row[NAME])) == repr(value)


@settings(examples, max_examples=300)
@given(config=configs, value=values)
def test_tensorboard(config, value, tmp_path_factory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    folder = tmp_path_factory.mktemp("tensorboard")
    deliver(f"tensorboard:{folder}", folder, config, value)
    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    with np.errstate(over="ignore"):
        assert events.Scalars(NAME)[0].value == np.float32(value)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    params = HParamsPluginData.FromString(content).session_start_info.hparams
    for key, given_value in flatten(plain(config)).items():
        held = params[key]
        kind = held.WhichOneof("kind")
        assert kind is not None
        if isinstance(given_value, str):
            assert held.string_value == given_value
        else:  # torch writes a boolean as a number
            assert held.number_value + held.bool_value == float(given_value)


@examples
@given(config=configs, value=values)
def test_prometheus(config, value, tmp_path_factory):
    from prometheus_client.parser import text_string_to_metric_families

    folder = tmp_path_factory.mktemp("prometheus")
    deliver(f"prometheus:{folder}/file.prom", folder, config, value)
    text = (folder / "file.prom").read_text(encoding="utf-8")
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["coati_perf_samples_learned"] == value


@examples
@given(config=configs)
def test_the_reports_lines_are_those_that_it_should_have(config):
    plain_config = plain(config)
    masked, _ = mask_secrets(plain_config)
    line = _seed_config_line(config, plain_config, masked)
    assert line.splitlines() in ([line], [])
    totals = RunTotals(make_header("run", "/").machine)
    totals.add(make_record("run", 0, some_metrics(0)))
    summary = make_summary("run", 1)
    with_config = render_run(make_header("run", "/", config), totals, summary).splitlines()
    without = render_run(make_header("run", "/", {}), totals, summary).splitlines()
    assert len(with_config) == len(without) + bool(plain_config) + len(plain_config)


@settings(examples, max_examples=40)
@given(config=configs, value=values)
def test_mlflow(config, value, tmp_path_factory, mlflow_store, runs):
    client = mlflow_store
    run_id = next(runs)
    deliver("mlflow:hostile", tmp_path_factory.getbasetemp(), config, value, run_id)
    experiment = client.get_experiment_by_name("hostile")
    (run,) = client.search_runs(
        [experiment.experiment_id], f"tags.`coati_perf.run_id` = '{run_id}'"
    )
    assert run.data.metrics[NAME] == value


@pytest.fixture(scope="module")
def runs():
    return iter(f"run-{number}" for number in range(10_000))


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory):
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", address)
        yield MlflowClient(address)


@settings(examples, max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(config=configs)
def test_wandb_takes_any_config(config, tmp_path_factory, monkeypatch, load_offline_run):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path_factory.mktemp("wandb")
    deliver("wandb:project", folder, config, 1.0, folder.name)
    held = load_offline_run(folder).config()
    # wandb takes minus signs off the front of keys, so that of -1 and 1 it holds the later one.
    named = {key.lstrip("-"): value for key, value in plain(config).items()}
    for key, given_value in named.items():
        if isinstance(given_value, (bool, int, float)) and key:
            assert float(held[key]) == float(given_value)  # JSON's numbers are float64
        elif isinstance(given_value, str) and key:
            assert held[key] == given_value


def test_wandb_holds_every_figure(tmp_path, monkeypatch, load_offline_run):
    """A thousand figures of any size, as the episodes of one run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (source,) = parse_sinks(["wandb:project"])
    sink = source.make()
    sink.open(make_header("run", tmp_path))
    written = []

    @settings(deadline=None, max_examples=1000)
    @given(value=values)
    def write(value):
        sink.write(make_record("run", len(written), {NAME: value}))
        written.append(value)

    write()
    sink.close(make_summary("run", len(written)))
    rows = [row for row in load_offline_run(tmp_path).history() if NAME in row]
    assert [float(row[NAME]) for row in rows] == written
