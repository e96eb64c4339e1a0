"""What a machine says of itself: programs and files are read, parsed, and put together.

Parsers are pure functions of text. What reads is a ``Reader``: this machine, or a recorded tree.
"""

from __future__ import annotations

from phalanx.hardware.probe.describe import Known, describe
from phalanx.hardware.probe.description import (
    DriveDescription,
    Fact,
    GpuDescription,
    NicDescription,
    NodeDescription,
    bad_description,
)
from phalanx.hardware.probe.reader import MachineReader, Reader, ReadError
from phalanx.hardware.probe.recorded import HardwareRecorder, RecordedReader

__all__ = [
    "DriveDescription",
    "Fact",
    "GpuDescription",
    "HardwareRecorder",
    "Known",
    "MachineReader",
    "NicDescription",
    "NodeDescription",
    "ReadError",
    "Reader",
    "RecordedReader",
    "bad_description",
    "describe",
]
