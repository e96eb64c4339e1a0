"""How hardware is read: programs with a time limit, files, folders, links."""

from __future__ import annotations

import fnmatch
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Protocol

PROGRAM_SECONDS = 10.0  # without persistence mode nvidia-smi has to start the driver first
END_SECONDS = 0.2  # for a killed program to go; one that hangs in the kernel is left there
# With 14 nvidia-smi says that a card's infoROM is damaged, after all that it was asked for.
ANSWERS_ALL_THE_SAME = (("nvidia-smi", 14),)
MOST_BYTES, PIECE_BYTES = 4 << 20, 64 << 10


class ReadError(Exception):
    """Something could not be read, and why."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.why = what, why


class NotThereError(ReadError):
    """The program is not installed, or there is no such file."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "not there")


class Reader(Protocol):
    """Where facts are read; every method raises ReadError where it cannot."""

    def run(self, *command: str) -> str:
        """What a program prints."""

    def text(self, path: str) -> str:
        """What a file has, without white space around it."""

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """What a folder has, sorted; nothing where there is no such folder."""

    def link(self, path: str) -> str:
        """The last name of what a link leads to."""


class MachineReader:
    """This machine."""

    def __init__(self, program_seconds: float = PROGRAM_SECONDS) -> None:
        self._seconds = program_seconds

    def run(self, *command: str) -> str:
        """What a program prints; one that does not end in time is killed, and not waited for."""
        shown = " ".join(command)
        program = shutil.which(command[0])
        if program is None:
            raise NotThereError(command[0])
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError as error:
            raise ReadError(shown, error.strerror or str(error)) from None
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            raise ReadError(shown, f"did not end within {self._seconds:g} s") from None
        text = output[:MOST_BYTES].decode(errors="replace")
        if process.returncode and (command[0], process.returncode) not in ANSWERS_ALL_THE_SAME:
            last = (text.strip().splitlines() or [""])[-1][:200]
            raise ReadError(shown, f"ended with {process.returncode}: {last}".rstrip(": "))
        return text

    def text(self, path: str) -> str:
        """What a file has."""
        try:
            with Path(path).open("rb", buffering=0) as file:
                data = b""
                # Files below /proc/sys refuse to be read in one large piece.
                while len(data) < MOST_BYTES and (piece := file.read(PIECE_BYTES)):
                    data += piece
                return data.decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            raise NotThereError(path) from None
        except OSError as error:
            raise ReadError(path, error.strerror or str(error)) from None

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """What a folder has."""
        try:
            names = [path.name for path in Path(folder).iterdir()]
            return sorted(fnmatch.filter(names, pattern))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ReadError(folder, error.strerror or str(error)) from None

    def link(self, path: str) -> str:
        """The last name of what a link leads to."""
        try:
            return Path(path).readlink().name
        except (FileNotFoundError, NotADirectoryError):
            raise NotThereError(path) from None
        except OSError as error:
            raise ReadError(path, error.strerror or str(error)) from None


def read(reader: Reader, path: str) -> str:
    """A file's text; "" where it cannot be read."""
    with suppress(ReadError):
        return reader.text(path)
    return ""


def linked(reader: Reader, path: str) -> str:
    """The last name of what a link leads to; "" where there is none."""
    with suppress(ReadError):
        return reader.link(path)
    return ""


def listed(reader: Reader, folder: str, pattern: str = "*") -> list[str]:
    """What a folder has; nothing where it cannot be read."""
    with suppress(ReadError):
        return reader.names(folder, pattern)
    return []


def number(text: str) -> int:
    """The whole number that a text begins with; 0: none."""
    digits = ""
    for letter in text.strip():
        if letter not in "0123456789":  # others are digits for Python, and no number
            break
        digits += letter
    return int(digits) if digits and len(digits) < 19 else 0
