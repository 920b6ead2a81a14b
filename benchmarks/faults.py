"""What faults of sinks, servers, disks and processes cost: episodes, and training's time.

Each row is a real run of the demo's trainer, small, with a fault injected from outside; the CSV
sink beside the faulty one is healthy. Run ``python benchmarks/faults.py`` as root (it mounts small
tmpfs); about six minutes, with ``--kills 10`` two.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import http.server
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coati_perf.journal import FILE_NAME
from coati_perf.replay import replay
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.delivery import Delivery
from coati_perf_wandb import WandbSink
from fault_runs import CLOSE_TIMEOUT_S, Faulty, Left, Scenario, healthy, run

_FULL_AT, _ROOM_AT = 4, 9
_TMPFS_KIB = 256


def faulty(how: str, where: str) -> Scenario:
    return Scenario(sinks=lambda folder: [Faulty(folder, how, where)])


def online(address: str) -> Scenario:
    environment = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": address,
        "WANDB_API_KEY": 40 * "a",
        "WANDB_SILENT": "true",
    }
    return Scenario(sinks=lambda _: ["wandb:project"], environment=environment)


class Cleanup(contextlib.ExitStack):
    """Undoes what it was told when it is left, but not in a forked process that leaves it too."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __exit__(self, *error: object) -> bool:
        if os.getpid() != self._pid:
            self.pop_all()
        return super().__exit__(*error)


def mount_tmpfs(path: Path, cleanup: Cleanup) -> Path:
    path.mkdir(parents=True)
    size = f"size={_TMPFS_KIB}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], check=True)
    cleanup.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
    return path


def filling(disk: Path, *, room_again: bool) -> Callable[[Path, int], None]:
    """Return what fills a disk before one episode, and makes room again before another."""
    filler = disk / "filler"

    def before_episode(folder: Path, episode: int) -> None:
        if episode == _FULL_AT:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(512 * b"0")
        elif episode == _ROOM_AT and room_again:
            filler.unlink()

    return before_episode


class Broken(http.server.BaseHTTPRequestHandler):
    """Answers 500 to everything."""

    def do_GET(self) -> None:
        self.send_error(500)

    def do_POST(self) -> None:
        self.send_error(500)

    def log_message(self, *arguments: Any) -> None: ...


def serve(kind: str, cleanup: Cleanup) -> str:
    """Listen on the loopback: refuse, accept and never answer, or answer 500 to everything."""
    if kind == "answers 500":
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        cleanup.callback(web.shutdown)
        return f"http://127.0.0.1:{web.server_port}"
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if kind == "refuses":
        listener.close()
    return address


def in_csv(folder: Path) -> list[int]:
    path = folder / "healthy.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [int(row["episode"]) for row in csv.DictReader(file)]


def heal(left: Left, sink: str) -> list[int]:
    """Deliver what is missing, twice; return the episodes that the sink has then."""
    if sink == "faulty":
        for _ in range(2):
            cursor = Cursor(left.journal, "Faulty", 0)
            delivery = Delivery(Faulty(left.folder), left.journal / FILE_NAME, cursor)
            delivery.catch_up()
            delivery.finish()
        return [int(line) for line in (left.folder / "faulty.jsonl").read_text().split()]
    for _ in range(2):
        if sink.startswith("wandb"):  # in a process of its own, as forks must not inherit its state
            command = [
                sys.executable,
                "-m",
                "coati_perf",
                "replay",
                str(left.journal),
                "--to",
                sink,
            ]
            offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
            subprocess.run(command, env=os.environ | offline, check=True, capture_output=True)
        else:
            (replayed,) = replay(left.journal, [sink])
            assert replayed.error is None, replayed
    if sink.startswith("csv"):
        return in_csv(left.folder)
    if sink.startswith("tensorboard"):
        return in_tensorboard(Path(sink.partition(":")[2] or left.journal / "tensorboard"))
    return in_wandb(left.journal)


def in_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run_folder,) = folder.iterdir()
    events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0})
    events.Reload()
    return [point.step for point in events.Scalars("perf/time/episode_s")]


def in_wandb(run_dir: Path) -> list[int]:
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line).get("history", {}).get("item", {}) for line in lines]
    return [row["perf/episode"] for row in rows if "perf/episode" in row]


