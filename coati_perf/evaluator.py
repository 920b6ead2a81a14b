"""The evaluator: what the trainer's hooks measure, on every rank."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

from coati_perf import catalogue
from coati_perf.callback import Callback
from coati_perf.clock import Clock, monotonic
from coati_perf.cost import CostModel, ParamCount
from coati_perf.exchange import Exchange, choose_exchange
from coati_perf.record import EpisodeRecord
from coati_perf.recorder import describe_error
from coati_perf.row import Departure, encode
from coati_perf.run import Run, check_save_path
from coati_perf.sinks import Sink, SinkSource, parse_sinks
from coati_perf.sinks.text import TextReportSink
from coati_perf.tally import Tally, experience_amounts, recorded_amounts

_logger = logging.getLogger(__name__)

MAKE_EXPERIENCE = "make_experience"
LEARN = "learn"
# A trainer that makes up phase names without end must not eat memory.
_MAX_PHASES = 128


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
        enable_grad_checkpoint: whether learning recomputes activations.
        ignore_episodes: how many first episodes to leave out, as warm-up.
        train_config: any mapping; it goes with the results as run metadata.
        save_path: file that a text report is appended to when the fit ends; folders are made.
        sinks: where the records of each episode go besides the journal: names
            (``"tensorboard"``), ``"name:argument"``, or ``Sink`` objects. Used on rank 0 only.
        run_dir: folder of the journal and of the sinks' files, by default
            ``coati_perf_runs/<time>-<short id>``. An existing one gets another segment.
        clock: a callable that returns seconds, never going backwards.
        close_timeout_s: how long the end of the fit may wait for sinks, in seconds.
        peak_tflops: a device's dense peak in TFLOP/s for the dtype in use; a figure above it is
            marked as impossible.
        cost_model: computes FLOP in place of the parameter counts.

    Raises (here, and in ``on_fit_start`` for what only then can be known):
        TypeError, ValueError: an argument is not of the kind described above.
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
        train_config: Mapping[Any, Any] | None = None,
        save_path: str | os.PathLike[str] | None = None,
        *,
        sinks: Iterable[str | Sink] = (),
        run_dir: str | os.PathLike[str] | None = None,
        clock: Clock = monotonic,
        close_timeout_s: float = 30.0,
        peak_tflops: float | None = None,
        cost_model: CostModel | None = None,
    ) -> None:
        num_params = ParamCount(
            _count("actor_num_params", actor_num_params),
            _count("critic_num_params", critic_num_params),
            _count("initial_model_num_params", initial_model_num_params),
            _count("reward_model_num_params", reward_model_num_params),
            bool(enable_grad_checkpoint),
        )
        if train_config is not None and not isinstance(train_config, Mapping):
            message = (
                f"train_config is a {type(train_config).__name__}; expected a mapping such as a "
                "dict: for a dataclass pass dataclasses.asdict(it), for a Namespace vars(it)"
            )
            raise TypeError(message)
        if not callable(clock):
            message = f"clock is {clock!r}; expected a callable that returns seconds"
            raise TypeError(message)
        self._cost_model = num_params if cost_model is None else cost_model
        self._ignore_episodes = _count("ignore_episodes", ignore_episodes)
        self._train_config = {} if train_config is None else train_config
        self._run_dir = _path("run_dir", run_dir)
        self._save_path = _path("save_path", save_path)
        self._close_timeout_s = _positive("close_timeout_s", close_timeout_s)
        self._peak_tflops = None if peak_tflops is None else _positive("peak_tflops", peak_tflops)
        self._sinks = parse_sinks(sinks)
        if self._save_path is not None:
            text_sink = TextReportSink(self._save_path)
            self._sinks += (SinkSource("text", lambda: text_sink),)

        self._clock = clock
        self._phases = _Phases(self)
        self._warned: set[str] = set()
        # The tally of the episode being measured; None outside one and in an ignored one.
        self._tally: Tally | None = None
        self._spare_tally = Tally(self._cost_model)
        self._ignoring = False
        self._fitting = False
        self._exchange: Exchange | None = None
        self._run: Run | None = None
        self._rows_sent = 0
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
        self._error_before_fit = _current_error_id()
        self._rows_sent = 0
        self._pending_overhead_s = 0.0
        self._exchange = choose_exchange()
        if self._exchange.rank == 0:
            if self._save_path is not None:
                check_save_path(self._save_path)
            self._run = Run(
                run_dir=self._run_dir,
                exchange=self._exchange,
                sinks=self._sinks,
                train_config=self._train_config,
                cost_model=self._cost_model,
                ignore_episodes=self._ignore_episodes,
                peak_tflops=self._peak_tflops,
                close_timeout_s=self._close_timeout_s,
            )
        self._fitting = True

    def on_fit_end(self) -> None:
        """End the fit: write what is left, within ``close_timeout_s``. Idempotent."""
        self.close()

    def on_episode_start(self, episode: int) -> None:
        """Begin an episode; the first one begins the fit where ``on_fit_start`` was not called."""
        if not self._fitting:
            self.on_fit_start()
        try:
            if self._tally is not None:
                self._fault("an episode began before the last one ended")
                self._end_episode(self._clock(), None)
            self._ignoring = episode < self._ignore_episodes
            if self._ignoring:
                return
            tally = self._spare_tally
            self._error_before_episode = _current_error_id()
            tally.start(episode, self._clock())
            tally.overhead_s = self._pending_overhead_s
            self._tally = tally
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_episode_start", error)

    def on_episode_end(self, episode: int) -> None:
        """End the episode and hand its row over, or say that an exception ended it."""
        if self._tally is None:
            if not self._ignoring:
                self._fault("on_episode_end outside an episode")
            self._ignoring = False
            return
        now = self._clock()
        try:
            self._end_episode(now, _error_since(self._error_before_episode))
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_episode_end", error)
        self._pending_overhead_s = self._clock() - now

    def on_make_experience_start(self) -> None:
        """Begin a collect step."""
        tally = self._tally
        if tally is None:
            return self._outside("on_make_experience_start")
        entered = self._clock()
        try:
            node = tally.open
            if node.name is MAKE_EXPERIENCE:
                self._fault("on_make_experience_start before the last one's end")
                node = tally.open = node.parent
            tally.open = node = node.children[MAKE_EXPERIENCE]
            node.started = now = self._clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_make_experience_start", error)
        return None

    def on_make_experience_end(self, experience: Any) -> None:
        """End a collect step and count what it made."""
        tally = self._tally
        if tally is None:
            return self._outside("on_make_experience_end")
        now = self._clock()
        try:
            node = tally.open
            if node.name is MAKE_EXPERIENCE:
                tally.open = node.parent
                node.seconds += now - node.started
            elif not tally.leave(MAKE_EXPERIENCE, now):
                self._fault("on_make_experience_end without its start")
            mask = experience.action_mask
            if mask is None:
                self._count_without_mask(tally, experience)
            else:
                tally.experiences[experience.sequences.shape, mask.shape].calls += 1
            tally.overhead_s += self._clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_make_experience_end", error)
        return None

    def on_learn_batch_start(self) -> None:
        """Begin learning from a batch."""
        tally = self._tally
        if tally is None:
            return self._outside("on_learn_batch_start")
        entered = self._clock()
        try:
            node = tally.open
            if node.name is LEARN:
                self._fault("on_learn_batch_start before the last one's end")
                node = tally.open = node.parent
            tally.open = node = node.children[LEARN]
            node.started = now = self._clock()
            tally.overhead_s += now - entered
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_learn_batch_start", error)
        return None

    def on_learn_batch_end(self, experience: Any) -> None:
        """End learning from a batch and count it."""
        tally = self._tally
        if tally is None:
            return self._outside("on_learn_batch_end")
        now = self._clock()
        try:
            node = tally.open
            if node.name is LEARN:
                tally.open = node.parent
                node.seconds += now - node.started
            elif not tally.leave(LEARN, now):
                self._fault("on_learn_batch_end without its start")
            tally.learned[experience.sequences.shape].calls += 1
            tally.overhead_s += self._clock() - now
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_learn_batch_end", error)
        return None

    # For loops without hooks.

    def phase(self, name: str) -> Phase:
        """Return a context manager that times the phase ``name`` within the episode.

        ``generate``, ``score`` and ``weight_sync`` are known to the catalogue; any other name of
        letters, digits, ``_``, ``-`` and ``.`` becomes ``perf/time/<name>_s``. Phases nest; one
        inside another of its name counts once. The object may be kept and entered again.
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
                ``learn`` count samples; other phases do not.
            prompt_lengths: prompt tokens of each sample, padding excluded.
            response_lengths: response tokens of each sample, as many samples.

        Never raises: a bad value is logged once and counted as a fault.
        """
        tally = self._tally
        if tally is None:
            return self._outside("record")
        now = self._clock()
        try:
            self._record(tally, phase, seconds, samples, prompt_lengths, response_lengths)
        except Exception as error:  # noqa: BLE001 - a driver's numbers must not stop it
            self._fault("record", error)
        tally.overhead_s += self._clock() - now
        return None

    def close(self) -> None:
        """End the fit: ``on_fit_end`` calls it, a plain loop when it is done. Idempotent."""
        if not self._fitting:
            return
        self._fitting = False
        try:
            error = _error_since(self._error_before_fit)
            if self._tally is not None:
                if error is None:
                    self._fault("the fit ended before its last episode did")
                self._end_episode(self._clock(), error)
            self._say_goodbye(error)
        except Exception as error:  # noqa: BLE001 - hooks never raise
            self._fault("on_fit_end", error)
        self._exchange = None

    @property
    def run_dir(self) -> Path | None:
        """The folder of the current or last fit's files, on rank 0; None elsewhere."""
        return None if self._run is None else self._run.run_dir

    @property
    def latest_record(self) -> EpisodeRecord | None:
        """The last episode's record, once the background thread has it, on rank 0."""
        return None if self._run is None else self._run.recorder.latest

    # Inside.

    def _end_episode(self, now: float, error: BaseException | None) -> None:
        tally, self._tally = self._tally, None
        exchange = self._exchange
        assert tally is not None
        assert exchange is not None
        if error is not None:
            departure = Departure(
                exchange.rank, self._rows_sent, tally.episode, describe_error(error)
            )
            if self._run is not None:
                self._run.recorder.put(departure)
            else:
                exchange.depart(encode(departure), failed=True)
            return
        if tally.open is not tally.root:
            self._fault("a phase was still open when its episode ended", tally=tally)
            tally.leave_all(now)
        row = tally.row(exchange.rank, self._rows_sent, now)
        self._rows_sent += 1
        if self._run is not None:
            self._run.recorder.put(row)
        else:
            exchange.send(row.sequence, encode(row))

    def _say_goodbye(self, error: BaseException | None) -> None:
        text = None if error is None else describe_error(error)
        if self._run is not None:
            if text is not None:
                self._run.recorder.put(Departure(0, self._rows_sent, None, text))
            self._run.close(text)
        elif self._exchange is not None:
            departure = Departure(self._exchange.rank, self._rows_sent, None, text)
            self._exchange.depart(encode(departure), failed=text is not None)
            self._exchange.close()

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
        if phase == "episode":
            tally.episode_s = seconds
            return
        prompts = [operator.index(length) for length in _items(prompt_lengths)]
        responses = [operator.index(length) for length in _items(response_lengths)]
        amounts = recorded_amounts(self._cost_model, phase, prompts, responses)
        count = operator.index(len(prompts) if samples is None else samples)
        if count and phase in ("generate", MAKE_EXPERIENCE):
            amounts[catalogue.GENERATED] = count
        elif count and phase == LEARN:
            amounts[catalogue.LEARNED] = count
        tally.add(amounts)
        if seconds is not None:
            tally.add_seconds(self._phases[phase].name, float(seconds))

    def _count_without_mask(self, tally: Tally, experience: Any) -> None:
        self._fault("action_mask is None: the FLOP of generation are unknown and left out")
        batch, length = experience.sequences.shape
        tally.add(experience_amounts(batch, length))
        tally.add({catalogue.SCORE_FLOP: self._cost_model.score(batch, length)})

    def _outside(self, what: str) -> None:
        if not self._ignoring:
            self._fault(f"{what} outside an episode")

    def _fault(
        self, what: str, error: Exception | None = None, *, tally: Tally | None = None
    ) -> None:
        """Count what could not be measured, and log it the first time; never raises."""
        detail = what if error is None else f"{what}: {describe_error(error)}"
        tally = tally or self._tally
        if tally is not None:
            tally.faults[detail] = tally.faults.get(detail, 0) + 1
        if detail not in self._warned and len(self._warned) < _MAX_PHASES:
            self._warned.add(detail)
            _logger.warning("not measured as it came: %s; training goes on", detail)


