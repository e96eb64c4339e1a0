"""What a person sees while a run goes on: a live bar, plain lines, or JSON lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

import msgspec
import rich.live
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from phalanx.config import ConfigError, Job
from phalanx.train.exits import CHECKPOINT_INTERVAL, EndReason, ExitCode, ExitInfo
from phalanx.train.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    RareRecord,
    Record,
    StartRecord,
    StepRecord,
    encode,
)
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sink

Output = Literal["auto", "live", "plain", "json"]


class PipeSink:
    """Rank 0's end of the pipe to the launcher; never waits for a slow or vanished reader."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe

    def write(self, record: Record) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            # Shorter than PIPE_BUF: written whole or, when the pipe is full, not at all.
            os.write(self._pipe, encode(record))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._pipe)


class Json:
    """Every record as a line of JSON on stdout, then how the run ended."""

    def write(self, record: Record) -> None:
        sys.stdout.write(encode(record).decode())

    def flush(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        self.flush()


class WaitClock:
    """How long a person waits for the first step."""

    def __init__(self, waited_seconds: float = 0.0) -> None:
        self._began = time.monotonic() - waited_seconds

    def text(self) -> str:
        """To be called when the first step is there."""
        return f"first step after {time.monotonic() - self._began:.1f} s"


class Plain:
    """A line at each log interval, for files and pipes."""

    def __init__(self, job: Job, folder: RunFolder, clock: WaitClock) -> None:
        self._clock = clock
        self._job = job
        self._shown_step = -1
        self._last: StepRecord | None = None
        print(f"{job.name}: {from_here(folder.path)}", flush=True)

    def write(self, record: Record) -> None:
        if not isinstance(record, StepRecord):
            print(event_text(record), flush=True)
            return
        first = self._last is None
        self._last = record
        if first:
            print(self._clock.text(), flush=True)
        if first or record.skipped or record.damaged or record.step % self._job.log.every == 0:
            self._show(record)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._last is not None and self._last.step != self._shown_step:
            self._show(self._last)

    def _show(self, record: StepRecord) -> None:
        self._shown_step = record.step
        eta = duration(record.eta_seconds)
        progress = f"step {record.step}/{self._job.train.steps}"
        print(f"{progress}  {figures(record)}  eta {eta}", flush=True)


class Live:
    """A bar that moves over a line of figures; validations and checkpoints scroll above them."""

    def __init__(self, job: Job, folder: RunFolder, clock: WaitClock) -> None:
        self._clock = clock
        self._started = False
        self._bar = Progress(
            TextColumn("[bold]step {task.completed}/{task.total}"),
            BarColumn(bar_width=40),
            TextColumn("eta {task.fields[eta]}"),
        )
        self._task = self._bar.add_task("step", total=job.train.steps, eta="unknown")
        console = Console(highlight=False, soft_wrap=True)
        # Four times a second: a machine that trains on its cores has better things to do.
        self._screen = rich.live.Live(console=console, refresh_per_second=4)
        self._screen.console.print(f"{job.name}: {from_here(folder.path)}", markup=False)
        self._show("starting the ranks")
        self._screen.start()

    def write(self, record: Record) -> None:
        if not isinstance(record, StepRecord):
            self._screen.console.print(event_text(record), markup=False)
            return
        if not self._started:
            self._started = True
            self._screen.console.print(self._clock.text())
        eta = duration(record.eta_seconds)
        self._bar.update(self._task, completed=record.step, eta=eta)
        self._show(figures(record))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._screen.stop()

    def _show(self, text: str) -> None:
        self._screen.update(Group(self._bar, Text(text, no_wrap=True, overflow="ellipsis")))


class LosableDisplay:
    """A display that may go away, with its terminal or the reader of a pipe; the run goes on."""

    def __init__(self, opened: Callable[[], Sink], folder: RunFolder) -> None:
        self._folder = folder
        self._display: Sink | None = None
        with self._guarded():
            self._display = opened()

    def write(self, record: Record) -> None:
        if self._display is not None:
            with self._guarded():
                self._display.write(record)
                self._display.flush()

    def flush(self) -> None:
        """What is written is flushed."""

    def close(self) -> None:
        if self._display is not None:
            with self._guarded():
                self._display.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._display = None
            discard_output(sys.stdout)
            words = f"stdout is gone ({error.strerror}); the run goes on without it"
            with output_may_be_gone():
                print(f"warning: {words}, see {self._folder.path}", file=sys.stderr, flush=True)


@contextmanager
def output_may_be_gone() -> Iterator[None]:
    """Inside, output that nobody can take any more is dropped."""
    try:
        yield
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """What a stream still holds, and all that follows, goes nowhere."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def open_display(output: Output, job: Job, folder: RunFolder, clock: WaitClock) -> Sink:
    """The display that was asked for, or the one that fits stdout."""
    if output == "json":
        return Json()
    if output == "live" or (output == "auto" and sys.stdout.isatty()):
        return Live(job, folder, clock)
    return Plain(job, folder, clock)


def figures(record: StepRecord) -> str:
    """What a step measured, on one line."""
    loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
    norm = "not finite" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    mfu = record.mfu_basis if record.mfu is None else f"{record.mfu:.1%}"
    pieces = [
        f"loss {loss}",
        f"grad {norm}",
        f"{record.tokens_per_second:,.0f} tok/s",
        f"mfu {mfu}",
    ]
    waited = record.parts.peer_wait
    if waited and record.step_seconds:
        pieces.append(f"comm {waited / record.step_seconds:.0%}")
    pieces += [f"damaged {record.damaged}"] * bool(record.damaged)
    return "  ".join(pieces + ["skipped"] * record.skipped)


def event_text(record: RareRecord | StartRecord) -> str:
    """A validation, evaluation or checkpoint on one line; a start with what was passed over."""
    if isinstance(record, StartRecord):
        passed_over = (f"passed over: {each}" for each in record.passed_over)
        return "\n".join([*passed_over, _begins(record), *record.changes])
    if isinstance(record, CheckpointRecord):
        where = from_here(Path(record.path))
        if record.problem:
            return f"step {record.step} is NOT SAVED: {record.problem} ({where})"
        return f"checkpoint of step {record.step} (held up {brief(record.seconds)}): {where}"
    if isinstance(record, EvaluationRecord):
        told = [f"{name} {value:.4g}" for name, value in record.scores.items()]
        told += [f"{name} is NOT SCORED: {why}" for name, why in record.problems.items()]
        return f"scores after step {record.step} ({brief(record.seconds)}): {', '.join(told)}"
    loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
    return f"validation loss after step {record.step}: {loss}"


def _begins(record: StartRecord) -> str:
    where = f": {from_here(Path(record.path)) if '://' not in record.path else record.path}"
    if not record.tier:
        return "nothing to resume from; starts fresh"
    if not record.step:
        return f"starts at step 0 with the {record.tier} of {where[2:]}"
    return f"continues after step {record.step} from {record.tier}{where if record.path else ''}"


def brief(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 0.1:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.1f} s"


def exit_text(info: ExitInfo, folder: RunFolder) -> str:
    """How the run ended, for a person."""
    if info.code == ExitCode.DONE:
        notes = dict(info.details)
        planned = notes.pop(CHECKPOINT_INTERVAL, "")
        lines = [f"warning: {what}: {why}" for what, why in notes.items()]
        lines += [f"checkpoints {planned}"] * bool(planned)
        why = "" if info.reason == EndReason.DONE else f" ({info.reason})"
        done = f"{info.message}{why}; everything is in {from_here(folder.path)}"
        return "\n".join([*lines, done])
    who = "the run" if info.rank is None else f"rank {info.rank}"
    lines = [f"{who} failed ({info.reason}, exit {info.code}): {info.message}"]
    if info.code == ExitCode.NOT_ARCHIVED:  # all that was to be trained is
        lines = [f"{info.message} (exit {info.code}); everything is in {from_here(folder.path)}"]
    if info.advice:
        lines.append(f"what to do: {info.advice}")
    if info.checkpoint:
        lines.append(f"newest checkpoint: {info.checkpoint}")
    if info.rank is not None:
        lines.append(f"log: {folder.log(info.rank)}")
    return "\n".join(lines)


def print_exit(output: Output, info: ExitInfo, folder: RunFolder) -> None:
    """The last thing a run says."""
    if output == "json":
        last = {"kind": "exit", "run_folder": str(folder.path)} | msgspec.to_builtins(info)
        print(msgspec.json.encode(last).decode(), flush=True)
    else:
        done = info.code == ExitCode.DONE
        print(exit_text(info, folder), file=sys.stdout if done else sys.stderr, flush=True)


def print_refusal(error: ConfigError, output: Output = "plain") -> None:
    """What is wrong with a job that was not started."""
    if output == "json":
        print(msgspec.json.encode({"problems": error.problems}).decode(), flush=True)
        return
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr, flush=True)


def duration(seconds: float | None) -> str:
    """Seconds as h:mm:ss."""
    if seconds is None:
        return "unknown"
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{whole:02d}"


def from_here(path: Path) -> Path:
    """A path as one would type it in the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def process_age_seconds() -> float:
    """Seconds since this command was started, the interpreter's own start included."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:  # not Linux: since the interpreter's clock began
        return time.process_time()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
