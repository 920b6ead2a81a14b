"""The evaluator: how it is made, and what a driver tells it in numbers; ``hooks`` has the rest."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from coati_perf import catalogue
from coati_perf.arguments import (
    clock_function,
    cost_models,
    count,
    dtype_or_none,
    keys_or_none,
    mapping,
    model_dtype,
    models_by_role,
    number_or_none,
    path_or_none,
    positive,
    positive_or_none,
    size_or_none,
)
from coati_perf.clock import Clock, monotonic
from coati_perf.cost import NO_MODELS, Amounts, ModelCosts, ParamCount
from coati_perf.device_timer import timed_on_device
from coati_perf.engine_outputs import EngineOutputs, read_outputs
from coati_perf.fit import FitSettings
from coati_perf.generated import generated_amounts
from coati_perf.hooks import Hooks
from coati_perf.recorded import COUNTED_PHASES, lengths_of_samples, recorded_amounts
from coati_perf.sinks import Sink, parse_sinks
from coati_perf.survey import Declared
from coati_perf.tally import Tally
from coati_perf.timed_step import TimedStep


class PerformanceEvaluator(Hooks):
    """Measures an on-policy training loop and reports on it, episode by episode.

    A drop-in for ColossalChat's class of this name: the positional parameters, the hooks and the
    first lines of the report are the same.

    After construction and fit start nothing here raises, waits for another rank or thread, or
    issues a collective: what cannot be measured is logged once, counted in the record
    (``faults``), and training goes on. Hooks and phases belong to one thread per process.

    Args:
        actor_num_params, critic_num_params, initial_model_num_params, reward_model_num_params:
            parameters of each model, for the coati convention of FLOP (see ``ParamCount``); 0
            for a model that there is not.
        enable_grad_checkpoint: whether learning recomputes activations; of ``models``, it is said
            of configs, while modules are taken as they are set.
        ignore_episodes: how many first episodes to leave out, as warm-up.
        train_config: any mapping, dataclass, namespace, or config of pydantic, OmegaConf or Hugging
            Face, with any values; it goes with the results as run metadata.
        save_path: file that a text report is appended to when the fit ends; folders are made.
        sinks: where the records of each episode go besides the journal: names
            (``"tensorboard"``), ``"name:argument"``, or ``Sink`` objects. Used on rank 0 only.
        run_dir: folder of the journal and of the sinks' files, by default
            ``coati_perf_runs/<time>-<short id>``. An existing one gets another segment.
        redact: secrets in ``train_config`` and the command line (keys such as ``hf_token`` or
            ``password``, values such as hub keys or URLs with passwords) are masked before
            anything is written. Names of further keys mask these too; False masks nothing.
        clock: a callable that returns seconds, never going backwards.
        close_timeout_s: how long the end of the fit may wait for sinks, in seconds.
        models: exact costs in place of the parameter counts, by role: ``actor`` (generates,
            scores, learns), ``critic`` (scores, learns), and any others that score, such as
            ``initial`` and ``reward``. Each a ``CostModel``, or what ``CostModel.traced`` takes:
            a Hugging Face config or a module. None for a model that there is not; one that learns
            is needed.
        dtype: the type that matrices are multiplied in, for the peak and the bytes: by default
            that of the actor's parameters or config, or else bfloat16. Under autocast, give that
            of autocast.
        peak_tflops: a device's dense peak in TFLOP/s, by default that of the data sheet, or
            measured where there is none; a figure above it is marked as impossible.
        peak_gb_per_s: its memory's bandwidth in GB/s (10⁹ bytes), likewise.
        data_parallel_size: how many replicas of the model the ranks form, where several ranks
            share one (tensor, pipeline, context or expert parallel): their samples count once. A
            number, or the ``ProcessGroup`` or ``DeviceMesh`` that a rank is data-parallel in.
        trainer_devices: how many devices train, where one process reports for all of them, as a
            driver does; by default each rank is one.
        rollout_devices: how many devices generate, where these are not those that train.
        timing: ``device`` times phases by events on the accelerator's current stream too, beside
            the host's clock: ``perf/device/…``. What the host waits for is then apparent.

    Raises (here, and in ``on_fit_start`` for what only then can be known):
        TypeError, ValueError: an argument is not of the kind described above.
        UntraceableModelError: one of ``models`` cannot be counted exactly; says why.
        SinkError: a sink that does not exist, or whose package is not installed.
        OutputError: ``run_dir`` or ``save_path`` cannot be written (at fit start, on rank 0).
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the first eight are ColossalChat's
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        enable_grad_checkpoint: bool = False,  # noqa: FBT001, FBT002
        ignore_episodes: int = 0,
        train_config: Any = None,
        save_path: str | os.PathLike[str] | None = None,
        *,
        sinks: Iterable[str | Sink] = (),
        run_dir: str | os.PathLike[str] | None = None,
        redact: bool | Iterable[str] = True,
        clock: Clock = monotonic,
        close_timeout_s: float = 30.0,
        peak_tflops: float | None = None,
        peak_gb_per_s: float | None = None,
        models: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        data_parallel_size: Any = None,
        trainer_devices: int | None = None,
        rollout_devices: int | None = None,
        timing: Literal["host", "device"] = "host",
    ) -> None:
        num_params = ParamCount(
            count("actor_num_params", actor_num_params),
            count("critic_num_params", critic_num_params),
            count("initial_model_num_params", initial_model_num_params),
            count("reward_model_num_params", reward_model_num_params),
            bool(enable_grad_checkpoint),
        )
        given = models_by_role("models", models)
        dtype = dtype_or_none("dtype", dtype) or model_dtype(given.get("actor"))
        checkpointing = num_params.grad_checkpoint
        costs = ModelCosts(cost_models(given, dtype, gradient_checkpointing=checkpointing))
        settings = FitSettings(
            run_dir=path_or_none("run_dir", run_dir),
            save_path=path_or_none("save_path", save_path),
            sinks=parse_sinks(sinks),
            train_config=mapping("train_config", train_config),
            redact=keys_or_none("redact", redact),
            workload=num_params if models is None and num_params.any_model else costs,
            ignore_episodes=count("ignore_episodes", ignore_episodes),
            declared=Declared(
                dtype=dtype,
                peak_tflops=positive_or_none("peak_tflops", peak_tflops),
                bandwidth_gb_per_s=positive_or_none("peak_gb_per_s", peak_gb_per_s),
                data_parallel_size=size_or_none("data_parallel_size", data_parallel_size),
                trainer_devices=number_or_none("trainer_devices", trainer_devices),
                rollout_devices=number_or_none("rollout_devices", rollout_devices),
            ),
            close_timeout_s=positive("close_timeout_s", close_timeout_s),
        )
        clock = clock_function("clock", clock)
        super().__init__(settings, clock, on_device=timed_on_device(timing))

    def record(
        self,
        phase: str,
        *,
        seconds: float | None = None,
        samples: int | None = None,
        prompt_lengths: Sequence[int] | None = None,
        response_lengths: Sequence[int] | None = None,
    ) -> None:
        """Count in numbers that someone else measured, within an episode.

        Args:
            phase: its name; ``"episode"`` with ``seconds`` sets the episode's own duration, in
                place of the clock's.
            seconds: how long the phase took, in seconds.
            samples: how many samples went through it, by default as many as there are lengths.
                ``generate`` or ``make_experience`` (name each sample in one of them) and
                ``learn`` count samples.
            prompt_lengths: prompt tokens of each sample, padding excluded; for ``score`` too.
            response_lengths: response tokens of each sample, as many samples. The sequences of one
                call to ``generate`` count as one batch for the bytes.

        Never raises: a bad value is logged once and counted as a fault.
        """
        tally = self._tally_for("record")
        if tally is None:
            return
        try:
            now = self.clock()
            self._record(tally, phase, seconds, samples, prompt_lengths, response_lengths)
            tally.overhead_s += self.clock() - now
        except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
            self.fault("record", error)

    def record_step(self, episode: int, step: TimedStep) -> None:
        """Record an episode that someone else timed, from its start to its end.

        For the controllers of trainers whose models run elsewhere, as under Ray, after each step.
        Counts are those of the step's own roles and not of all ``models``. Never raises; what is
        wrong with the step is logged once and counted as a fault of the episode.
        """
        with self.episode(episode):
            if self._ignoring:
                return
            try:
                if step.prompts is None:
                    self.fault("record_step without lengths: tokens and FLOP are left out")
                else:
                    workload = self._settings.workload
                    models = workload.models if isinstance(workload, ModelCosts) else {}
                    self.defer(functools.partial(step.amounts, models), *step.lengths())
                seconds = {name: s for name, s in step.seconds.items() if name != "episode" and s}
            except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
                self.fault("record_step", error)
                return
            self.record("episode", seconds=step.wall_s)
            for phase, taken in seconds.items():
                self.record(phase, seconds=taken)

    def record_outputs(
        self, outputs: Any, *, seconds: float | Literal["engine"] | None = None
    ) -> None:
        """Count in what an inference engine generated, within an episode, in place of ``record``.

        Prompt tokens that its prefix cache had are not counted as work. Never raises; what is not
        understood is logged once and counted as a fault.

        Args:
            outputs: the finished outputs of vLLM's ``LLM.generate`` or SGLang's
                ``Engine.generate``; see ``read_outputs``.
            seconds: how long it took; ``"engine"`` takes the time from the outputs, where they
                have one. By default none: put the call into ``phase("generate")``.
        """
        tally = self._tally_for("record_outputs")
        if tally is None:
            return
        try:
            now = self.clock()
            read = read_outputs(outputs)
            self._count_outputs(tally, read)
            taken = read.seconds if seconds == "engine" else seconds
            if taken is not None:
                self._record(tally, "generate", taken, None, None, None)
            elif seconds == "engine":
                self.fault("the engine's outputs have no times")
            tally.overhead_s += self.clock() - now
        except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
            self.fault("record_outputs", error)

    def defer(self, amounts: Callable[..., Amounts], *lengths: torch.Tensor) -> None:
        """Count what a function makes of lengths, within an episode; for integrations.

        ``amounts(*lengths)`` is called on a background thread, with the lengths on the host: the
        device is not waited for here. It returns figures by their names in ``catalogue``. Never
        raises; what the function raises is a fault of the episode.
        """
        tally = self._tally_for("defer")
        if tally is not None:
            tally.batches.add_deferred(amounts, lengths)

    def _record(  # noqa: PLR0913, PLR0917 - as record()
        self,
        tally: Tally,
        phase: str,
        seconds: float | None,
        samples: int | None,
        prompt_lengths: Sequence[int] | None,
        response_lengths: Sequence[int] | None,
    ) -> None:
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            message = f"seconds is {seconds!r}; expected a finite number of at least 0"
            raise ValueError(message)
        prompts, responses = lengths_of_samples(prompt_lengths, response_lengths, samples)
        number = len(prompts) if samples is None else samples
        if number and phase not in COUNTED_PHASES:
            message = f"phase {phase!r} counts no samples; {', '.join(COUNTED_PHASES)} do"
            raise ValueError(message)
        if number and not prompts:
            self._count_without_lengths(phase)
        tally.add(recorded_amounts(self._settings.workload, phase, prompts, responses, number))
        if phase == "episode":
            tally.episode_s = seconds
        elif seconds is not None:
            tally.add_seconds(self._phases[phase].name, float(seconds))

    def _count_outputs(self, tally: Tally, read: EngineOutputs) -> None:
        workload = self._settings.workload
        tally.add({catalogue.PREEMPTED: read.preempted})
        if not isinstance(workload, ModelCosts):  # its convention knows no prefix cache
            self._record(tally, "generate", None, None, read.prompts, read.responses)
            return
        prompts, responses = torch.tensor(read.prompts), torch.tensor(read.responses)
        cached = None if read.cached is None else torch.tensor(read.cached)
        actor = workload.models.get("actor")
        amounts = functools.partial(generated_amounts, actor, cached=cached)
        tally.batches.add_deferred(amounts, (prompts, responses))

    def _count_without_lengths(self, phase: str) -> None:
        if self._settings.workload.convention != NO_MODELS:
            self.fault(
                f"record({phase!r}, samples=…) without lengths: their tokens and FLOP are left out"
            )
