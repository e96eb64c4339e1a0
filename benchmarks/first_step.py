"""How long a person waits from ``phalanx train`` to the first step, and where the time goes.

    python -m benchmarks.first_step

Starts the real command several times (``examples/tiny.toml``: preset ``tiny``, four CPU ranks,
synthetic tokens) and waits for the first step on its ``--json`` output. Further starts, through
the same entry point with clocks put around the stages, say where the time goes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from proof.report import report

JOB = Path(__file__).parent.parent / "examples" / "tiny.toml"
MARKS = "PHALANX_FIRST_STEP_MARKS"  # names the file that receives the clocks' readings


class Start(NamedTuple):
    """One start of the command, until its first step was printed."""

    wall_seconds: float
    cpu_seconds: float  # user and system time of the launcher and all ranks, of the whole run
    marks: list[tuple[str, float]]  # stage that ends there, seconds since the start


def start(command: list[str]) -> Start:
    """Run a command that trains two steps, and wait for the first one's record."""
    with tempfile.TemporaryDirectory(prefix="phalanx-first-step-") as folder:
        settings = {"train.steps": 2, "schedule.warmup_steps": 0, "checkpoint.at_end": "false"}
        settings |= {"runs": folder}
        for key, value in settings.items():
            command = [*command, "--set", f"{key}={value}"]
        marks = Path(folder) / "marks"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "--json"], stdout=subprocess.PIPE, env=os.environ | {MARKS: str(marks)}
        )
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline()]
            wall_seconds = time.monotonic() - began
            lines += process.stdout.readlines()
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise
        if code or json.loads(lines[0]).get("step") != 1:
            raise SystemExit(f"{' '.join(command)} ended with {code}: {lines!r}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Start(wall_seconds, cpu, _read_marks(marks, began, wall_seconds))


def _read_marks(path: Path, began: float, wall_seconds: float) -> list[tuple[str, float]]:
    if not path.exists():
        return []
    pairs = (line.rsplit(" ", 1) for line in path.read_text().splitlines())
    marks = [(name, float(clock) - began) for name, clock in pairs]
    first = [mark for mark in marks if mark[1] <= wall_seconds]
    return [*first, ("record reaches the terminal", wall_seconds)]


def run_with_clocks(arguments: list[str]) -> None:
    """The command ``phalanx``, with a mark at the end of every stage of rank 0."""
    _mark("interpreter")
    from phalanx.cli import main
    from phalanx.cli.process import collection_paused
    from phalanx.train.rank.threads import keep_single_threaded

    keep_single_threaded()
    _mark("command line")
    with collection_paused():
        importlib.import_module("torch")
        _mark("import torch")
        importlib.import_module("torch.distributed.fsdp")
        _mark("import torch.distributed")
        from phalanx.train import trainer
        from phalanx.train.rank import launch, local_orders, rank

        _mark("import phalanx.train")
    _clock(launch, "start_ranks", "run folder")
    _clock(rank.Rank, "run", "fork")
    _clock(local_orders.LocalOrders, "_join_group", "", "process group")
    _clock(rank, "build_mesh", "provenance", "mesh")
    _clock(trainer.Trainer, "train_step", "sinks", "first step")
    _clock(rank, "Trainer", "", "model, optimizer, feed")
    sys.argv = ["phalanx", *arguments]
    main()


def _clock(owner: Any, name: str, before: str, after: str = "") -> None:
    """Mark the stage that ends when a function is called, and the one it is itself."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        _mark(before)
        result = function(*args, **kwargs)
        _mark(after)
        return result

    setattr(owner, name, clocked)


def _mark(stage: str) -> None:
    if stage and os.environ.get("RANK", "0") == "0":
        with Path(os.environ[MARKS]).open("a") as file:
            file.write(f"{stage} {time.monotonic()}\n")


def stage_medians(starts: list[Start]) -> dict[str, float]:
    """Seconds that each stage took, in order; the median over the starts."""
    durations: dict[str, list[float]] = {}
    for one in starts:
        previous = 0.0
        for name, ended in one.marks:
            durations.setdefault(name, []).append(ended - previous)
            previous = ended
    return {name: statistics.median(values) for name, values in durations.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time from the command to the first step.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--clocked", type=int, default=3, help="starts that say where time goes")
    parser.add_argument("--output", type=Path, default=Path("runs/first_step.json"))
    options = parser.parse_args()
    phalanx = str(Path(sys.executable).parent / "phalanx")
    load_average = os.getloadavg()
    print(f"load average before: {load_average[0]:.1f} on {os.cpu_count()} cores")
    plain = []
    for number in range(options.repetitions):
        plain.append(start([phalanx, "train", str(JOB)]))
        one = plain[-1]
        print(f"start {number + 1}: {one.wall_seconds:.2f} s, {one.cpu_seconds:.1f} s of CPU")
    itself = [sys.executable, "-m", "benchmarks.first_step", "clocked", "train", str(JOB)]
    stages = stage_medians([start(itself) for _ in range(options.clocked)])
    median = statistics.median(one.wall_seconds for one in plain)
    if stages:
        print("\nwhere the time goes (medians of clocked starts, rank 0):")
    for name, seconds in stages.items():
        print(f"  {name:36s} {seconds:6.2f} s")
    details = {
        "load_average": load_average,
        "cores": os.cpu_count(),
        "wall_seconds": [one.wall_seconds for one in plain],
        "cpu_seconds": [one.cpu_seconds for one in plain],
        "median_seconds": median,
        "stage_seconds": stages,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(details, indent=2) + "\n")
    return report("first-step", {"median_seconds": median})


if __name__ == "__main__":
    if sys.argv[1:2] == ["clocked"]:
        run_with_clocks(sys.argv[2:])
    else:
        raise SystemExit(main())
