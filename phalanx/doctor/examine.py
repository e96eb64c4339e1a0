"""What a person asks of a node: settings and measurements in one report."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct, structs

from phalanx.doctor.checks.check import Profile
from phalanx.doctor.checks.run import Source, check_settings, open_evidence
from phalanx.doctor.finding import Finding, NodeReport
from phalanx.doctor.node import CheckOptions, check_node
from phalanx.doctor.selection import Selection


class Request(Struct, frozen=True, kw_only=True):
    """Which checks, of what, and how."""

    selection: Selection
    options: CheckOptions
    source: Source
    profiles: tuple[Profile, ...] = ()  # none: as the evidence shows them


def examine(request: Request, say: Callable[[Finding], None] = lambda _: None) -> NodeReport:
    """All findings; ``say`` hears of each as it is made."""
    selection, source = request.selection, request.source
    # Measurements first: they fork, and reading settings makes threads. A recorded machine
    # cannot be measured.
    measured = selection.measured if source.recorded is None else ()
    report = check_node(request.options, measured, say)
    findings = list(report.findings)
    if selection.settings:
        with open_evidence(source) as evidence:
            for finding in check_settings(evidence, selection.settings, request.profiles):
                findings.append(finding)
                say(finding)
    depth = "settings" if selection.settings and selection.short else report.depth
    return structs.replace(report, findings=findings, depth=depth, time_ns=time.time_ns())
