"""No planted secret is in any file that any sink wrote; nothing innocent is masked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

HERE = Path(__file__).parent

# By key, whatever the value; each value is unlike any text that a file could hold by chance.
SECRET_KEYS = "api_key hf_token password client_secret credentials ssh_key wandbApiKey"
BY_KEY = {key: f"planted-by-key-{number}-zq" for number, key in enumerate(SECRET_KEYS.split())}
# By the shape of the value, under innocent keys.
BY_SHAPE = {
    "note": "hf_" + "zQ9" * 12,
    "remark": "sk-proj-" + "zQ9-" * 8,
    "comment": "AKIA" + "ZQ9W" * 4,
    "text": "ghp_" + "zQ9" * 12,
    "line": "github_pat_" + "zQ9" * 12,
    "word": "glpat-" + "zQ9w" * 6,
    "letter": "xoxb-" + "1234567890-zQ9zQ9",
    "page": "AIza" + "zQ9wZ" * 7,
    "sheet": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiJ6UTkifQ." + "zQ9zQ9zQ9",
    "block": "-----BEGIN RSA PRIVATE KEY-----\nzQ9zQ9zQ9zQ9\n-----END RSA PRIVATE KEY-----",
}
IN_URLS = {
    "tracking_uri": "https://me:planted-in-url-1-zq@host/x",
    "database": "postgresql://me:planted-in-url-2-zq@host:5432/db",
}
PASSWORDS = ["planted-in-url-1-zq", "planted-in-url-2-zq"]
ON_COMMAND_LINE = ["--hub-token", "planted-argument-1-zq", "--db.password=planted-argument-2-zq"]
SECRETS = [
    *BY_KEY.values(),
    *(line for text in BY_SHAPE.values() for line in text.splitlines() if "-----" not in line),
    *PASSWORDS,
    "planted-argument-1-zq",
    "planted-argument-2-zq",
]

INNOCENT = """
tokenizer tokenizer_name max_new_tokens max_tokens num_tokens tokens_per_batch token_level
pad_token eos_token bos_token unk_token mask_token sep_token pad_token_id eos_token_id
keyboard monkey keynote turkey hockey key keys input_key output_key prompt_key reward_key
label_keys num_key_value_heads key_size kl_key dataset_key key_bias secretary passage
passes bypass compass pass_rate author authority credit accredited session sessions
private_dataset signing_bonus access_mode apical accountable public_path
use_auth_token_count tokenization detokenize keypoint
"""

SCRIPT = """
import json, os, sys
sys.path.insert(0, os.environ["HERE"])
from conftest import train
from coati_perf import PerformanceEvaluator
with open("config.json") as file:
    config = json.load(file)
evaluator = PerformanceEvaluator(
    1, 1, 1, 1, train_config=config, run_dir="run", save_path="report.txt",
    sinks=["csv", "tensorboard", "wandb", "mlflow", "prometheus", "accelerate:trackio"],
)
train(evaluator, episodes=2)
"""


@pytest.fixture
def written(tmp_path):
    """Return what a run wrote whose config is ``config`` and whose arguments are as above."""

    def run(config):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "train.py", *ON_COMMAND_LINE],
            cwd=tmp_path,
            env={
                **{name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
                "HERE": str(HERE),
                "WANDB_MODE": "offline",
                "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
                "TRACKIO_DIR": str(tmp_path / "trackio"),
            },
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "was not closed" not in done.stderr, done.stderr
        (tmp_path / "config.json").unlink()
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for part in ("metrics.csv", "tfevents", ".wandb", "mlflow.db", ".prom", "report.txt"):
            assert any(part in path.name for path in files), part
        return files

    return run


def test_no_planted_secret_is_in_any_file(written):
    assert len(SECRETS) >= 20
    files = written({"a": [{"b": {**BY_KEY, **BY_SHAPE}}], **IN_URLS, **BY_KEY, **BY_SHAPE})
    found = {
        (secret, str(path))
        for path, content in files.items()
        for secret in SECRETS
        if secret.encode() in content
    }
    assert found == set()


def test_innocent_keys_are_left_alone(written, read_run):
    config = dict.fromkeys(INNOCENT.split(), "innocent-value")
    assert len(config) >= 50
    written(config)
    header = read_run().header
    assert header.train_config == config
    assert header.masked == []