class Phase:
    """Times one phase; see ``PerformanceEvaluator.phase``."""

    __slots__ = ("_evaluator", "name")

    def __init__(self, evaluator: PerformanceEvaluator, name: str) -> None:
        self._evaluator = evaluator
        self.name = name

    def __enter__(self) -> None:
        evaluator = self._evaluator
        tally = evaluator._tally
        if tally is None:
            return evaluator._outside(f"phase {self.name!r}")
        entered = evaluator._clock()
        node = tally.open.children[self.name]
        tally.open = node
        node.started = now = evaluator._clock()
        tally.overhead_s += now - entered
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        evaluator = self._evaluator
        tally = evaluator._tally
        if tally is None:
            return
        now = evaluator._clock()
        node = tally.open
        if node.name is self.name:
            tally.open = node.parent
            node.seconds += now - node.started
        elif not tally.leave(self.name, now):
            evaluator._fault(f"phase {self.name!r} ended out of order")
        tally.overhead_s += evaluator._clock() - now


class _Phases(dict[str, Phase]):
    """The phases of one evaluator by the name asked for; a new name makes its own."""

    def __init__(self, evaluator: PerformanceEvaluator) -> None:
        super().__init__()
        self._evaluator = evaluator

    def __missing__(self, asked: str) -> Phase:
        evaluator = self._evaluator
        if len(self) >= _MAX_PHASES:
            evaluator._fault(f"more than {_MAX_PHASES} phases; the rest are named 'more'")
            return Phase(evaluator, "more")
        name = sys.intern(str(asked))
        if not catalogue.is_phase_name(name):
            name = sys.intern(catalogue.to_phase_name(name))
            evaluator._fault(f"phase {str(asked)[:80]!r} is named {name!r}: letters, digits, _ - .")
        phase = self[asked] = Phase(evaluator, name)
        return phase


def _current_error_id() -> int:
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def _error_since(before: int) -> BaseException | None:
    """Return the exception being handled in the caller's frames, unless it is an earlier one."""
    error = sys.exc_info()[1]
    return None if error is None or id(error) == before else error


def _items(lengths: Sequence[int] | None) -> Sequence[int]:
    """Return lengths as Python integers, from a list, a NumPy array or a tensor."""
    if lengths is None:
        return ()
    to_list = getattr(lengths, "tolist", None)
    return lengths if to_list is None else to_list()


def _count(name: str, value: SupportsIndex) -> int:
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        message = f"{name} is {value!r} ({type(value).__name__}); expected an integer"
        raise TypeError(message)
    if count < 0:
        message = f"{name} is {count}; expected an integer of at least 0"
        raise ValueError(message)
    return count


def _positive(name: str, value: float) -> float:
    if isinstance(value, (int, float)) and 0 < value < math.inf:
        return float(value)
    message = f"{name} is {value!r}; expected a finite number above 0"
    raise ValueError(message)


def _path(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    if value is None:
        return None
    try:
        return Path(value)
    except TypeError:
        message = f"{name} is {value!r}; expected a path"
        raise TypeError(message) from None
