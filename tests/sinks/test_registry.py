"""Sinks by name."""

from __future__ import annotations

import pytest

from coati_perf import SinkError
from coati_perf.sinks.registry import parse_sinks


class GoodSink:
    def open(self, header): ...
    def write(self, record): ...
    def close(self, summary): ...


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(SinkError, match=r"no sink named 'wanbd'; there are: .*tensorboard.*wandb"):
        parse_sinks(["wanbd"])


@pytest.mark.parametrize("sink", [3, None, object(), GoodSink])
def test_what_is_neither_name_nor_sink_is_refused(sink):
    with pytest.raises(TypeError, match="expected a sink's name"):
        parse_sinks([sink])


def test_the_argument_is_all_after_the_first_colon(tmp_path):
    (source,) = parse_sinks([f"text:{tmp_path}/a:b"])
    assert source.label == f"text:{tmp_path}/a:b"
    assert source.make().path == tmp_path / "a:b"


def test_a_text_sink_needs_a_path():
    with pytest.raises(SinkError, match="needs a path: 'text:PATH'"):
        parse_sinks(["text"])


def test_a_sink_object_is_used_as_it_is():
    sink = GoodSink()
    assert parse_sinks([sink])[0].make() is sink


def test_a_third_partys_sink_is_found_by_its_entry_point(tmp_path, monkeypatch):
    (tmp_path / "other.py").write_text(
        "class S:\n"
        "    def __init__(self, argument): self.argument = argument\n"
        "    def open(self, header): pass\n"
        "    def write(self, record): pass\n"
        "    def close(self, summary): pass\n"
        "def broken(argument): return 3\n",
        encoding="utf-8",
    )
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: other\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[coati_perf.sinks]\nother = other:S\nbroken = other:broken\nmissing = nowhere:S\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parse_sinks(["other:x"])[0].make().argument == "x"
    with pytest.raises(SinkError, match="'broken' made a int, no Sink"):
        parse_sinks(["broken"])
    with pytest.raises(SinkError, match=r"'missing' \(nowhere:S\) could not be loaded: Module"):
        parse_sinks(["missing"])
