"""Whose run a folder holds: job 1 of a new server must not go on in the folder of an old one's."""

from __future__ import annotations

from pathlib import Path

from phalanx.train.report.run_folder import OWNER, make_owned


def own_run_folder(folder: Path, owner: str, generation: int) -> Path:
    """The folder itself, or one beside it where the folder is another owner's.

    All ranks of all generations come to the same one, without a word to each other: in the first
    generation whoever comes first makes the folder and its mark, and nobody changes the mark. Later
    a folder that is missing may be on storage that is away: whoever begins makes it
    (``enter_folder``), and whoever goes on waits for it.
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
    if generation > 1:
        return True
    make_owned(folder, owner)
    return mark.read_text() == owner
