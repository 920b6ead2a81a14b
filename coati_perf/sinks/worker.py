"""The thread that feeds one sink from the journal, and what is done when the sink fails."""

from __future__ import annotations

import collections
import logging
import shlex
import threading
import time
from pathlib import Path

from coati_perf.feed import Feed
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.delivery import AbandonedError, Delivery
from coati_perf.sinks.registry import SinkSource

_logger = logging.getLogger(__name__)

# A sink that fails is tried again after pauses that double from the one to the other; at the end
# of the run, after these alone.
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_LAST_PAUSES_S = (0.2, 1.0)
# A call that takes longer is given up, with its thread, for another sink of the same name: wandb
# itself gives up an unreachable server after 100 s.
CALL_LIMIT_S = 120.0
# So many threads may be stuck in one sink's calls.
_MAX_STUCK = 3


class SinkWorker:
    """Delivers the journal to a sink on a thread of its own, behind a cursor that outlives it.

    However far the sink falls behind, nothing is skipped and nothing is kept in memory. ``feed``
    is that of the run that is being written, None where there is none.
    """

    def __init__(
        self, source: SinkSource, journal: Path, cursor: Cursor, feed: Feed | None = None
    ) -> None:
        self.label = source.label
        self.errors = 0
        self.retries = 0
        self.last_error: str | None = None
        self._source = source
        self._journal = journal
        self._cursor = cursor
        self._feed = feed
        self._delivered: collections.Counter[str] = collections.Counter()
        self._stuck = 0
        self._cut_off = False
        self._wake = threading.Event()
        self._finishing = threading.Event()
        self._tried = threading.Event()
        self._start()

    @property
    def offset(self) -> int:
        """Up to which byte of the journal the sink has what is in it."""
        return self._delivery.offset

    def delivered(self, run_id: str | None = None) -> int:
        """Return how many episodes of a run, or of all, the sink took in."""
        both = self._delivered + self._delivery.delivered
        return both.total() if run_id is None else both[run_id]

    @property
    def how_to_replay(self) -> str:
        """The command that delivers later what the sink did not get."""
        if self._source.named:
            return f"coati-perf replay {self._journal.parent} --to {shlex.quote(self.label)}"
        return f"all are in {self._journal}, for a sink that has a name"

    def health(self, run_id: str, recorded: int) -> dict[str, int]:
        """Return what ``catalogue.SINK_HEALTH`` names, when so many episodes are recorded."""
        lost = 0 if self._feed is None or self.last_error is None else self._feed.lost
        return {
            "lag_episodes": max(recorded - self.delivered(run_id), 0),
            "errors": self.errors,
            "retries": self.retries,
            "dropped": lost,
        }

    def wake(self) -> None:
        """Say that the journal has grown, and give up a call that takes too long."""
        self._wake.set()
        called_at = self._delivery.called_at
        if called_at is not None and time.monotonic() - called_at > CALL_LIMIT_S:
            self._give_up_call()

    def wait_until_tried(self, timeout: float) -> None:
        """Wait until the sink has been opened, or has failed."""
        self._tried.wait(timeout)

    def finish(self, *, cut_off: bool = False) -> None:
        """Say that the journal will not grow any more: the last tries, then the thread ends.

        ``cut_off`` says that its last run may have no summary, as its process is dead.
        """
        self._cut_off = cut_off
        self._finishing.set()
        self._wake.set()

    @property
    def ended(self) -> bool:
        """Whether nothing more will be tried."""
        return not self._thread.is_alive()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; say whether everything was delivered by then."""
        self._thread.join(timeout)
        return self.ended and self.last_error is None

    def abandon(self) -> None:
        """Give up what the sink still does, at the run's end, where it has a way to."""
        abandon = getattr(self._delivery.sink, "abandon", None)
        if abandon is not None:
            try:
                abandon()
            except Exception as error:  # noqa: BLE001 - a sink may raise anything
                self._note(error)

    def _start(self) -> None:
        self._delivery = Delivery(self._source.make(), self._journal, self._cursor, self._feed)
        # Never joined at the interpreter's exit: a sink may be stuck in someone's C code.
        self._thread = threading.Thread(
            target=self._run,
            args=(self._delivery,),
            name=f"coati_perf-sink-{self.label}",
            daemon=True,
        )
        self._thread.start()

    def _give_up_call(self) -> None:
        if self._delivery.abandoned or not self._source.named or self._stuck >= _MAX_STUCK:
            return  # a sink object can't be made anew: the thread stays with it
        self._stuck += 1
        self._delivery.abandoned = True
        self._delivered += self._delivery.delivered
        self._note(TimeoutError(f"a call took more than {CALL_LIMIT_S:g} s"))
        self._start()

    def _run(self, delivery: Delivery) -> None:
        pause = 0.0
        while not delivery.abandoned:
            if pause:
                self.retries += not self._finishing.wait(pause)
            else:
                self._wake.wait()
            self._wake.clear()
            if self._finishing.is_set():
                break
            pause = 0.0 if self._try(delivery) else _next_pause(pause)
        for last_pause in (*_LAST_PAUSES_S, None):
            if self._try(delivery) or delivery.abandoned or last_pause is None:
                break
            time.sleep(last_pause)
            self.retries += 1

    def _try(self, delivery: Delivery) -> bool:
        """Deliver what the journal has; say whether the sink took all of it."""
        try:
            delivery.catch_up()
            if self._cut_off:
                delivery.finish()
        except AbandonedError:
            return False
        except Exception as error:  # noqa: BLE001 - a sink may raise anything
            self._note(error)
            return False
        finally:
            self._tried.set()
        self.last_error = None
        return True

    def _note(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"
        if self.errors == 1:
            _logger.warning(
                "sink %s failed (%s); training goes on, the journal keeps what it misses, and it "
                "is tried again",
                self.label,
                self.last_error,
            )


def _next_pause(pause: float) -> float:
    return min(max(2 * pause, _FIRST_PAUSE_S), _MAX_PAUSE_S)
