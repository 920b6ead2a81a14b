"""Secrets in train_config: none reaches a file, and nothing else is masked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_perf import PerformanceEvaluator
from coati_perf.redaction import MASK, mask_command, mask_secrets, mask_text

SECRET = "x9"


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        (["train.py", "--hf-token", SECRET, "--lr", "1"], ["--hf-token", MASK, "--lr", "1"]),
        (["train.py", "--hf_token=x", "api_key=y", "+a.b.password=z"],
         [f"--hf_token={MASK}", f"api_key={MASK}", f"+a.b.password={MASK}"]),
        (["train.py", "--max_tokens", "5", "--tokenizer=a", "-x", "https://me:pw@host/"],
         ["--max_tokens", "5", "--tokenizer=a", "-x", f"https://me:{MASK}@host/"]),
        (["train.py", "--mine", SECRET, "mine=x"], ["--mine", MASK, f"mine={MASK}"]),
    ],
)  # fmt: skip
def test_secrets_of_the_command_line_are_masked(given, masked):
    assert mask_command(given, ["mine"]) == ["train.py", *masked]


@pytest.mark.parametrize(
    "key",
    [
        "token", "hf_token", "hub_token", "HF_TOKEN", "wandbApiKey", "api_key", "apikey",
        "AWS_SECRET_ACCESS_KEY", "openai-api-key", "password", "db_password", "passwd",
        "client_secret", "credentials", "ssh_key", "private_key", "access-token", "id_token",
    ],
)  # fmt: skip
def test_a_key_that_names_a_secret_masks_its_value(key):
    assert mask_secrets({"a": {key: SECRET}}) == ({"a": {key: MASK}}, [f"a.{key}"])
    assert mask_secrets({key: {"deep": SECRET}})[0] == {key: MASK}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad_token", "<pad>"),
        ("eos_token_id", 2),
        ("max_tokens", 512),
        ("num_tokens", 5),
        ("tokenizer", "gpt2"),
        ("token_level", True),
        ("input_key", "prompt"),
        ("reward_keys", ["a"]),
        ("key", "value"),
        ("num_key_value_heads", 8),
        ("kl_coef", 0.1),
        ("hub_token", None),
        ("use_auth_token", True),
        ("secretary", "Ann"),
        ("commit", "9d4e1e23bd5b727046a9e3b4b7db57bd8d6ee684"),
        ("model", "meta-llama/Llama-3-8B"),
        ("url", "https://user@host/path"),
    ],
)
def test_what_is_no_secret_stays(key, value):
    assert mask_secrets({key: value}) == ({key: value}, [])


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("hf_" + "aB3" * 12, MASK),
        ("use sk-proj-" + "a1-_" * 8 + " here", f"use {MASK} here"),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
        ("ghp_" + "a1" * 18, MASK),
        ("postgres://ann:s3cret@db/runs", f"postgres://ann:{MASK}@db/runs"),
        ("redis://:s3cret@cache", f"redis://:{MASK}@cache"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_-1", MASK),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", MASK),
        ("-----BEGIN PRIVATE KEY-----\nMIIE", MASK),
    ],
)
def test_a_value_of_a_known_shape_is_masked_under_any_key(text, masked):
    assert mask_text(text) == masked
    assert mask_secrets({"note": ["a", text]}) == ({"note": ["a", masked]}, ["note.1"])


def test_more_keys_can_be_named():
    assert mask_secrets({"endpoint": "x", "lr": 1}, ["endpoint"]) == (
        {"endpoint": MASK, "lr": 1},
        ["endpoint"],
    )


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(plain_data)
def test_masking_is_idempotent_and_never_raises(data):
    once, _ = mask_secrets(data)
    assert mask_secrets(once)[0] == once


CONFIG = {
    "hf_token": "swordfish-1",
    "lr": 0.1,
    "nested": {"db": "postgres://ann:swordfish-2@db", "password": "swordfish-3"},
}


def test_no_secret_reaches_a_file_of_the_run(tmp_path, read_run):
    evaluator = PerformanceEvaluator(
        1, 1, 1, 1, train_config=CONFIG, save_path=tmp_path / "r.txt", run_dir=tmp_path / "run"
    )
    with evaluator.episode(0):
        pass
    evaluator.close()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(b"swordfish" in content for content in written)
    header = read_run().header
    assert header.masked == ["hf_token", "nested.db", "nested.password"]
    assert header.train_config["lr"] == 0.1
    first_line = (tmp_path / "r.txt").read_text().splitlines()[0]
    assert first_line.startswith("***; 0.1; {'db': 'postgres://ann:***@db', 'password': '***'}")


def test_a_secret_in_an_exception_is_masked_too(tmp_path, read_run):
    evaluator = PerformanceEvaluator(1, 1, 1, 1, run_dir=tmp_path / "run")
    error = "cannot reach https://ann:swordfish@hub"
    with pytest.raises(ConnectionError), evaluator.episode(0):
        raise ConnectionError(error)
    evaluator.close()
    assert b"swordfish" not in (tmp_path / "run" / "journal.jsonl").read_bytes()
    assert "https://ann:***@hub" in json.dumps([f.error for f in read_run().failures])


def test_redaction_is_adjusted_by_the_user(tmp_path, read_run):
    for redact, kept in ((["lr"], (MASK, MASK)), (False, ("swordfish-1", 0.1))):
        evaluator = PerformanceEvaluator(
            1, 1, 1, 1, train_config=CONFIG, run_dir=tmp_path / "run", redact=redact
        )
        with evaluator.episode(0):
            pass
        evaluator.close()
        config = read_run().header.train_config
        assert (config["hf_token"], config["lr"]) == kept
    with pytest.raises(TypeError, match="redact is 5; expected True, False or names of keys"):
        PerformanceEvaluator(1, 1, 1, 1, redact=5)
