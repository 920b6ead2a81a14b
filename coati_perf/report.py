"""The text of a run's report. Knows records and totals, no sink and no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coati_perf import catalogue
from coati_perf.compat import divide
from coati_perf.cost import NO_MODELS
from coati_perf.evidence import FOLDER as EVIDENCE_FOLDER
from coati_perf.journal import Journal, Segment
from coati_perf.machine import Machine
from coati_perf.metric import Devices
from coati_perf.record import Header, Impossible, Summary
from coati_perf.totals import RunTotals

# Keeps ColossalChat's rates finite where no time passed.
_EPSILON_S = 1e-12
_WIDTH = 96
# From here on a figure needs no decimals.
_LARGE = 1000

CONVENTIONS = {
    NO_MODELS: "not counted, as neither parameter counts nor models were given",
    "coati": "coati convention: 2 FLOP per parameter and token position, no attention, padding "
    "counted as work, generation without KV cache; over-reports",
    "exact": "exact: read off the models; causal attention, KV cache, real tokens",
    "exact, full attention": "exact: read off the models; KV cache, real tokens, and attention "
    "over all pairs of positions",
}


def seed_report(totals: RunTotals) -> str:
    """Return ColossalChat's ``Performance summary:`` lines, to the letter, for a whole run.

    Source: the report strings in ``tests/data/golden_seed_reports.json``. Counts are the true
    sums over ranks, durations the means over ranks, TFLOPS per rank.
    """
    figures, _ = totals.figures()
    generated = int(figures.get(catalogue.GENERATED, 0))
    learned = int(figures.get(catalogue.LEARNED, 0))
    effective = min(generated, learned)
    make_s = _make_experience_s(figures)
    learn_s = figures.get(catalogue.LEARN_S, 0.0)
    episode_s = figures.get(catalogue.EPISODE_S, 0.0)
    sample_s = divide(1, effective / (episode_s + _EPSILON_S))
    make_sample_s = divide(make_s, effective)
    learn_sample_s = divide(learn_s, effective)

    def work(verb: str, samples: int, flop: str, seconds: float) -> str:
        rate = samples / (seconds + _EPSILON_S)
        devices = totals.machine.devices(Devices.TRAINER)
        tflops = figures.get(flop, 0.0) / devices / 1e12 / (seconds + _EPSILON_S)
        return (
            f"{verb} {samples} samples, throughput: {rate:.2f} samples/s, "
            f"TFLOPS per GPU: {tflops:.2f}\n"
        )

    def share(phase: str, seconds: float) -> str:
        return f"{phase} time per sample: {seconds:.2f} s, {seconds / sample_s * 100:.2f}%"

    return (
        "Performance summary:\n"
        + work("Generate", generated, catalogue.MAKE_EXPERIENCE_FLOP, make_s)
        + work("Train", learned, catalogue.LEARN_FLOP, learn_s)
        + f"Overall throughput: {effective / (episode_s + _EPSILON_S):.2f} samples/s\n"
        + f"Overall time per sample: {sample_s:.2f} s\n"
        + f"{share('Make experience', make_sample_s)}\n"
        + share("Learn", learn_sample_s)
    )


def _make_experience_s(figures: Mapping[str, float]) -> float:
    """Return the seconds of making experience: of its parts, in a loop that marks only these."""
    parts = figures.get(catalogue.GENERATE_S, 0.0) + figures.get(catalogue.SCORE_S, 0.0)
    return figures.get(catalogue.MAKE_EXPERIENCE_S, parts)


def render_run(
    header: Header, totals: RunTotals, summary: Summary | None, ending: str | None = None
) -> str:
    """Return what we add to ColossalChat's lines: how the run ended, and where its time went.

    ``ending`` says how a run ended that has no summary.
    """
    version = header.versions.get("coati_perf", "?")
    ending = ending if summary is None else _ending(summary)
    lines = [f"coati_perf {version}, run {header.run_id}: {ending}", _covered(header, totals)]
    figures, impossible = totals.figures()
    if totals.episodes:
        lines += ["", *_time_table(totals, figures), ""]
        if speeds := list(_speed_table(figures)):
            lines += [*speeds, ""]
        lines += _rates(figures, totals.machine.devices(Devices.ALL))
    lines.append(f"FLOPs: {CONVENTIONS.get(header.convention, header.convention)}.")
    lines += _peak_lines(header.machine)
    if impossible:
        lines += _impossible_lines(header, impossible)
    lines += [f"WARNING: {warning}" for warning in header.warnings]
    if unmasked := figures.get(catalogue.UNMASKED_BATCHES):
        lines.append(
            f"Padded lengths stand for the real ones in {unmasked:,.0f} batches: they had no"
            " attention_mask."
        )
    lines += _rank_lines(totals)
    if summary is not None and summary.failures:
        lines.append("Left by an exception, and not counted:")
        lines += [f"  {failure}" for failure in summary.failures]
    if totals.faults:
        faults = ", ".join(f"{fault} × {count}" for fault, count in totals.faults.items())
        lines.append(f"Hook calls that could not be measured as they came: {faults}.")
    if header.train_config:
        lines += ["train_config:", *(f"  {line}" for line in _config(header.train_config))]
    return "\n".join(lines) + "\n"


def render_journal(journal: Journal) -> str:
    """Return the report of every segment of a journal: finished, failed, running or cut off."""
    parts = []
    for number, segment in enumerate(journal.segments):
        last = number == len(journal.segments) - 1
        totals = RunTotals(segment.header.machine)
        for record in segment.episodes:
            totals.add(record)
        title = f"Segment {number + 1} of {len(journal.segments)}\n"
        parts.append(
            (title if len(journal.segments) > 1 else "")
            + f"{seed_report(totals)}\n\n"
            + render_run(
                segment.header,
                totals,
                segment.summary,
                _unended(segment, live=journal.live and last),
            )
        )
    if journal.torn_lines:
        parts.append(f"{journal.torn_lines} torn line(s) were skipped.\n")
    return "\n".join(parts)


def _ending(summary: Summary) -> str:
    if summary.status == "killed":
        return _cut_off(summary.last_episode)
    if summary.status == "failed":
        return f"FAILED {_after(summary.last_episode)}: {summary.error}"
    return "finished"


def _unended(segment: Segment, *, live: bool) -> str:
    last = segment.episodes[-1].episode if segment.episodes else None
    if segment.failures:
        errors = dict.fromkeys(f"rank {f.rank}: {f.error}" for f in segment.failures)
        return f"FAILED {_after(last)}: {'; '.join(errors)}"
    if live:
        return f"still running, {_after(last)}"
    return _cut_off(last)


def _cut_off(last_episode: int | None) -> str:
    ending = "the journal ends without a summary (killed, or lost power)"
    return f"CUT OFF {_after(last_episode)}: {ending}"


def _after(last_episode: int | None) -> str:
    return (
        "before any episode was finished"
        if last_episode is None
        else f"after episode {last_episode}"
    )


def _covered(header: Header, totals: RunTotals) -> str:
    ranks = f"{header.world_size} rank{'s' * (header.world_size > 1)} ({header.device})"
    if not totals.episodes:
        ignored = f" after the {header.ignore_episodes} that are ignored"
        return (
            f"Nothing was measured on {ranks}: no episode was finished"
            f"{ignored if header.ignore_episodes else ''}."
        )
    return (
        f"{totals.episodes} episodes ({totals.first_episode} to {totals.last_episode}) on {ranks}"
    )


def _time_table(totals: RunTotals, figures: Mapping[str, float]) -> Iterator[str]:
    """Yield where the time went, as a tree; each level adds up to the one above it."""
    episode_s = figures[catalogue.EPISODE_S]
    yield f"{'Where the time went':<42}{'seconds':>12}{'share':>9}"

    def row(name: str, depth: int, seconds: float) -> str:
        share = f"{seconds / episode_s:.1%}" if episode_s else "-"
        return f"{'  ' * (depth + 1) + name:<42}{seconds:>12.3f}{share:>9}"

    def level(prefix: str, depth: int, whole: float) -> Iterator[str]:
        inside = {
            path: seconds
            for path, seconds in totals.phases.items()
            if path.startswith(prefix) and "/" not in path[len(prefix) :]
        }
        for path, seconds in inside.items():
            yield row(path[len(prefix) :], depth, seconds)
            yield from level(f"{path}/", depth + 1, seconds)
        if prefix and inside:
            yield row("(rest)", depth, whole - sum(inside.values()))

    yield from level("", 0, episode_s)
    yield row("other", 0, figures.get(catalogue.OTHER_S, 0.0))
    if overlap := figures.get(catalogue.OVERLAP_S):
        yield row("(overlap of the above)", 0, -overlap)
    yield row("episode", 0, episode_s)


_SPEEDS = {
    "TFLOP/s": "perf/tflops/{}_per_device",
    "executed": "perf/tflops/{}_executed_per_device",
    "MFU": "perf/mfu/{}",
    "HFU": "perf/hfu/{}",
    "MBU": "perf/mbu/{}",
}
_SPEED_PHASES = ("generate", "score", "make_experience", "learn", "overall")


def _speed_table(figures: Mapping[str, float]) -> Iterator[str]:
    """Yield each phase's speed per device: useful, executed, and as shares of the peak."""
    names = {
        phase: {title: name.format(phase) for title, name in _SPEEDS.items()}
        for phase in _SPEED_PHASES
    }
    shown = [phase for phase in names if any(name in figures for name in names[phase].values())]
    titles = [title for title in _SPEEDS if any(names[phase][title] in figures for phase in shown)]
    if shown:
        yield f"{'Speed of a device':<30}" + "".join(f"{title:>12}" for title in titles)
    for phase in shown:
        cells = [_cell(title, figures.get(names[phase][title])) for title in titles]
        yield f"  {phase:<28}" + "".join(f"{cell:>12}" for cell in cells)


