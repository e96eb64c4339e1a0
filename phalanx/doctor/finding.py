"""What a check found: a verdict, what was measured, what was expected, and what to do about it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from phalanx.cluster.causes import Cause

Verdict = Literal["pass", "warn", "fail", "skip", "unknown"]
# critical: wrong numbers, or a job that does not run; high: a factor of some rate; medium: percents
# of a step; low: now and then, or only with other trouble.
Severity = Literal["critical", "high", "medium", "low"]
Measured = dict[str, float | int | str]


class MendStep(Struct, frozen=True):
    """One command of a shell that mends something, and the one that takes it back."""

    do: str
    undo: str


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one check.

    ``cause``: of ``cluster/causes.py``, where it failed.
    """

    check: str
    verdict: Verdict
    measured: Measured = {}  # names carry the unit
    expected: str = ""
    suggestion: str = ""
    cause: str = ""
    seconds: float = 0.0  # that the check took
    severity: Severity | Literal[""] = ""
    why: str = ""  # what it costs
    steps: tuple[MendStep, ...] = ()

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {plain(value)}" for name, value in self.measured.items())
        return f"{self.check}: {facts or self.verdict}" + (
            f" (expected {self.expected})" if self.expected else ""
        )


class NodeReport(Struct, frozen=True, kw_only=True):
    """All findings about a node."""

    node: str
    time_ns: int
    depth: Literal["quick", "settings", "full"]
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """A warning does not keep a node from work."""
        return not self.failed

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fail"]

    @property
    def cause(self) -> str:
        """Of the first failure; "" where all is well."""
        return next((finding.cause or Cause.FAILED_CHECK for finding in self.failed), "")

    @property
    def detail(self) -> str:
        """All failures in one line."""
        return "; ".join(str(finding) for finding in self.failed)


def plain(value: float | int | str) -> str:
    """A measured value for a person: three digits, no exponents."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
