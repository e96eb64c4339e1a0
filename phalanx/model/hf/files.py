"""The files of a Hugging Face folder: which holds which tensor, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class HfError(Exception):
    """A Hugging Face folder and a Phalanx model do not fit: where, what, and the rule."""

    def __init__(self, folder: Path | None, problem: str) -> None:
        self.folder = folder
        self.problem = problem
        super().__init__(folder, problem)

    def __str__(self) -> str:
        return self.problem if self.folder is None else f"{self.folder}: {self.problem}"


def tensor_files(folder: Path) -> dict[str, str]:
    """File of every tensor in a folder."""
    try:
        if (folder / INDEX_FILE).exists():
            listed = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
            return _without_another(folder, _inside(folder, listed))
        with safe_open(folder / SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except FileNotFoundError as error:
        if (folder / SINGLE_FILE).exists():  # safetensors says so of a file it may not open
            raise HfError(folder, f"{SINGLE_FILE} may not be read by this user") from error
        raise HfError(folder, f"neither {SINGLE_FILE} nor {INDEX_FILE} is there") from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise HfError(folder, f"the list of tensors cannot be read: {error}") from error


def _without_another(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """A folder's list of tensors, where no file beside it has them too: theirs would be read."""
    if (folder / SINGLE_FILE).exists() and SINGLE_FILE not in files.values():
        problem = f"{SINGLE_FILE} and {INDEX_FILE} are both there, and may be two models"
        raise HfError(folder, f"{problem}: remove the one that is old, with its files")
    return files


def _inside(folder: Path, files: Any) -> dict[str, str]:
    """A folder's list of tensors, whose files are all in it."""
    for name, file in files.items() if isinstance(files, dict) else [("weight_map", None)]:
        if not isinstance(file, str) or "\0" in file:
            raise HfError(folder, f"{INDEX_FILE} names no file for {name}")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise HfError(folder, f"{INDEX_FILE} names {file} for {name}: outside of the folder")
    found: dict[str, str] = files
    return found