def _cell(title: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if title in ("MFU", "HFU", "MBU") else readable(value)


def _rates(figures: Mapping[str, float], devices: int) -> Iterator[str]:
    """Yield every other ratio; of one device what it does is what all do."""
    in_table = {name.format(phase) for phase in _SPEED_PHASES for name in _SPEEDS.values()}
    for ratio in catalogue.RATIOS:
        repeated = devices == 1 and ratio.name.endswith("_per_s_per_device")
        if ratio.name in figures and ratio.name not in in_table and not repeated:
            yield f"{ratio.name:<58}{readable(figures[ratio.name]):>12} {ratio.unit}"


def readable(value: float) -> str:
    """Four significant digits, without an exponent for the sizes that occur."""
    return f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.4g}"


def _impossible_lines(header: Header, impossible: Mapping[str, Impossible]) -> Iterator[str]:
    """Yield every figure that no device could reach, under what it is measured against."""
    yield (
        "IMPOSSIBLE, and left out of the metrics, as the convention or its inputs are wrong (to"
        f" reproduce: {Path(header.run_dir) / EVIDENCE_FOLDER}):"
    )
    for name, flaw in impossible.items():
        unit = catalogue.CATALOGUE[name].unit
        yield (
            f"  {name:<48}{readable(flaw.value):>10} {unit}, where {readable(flaw.limit)} is most:"
            f" {flaw.reason}"
        )


def _peak_lines(machine: Machine) -> Iterator[str]:
    if machine.peak_tflops is not None:
        bandwidth = "" if machine.bandwidth is None else f", {readable(machine.bandwidth)} TB/s"
        yield (
            f"Peak of a device: {readable(machine.peak_tflops)} TFLOP/s{bandwidth}"
            f" ({machine.peak_source})."
        )


def _rank_lines(totals: RunTotals) -> Iterator[str]:
    if totals.slowest_seconds:
        (rank, phase), excess = max(totals.slowest_seconds.items(), key=lambda item: item[1])
        yield (
            f"Slowest: rank {rank}, by {phase}. In the episodes that it held up it took"
            f" {excess:.3f} s more than the mean of the ranks, in all."
        )
    if totals.incomplete_episodes:
        yield (
            f"INCOMPLETE: in {totals.incomplete_episodes} episode(s) some ranks sent no figures; "
            "sums are without them."
        )


def _config(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        line = " ".join(f"{key} = {value}".split())
        yield line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
