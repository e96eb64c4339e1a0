"""Runs checks of settings on a machine, or on a recorded one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from phalanx.doctor.checks.check import Profile, decide, profiles_of
from phalanx.doctor.checks.evidence import (
    PROCESS_FILE,
    NodeEvidence,
    read_process,
    recorded_process,
)
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.finding import Finding
from phalanx.hardware.probe import HardwareRecorder, MachineReader, RecordedReader


class Source(Struct, frozen=True, kw_only=True):
    """Where evidence comes from: this machine, or a folder that was recorded."""

    folder: Path  # that a job would work in
    environment: dict[str, str] = {}  # that the person has
    recorded: Path | None = None
    record: Path | None = None  # what is read is written down there


def check_settings(
    evidence: NodeEvidence, names: tuple[str, ...], profiles: tuple[Profile, ...] = ()
) -> Iterator[Finding]:
    """Findings of the checks named; without profiles, as the evidence shows them."""
    chosen = [SETTINGS[name] for name in names]
    if evidence.has_gpus:  # no program is started for what is not there
        evidence.start(command for check in chosen for command in check.commands)
    profiles = profiles or profiles_of(evidence)
    for check in chosen:
        began = time.perf_counter()
        finding = decide(check, evidence, profiles)
        yield structs.replace(finding, seconds=round(time.perf_counter() - began, 4))


@contextmanager
def open_evidence(source: Source) -> Iterator[NodeEvidence]:
    """Evidence of a source; what is to be recorded is complete when it is closed."""
    if source.recorded is not None:
        reader = RecordedReader(source.recorded)
        with NodeEvidence(reader, recorded_process(source.recorded)) as evidence:
            yield evidence
        return
    process = read_process(source.folder, source.environment)
    if source.record is None:
        with NodeEvidence(MachineReader(), process) as evidence:
            yield evidence
        return
    recorder = HardwareRecorder(MachineReader(), source.record)
    with NodeEvidence(recorder, process) as evidence:
        yield evidence
    (source.record / PROCESS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(process)))
    recorder.close()
