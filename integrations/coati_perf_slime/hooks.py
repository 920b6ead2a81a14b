"""The two functions that slime's flags name, and how what they see becomes records.

A step's lengths and the time of its rollout are known in slime's rollout manager, all other times
in its training actors. The first leave a file for each rollout in the folder that
``COATI_PERF_RUN`` names, which one of the others reads when the step is done; the journal lies
there too.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coati_perf import PerformanceEvaluator, TimedStep
from coati_perf.timed_step import phase_seconds

_logger = logging.getLogger(__name__)

FOLDER = "COATI_PERF_RUN"
# Every actor that trains calls it after each rollout, and it resets the timers (0.3).
SEAM, MODULE = "log_perf_data", "slime.observability.train_metric_utils"
TIMER = "slime.observability.timer"

# slime's timers by our phases. "train" holds others, and those of "train_wait" lie beside.
_PHASES = {
    "ref_log_probs": "score",
    "log_probs": "score",
    "teacher_log_probs": "teacher",
    "actor_train": "learn",
    "update_weights": "weight_sync",
    "data_preprocess": "data_preprocess",
    "save_model": "save_model",
    "wake_up": "wake_up",
    "sleep": "sleep",
}
_SCORED = {"log_probs": "actor", "ref_log_probs": "initial"}


class _Rollout(msgspec.Struct):
    """The file of a rollout: its seconds, and the tokens of each prompt and each response."""

    seconds: float
    prompts: list[int]
    responses: list[int]


def rollout_logged(
    rollout_id: int, args: Any, samples: Sequence[Any], extra_metrics: Any, rollout_time: float
) -> None:
    """Leave the lengths and the time of a rollout; ``--custom-rollout-log-function-path``.

    slime then logs as before. Never raises.
    """
    try:
        # Of a sample that is masked out altogether, all that was sampled is the response.
        responses = [s.effective_response_length or s.response_length for s in samples]
        totals = [len(sample.tokens) for sample in samples]
        prompts = [t - r for t, r in zip(totals, responses, strict=True)]
        path = _rollout_file(rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".tmp")
        written.write_bytes(msgspec.json.encode(_Rollout(float(rollout_time), prompts, responses)))
        written.replace(path)
    except Exception as error:  # noqa: BLE001 - the rollout goes on
        _logger.warning("rollout %s is not measured: %r", rollout_id, error)


def megatron_started(args: Any) -> None:
    """Record every step from here on; ``--custom-megatron-init-path``.

    slime calls it in each training actor; that of the first data-parallel and the last pipeline
    rank records. FLOP are counted by the config in ``args.hf_checkpoint``, where it can be.

    Raises:
        RuntimeError: this version of slime has not the function that is watched.
        ValueError: ``COATI_PERF_RUN`` is not set.
    """
    _folder()
    module = importlib.import_module(MODULE)
    original = getattr(module, SEAM, None)
    if original is None:
        message = f"this slime has no {MODULE}.{SEAM}: nothing to measure by"
        raise RuntimeError(message)
    if _records():
        setattr(module, SEAM, _beside(original, _evaluator(args)))


def _beside(original: Callable[..., Any], evaluator: PerformanceEvaluator) -> Callable[..., Any]:
    """Return the function that also records the step."""

    @functools.wraps(original)
    def watched(rollout_id: int, args: Any, *given: Any, **named: Any) -> Any:
        try:
            _record(evaluator, int(rollout_id), args)
        except Exception as error:  # noqa: BLE001 - training goes on
            evaluator.fault("a step of slime", error)
        return original(rollout_id, args, *given, **named)

    return watched


def _record(evaluator: PerformanceEvaluator, rollout_id: int, args: Any) -> None:
    timers: Mapping[str, float] = importlib.import_module(TIMER).Timer().log_dict()
    path = _rollout_file(rollout_id)
    rollout = msgspec.json.decode(path.read_bytes(), type=_Rollout)
    evaluator.record_step(
        rollout_id,
        TimedStep(
            wall_s=float(timers["train_wait"] + timers["train"]),
            seconds={"generate": rollout.seconds, **phase_seconds(timers, _PHASES)},
            prompts=rollout.prompts,
            responses=rollout.responses,
            scored=[role for name, role in _SCORED.items() if name in timers],
            learned=["actor"],
            responses_per_prompt=int(args.n_samples_per_prompt),
        ),
    )
    path.unlink()


def _evaluator(args: Any) -> PerformanceEvaluator:
    make = functools.partial(
        PerformanceEvaluator,
        0,
        0,
        0,
        0,
        enable_grad_checkpoint=getattr(args, "recompute_granularity", None) == "full",
        train_config=vars(args),
        run_dir=_folder(),
    )
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(args.hf_checkpoint, local_files_only=True)
        evaluator = make(models={"actor": config, "initial": config})
    except Exception as error:  # noqa: BLE001 - the times alone are worth having
        _logger.warning("no FLOP, for the model of args.hf_checkpoint cannot be read: %r", error)
        evaluator = make()
    trainers = args.actor_num_nodes * args.actor_num_gpus_per_node
    evaluator.measure_alone()
    evaluator.declare_devices(trainers, None if args.colocate else args.rollout_num_gpus)
    return evaluator


def _records() -> bool:
    """Say whether this is the rank that slime's own figures come from."""
    mpu = importlib.import_module("megatron.core").mpu
    return bool(
        mpu.get_tensor_model_parallel_rank() == 0
        and mpu.is_pipeline_last_stage()
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _rollout_file(rollout_id: int) -> Path:
    return _folder() / "rollouts" / f"{rollout_id}.json"


def _folder() -> Path:
    folder = os.environ.get(FOLDER)
    if not folder:
        message = f"{FOLDER} is not set; expected a folder that all nodes share"
        raise ValueError(message)
    return Path(folder)
