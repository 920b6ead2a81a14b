"""The command ``coati-perf``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coati_perf import __version__
from coati_perf.flops import UntraceableModelError
from coati_perf.flops_table import ConfigError, flops_table, load_config
from coati_perf.journal import JournalError, read_journal
from coati_perf.pending import recover
from coati_perf.replay import ReplayError, replay
from coati_perf.report import render_journal
from coati_perf.sinks import SinkError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 2 with one line on what was wrong.

    A replay that did not deliver everything returns 1.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "report":
            recover(options.journal if options.journal.is_dir() else options.journal.parent)
            sys.stdout.write(render_journal(read_journal(options.journal)))
        elif options.command == "replay":
            return _replay(options)
        elif options.command == "flops":
            _flops(options.model, options.prompt, options.response, options.batch)
        else:
            _demo(options)
    except (
        JournalError,
        OSError,
        ConfigError,
        UntraceableModelError,
        SinkError,
        ReplayError,
    ) as error:
        sys.stderr.write(f"coati-perf: {error}\n")
        return 2
    return 0


def _replay(options: argparse.Namespace) -> int:
    results = replay(options.journal, options.to, follow=options.follow, again=options.again)
    for result in results:
        ending = "has everything" if result.error is None else f"FAILED: {result.error}"
        sys.stdout.write(f"{result.sink}: {result.episodes} episodes delivered, {ending}\n")
    return int(any(result.error is not None for result in results))


def _flops(model: Path, prompt: int, response: int, batch: int) -> None:
    try:
        config = load_config(model)
    except ModuleNotFoundError as error:
        message = "to read a config transformers is needed: pip install 'coati-perf[transformers]'"
        raise OSError(message) from error
    sys.stdout.write(flops_table(config, prompt, response, batch) + "\n")


def _demo(options: argparse.Namespace) -> None:
    try:
        from coati_perf.demo.command import run_demo  # noqa: PLC0415 - brings in transformers
    except ModuleNotFoundError as error:
        message = f"the demo needs the package {error.name!r}: pip install 'coati-perf[demo]'"
        raise OSError(message) from error
    run_demo(options.episodes, options.seed, options.run_dir, options.convention)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coati-perf", description="The performance ledger for RLHF and RL post-training."
    )
    parser.add_argument("--version", action="version", version=f"coati-perf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report", help="print the summary of a finished, running or killed run"
    )
    report.add_argument(
        "journal", type=Path, help="a journal.jsonl, or the run directory that holds it"
    )
    again = commands.add_parser(
        "replay", help="deliver a run to sinks: what they did not get, or all of it"
    )
    again.add_argument("journal", type=Path, help="a journal.jsonl, or the run directory")
    again.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="SINK",
        help="name or name:argument; more than one may be given",
    )
    again.add_argument("--follow", action="store_true", help="go on until the run has ended")
    again.add_argument(
        "--again", action="store_true", help="from the start, whatever was delivered"
    )
    demo = commands.add_parser("demo", help="train a tiny model with PPO, and measure it")
    demo.add_argument("--episodes", type=_positive, default=14, help="default: %(default)s")
    demo.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    demo.add_argument("--run-dir", type=Path, help="default: a new folder below coati_perf_runs/")
    demo.add_argument(
        "--convention",
        choices=("exact", "coati"),
        default="exact",
        help="how FLOPs are counted: exactly, or as ColossalChat does (default: %(default)s)",
    )
    flops = commands.add_parser("flops", help="what the phases of a model cost, without a run")
    flops.add_argument("model", type=Path, help="a Hugging Face config.json, or a model's folder")
    flops.add_argument("--prompt", type=_positive, default=1024, help="tokens; %(default)s")
    flops.add_argument("--response", type=_positive, default=1024, help="tokens; %(default)s")
    flops.add_argument("--batch", type=_positive, default=1, help="sequences; %(default)s")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"{text} is too small; expected at least 1"
        raise argparse.ArgumentTypeError(message)
    return number
