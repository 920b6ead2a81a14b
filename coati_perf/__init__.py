"""The performance ledger for RLHF and RL post-training of language models."""

from coati_perf._version import __version__
from coati_perf.callback import Callback
from coati_perf.clock import Timer
from coati_perf.compat import all_reduce_mean, divide, get_world_size, save_eval_result_rank_0
from coati_perf.cost import ParamCount
from coati_perf.evaluator import PerformanceEvaluator
from coati_perf.flops import CostModel, UntraceableModelError
from coati_perf.journal import Journal, JournalError, read_journal
from coati_perf.learning import LearningMeter, measure_learning
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.run import OutputError
from coati_perf.sinks import Sink, SinkError
from coati_perf.timed_step import TimedStep

__all__ = [
    "Callback",
    "CostModel",
    "EpisodeRecord",
    "Header",
    "Journal",
    "JournalError",
    "LearningMeter",
    "OutputError",
    "ParamCount",
    "PerformanceEvaluator",
    "Sink",
    "SinkError",
    "Summary",
    "TimedStep",
    "Timer",
    "UntraceableModelError",
    "__version__",
    "all_reduce_mean",
    "divide",
    "get_world_size",
    "measure_learning",
    "read_journal",
    "save_eval_result_rank_0",
]
