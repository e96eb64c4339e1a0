"""Whose run a folder holds: job 1 of a new server must not go on in the folder of an old one's."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

OWNER = "owner"  # the file that names it, made together with the folder


def own_run_folder(folder: Path, owner: str, generation: int) -> Path:
    """The folder itself, or one beside it where the folder is another owner's.

    All ranks of all generations come to the same one, without a word to each other: whoever comes
    first makes the folder and its mark in one step, and nobody changes the mark.
    """
    beside = folder.with_name(f"{folder.name}-{owner[:8]}")
    try:
        if beside.exists() or not _is_own(folder, owner, generation):
            return beside
    except OSError:
        pass  # what comes next needs the folder, too, and says what is wrong with it
    return folder


def _is_own(folder: Path, owner: str, generation: int) -> bool:
    mark = folder / OWNER
    try:
        return mark.read_text() == owner
    except FileNotFoundError:
        if folder.exists():
            if mark.exists():  # made since, by another rank
                return mark.read_text() == owner
            return generation > 1  # made before there were marks
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        (draft / OWNER).write_text(owner)
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not mark.exists():
            raise
    return mark.read_text() == owner
