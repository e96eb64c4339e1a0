"""A controller's log as a recording: written by a simulation, read without a running server."""

from __future__ import annotations

from pathlib import Path

MARK = "recording.json"  # in a state folder: its log is read, and no server is asked


def is_recording(folder: Path) -> bool:
    """Whether a state folder is a recording."""
    return (folder / MARK).exists()
