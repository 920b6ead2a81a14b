"""The hooks: all that runs on the training thread, on every rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from coati_perf.batches import experience_counts, given_lengths, mask_lengths
from coati_perf.callback import Callback
from coati_perf.clock import Clock
from coati_perf.device_memory import AcceleratorMemory, DeviceMemory
from coati_perf.device_timer import DeviceTimer, timing_event
from coati_perf.errors import current_error_id, describe_error, error_since
from coati_perf.fit import Fit, FitSettings
from coati_perf.phase import Phase, Phases
from coati_perf.probes import attach
from coati_perf.record import EpisodeRecord
from coati_perf.tally import Tally

_logger = logging.getLogger(__name__)

MAKE_EXPERIENCE = "make_experience"
LEARN = "learn"
# A trainer that finds ever new ways to misuse a hook must not flood the log.
_MAX_WARNINGS = 128


class Hooks(Callback):
    """Measures fits, episodes and phases: the half of ``PerformanceEvaluator`` that is called.

    Nothing here raises once a fit has begun, waits for another rank or thread, or issues a
    collective.
    """

    def __init__(self, settings: FitSettings, clock: Clock, *, on_device: bool) -> None:
        self.clock = clock
        self._settings = settings
        self._phases = Phases(self)
        self._warned: set[str] = set()
        # The tally of the episode being measured; None outside one and in an ignored one.
        self._tally: Tally | None = None
        self._spare_tally = Tally()
        self._ignoring = False
        self._timer = DeviceTimer(timing_event) if on_device else None
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
                self.fault("an episode began before the last one ended")
                self._end_episode(self._fit, self.clock(), None)
            self._ignoring = episode < self._settings.ignore_episodes
            if self._ignoring:
                return
            entered = self.clock()
            tally = self._spare_tally
            self._error_before_episode = current_error_id()
            tally.start(int(episode))
            for probe in self._probes:
                probe.clear()
            tally.started = now = self.clock()
            tally.overhead_s = self._pending_overhead_s + now - entered
            self._tally = tally
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self.fault("on_episode_start", error)

    def on_episode_end(self, episode: int) -> None:
        """End the episode and hand its row over, or say that an exception ended it."""
        fit = self._fit
        if self._ignoring:
            self._ignoring = False
            return
        if self._tally is None or fit is None:
            self.fault("on_episode_end outside an episode")
            return
        try:
            now = self.clock()
            self._end_episode(fit, now, error_since(self._error_before_episode))
            self._pending_overhead_s = self.clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self.fault("on_episode_end", error)

    # The next four are spelled out, as a call to a shared method would add 50 ns to each; the clock
    # is read through a local name, which saves 10 ns a read.

    def on_make_experience_start(self) -> None:
        """Begin a collect step."""
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self.fault("on_make_experience_start outside an episode")
            return
        try:
            clock = self.clock
            entered = clock()
            node = tally.open
            if node.name is MAKE_EXPERIENCE and not node.marked:
                self.fault("on_make_experience_start before the last one's end")
                node = tally.open = node.parent
            tally.open = node = node.children[MAKE_EXPERIENCE]
            node.started = now = clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self.fault("on_make_experience_start", error)

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
            self.fault("on_make_experience_end outside an episode")
            return
        try:
            clock = self.clock
            now = clock()
            node = tally.open
            if node.name is MAKE_EXPERIENCE:
                tally.open = node.parent
                node.seconds += now - node.started
            elif not tally.leave(MAKE_EXPERIENCE, now):
                self.fault("on_make_experience_end without its start")
            mask = experience.action_mask
            if mask is None:
                self._count_without_mask(tally, experience)
            elif lengths is None and getattr(experience, "attention_mask", None) is None:
                tally.batches.experiences[experience.sequences.shape, mask.shape].calls += 1
            else:
                _count_made(tally, experience, lengths)
            tally.overhead_s += clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self.fault("on_make_experience_end", error)

    def on_learn_batch_start(self) -> None:
        """Begin learning from a batch."""
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self.fault("on_learn_batch_start outside an episode")
            return
        try:
            clock = self.clock
            entered = clock()
            node = tally.open
            if node.name is LEARN and not node.marked:
                self.fault("on_learn_batch_start before the last one's end")
                node = tally.open = node.parent
            tally.open = node = node.children[LEARN]
            node.started = now = clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self.fault("on_learn_batch_start", error)

    def on_learn_batch_end(self, experience: Any, lengths: Any = None) -> None:
        """End learning from a batch and count it.

        The real lengths come from its ``attention_mask``, or are given: tokens of each sample,
        (B,).
        """
        if self._ignoring:
            return
        tally = self._tally
        if tally is None:
            self.fault("on_learn_batch_end outside an episode")
            return
        try:
            clock = self.clock
            now = clock()
            node = tally.open
            if node.name is LEARN:
                tally.open = node.parent
                node.seconds += now - node.started
            elif not tally.leave(LEARN, now):
                self.fault("on_learn_batch_end without its start")
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
            self.fault("on_learn_batch_end", error)

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
            self.fault("phase", error)
            return self._phases["unnamed"]

    @contextlib.contextmanager
    def episode(self, episode: int) -> Iterator[None]:
        """Measure one episode of a plain loop, in place of the two episode hooks."""
        self.on_episode_start(episode)
        try:
            yield
        finally:
            self.on_episode_end(episode)

    def close(self) -> None:
        """End the fit: ``on_fit_end`` calls it, a plain loop when it is done. Idempotent."""
        fit, self._fit = self._fit, None
        if fit is None:
            return
        try:
            error = error_since(self._error_before_fit)
            if self._tally is not None:
                if error is None:
                    self.fault("the fit ended before its last episode did")
                self._end_episode(fit, self.clock(), error)
            fit.close(error)
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self.fault("on_fit_end", error)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the current or last fit's files, on rank 0; None elsewhere."""
        return None if self._last_fit is None else self._last_fit.run_dir

    @property
    def latest_record(self) -> EpisodeRecord | None:
        """The last episode's record, once the background thread has it, on rank 0."""
        return None if self._last_fit is None else self._last_fit.latest_record

    # For integrations.

    @property
    def in_episode(self) -> bool:
        """Whether an episode is being measured."""
        return self._tally is not None

    def drop_episode(self) -> None:
        """Forget the episode that has begun, where each has to be begun too early."""
        self._tally = None

    def measure_alone(self) -> None:
        """Leave the job's other ranks out of the next fit: they have no evaluator."""
        self._settings = msgspec.structs.replace(self._settings, alone=True)

    def declare_devices(self, trainer: int | None, rollout: int | None = None) -> None:
        """Say which devices train and generate, where the user has not, for the next fit."""
        declared = self._settings.declared
        if declared.trainer_devices is None and declared.rollout_devices is None:
            found = msgspec.structs.replace(
                declared, trainer_devices=trainer, rollout_devices=rollout
            )
            self._settings = msgspec.structs.replace(self._settings, declared=found)

    def fault(
        self, what: str, error: Exception | None = None, *, tally: Tally | None = None
    ) -> None:
        """Count what could not be measured, and log it the first time; never raises."""
        detail = what if error is None else f"{what}: {describe_error(error)}"
        tally = tally or self._tally
        if tally is not None:
            tally.faults[detail] = tally.faults.get(detail, 0) + 1
        self.warn_once(f"not measured as it came: {detail}; training goes on")

    def warn_once(self, message: str) -> None:
        """Log a warning, the first time that it is given."""
        if message not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(message)
            _logger.warning("%s", message)

    # Inside.

    def _tally_for(self, what: str) -> Tally | None:
        """Return the episode's tally; None in an ignored one, and outside, which is a fault."""
        if self._tally is None and not self._ignoring:
            self.fault(f"{what} outside an episode")
        return self._tally

    def _end_episode(self, fit: Fit, now: float, error: BaseException | None) -> None:
        tally, self._tally = self._tally, None
        assert tally is not None
        if error is not None:
            fit.report_failure(tally.episode, error)
            return
        if tally.open is not tally.root:
            self.fault("a phase was still open when its episode ended", tally=tally)
            tally.leave_all(now)
        if self._memory is not None:
            tally.add(self._memory.take())
        fit.hand_over(tally, now, [] if self._timer is None else self._timer.take())

    def _count_without_mask(self, tally: Tally, experience: Any) -> None:
        self.fault("action_mask is None: the FLOP of generation are unknown and left out")
        batch, length = experience.sequences.shape
        tally.add(experience_counts(batch, length))
        tally.add(self._settings.workload.padded_scoring(batch, length))


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
