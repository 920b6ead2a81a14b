"""Exact costs in the evaluator: real lengths, padding, replicas, peaks, by hand-made figures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from coati_perf import CostModel, PerformanceEvaluator, catalogue
from coati_perf.flops.head import Head
from coati_perf.flops.memory import Memory
from coati_perf.flops.model import TracedCost
from coati_perf.flops.trace import Trace
from coati_perf.flops.visibility import Visibility
from coati_perf.flops.work import Work

# Whole numbers that tell the terms apart: a forward costs 10 a token and 1 a pair, learning thrice
# that and, with checkpoints, four times; a decode step 7 and 1 a key.
MEMORY = Memory(weights=1000, cache=((Visibility(), 3),), weight_size=2, cache_size=2)


def model(factor=1) -> TracedCost:
    def work(per_token, per_pair):
        return Work(per_token=factor * per_token, pairs=((Visibility(), float(factor * per_pair)),))

    return TracedCost(
        trace=Trace(
            forward=work(10, 1),
            forward_backward=work(30, 3),
            prefill=work(9, 1),
            decode=Work(constant=7 * factor, pairs=((Visibility(), float(factor)),)),
            memory=MEMORY,
            head=Head(),
        ),
        executed_learning=work(40, 4),
        source="a test",
    )


def forward(length, factor=1):
    return factor * (10 * length + length * (length + 1) / 2)


def generate(prompt, response, factor=1):
    prefill = 9 * prompt + prompt * (prompt + 1) / 2
    return factor * (
        prefill + sum(7 + cached + 1 for cached in range(prompt, prompt + response - 1))
    )


def padded(prompts, responses):
    """Return an experience as ColossalChat pads it: prompts on the left, responses on the right."""
    width, actions = max(prompts), max(responses)
    attention, action = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        answer = [1] * response + [0] * (actions - response)
        attention.append([0] * (width - prompt) + [1] * prompt + answer)
        action.append(answer)
    return SimpleNamespace(
        sequences=torch.zeros(len(prompts), width + actions, dtype=torch.long),
        attention_mask=torch.tensor(attention),
        action_mask=torch.tensor(action, dtype=torch.bool),
    )


MODELS = {"actor": model(), "critic": model(100), "initial": model(10_000)}
PROMPTS, RESPONSES = [5, 3, 4], [6, 2, 4]
LENGTHS = [11, 5, 8]


@pytest.fixture
def measure(tmp_path, clock, read_run):
    """Return a measurer of one episode: make for 2 s (generate 1 s), learn for 4 s."""

    def run(experience, *, make_lengths=None, learn_lengths=None, models=None, **options):
        evaluator = PerformanceEvaluator(
            0,
            0,
            0,
            0,
            clock=clock,
            run_dir=tmp_path / "run",
            models=models or MODELS,
            **{"peak_tflops": 1e-9, "peak_gb_per_s": 1.0, **options},
        )
        with evaluator.episode(0):
            evaluator.on_make_experience_start()
            with evaluator.phase("generate"):
                clock.advance(1.0)
            with evaluator.phase("score"):
                clock.advance(1.0)
            evaluator.on_make_experience_end(experience, lengths=make_lengths)
            evaluator.on_learn_batch_start()
            clock.advance(4.0)
            evaluator.on_learn_batch_end(experience, lengths=learn_lengths)
        evaluator.close()
        return read_run().episodes[0]

    return run


def test_useful_work_is_that_of_the_real_tokens_row_by_row(measure):
    metrics = measure(padded(PROMPTS, RESPONSES)).metrics
    rows = sum(generate(*pair) for pair in zip(PROMPTS, RESPONSES, strict=True))
    assert metrics[catalogue.GENERATE_FLOP] == rows
    assert metrics[catalogue.SCORE_FLOP] == sum(forward(length, 10_101) for length in LENGTHS)
    assert metrics[catalogue.LEARN_FLOP] == sum(3 * forward(length, 101) for length in LENGTHS)


def test_executed_work_is_that_of_the_padded_batch_and_of_recomputation(measure):
    metrics = measure(padded(PROMPTS, RESPONSES)).metrics
    assert metrics[catalogue.GENERATE_EXECUTED] == 3 * generate(5, 6)
    assert metrics[catalogue.SCORE_EXECUTED] == 3 * forward(11, 10_101)
    assert metrics[catalogue.LEARN_EXECUTED] == 3 * 4 * forward(11, 101)
    # A prefill and five steps read all weights; prompts and steps are written to the cache, and
    # step t reads the t keys before it and its own.
    weights, written, read = 6 * 1000, 3 * 3 * (5 + 5), 3 * 3 * sum(range(6, 11))
    assert metrics[catalogue.GENERATE_BYTES] == 2 * (weights + written + read)


def test_tokens_and_padding_are_counted_to_the_token(measure):
    metrics = measure(padded(PROMPTS, RESPONSES)).metrics
    assert metrics[catalogue.PROMPT_TOKENS] == 12
    assert metrics[catalogue.RESPONSE_TOKENS] == 12
    assert metrics[catalogue.LEARN_TOKENS] == 24
    assert metrics["perf/tokens/padding_fraction"] == 9 / 33
    assert metrics["perf/tokens/learn_padding_fraction"] == 9 / 33
    assert metrics["perf/tokens/response_mean"] == 4
    assert metrics[catalogue.RESPONSE_MAX] == 6
    assert metrics["perf/throughput/response_tokens_per_s"] == 12
    assert metrics["perf/throughput/overall_tokens_per_s"] == 24 / 6
    assert catalogue.UNMASKED_BATCHES not in metrics


def test_utilisation_is_useful_or_executed_work_over_the_peak(measure):
    """The peak is 1e4 FLOP/s and 1e9 byte/s."""
    models = {"actor": model(), "critic": model()}
    metrics = measure(padded(PROMPTS, RESPONSES), models=models, peak_tflops=1e-8).metrics
    for phase, seconds in (("generate", 1.0), ("score", 1.0), ("learn", 4.0)):
        useful = metrics[f"perf/flops/{phase}"]
        executed = metrics[f"perf/flops/{phase}_executed"]
        assert metrics[f"perf/mfu/{phase}"] == pytest.approx(useful / seconds / 1e4)
        assert metrics[f"perf/hfu/{phase}"] == pytest.approx(executed / seconds / 1e4)
        assert metrics[f"perf/mfu/{phase}"] <= metrics[f"perf/hfu/{phase}"]
        if phase != "generate":
            assert metrics[f"perf/lost/{phase}_s"] == pytest.approx(seconds - useful / 1e4)
    moved = metrics[catalogue.GENERATE_BYTES]
    assert metrics["perf/mbu/generate"] == pytest.approx(moved / 1e9)
    useful = metrics[catalogue.GENERATE_FLOP]
    assert metrics["perf/lost/generate_s"] == pytest.approx(1 - max(useful / 1e4, moved / 1e9))


def test_the_report_shows_each_phases_speed_and_none_that_is_impossible(measure, tmp_path):
    """Learning: 3 · 101 · (10 L + L(L+1)/2) FLOP over 11, 5 and 8 tokens in 4 s, 1.4e4 FLOP/s."""
    report = tmp_path / "report.txt"
    models = {"actor": model(), "critic": model(100)}
    measure(padded(PROMPTS, RESPONSES), models=models, save_path=report, peak_tflops=3e-8)
    lines = report.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Speed of a"))
    table = {line.split()[0]: line.split()[1:] for line in lines[start + 1 :] if line[:2] == "  "}
    assert lines[start].split()[-5:] == ["TFLOP/s", "executed", "MFU", "HFU", "MBU"]
    useful = 3 * 101 * (10 * 24 + 11 * 12 / 2 + 5 * 6 / 2 + 8 * 9 / 2) / 4
    assert table["learn"][0] == f"{useful / 1e12:.4g}"
    assert table["learn"][2] == f"{useful / 3e4:.1%}"
    assert "score" not in table, "101 · 357 FLOP in 1 s are above 3e4 FLOP/s"
    impossible = next(n for n, line in enumerate(lines) if line.startswith("IMPOSSIBLE, and left"))
    assert any(line.startswith("  perf/mfu/score ") for line in lines[impossible + 1 :])


def test_given_lengths_take_the_place_of_masks(measure):
    bare = SimpleNamespace(
        sequences=torch.zeros(3, 11, dtype=torch.long), action_mask=torch.ones(3, 6)
    )
    expected = measure(padded(PROMPTS, RESPONSES)).metrics
    metrics = measure(
        bare, make_lengths=(PROMPTS, RESPONSES), learn_lengths=torch.tensor(LENGTHS)
    ).metrics
    del expected[catalogue.TRAINING_THREAD_S], metrics[catalogue.TRAINING_THREAD_S]
    assert metrics == expected


def test_without_masks_padded_lengths_are_taken_and_it_is_said(measure, capsys):
    bare = SimpleNamespace(
        sequences=torch.zeros(3, 11, dtype=torch.long), action_mask=torch.ones(3, 6)
    )
    record = measure(bare, save_path=None)
    assert record.metrics[catalogue.UNMASKED_BATCHES] == 2
    assert record.metrics[catalogue.RESPONSE_TOKENS] == 18
    assert record.metrics[catalogue.SCORE_FLOP] == record.metrics[catalogue.SCORE_EXECUTED]
    assert "perf/tokens/padding_fraction" not in record.metrics


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"attention_mask": torch.ones(3, 9)}, "attention_mask has shape (3, 9); expected that of"),
        ({"attention_mask": "none"}, "on_make_experience_end: AttributeError"),
    ],
)
def test_a_bad_mask_is_a_fault_and_no_exception(measure, change, fault):
    experience = padded(PROMPTS, RESPONSES)
    vars(experience).update(change)
    record = measure(experience)
    assert any(fault in text for text in record.faults), record.faults


def test_given_lengths_of_another_batch_size_are_a_fault(measure):
    record = measure(padded(PROMPTS, RESPONSES), learn_lengths=[1, 2])
    assert any("lengths has shape (2,); expected one for each of 3" in f for f in record.faults)


def test_a_cost_function_that_raises_is_a_fault_and_the_row_stays(measure):
    def broken(length):
        raise ZeroDivisionError

    models = {"critic": CostModel.custom(forward=lambda n: n, backward=broken)}
    record = measure(padded(PROMPTS, RESPONSES), models=models)
    assert record.metrics[catalogue.GENERATED] == 3
    assert any("ZeroDivisionError" in fault for fault in record.faults)


def test_a_rate_above_the_peak_is_kept_out_with_a_file_that_reproduces_it(measure, tmp_path):
    record = measure(padded(PROMPTS, RESPONSES), peak_tflops=1e-12)
    assert "perf/mfu/learn" not in record.metrics
    flaw = record.impossible["perf/mfu/learn"]
    assert flaw.limit == 1
    file = tmp_path / "run" / "impossible" / "perf_mfu_learn.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    (numerator,) = kept["numerator"].values()
    (denominator,) = kept["denominator"].values()
    value = kept["scale"] * numerator / (denominator * kept["devices"] * kept["peak"])
    assert value == kept["value"] == flaw.value
    assert kept["cost_model"]["actor"]["convention"] == "exact"


def test_convention_costs_and_warnings_are_in_header_and_records(measure, read_run):
    count = CostModel.custom(forward=lambda n: n)
    fallback = CostModel.traced(torch.nn.LSTM(2, 2), fallback="num_params")
    record = measure(
        padded(PROMPTS, RESPONSES), models={"critic": count, "reward": fallback, "initial": None}
    )
    header = read_run().header
    assert header.convention == record.convention == "custom and num_params"
    assert header.cost_model["reward"]["num_params"] == 48
    assert record.warnings == header.warnings
    assert "reward: parameters counted, since the model cannot be traced" in record.warnings[0]


def test_checkpointing_is_that_of_the_models_that_are_configs(tmp_path, monkeypatch, read_run):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    for checkpointing in (False, True):
        evaluator = PerformanceEvaluator(
            0, 0, 0, 0, checkpointing, run_dir=tmp_path / str(checkpointing),
            models={"actor": config}, peak_tflops=1.0,
        )  # fmt: skip
        with evaluator.episode(0):
            evaluator.on_learn_batch_start()
            evaluator.on_learn_batch_end(padded([3, 3], [4, 4]))
        evaluator.close()
        metrics = read_run(tmp_path / str(checkpointing)).episodes[0].metrics
        executed = metrics[catalogue.LEARN_EXECUTED]
        assert (executed > metrics[catalogue.LEARN_FLOP]) == checkpointing


def test_recorded_lengths_cost_what_the_same_masks_do(tmp_path, clock, read_run, measure):
    expected = measure(padded(PROMPTS, RESPONSES)).metrics
    evaluator = PerformanceEvaluator(
        0, 0, 0, 0, run_dir=tmp_path / "recorded", clock=clock, models=MODELS
    )  # fmt: skip
    with evaluator.episode(0):
        for phase in ("make_experience", "learn"):
            evaluator.record(phase, prompt_lengths=PROMPTS, response_lengths=RESPONSES)
    evaluator.close()
    metrics = read_run(tmp_path / "recorded").episodes[0].metrics
    for name in (
        catalogue.GENERATE_FLOP,
        catalogue.SCORE_FLOP,
        catalogue.LEARN_FLOP,
        catalogue.RESPONSE_TOKENS,
        catalogue.RESPONSE_MAX,
    ):
        assert metrics[name] == expected[name], name
    assert metrics[catalogue.GENERATE_EXECUTED] == metrics[catalogue.GENERATE_FLOP]
    assert "perf/tokens/padding_fraction" not in metrics
    # One batch: all weights in the prefill and in each step of the longest; every prompt and all
    # but the last response token are written, and a step reads the keys before it and its own.
    written = 3 * (sum(PROMPTS) + sum(RESPONSES) - 3)
    pairs = zip(PROMPTS, RESPONSES, strict=True)
    read = 3 * sum(sum(range(prompt + 1, prompt + response)) for prompt, response in pairs)
    assert metrics[catalogue.GENERATE_BYTES] == 2 * (6 * 1000 + written + read)


def test_samples_without_lengths_have_no_tokens_and_no_speed(tmp_path, read_run):
    evaluator = PerformanceEvaluator(0, 0, 0, 0, run_dir=tmp_path, models=MODELS)
    with evaluator.episode(0):
        evaluator.record("learn", seconds=1.0, samples=2)
    evaluator.close()
    record = read_run(tmp_path).episodes[0]
    assert record.metrics[catalogue.LEARNED] == 2
    assert catalogue.LEARN_TOKENS not in record.metrics
    assert not any("mfu" in name or "flops" in name for name in record.metrics)
    assert list(record.faults.values()) == [1]


def test_without_models_nothing_is_said_of_flop(tmp_path, read_run):
    evaluator = PerformanceEvaluator(
        0, 0, 0, 0, run_dir=tmp_path / "run", save_path=tmp_path / "report"
    )
    with evaluator.episode(0):
        evaluator.record("generate", seconds=1.0, prompt_lengths=[4], response_lengths=[3])
        evaluator.record("learn", seconds=1.0, samples=2)
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(padded(PROMPTS, RESPONSES))
    evaluator.close()
    record = read_run().episodes[0]
    assert record.faults == {}
    assert record.metrics[catalogue.RESPONSE_TOKENS] == 3
    assert not any("tflops" in name or "flops" in name for name in record.metrics)
    assert "FLOPs: not counted" in (tmp_path / "report").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("actor", "given", "expected"),
    [
        (torch.nn.Linear(2, 2, dtype=torch.float16), None, torch.float16),
        (torch.nn.Linear(2, 2), torch.bfloat16, torch.bfloat16),
        (SimpleNamespace(dtype=torch.float32), None, torch.float32),
        (SimpleNamespace(dtype=None), None, torch.bfloat16),
    ],
    ids=["module", "given", "config", "config without"],
)
def test_the_peak_is_that_of_the_actors_dtype_unless_given(actor, given, expected, monkeypatch):
    monkeypatch.setattr(CostModel, "traced", lambda *_, dtype, **__: traced.append(dtype))
    traced = []
    evaluator = PerformanceEvaluator(0, 0, 0, 0, models={"actor": actor}, dtype=given)
    assert evaluator._settings.declared.dtype is expected
    assert traced == [expected]


def test_the_data_parallel_group_may_be_given_itself(tmp_path, read_run):
    group = SimpleNamespace(size=lambda: 4)
    evaluator = PerformanceEvaluator(0, 0, 0, 0, data_parallel_size=group, run_dir=tmp_path)
    with evaluator.episode(0):
        pass
    evaluator.close()
    assert read_run(tmp_path).header.machine.data_parallel_size == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": [1]}, "models is a list; expected a mapping"),
        ({"models": {"actor": "llama"}}, "got str; expected a Hugging Face config"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0; expected an integer of at least 1"),
        ({"rollout_devices": -1}, "rollout_devices is -1; expected an integer of at least 0"),
        ({"peak_gb_per_s": 0}, "peak_gb_per_s is 0; expected a finite number above 0"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PerformanceEvaluator(0, 0, 0, 0, **options)
