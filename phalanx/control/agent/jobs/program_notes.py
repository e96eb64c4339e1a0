"""What an agent notes of the programs that it starts, for the agent after it.

Our own trainer says who it is when an agent is back; a user's program says nothing. The note lies
beside the job's folder, which belongs to the job's user.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct


class ProgramNote(Struct, frozen=True, kw_only=True):
    """One generation of a program on this node."""

    job: int
    generation: int
    ranks: tuple[int, ...]  # by index
    payload: str
    user: str = ""  # whom it runs as, where the agent is root
    gpus: int = 0
    restored: int = 0


def note_program(folder: Path, note: ProgramNote) -> None:
    """Remember a program that is about to start; ``folder``: the job's."""
    path = _path(folder)
    draft = path.with_name(f"{path.name}.tmp")
    with suppress(OSError):  # a job does not fail for what only another agent would need
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(note))
        draft.rename(path)


def noted_programs(jobs: Path) -> list[ProgramNote]:
    """The programs that an earlier agent has started, and not seen to the end of their job."""
    notes = []
    for path in sorted(jobs.glob("*.program")):
        with suppress(OSError, msgspec.MsgspecError):
            notes.append(msgspec.json.decode(path.read_bytes(), type=ProgramNote))
    return notes


def forget_program(folder: Path) -> None:
    """Its job is over here."""
    with suppress(OSError):
        _path(folder).unlink(missing_ok=True)


def _path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.program")
