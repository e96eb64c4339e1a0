"""Whose job a node's folder of a number is: a new server's job 1 is not the old one's."""

from __future__ import annotations

import hmac
from contextlib import suppress
from pathlib import Path

from phalanx.control.agent.jobs.program_notes import forget_program
from phalanx.control.agent.spawn.log_keeping import move_logs, owner_path


def run_owner(key: bytes) -> str:
    """What tells a job from those of other servers with its number, of the key of its keepers."""
    return hmac.digest(key, b"run folder", "sha256").hex()[:16]


def own_job_folder(folder: Path, owner: str) -> Path | None:
    """Have a folder be this job's own; where another server's job of the number had it, that goes
    beside it, with its logs and what its program left. Returns where; None: it was ours.

    A folder without a mark is that of a job that ran before there were marks.
    """
    mark = owner_path(folder)
    before = mark.read_text() if mark.exists() else ""
    if before == owner:
        return None
    aside = None
    if before:
        aside = _free(folder.with_name(f"{folder.name}-{before[:8]}"))
        forget_program(folder)
        move_logs(folder, aside)
        folder.mkdir(mode=0o755)
    with suppress(OSError):  # a job does not fail for what only the next server would need
        draft = mark.with_name(f"{mark.name}.tmp")
        draft.write_text(owner)
        draft.rename(mark)
    return aside


def _free(path: Path) -> Path:
    """The path, or one with a number where a third server's job has taken it."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
