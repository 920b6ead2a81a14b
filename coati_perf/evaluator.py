"""The evaluator: what the trainer's hooks measure, on every rank."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
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
from coati_perf.batches import experience_counts, given_lengths, mask_lengths
from coati_perf.callback import Callback
from coati_perf.clock import Clock, monotonic
from coati_perf.cost import NO_MODELS, Amounts, ModelCosts, ParamCount
from coati_perf.device_memory import AcceleratorMemory, DeviceMemory
from coati_perf.device_timer import DeviceTimer, timed_on_device, timing_event
from coati_perf.engine_outputs import EngineOutputs, read_outputs
from coati_perf.errors import current_error_id, describe_error, error_since
from coati_perf.fit import Fit, FitSettings
from coati_perf.generated import generated_amounts
from coati_perf.phase import Phase, Phases
from coati_perf.probes import attach
from coati_perf.record import EpisodeRecord
from coati_perf.recorded import COUNTED_PHASES, lengths_of_samples, recorded_amounts
from coati_perf.sinks import Sink, parse_sinks
from coati_perf.survey import Declared
from coati_perf.tally import Tally
from coati_perf.timed_step import TimedStep

_logger = logging.getLogger(__name__)

MAKE_EXPERIENCE = "make_experience"
LEARN = "learn"
# A trainer that finds ever new ways to misuse a hook must not flood the log.
_MAX_WARNINGS = 128


class PerformanceEvaluator(Callback):
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
        self._settings = FitSettings(
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
        self._clock = clock_function("clock", clock)
        self._phases = Phases(self)
        self._warned: set[str] = set()
        # The tally of the episode being measured; None outside one and in an ignored one.
        self._tally: Tally | None = None
        self._spare_tally = Tally()
        self._ignoring = False
        self._timer = DeviceTimer(timing_event) if timed_on_device(timing) else None
        has_memory = torch.accelerator.current_accelerator() is not None
        self._memory = DeviceMemory(AcceleratorMemory()) if has_memory else None
        self._probes = [probe for probe in (self._timer, self._memory) if probe is not None]
        if self._probes:
            attach(self, self._probes)
        # The current fit, None outside one; and the last one, for its results.
        self._fit: Fit | None = None
        self._last_fit: Fit | None = None
        self._pending_overhead_s = 0.0
        # The exceptions that were being handled when the fit and the episode began, by id: a
        # trainer may be run inside an ``except`` block, and those are not its failures.
        self._error_before_fit = 0
        self._error_before_episode = 0

    # The hooks.

    def on_fit_start(self) -> None:
        """Begin a fit of its own: open the exchange and, on rank 0, journal and sinks.

        Raises what the class says. A fit that was never ended is closed first.
        """
        self.close()
        self._error_before_fit = current_error_id()
        self._pending_overhead_s = 0.0
        self._fit = self._last_fit = Fit(self._settings)

    def on_fit_end(self) -> None:
        """End the fit: write what is left, within ``close_timeout_s``. Idempotent."""
        self.close()

    def on_episode_start(self, episode: int) -> None:
        """Begin an episode; the first one begins the fit where ``on_fit_start`` was not called."""
        if self._fit is None:
            self.on_fit_start()
        try:
            if self._tally is not None and self._fit is not None:
                self._fault("an episode began before the last one ended")
                self._end_episode(self._fit, self._clock(), None)
            self._ignoring = episode < self._settings.ignore_episodes
            if self._ignoring:
                return
            entered = self._clock()
            tally = self._spare_tally
            self._error_before_episode = current_error_id()
            tally.start(int(episode))
            for probe in self._probes:
                probe.clear()
            tally.started = now = self._clock()
            tally.overhead_s = self._pending_overhead_s + now - entered
            self._tally = tally
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_episode_start", error)

    def on_episode_end(self, episode: int) -> None:
        """End the episode and hand its row over, or say that an exception ended it."""
        fit = self._fit
        if self._ignoring:
            self._ignoring = False
            return
        if self._tally is None or fit is None:
            self._fault("on_episode_end outside an episode")
            return
        try:
            now = self._clock()
            self._end_episode(fit, now, error_since(self._error_before_episode))
            self._pending_overhead_s = self._clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_episode_end", error)

    # The next four are spelled out, as a call to a shared method would add 50 ns to each; the clock
    # is read through a local name, which saves 10 ns a read.

    def on_make_experience_start(self) -> None:
        """Begin a collect step."""
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self._fault("on_make_experience_start outside an episode")
            return
        try:
            clock = self._clock
            entered = clock()
            node = tally.open
            if node.name is MAKE_EXPERIENCE and not node.marked:
                self._fault("on_make_experience_start before the last one's end")
                node = tally.open = node.parent
            tally.open = node = node.children[MAKE_EXPERIENCE]
            node.started = now = clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_make_experience_start", error)

    def on_make_experience_end(
        self, experience: Any, lengths: tuple[Any, Any] | None = None
    ) -> None:
        """End a collect step and count what it made.

        The real lengths come from ``experience``'s masks, or are given: the tokens of each prompt
        and of each response, (B,) each.
        """
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self._fault("on_make_experience_end outside an episode")
            return
        try:
            clock = self._clock
            now = clock()
            node = tally.open
            if node.name is MAKE_EXPERIENCE:
                tally.open = node.parent
                node.seconds += now - node.started
            elif not tally.leave(MAKE_EXPERIENCE, now):
                self._fault("on_make_experience_end without its start")
            mask = experience.action_mask
            if mask is None:
                self._count_without_mask(tally, experience)
            elif lengths is None and getattr(experience, "attention_mask", None) is None:
                tally.batches.experiences[experience.sequences.shape, mask.shape].calls += 1
            else:
                _count_made(tally, experience, lengths)
            tally.overhead_s += clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_make_experience_end", error)

    def on_learn_batch_start(self) -> None:
        """Begin learning from a batch."""
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self._fault("on_learn_batch_start outside an episode")
            return
        try:
            clock = self._clock
            entered = clock()
            node = tally.open
            if node.name is LEARN and not node.marked:
                self._fault("on_learn_batch_start before the last one's end")
                node = tally.open = node.parent
            tally.open = node = node.children[LEARN]
            node.started = now = clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_learn_batch_start", error)

    def on_learn_batch_end(self, experience: Any, lengths: Any = None) -> None:
        """End learning from a batch and count it.

        The real lengths come from its ``attention_mask``, or are given: tokens of each sample,
        (B,).
        """
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self._fault("on_learn_batch_end outside an episode")
            return
        try:
            clock = self._clock
            now = clock()
            node = tally.open
            if node.name is LEARN:
                tally.open = node.parent
                node.seconds += now - node.started
            elif not tally.leave(LEARN, now):
                self._fault("on_learn_batch_end without its start")
            shape = experience.sequences.shape
            if lengths is not None or getattr(experience, "attention_mask", None) is not None:
                _count_learned(tally, experience, lengths)
            else:
                if shape != tally.learn_shape:  # comparing takes 27 ns, looking up 46 ns
                    tally.learn_count = tally.batches.learned[shape]
                    tally.learn_shape = shape
                tally.learn_count.calls += 1
            tally.overhead_s += clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_learn_batch_end", error)

    # For loops without hooks.

    def phase(self, name: str) -> Phase:
        """Return what times the phase ``name`` within the episode: ``with`` it, or decorate by it.

        ``generate``, ``score`` and ``weight_sync`` are known to the catalogue; any other name of
        letters, digits, ``_``, ``-`` and ``.`` becomes ``perf/time/<name>_s``, but for
        ``episode``, ``other`` and ``overlap``, which are taken. Another name is made one of these,
        with a warning. Phases nest; one inside another of its name counts once. The object may be
        kept and entered again.
        """
        try:
            return self._phases[name]
        except Exception as error:  # noqa: BLE001 - such as an unhashable name
            self._fault("phase", error)
            return self._phases["unnamed"]

    @contextlib.contextmanager
    def episode(self, episode: int) -> Iterator[None]:
        """Measure one episode of a plain loop, in place of the two episode hooks."""
        self.on_episode_start(episode)
        try:
            yield
        finally:
            self.on_episode_end(episode)

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
            now = self._clock()
            self._record(tally, phase, seconds, samples, prompt_lengths, response_lengths)
            tally.overhead_s += self._clock() - now
        except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
            self._fault("record", error)

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
                    self._fault("record_step without lengths: tokens and FLOP are left out")
                else:
                    workload = self._settings.workload
                    models = workload.models if isinstance(workload, ModelCosts) else {}
                    self.defer(functools.partial(step.amounts, models), *step.lengths())
                seconds = {name: s for name, s in step.seconds.items() if name != "episode" and s}
            except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
                self._fault("record_step", error)
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
            now = self._clock()
            read = read_outputs(outputs)
            self._count_outputs(tally, read)
            taken = read.seconds if seconds == "engine" else seconds
            if taken is not None:
                self._record(tally, "generate", taken, None, None, None)
            elif seconds == "engine":
                self._fault("the engine's outputs have no times")
            tally.overhead_s += self._clock() - now
        except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
            self._fault("record_outputs", error)

    def defer(self, amounts: Callable[..., Amounts], *lengths: torch.Tensor) -> None:
        """Count what a function makes of lengths, within an episode; for integrations.

        ``amounts(*lengths)`` is called on a background thread, with the lengths on the host: the
        device is not waited for here. It returns figures by their names in ``catalogue``. Never
        raises; what the function raises is a fault of the episode.
        """
        tally = self._tally_for("defer")
        if tally is not None:
            tally.batches.add_deferred(amounts, lengths)

    def close(self) -> None:
        """End the fit: ``on_fit_end`` calls it, a plain loop when it is done. Idempotent."""
        fit, self._fit = self._fit, None
        if fit is None:
            return
        try:
            error = error_since(self._error_before_fit)
            if self._tally is not None:
                if error is None:
                    self._fault("the fit ended before its last episode did")
                self._end_episode(fit, self._clock(), error)
            fit.close(error)
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_fit_end", error)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the current or last fit's files, on rank 0; None elsewhere."""
        return None if self._last_fit is None else self._last_fit.run_dir

    @property
    def latest_record(self) -> EpisodeRecord | None:
        """The last episode's record, once the background thread has it, on rank 0."""
        return None if self._last_fit is None else self._last_fit.latest_record

    # Inside.

    def _tally_for(self, what: str) -> Tally | None:
        """Return the episode's tally; None in an ignored one, and outside, which is a fault."""
        if self._tally is None and not self._ignoring:
            self._fault(f"{what} outside an episode")
        return self._tally

    def _drop_episode(self) -> None:
        """Forget the episode that has begun, of an integration that begins each too early."""
        self._tally = None

    def _end_episode(self, fit: Fit, now: float, error: BaseException | None) -> None:
        tally, self._tally = self._tally, None
        assert tally is not None
        if error is not None:
            fit.report_failure(tally.episode, error)
            return
        if tally.open is not tally.root:
            self._fault("a phase was still open when its episode ended", tally=tally)
            tally.leave_all(now)
        if self._memory is not None:
            tally.add(self._memory.take())
        fit.hand_over(tally, now, [] if self._timer is None else self._timer.take())

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
            self._fault(
                f"record({phase!r}, samples=…) without lengths: their tokens and FLOP are left out"
            )

    def _count_without_mask(self, tally: Tally, experience: Any) -> None:
        self._fault("action_mask is None: the FLOP of generation are unknown and left out")
        batch, length = experience.sequences.shape
        tally.add(experience_counts(batch, length))
        tally.add(self._settings.workload.padded_scoring(batch, length))

    def _measure_alone(self) -> None:
        """Leave the job's other ranks out of the next fit: they have no evaluator."""
        self._settings = msgspec.structs.replace(self._settings, alone=True)

    def _declare_devices(self, trainer: int | None, rollout: int | None = None) -> None:
        """Take what an integration found out, where the user said nothing, for the next fit."""
        declared = self._settings.declared
        if declared.trainer_devices is None and declared.rollout_devices is None:
            found = msgspec.structs.replace(
                declared, trainer_devices=trainer, rollout_devices=rollout
            )
            self._settings = msgspec.structs.replace(self._settings, declared=found)

    def _fault(
        self, what: str, error: Exception | None = None, *, tally: Tally | None = None
    ) -> None:
        """Count what could not be measured, and log it the first time; never raises."""
        detail = what if error is None else f"{what}: {describe_error(error)}"
        tally = tally or self._tally
        if tally is not None:
            tally.faults[detail] = tally.faults.get(detail, 0) + 1
        self._warn_once(f"not measured as it came: {detail}; training goes on")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(message)
            _logger.warning("%s", message)


def _count_made(tally: Tally, experience: Any, lengths: tuple[Any, Any] | None) -> None:
    """Count a batch of experience whose real lengths are known."""
    shape, actions = experience.sequences.shape, experience.action_mask
    if lengths is not None:
        prompts = given_lengths("lengths[0]", lengths[0], shape[0])
        responses = given_lengths("lengths[1]", lengths[1], shape[0])
    else:
        # Of the prompt's part alone: in a response, a mask that is made by comparing with the
        # padding misses an end of sequence that is the same token.
        end = shape[-1] - actions.shape[-1]
        prompts = mask_lengths("attention_mask", experience.attention_mask, shape, end)
        responses = actions.sum(-1)
    tally.batches.add_made(shape, actions.shape, prompts, responses)


def _count_learned(tally: Tally, experience: Any, lengths: Any) -> None:
    """Count a batch learned from whose real lengths are known."""
    shape = experience.sequences.shape
    if lengths is not None:
        total = given_lengths("lengths", lengths, shape[0])
    else:
        total = mask_lengths("attention_mask", experience.attention_mask, shape)
    tally.batches.add_learned(shape, total)
