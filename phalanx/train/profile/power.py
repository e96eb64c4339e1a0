"""Power limit and clocks of a GPU, asked for while it works."""

from __future__ import annotations

import subprocess
from typing import Protocol

from phalanx.train.profile.facts import PowerReading

FIELDS = "power.limit,power.default_limit,power.draw,clocks.sm,clocks.max.sm"
SECONDS = 10.0  # after which no answer is awaited


class PowerQuestion(Protocol):
    """Somebody was asked, and answers while steps go on."""

    def answer(self) -> PowerReading | None: ...


class DriverQuestion:
    """``nvidia-smi``, started as a process of its own so that nothing waits for it."""

    def __init__(self, index: int) -> None:
        self._process: subprocess.Popen[str] | None = None
        command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                [*command, f"--id={index}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return  # no driver's tool here: nothing is known

    def answer(self) -> PowerReading | None:
        if self._process is None:
            return None
        try:
            text, _ = self._process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None
        return parse_power(text)


def parse_power(text: str) -> PowerReading | None:
    """A line of the driver's tool; None where a card does not tell one of the values."""
    try:
        values = [float(word) for word in text.strip().split(",")]
        limit, default, draw, clock, highest = values
    except ValueError:
        return None
    return PowerReading(
        limit_watts=limit,
        default_limit_watts=default,
        draw_watts=draw,
        clock_mhz=clock,
        highest_clock_mhz=highest,
    )
