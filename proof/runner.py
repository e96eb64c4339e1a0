"""Measures a claim: waits for quiet cores, runs its command, reads the figures that it reports."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from proof.claim import Claim, Need, Verdict, judge
from proof.history import ROOT, Measurement, reference, this_commit, usual_pace
from proof.machine import (
    MOST_WAIT_SECONDS,
    QUIET_SHARE,
    busy_share,
    machine_name,
    pace_seconds,
    wait_until_quiet,
)
from proof.report import FIGURES_VARIABLE

LAST_LINES = 15  # of a command that failed
PATIENCE = 10  # times the minutes that a claim says it takes
SETTLE_SECONDS = 2.0  # what the command started may still be ending
SHORT_WAIT_SECONDS = 5.0  # where the cores were busy before
SLOW_MACHINE = 1.1  # times: worth a line
MOST_SLOWER = 2.0  # times: a machine slower than that proves nothing
AGAIN = 2  # further attempts of a figure that fell: noise passes, a regression stays


@dataclass
class Outcome:
    """A claim that was measured, or why it was not."""

    claim: Claim
    measurement: Measurement | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    error: str = ""
    output: str = ""  # the last lines of its command

    @property
    def failed(self) -> bool:
        return bool(self.error) or any(verdict.problem for verdict in self.verdicts)


class Prover:
    """Measures claims one after the other; where the cores stay busy it does not wait each time."""

    def __init__(self, history: list[Measurement]) -> None:
        self._history = history
        self._wait_seconds = MOST_WAIT_SECONDS
        self._usual_pace = usual_pace(history, machine_name())

    def prove(self, claim: Claim) -> Outcome:
        """Measure a claim; again where a figure that depends on the machine fell.

        Not on a GPU: its time is dear, and nobody else is on it."""
        before = reference(self._history, claim.name, machine_name())
        again = 0 if Need.CUDA in claim.needs else AGAIN
        for attempt in range(1 + again):
            outcome = self._measure(claim, before)
            fallen = [verdict for verdict in outcome.verdicts if verdict.may_be_noise]
            if not fallen or attempt == again:
                break
            worst = "; ".join(f"{v.figure.name} {v.words}, {v.problem}" for v in fallen)
            print(f"    {worst}: measured again", flush=True)
        return outcome

    def _measure(self, claim: Claim, before: dict[str, float]) -> Outcome:
        quiet_needed = Need.QUIET in claim.needs
        busy = wait_until_quiet(self._wait_seconds) if quiet_needed else 0.0
        if busy > QUIET_SHARE:
            self._wait_seconds = SHORT_WAIT_SECONDS
        pace = pace_seconds() if quiet_needed else 0.0
        began = time.monotonic()
        try:
            figures, output = run_command(claim)
        except CommandError as error:
            return Outcome(claim, error=str(error))
        seconds = time.monotonic() - began
        if quiet_needed:
            time.sleep(SETTLE_SECONDS)
            busy = max(busy, busy_share())
            pace = max(pace, pace_seconds())
        measurement = Measurement(
            claim=claim.name,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            commit=this_commit(),
            machine=machine_name(),
            busy=round(busy, 3),
            trusted=busy <= QUIET_SHARE,
            seconds=round(seconds, 1),
            figures=figures,
            pace=round(pace, 4),
            command=claim.command,
        )
        slower = self._slower(pace)
        if slower > SLOW_MACHINE:
            print(f"    this machine is {slower:.2f}× slower than usual: so may times be")
        verdicts = judge(claim, figures, before, trusted=measurement.trusted, slower=slower)
        return Outcome(claim, measurement, verdicts, output=output)

    def _slower(self, pace: float) -> float:
        """By what factor this machine is slower than such machines usually are; at least 1."""
        if not pace or not self._usual_pace:
            return 1.0
        return min(MOST_SLOWER, max(1.0, pace / self._usual_pace))


class CommandError(Exception):
    """A claim's command that did not come to report its figures."""


def run_command(claim: Claim) -> tuple[dict[str, float], str]:
    """The figures that the command reports, and its last lines, shown only where one fails."""
    with tempfile.TemporaryDirectory(prefix="phalanx-proof-") as folder:
        path, log = Path(folder) / "figures.json", Path(folder) / "log"
        environment = os.environ | {FIGURES_VARIABLE: str(path), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    arguments(claim.command),
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=60 * PATIENCE * claim.minutes,
                    check=False,
                )
            except subprocess.TimeoutExpired as late:
                words = f"not done after {late.timeout:.0f} s"
                raise CommandError(f"{words}\n{_tail(log)}") from late
        if not path.exists():
            words = f"exit code {done.returncode} and no figures"
            raise CommandError(f"{words}\n{_tail(log)}")
        figures: dict[str, float] = json.loads(path.read_text())
        names = [figure.name for figure in claim.figures if figure.name in figures]
        return {name: figures[name] for name in names}, _tail(log)


def arguments(command: str) -> list[str]:
    """The command's words, with this environment's own interpreter and scripts."""
    words = shlex.split(command)
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return [str(Path(sys.executable).parent / words[0]), *words[1:]]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"    | {line}" for line in lines)
