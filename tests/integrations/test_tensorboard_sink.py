"""TensorBoard's files, read back with TensorBoard's own reader."""

from __future__ import annotations

import shutil
import time

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from coati_perf import PerformanceEvaluator, read_journal


@pytest.fixture
def read_events(tmp_path):
    def read(run):
        events = EventAccumulator(
            str(tmp_path / "run" / "tensorboard" / run.header.run_id), size_guidance={"scalars": 0}
        )
        return events.Reload()

    return read


def test_every_scalar_of_every_episode_is_the_journals(fit, read_events):
    run = fit("tensorboard")
    events = read_events(run)
    names = {name for record in run.episodes for name in record.metrics}
    assert set(events.Tags()["scalars"]) == names
    for name in names:
        written = [(e.step, e.value, e.wall_time) for e in events.Scalars(name)]
        expected = [
            # TensorBoard keeps float32, whose rounding is 2**-24.
            (record.episode, pytest.approx(record.metrics[name], rel=2**-24), record.at)
            for record in run.episodes
            if name in record.metrics
        ]
        assert written == expected


def test_the_config_is_beside_the_final_metrics(fit, read_events):
    """In the same run as the scalars, so that HPARAMS shows the last value of each."""
    events = read_events(fit("tensorboard"))
    content = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(data)
        for tag, data in events.PluginTagToContent("hparams").items()
    }
    given = content["_hparams_/session_start_info"].session_start_info.hparams
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in given.items()}
    assert values == {
        "lr": 1e-5,
        "plugin": "zero2",
        "nested.layers.0": 1,
        "nested.layers.1": 2,
        "nested.none": "None",
        "flag": True,
        "empty": "[]",
        "coati_perf/convention": "coati",
    }
    shown = {info.name.tag for info in content["_hparams_/experiment"].experiment.metric_infos}
    assert "perf/throughput/learn_samples_per_s" in shown
    assert "_hparams_/session_end_info" in content


def test_custom_scalars_has_a_chart_per_group(fit, read_events):
    events = read_events(fit("tensorboard"))
    layout = layout_pb2.Layout.FromString(
        events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert "perf/time/learn_s" in charts["time"]
    assert {"time", "samples", "throughput", "tflops", "ranks"} <= set(charts)


def test_the_report_is_shown_as_text(fit, read_events):
    events = read_events(fit("tensorboard"))
    (text,) = events.Tensors("coati_perf/report/text_summary")
    report = text.tensor_proto.string_val[0].decode()
    assert "Where the time went" in report


def test_a_directory_may_be_named(fit, tmp_path):
    run = fit(f"tensorboard:{tmp_path / 'boards'}")
    assert list((tmp_path / "boards" / run.header.run_id).glob("events.out.tfevents.*"))


# TensorBoard's own writer thread dies of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_deleted_in_mid_run_stops_neither_training_nor_the_journal(tmp_path, caplog):
    evaluator = PerformanceEvaluator(1, 1, 1, 1, run_dir=tmp_path / "run", sinks=["tensorboard"])
    evaluator.on_fit_start()
    deadline = time.monotonic() + 10
    while not list((tmp_path / "run" / "tensorboard").glob("*/events*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    for episode in range(20):
        with evaluator.episode(episode), evaluator.phase("learn"):
            pass
    evaluator.close()
    run = read_journal(tmp_path / "run").segments[0]
    assert len(run.episodes) == 20
    assert run.summary.status == "finished"
    assert "sink tensorboard got 0 of 20 episodes and was not closed" in caplog.text