class Matrix:
    """Runs scenarios and prints a row for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rows: list[dict[str, Any]] = []
        bare = [run(Scenario(measured=False), folder / f"bare-{number}") for number in range(3)]
        self._bare_exit_s = statistics.median(left.exit_s for left in bare if left.exit_s)
        print(f"the interpreter's exit takes {self._bare_exit_s:.2f} s without an evaluator\n")
        print(
            f"{'fault':<50}{'finished':>9}{'lost':>6}{'healthy':>9}{'healed':>8}"
            f"{'max, ms':>9}{'held up, s':>12}"
        )

    def add(self, fault: str, scenario: Scenario, sink: str = "") -> None:
        self.say(fault, run(scenario, self._folder / fault.replace(" ", "_")), sink)

    def say(self, fault: str, left: Left, sink: str) -> None:
        known = set(left.recorded()) | set(in_csv(left.folder))
        lost = left.finished.keys() - known
        got = in_csv(left.folder)
        delays_ms = [1e3 * delay_s for delay_s in left.delays_s]
        row = {
            "fault": fault,
            "finished": len(left.finished),
            "lost": len(lost),
            "healthy": sorted(got) == sorted(left.finished),
            "healed": sorted(heal(left, sink)) == sorted(known) if sink else None,
            "max_ms": delays_ms[-1] if delays_ms else None,
            "held_up_s": None if left.exit_s is None else left.exit_s - self._bare_exit_s,
        }
        self.rows.append(row)
        cells = [
            f"{fault:<50}{row['finished']:>9}{row['lost']:>6}{_said(row['healthy']):>9}",
            f"{_said(row['healed']):>8}",
            *(
                f"{'-':>{width}}" if row[name] is None else f"{row[name]:>{width}.2f}"
                for name, width in _WIDTHS.items()
            ),
        ]
        print("".join(cells), flush=True)


_WIDTHS = {"max_ms": 9, "held_up_s": 12}


def _said(value: bool | None) -> str:  # noqa: FBT001
    return "-" if value is None else "all" if value else "NOT ALL"


def leave(folder: Path, episode: int) -> None:
    if episode == 7:
        sys.exit(1)


def fork(folder: Path, episode: int) -> None:
    if episode == 5 and os.fork() == 0:
        time.sleep(0.3)
        sys.exit(0)


def delete(folder: Path, episode: int) -> None:
    while episode == 5 and (folder / "run").exists():
        shutil.rmtree(folder / "run", ignore_errors=True)  # sinks may be writing there


def protect(folder: Path, episode: int) -> None:
    if episode == 5:
        for path in (folder / "run", folder / "run" / "cursors"):
            path.chmod(0o555)


def sinks_and_servers(matrix: Matrix) -> None:
    matrix.add("none", Scenario(sinks=lambda folder: [Faulty(folder)]), "faulty")
    for where in ("open", "write", "close"):
        matrix.add(f"sink raises in {where}", faulty("raise", where), "faulty")
    matrix.add("sink raises at random", faulty("raise at random", "any"), "faulty")
    for where in ("open", "write", "close"):
        matrix.add(f"sink hangs for ever in {where}", faulty("hang", where), "faulty")
    for kind in ("refuses", "never answers", "answers 500"):
        with Cleanup() as cleanup:
            scenario = online(serve(kind, cleanup))
            matrix.add(f"wandb's server {kind}", scenario, "wandb:project")


def disks(matrix: Matrix, folder: Path) -> None:
    for room_again in (True, False):
        here = folder / f"journal-{room_again}"
        with Cleanup() as cleanup:
            disk = mount_tmpfs(here / "run", cleanup)
            scenario = Scenario(before_episode=filling(disk, room_again=room_again))
            then = "for a while" if room_again else "to the end"
            matrix.say(f"journal's disk full {then}", run(scenario, here), "")
    with Cleanup() as cleanup:
        disk = mount_tmpfs(folder / "tensorboard", cleanup)
        sink = f"tensorboard:{disk}/runs"
        scenario = Scenario(sinks=lambda _: [sink], before_episode=filling(disk, room_again=False))
        left = run(scenario, folder / "full-tensorboard")
        (disk / "filler").unlink()
        matrix.say("TensorBoard's disk full to the end", left, sink)
        disk = mount_tmpfs(folder / "wandb", cleanup)
        scenario = Scenario(
            sinks=lambda _: [WandbSink("project", dir=str(disk))],
            before_episode=filling(disk, room_again=False),
            environment={"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        )
        left = run(scenario, folder / "full-wandb")
        matrix.say("wandb's disk full to the end", left, "wandb:project")
    scenario = Scenario(before_episode=protect, unprivileged=True)
    matrix.add("run's folder made read-only", scenario, "")
    matrix.add("run's folder deleted", Scenario(before_episode=delete), "")


def processes(matrix: Matrix, folder: Path, kills: int) -> None:
    matrix.add("sys.exit inside an episode", Scenario(before_episode=leave), "")
    matrix.add("fork in mid-run", Scenario(before_episode=fork), "")
    for signal_, times in ((signal.SIGKILL, kills), (signal.SIGTERM, max(kills // 10, 1))):
        killed_at_random(matrix, folder, signal_, times)


def killed_at_random(matrix: Matrix, folder: Path, signal_: signal.Signals, times: int) -> None:
    """Kill runs at random moments; one row for all, with the age of the episodes that it cost."""
    whole = run(Scenario(), folder / f"whole-{signal_.name}")
    length_s = max(whole.finished.values()) - min(whole.finished.values())
    dice = random.Random(0)
    finished = lost = 0
    healed, fresh_ms = [], []
    for number in range(times):
        kill = signal_, dice.uniform(0, length_s)
        scenario = Scenario(sinks=lambda _: ["tensorboard"], kill=kill)
        left = run(scenario, folder / f"{signal_.name}-{number}")
        known = left.recorded()
        missing = left.finished.keys() - set(known)
        finished += len(left.finished)
        lost += len(missing)
        fresh_ms += [1e3 * (left.ended_at - left.finished[episode]) for episode in missing]
        for sink in ("tensorboard", healthy(left.folder)) if known else ():
            got = heal(left, sink)
            healed.append(sorted(got) == known)
        shutil.rmtree(left.folder)
    fault = f"{signal_.name} at {times} random moments"
    matrix.rows.append(
        {"fault": fault, "finished": finished, "lost": lost, "healed": all(healed),
         "lost_younger_than_ms": max(fresh_ms, default=None)}
    )  # fmt: skip
    young = f", finished less than {max(fresh_ms):.0f} ms before" if fresh_ms else ""
    print(f"{fault:<50}{finished:>9}{lost:>6}{'':>9}{_said(all(healed)):>8}{young}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    with Cleanup() as cleanup:
        folder = Path(tempfile.mkdtemp())
        folder.chmod(0o755)  # a run without root's privileges must get in
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        matrix = Matrix(folder)
        sinks_and_servers(matrix)
        disks(matrix, folder)
        processes(matrix, folder, arguments.kills)
    print(f"\nclose_timeout_s = {CLOSE_TIMEOUT_S:g}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(matrix.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
