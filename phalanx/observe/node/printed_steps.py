"""Steps that a program prints: read from its output, as training libraries are known to write them.

A library is recognised by lines that only it writes; until then, and of anything else, nothing is
believed. What is found is for people, the ledger and estimates: nobody is judged by it, since a
library may print every step or every thousandth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from phalanx.train.report.records import StepParts, StepRecord

PRINTED = "as the program prints it"  # the basis of such a record
MOST_STEP = 1 << 53
LINE_CHARS = 2_000  # of a line that are looked at

_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_BAR = (
    r"\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<steps>\d+) \[[^\]]*?(?:it/s|s/it)(?:, (?P<rest>[^\]]*))?\]"
)

HF_LOSS = re.compile(r"'(?:train_)?loss': ")
HF_BAR = re.compile(rf"^\s*{_BAR}")
LIGHTNING = re.compile(rf"^Epoch (?P<epoch>\d+):\s+{_BAR}")
TORCHTITAN = re.compile(r"\bstep:\s*(?P<step>\d+)\s+loss:\s*\S+")
MEGATRON = re.compile(r"^\s*(?:\[[^\]]*\] )?iteration\s+(?P<step>\d+)/\s*(?P<steps>\d+)\s*\|")
DEEPSPEED = re.compile(r"\[Rank 0\] step=(?P<step>\d+), skipped=\d+, lr=\[")
NANOGPT = re.compile(r"^iter (?P<step>\d+): loss \S+, time ")


class PrintedStep(NamedTuple):
    """What one line says; None: it does not say that."""

    step: int
    steps: int = 0  # that the run has in all; 0: it does not say
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None


class StepLines:
    """The output of one start of a program."""

    def __init__(self) -> None:
        self.library = ""  # that was recognised
        self._rest = ""
        self._step = 0  # newest that was given out
        self._bar: tuple[int, int] = (0, 0)  # of transformers: step and all steps
        self._logs = ""  # and its numbers, printed beside the bar

    def feed(self, text: str) -> list[PrintedStep]:
        """The steps in some more output, oldest first; none is given out twice."""
        lines = re.split(r"[\r\n]", self._rest + text)
        self._rest = lines.pop()[-LINE_CHARS:]
        steps: list[PrintedStep] = []
        for line in lines:
            printed = self._line(_COLOUR.sub("", line[:LINE_CHARS]))
            if printed is not None and self._step < printed.step < MOST_STEP:
                self._step = printed.step
                steps.append(printed)
        return steps

    def _line(self, line: str) -> PrintedStep | None:
        for library, read in READERS.items():
            if self.library in ("", library) and (printed := read(line)) is not None:
                self.library = library
                return printed
        return self._transformers(line) if self.library in ("", "transformers") else None

    def _transformers(self, line: str) -> PrintedStep | None:
        """Its progress bar counts steps, and only lines beside it tell that it is its."""
        if match := HF_BAR.match(line):
            bar = int(match["step"]), int(match["steps"])
            if self.library and bar[1] != self._bar[1]:
                return None  # of an evaluation
            self._bar = bar
        elif _is_logs(line):
            self.library, self._logs = "transformers", line
        else:
            return None
        step, steps = self._bar
        if not self.library or not step:
            return None
        logs, self._logs = self._logs, ""
        return PrintedStep(
            step,
            steps,
            _value(logs, "'loss'"),
            _value(logs, "'grad_norm'"),
            _value(logs, "'learning_rate'"),
        )


def _is_logs(text: str) -> bool:
    """Whether a line is a dictionary as its Trainer prints it, with the loss and then the epoch."""
    loss = HF_LOSS.search(text) if text.startswith("{") and text.endswith("}") else None
    return loss is not None and text.rfind("'epoch': ") >= loss.end()


def _lightning(line: str) -> PrintedStep | None:
    if not (match := LIGHTNING.match(line)):
        return None
    step, steps, rest = int(match["step"]), int(match["steps"]), match["rest"] or ""
    loss = _value(rest, r"\b(?:train_)?loss(?:_step)?")
    return PrintedStep(int(match["epoch"]) * steps + step, 0, loss)


def _torchtitan(line: str) -> PrintedStep | None:
    if not (match := TORCHTITAN.search(line)):
        return None
    return PrintedStep(
        int(match["step"]),
        0,
        _value(line, r"\bloss"),
        _value(line, r"\bgrad_norm"),
        None,
        _value(line, r"\btps"),
    )


def _megatron(line: str) -> PrintedStep | None:
    if not (match := MEGATRON.match(line)):
        return None
    return PrintedStep(
        int(match["step"]),
        int(match["steps"]),
        _value(line, r"\blm loss"),
        _value(line, r"\bgrad norm"),
        _value(line, r"\blearning rate"),
    )


def _deepspeed(line: str) -> PrintedStep | None:
    if not (match := DEEPSPEED.search(line)):
        return None
    return PrintedStep(int(match["step"]), learning_rate=_value(line, r"\blr", opens=r"\["))


def _nanogpt(line: str) -> PrintedStep | None:
    if not (match := NANOGPT.match(line)):
        return None
    return PrintedStep(int(match["step"]), 0, _value(line, r"\bloss"))


READERS: dict[str, Callable[[str], PrintedStep | None]] = {
    "lightning": _lightning,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "nanogpt": _nanogpt,
}


def _value(text: str, name: str, opens: str = "") -> float | None:
    """The number behind a name; None: there is none."""
    match = re.search(rf"{name}[:= ]\s*{opens}'?(?P<number>{_NUMBER})", text)
    return float(match["number"].replace(",", "")) if match else None


def step_record(
    printed: PrintedStep, job: int, generation: int, rank: int, seconds: float
) -> StepRecord:
    """A printed step as others are recorded; ``seconds``: of a step, as lines follow each other."""
    rate = printed.tokens_per_second or 0.0
    loss = printed.loss
    return StepRecord(
        job=str(job),
        generation=generation,
        rank=rank,
        step=printed.step,
        first_sample=0,
        samples=0,
        tokens=round(rate * seconds),
        tokens_seen=0,
        loss=loss,
        grad_norm=printed.grad_norm,
        learning_rate=printed.learning_rate or 0.0,
        step_seconds=seconds,
        parts=StepParts(),
        tokens_per_second=rate,
        mfu=None,
        hfu=None,
        mfu_basis=PRINTED,
        peak_memory_bytes=0,
        eta_seconds=None,
        skipped=False,
        non_finite=loss is not None and not math.isfinite(loss),
    )
