"""How a node is set up: versions, and settings as doctor's checks see them, to be compared."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from phalanx import __version__
from phalanx.doctor.finding import Finding, plain

MOST_VERSIONS, MOST_SETTINGS, MOST_LETTERS = 64, 256, 512
# What these checks measure changes by itself: only their verdict is a setting.
CHANGING = (
    *("os.clock", "os.interrupts", "os.cgroup_memory", "os.hugepages", "os.overlay"),
    *("gpu.throttle", "gpu.temperature", "gpu.ecc", "gpu.remap", "gpu.pcie_replays"),
    *("gpu.nvlink_errors", "network.errors", "network.retransmits", "network.hostname"),
    # Interfaces of containers come and go.
    *("storage.mount_type", "network.interface"),
)


class NodeSetup(Struct, frozen=True, kw_only=True):
    """How a node is set up: versions, and what doctor's checks say of its settings."""

    versions: dict[str, str]
    settings: dict[str, str]  # by check: "pass", "warn: enabled always"


def read_setup(folder: Path, recorded: Path | None = None) -> NodeSetup:
    """The versions and settings of this machine, or of a recorded one."""
    # Imported here: a server only takes in what was read.
    from phalanx.doctor.checks.registry import SETTINGS
    from phalanx.doctor.checks.run import Source, check_settings, open_evidence

    source = Source(folder=folder, environment=dict(os.environ), recorded=recorded)
    with open_evidence(source) as evidence:
        findings = list(check_settings(evidence, tuple(SETTINGS)))
        packages = evidence.process.packages
    versions = {"phalanx": __version__, "python": platform.python_version(), **packages}
    return NodeSetup(versions=versions, settings=settings_of(findings))


def settings_of(findings: Iterable[Finding]) -> dict[str, str]:
    """What can be compared between nodes: verdicts, and values that somebody set."""
    return {
        finding.check: _setting(finding)
        for finding in findings
        if finding.verdict not in ("skip", "unknown")
    }


def _setting(finding: Finding) -> str:
    if finding.check in CHANGING:
        return finding.verdict
    values = [
        f"{name} {plain(value)}"
        for name, value in finding.measured.items()
        if not isinstance(value, float)
    ]
    text = f"{finding.verdict}: {', '.join(values)}" if values else finding.verdict
    # One that is too long would have the server refuse all of them.
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def bad_setup(setup: NodeSetup) -> str:
    """What is wrong with a setup that somebody sent; "": nothing."""
    for name, most in (("versions", MOST_VERSIONS), ("settings", MOST_SETTINGS)):
        values: dict[str, str] = getattr(setup, name)
        if len(values) > most:
            return f"{name}: at most {most}"
        for key, value in values.items():
            if max(len(key), len(value)) > MOST_LETTERS:
                return f"{name}: {key[:40]!a}: at most {MOST_LETTERS} letters"
    return ""
