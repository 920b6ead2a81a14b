"""The command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from coati_perf.cli import main


def test_report_prints_a_finished_run(make_evaluator, tmp_path, capsys):
    evaluator = make_evaluator()
    with evaluator.episode(7):
        pass
    evaluator.close()
    assert main(["report", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Performance summary:\n")
    assert "finished\n1 episodes (7 to 7)" in printed


def test_report_says_what_is_wrong_in_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("coati-perf: no journal at ")


def test_report_of_a_folder_of_runs_names_the_newest(tmp_path, capsys):
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        journal = tmp_path / name / "journal.jsonl"
        journal.touch()
        os.utime(journal, (1000 - age, 1000 - age))
    assert main(["report", str(tmp_path)]) == 2
    newest = f"; the newest run there is {tmp_path / 'new'}\n"
    assert capsys.readouterr().err.endswith(newest)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--episodes", "0"]])
def test_a_wrong_command_is_refused(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    file.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    return file


def test_flops_prints_the_phases_and_the_formula(config_file, capsys):
    """2 layers of 64·(64+32+32+64) + 3·64·96 weights, a head of 64·100: 67,840 a token."""
    shape = ["--prompt", "10", "--response", "5", "--batch", "2"]
    for given in (config_file, config_file.parent):
        assert main(["flops", str(given), *shape]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("74,560 parameters; 2 × (10 prompt + 5 response tokens)")
        phases = {line.split()[0]: line.split()[1:] for line in lines[3:7]}
        score = 2 * (15 * 2 * 67_840 + 2 * 256 * 15 * 16 / 2)
        assert float(phases["score"][0]) == pytest.approx(score / 1e12, rel=1e-3)
        assert float(phases["learn"][0]) == pytest.approx(3 * score / 1e12, rel=1e-3)
        assert "  forward           135680·L + 512·pairs[all](L)" in lines


def test_flops_says_what_is_wrong_in_one_line(tmp_path, config_file, capsys):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "unknown.json").write_text('{"model_type": "abacus"}')
    for name in ("list.json", "unknown.json", "missing.json"):
        assert main(["flops", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert f"{name} is no Hugging Face config" in error
        assert error.count("\n") == 1


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "coati_perf", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("coati-perf ")
