"""Where a description comes from: options, the site's file, the engine, and the machine."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.control.agent.description.labels import read_labels
from phalanx.control.host.node_facts import NodeFacts
from phalanx.hardware.probe.describe import Known, describe
from phalanx.hardware.probe.description import OPTION, Fact, NodeDescription
from phalanx.hardware.probe.kubernetes_labels import label_facts
from phalanx.hardware.probe.reader import (
    PROGRAM_SECONDS,
    MachineReader,
    Reader,
    ReadError,
    linked,
    listed,
    read,
)
from phalanx.hardware.probe.recorded import HardwareRecorder, RecordedReader
from phalanx.hardware.probe.site_file import GivenDescription, read_site, site_facts


class DescriptionSources(Struct, frozen=True, kw_only=True):
    """All sources of one node's description."""

    told: tuple[Fact, ...] = ()  # options and the engine's variables
    hardware: str = ""  # folder of recorded hardware, instead of this machine
    site_file: str = ""
    labels_file: str = ""  # of the Kubernetes node
    program_seconds: float = PROGRAM_SECONDS

    def reader(self) -> Reader:
        """What reads: this machine, or the recorded one; ConfigError where there is none."""
        if self.hardware:
            return RecordedReader(Path(self.hardware))
        return MachineReader(self.program_seconds)

    def checked(self) -> DescriptionSources:
        """Itself; ConfigError where a file or folder that was named cannot be used."""
        self.reader()
        if self.site_file:
            read_site(Path(self.site_file))
        return self

    def known(self, name: str, before: NodeDescription | None) -> tuple[Known, list[str]]:
        """What is known before the machine is read, and what of it could not be."""
        facts, unread = list(self.told), []
        if self.site_file:
            try:
                facts += site_facts(read_site(Path(self.site_file)), name)
            except ConfigError as error:
                unread.append(str(error))
        try:
            # What labels say of its rack is more than that the node may fail as a whole.
            facts = [*label_facts(read_labels(self.labels_file, os.environ)), *facts]
        except ReadError as error:
            unread.append(str(error))
        return Known(facts=tuple(facts), before=before), unread

    def describe(
        self, name: str, before: NodeDescription | None, record: Path | None = None
    ) -> NodeDescription:
        """Reads everything, into a folder if asked; takes as long as the slowest program may."""
        known, unread = self.known(name, before)
        reader = self.reader()
        recorder = HardwareRecorder(reader, record) if record is not None else None
        found = describe(recorder or reader, known)
        if recorder is not None:
            recorder.close()
        return structs.replace(found, unread=(*unread, *found.unread))

    def fingerprint(self) -> tuple[str, ...]:
        """What changes where a machine does, read in a moment and without any program."""
        marks = [_stamp(path) for path in (self.site_file, self.labels_file) if path]
        if self.hardware:
            files = sorted(path for path in Path(self.hardware).rglob("*") if path.is_file())
            return (*marks, *(f"{path} {_stamp(str(path))}" for path in files))
        reader = MachineReader()
        marks += [*listed(reader, "/dev", "nvidia*"), read(reader, "/proc/driver/nvidia/version")]
        for name in listed(reader, "/sys/class/net"):
            folder = f"/sys/class/net/{name}"
            if linked(reader, f"{folder}/device"):
                marks += [
                    name,
                    read(reader, f"{folder}/operstate"),
                    read(reader, f"{folder}/speed"),
                ]
        for name in listed(reader, "/sys/class/infiniband"):
            for port in listed(reader, f"/sys/class/infiniband/{name}/ports"):
                folder = f"/sys/class/infiniband/{name}/ports/{port}"
                marks += [name, read(reader, f"{folder}/state"), read(reader, f"{folder}/rate")]
        return tuple(marks)


def told_facts(options: GivenDescription, engine: str, facts: NodeFacts) -> tuple[Fact, ...]:
    """What options say, then what the engine's variables say."""
    said = []
    for key in GivenDescription.__struct_fields__:
        value = getattr(options, key)
        if value:
            text = ",".join(value) if isinstance(value, tuple) else value
            said.append(Fact(key, text, OPTION))
    places = {key: getattr(facts, key) for key in ("leaf", "pod", "rack")}
    return (*said, *(Fact(key, value, engine) for key, value in places.items() if value))


def _stamp(path: str) -> str:
    try:
        status = Path(path).stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns} {status.st_size}"
