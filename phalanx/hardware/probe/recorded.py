"""Recorded hardware: a folder that stands for a machine, and how one is made.

``commands/`` has what each program printed, one file a command line; ``sysfs.txt`` has files of one
line (``/path = text``), links (``/path -> name``) and names in folders (``/path``); ``files/`` has
files of several lines at their own paths.
"""

from __future__ import annotations

import fnmatch
import re
import threading
from pathlib import Path

from phalanx.config import ConfigError
from phalanx.hardware.probe.reader import NotThereError, Reader, ReadError

COMMANDS, SYSFS, FILES = "commands", "sysfs.txt", "files"
FAILED = "# failed: "  # first line of what a program left that did not work


def command_file(command: tuple[str, ...]) -> str:
    """The name of the file with what a command printed."""
    return re.sub(r"[^\w.,=-]+", "_", " ".join(command))


class RecordedReader:
    """Reads a recorded tree; what was not recorded is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._folders: dict[str, set[str]] = {}
        if not folder.is_dir():
            rule, fix = (
                "no folder of recorded hardware",
                "make one with `phalanx describe --record`",
            )
            raise ConfigError("hardware", str(folder), rule, fix)
        sysfs = folder / SYSFS
        for line in sysfs.read_text().splitlines() if sysfs.exists() else ():
            if match := re.match(r"(/[^\s]*)(?: (=|->) ?(.*))?$", line):
                path, sort, value = match.groups()
                if sort:
                    (self._texts if sort == "=" else self._links)[path] = value
                self._note(path)
        files = folder / FILES
        for file in sorted(files.rglob("*")):
            if file.is_file():
                path = f"/{file.relative_to(files).as_posix()}"
                self._texts[path] = file.read_text(errors="replace").strip()
                self._note(path)

    def _note(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        while parent:
            self._folders.setdefault(parent, set()).add(name)
            parent, _, name = parent.rpartition("/")

    def run(self, *command: str) -> str:
        """What the program printed then."""
        try:
            text = (self._folder / COMMANDS / command_file(command)).read_text(errors="replace")
        except OSError:
            raise NotThereError(command[0]) from None
        if text.startswith(FAILED):
            raise ReadError(" ".join(command), text[len(FAILED) :].strip())
        return text

    def text(self, path: str) -> str:
        """What the file had then."""
        if path not in self._texts:
            raise NotThereError(path)
        return self._texts[path]

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """What the folder had then."""
        return sorted(fnmatch.filter(self._folders.get(folder.rstrip("/"), ()), pattern))

    def link(self, path: str) -> str:
        """What the link led to then."""
        if path not in self._links:
            raise NotThereError(path)
        return self._links[path].rpartition("/")[2]


class HardwareRecorder:
    """Reads as another reader does, and writes down what it was told."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self._reader, self._folder = reader, folder
        self._lines: dict[str, str] = {}
        self._lock = threading.Lock()  # programs run side by side
        try:
            (folder / COMMANDS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError("record", str(folder), why, "name a folder of yours") from None

    def run(self, *command: str) -> str:
        """Runs a program and keeps what it prints."""
        file = self._folder / COMMANDS / command_file(command)
        try:
            text = self._reader.run(*command)
        except NotThereError:
            raise
        except ReadError as error:
            file.write_text(f"{FAILED}{error.why}\n")
            raise
        file.write_text(text)
        return text

    def text(self, path: str) -> str:
        """Reads a file and keeps it."""
        text = self._reader.text(path)
        if "\n" in text:
            file = self._folder / FILES / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        else:
            self._keep(path, f"{path} = {text}")
        return text

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Lists a folder and keeps the names."""
        names = self._reader.names(folder, pattern)
        with self._lock:
            for name in names:
                self._lines.setdefault(f"{folder}/{name}", f"{folder}/{name}")
        return names

    def link(self, path: str) -> str:
        """Reads a link and keeps it."""
        name = self._reader.link(path)
        self._keep(path, f"{path} -> {name}")
        return name

    def _keep(self, path: str, line: str) -> None:
        with self._lock:
            self._lines[path] = line

    def close(self) -> None:
        """Write the lines of sysfs, in the order of their paths."""
        lines = [self._lines[path] for path in sorted(self._lines)]
        (self._folder / SYSFS).write_text("\n".join([*lines, ""]))
