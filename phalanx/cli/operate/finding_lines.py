"""Findings of the doctor for a person at a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from phalanx.cli.tables import plain as harmless
from phalanx.doctor.finding import Finding, plain

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red", "unknown": "cyan", "skip": "dim"}


def show_finding(finding: Finding) -> None:
    """What was measured; of what is not well also what was expected and what to do."""
    if finding.verdict == "skip" and "." in finding.check:
        return  # a setting that this machine does not have
    facts = ", ".join(f"{name} {plain(value)}" for name, value in finding.measured.items())
    colour, console = COLOURS[finding.verdict], Console(soft_wrap=True, highlight=False)
    console.print(
        f"[{colour}]{finding.verdict:8}[/]{_shown(finding.check):28}{_shown(facts)}"
        + (f"  [dim]{_shown(finding.expected)}[/]" if finding.verdict == "skip" else "")
    )
    if finding.verdict in ("warn", "fail"):
        severity = f" ({finding.severity})" if finding.severity else ""
        console.print(f"        expected {_shown(finding.expected)}{severity}")
        for line in filter(None, (finding.why, finding.suggestion)):
            console.print(f"        {_shown(line)}")


def _shown(text: str) -> str:
    """What was read of a machine steers no terminal."""
    return escape(harmless(text))
