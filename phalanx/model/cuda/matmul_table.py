"""Which algorithm won for a matmul, by device and library: shipped with us, or found here before.

A shipped table is one file of all shapes that were timed on a card under load; what a job times
itself lies in a folder, a file a shape, so that ranks write without asking each other.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

SHIPPED = "tables"  # folder beside this file: <anything>.toml, each for one device and library

log = logging.getLogger(__name__)


class Tuned(NamedTuple):
    """What timing came to."""

    algorithm: tuple[int, ...]  # cublasLtMatmulAlgo_t as the library gave it
    workspace: int  # bytes that it needs
    microseconds: float


class MatmulTable:
    """Choices for one device and one version of the library; a problem is named by a text."""

    def __init__(self, device: str, version: int, folder: Path | None) -> None:
        self.device, self.version, self.folder = device, version, folder
        self._shipped = shipped(device, version)

    def find(self, problem: str) -> Tuned | None:
        """What was chosen for a problem: here before, else where the table was made."""
        if self.folder is not None:
            try:
                stored = json.loads(self._file(problem).read_bytes())
                if stored.pop("problem") == self._named(problem):
                    return _tuned(stored)
            except FileNotFoundError:
                pass
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("a matmul is timed again, its file is damaged: %s", error)
        return self._shipped.get(problem)

    def remember(self, problem: str, tuned: Tuned) -> None:
        """Keep a choice for the next start; a disk that takes nothing costs only that."""
        if self.folder is None:
            return
        path = self._file(problem)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        content = {"problem": self._named(problem), **tuned._asdict()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(content))
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            log.warning("the choice of a matmul is not kept: %s", error)

    def _named(self, problem: str) -> list[str | int]:
        return [self.device, self.version, problem]

    def _file(self, problem: str) -> Path:
        assert self.folder is not None
        named = json.dumps(self._named(problem)).encode()
        return self.folder / f"{hashlib.blake2b(named, digest_size=8).hexdigest()}.json"


@functools.cache
def shipped(device: str, version: int) -> dict[str, Tuned]:
    """The shipped choices for a device and library, by problem; {} where there are none."""
    folder = resources.files(__package__) / SHIPPED
    files: list[Traversable] = list(folder.iterdir()) if folder.is_dir() else []
    for file in files:
        if file.name.endswith(".toml"):
            table = tomllib.loads(file.read_text())
            if (table["device"], table["library"]) == (device, version):
                return {name: _tuned(entry) for name, entry in table["matmuls"].items()}
    return {}


def written(device: str, version: int, fastest: dict[str, Tuned]) -> str:
    """The text of a table to ship."""
    lines = [f"device = {json.dumps(device)}", f"library = {version}", "", "[matmuls]"]
    for problem, tuned in sorted(fastest.items()):
        words = ", ".join(f'"{word:x}"' for word in tuned.algorithm)
        lines.append(
            f'"{problem}" = {{ algorithm = [{words}], workspace = {tuned.workspace}, '
            f"microseconds = {tuned.microseconds:.1f} }}"
        )
    return "\n".join(lines) + "\n"


def _tuned(entry: dict[str, object]) -> Tuned:
    """From a file; numbers of 64 bits are hexadecimal in TOML, which has no larger than 63."""
    words, workspace, time = (entry[name] for name in Tuned._fields)
    assert isinstance(words, list) and isinstance(workspace, int) and isinstance(time, int | float)
    numbers = tuple(int(word, 16) if isinstance(word, str) else int(word) for word in words)
    return Tuned(numbers, workspace, float(time))
