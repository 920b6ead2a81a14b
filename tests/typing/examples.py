"""Code as users write it; mypy --strict and pyright check it."""

from __future__ import annotations

from coati_perf import (
    Callback,
    CostModel,
    EpisodeRecord,
    Header,
    PerformanceEvaluator,
    Sink,
    Summary,
    read_journal,
)


class PrintingSink:
    def open(self, header: Header) -> None:
        print(header.run_id)

    def write(self, record: EpisodeRecord) -> None:
        learn_s: float = record.metrics["perf/time/learn_s"]
        print(record.episode, learn_s)

    def close(self, summary: Summary) -> None:
        print(summary.status)


sink: Sink = PrintingSink()
cost_model: CostModel = CostModel.from_num_params(1)
evaluator = PerformanceEvaluator(
    1, 1, 1, 1, True, 2, {"a": 1}, "r.txt", sinks=["wandb:p", sink], models={"actor": cost_model}
)
callback: Callback = evaluator
with evaluator.episode(0), evaluator.phase("generate"):
    evaluator.record("generate", seconds=1.0, samples=2, prompt_lengths=[1], response_lengths=[2])


@evaluator.phase("score")
def score(tokens: list[int]) -> float:
    return float(len(tokens))


reward: float = score([1, 2])
episodes: list[EpisodeRecord] = read_journal("run").segments[-1].episodes
