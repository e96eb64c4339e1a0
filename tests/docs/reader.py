"""Somebody who follows a page: types what its blocks say and compares what it shows."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(?P<kind>console|sh)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"Save this as `([\w.]+)`[^`]*```toml\n(.*?)```", re.DOTALL)
RUN = re.compile(r"(?P<name>[\w-]+)/(?P<id>\d{8}-\d{6}-[0-9a-f]{6})")
STAYS = re.compile(r"^(\w+=\S+ )*phalanx (up|agent) ")  # until it is ended
REFUSED = "error: "
START_SECONDS, COMMAND_SECONDS = 600.0, 300.0


class Block(NamedTuple):
    """A command with what the page shows below it, or several that show nothing."""

    command: str
    shown: str


def blocks(page: Path) -> Iterator[Block]:
    """What a page has its reader type, in order."""
    for each in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if each["kind"] == "sh":
            yield Block(each["text"], "")
        else:
            command, _, shown = each["text"].removeprefix("$ ").partition("\n")
            yield Block(command, shown)


def missing(shown: str, printed: str) -> list[str]:
    """Lines that are shown and were not printed, whatever their numbers and blanks."""
    lines = [form(line) for line in printed.splitlines()]
    return [
        line
        for line in shown.splitlines()
        if line.strip() not in ("", "…") and form(line) not in lines
    ]


def form(line: str) -> str:
    """A line without what differs from run to run."""
    line = re.sub(r"\(held up [^)]*\)", "(held up)", RUN.sub(r"\g<name>/ID", line))
    line = re.sub(r" +comm \d+%| about(?= \d+%)", "", line)  # measured on some steps only
    line = re.sub(r"\b[0-9a-f]{12}\b", "ID", line)
    line = re.sub(r"-?\d[\d,.:]*( (ms|s|h|min)\b)?|\d*m\d+s|[█▏▎▍▌▋▊▉]+", "N", line)
    return re.sub(r"[\s─]+", " ", line).strip()


class Reader:
    """Has a folder with the examples, a home and a shell; nothing else is known."""

    def __init__(self, folder: Path, columns: int = 200) -> None:
        self.folder, self.home = folder / "work", folder / "home"
        self.home.mkdir()
        shutil.copytree(ROOT / "examples", self.folder / "examples")
        program = folder / "bin" / "phalanx"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
        program.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "TMPDIR": str(folder),
            "COLUMNS": str(columns),
            "NO_COLOR": "1",
            "PWD": str(self.folder),
        }
        self.running: list[subprocess.Popen[bytes]] = []
        self._runs: dict[str, str] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in reversed(self.running):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def follow(
        self,
        page: Path,
        *,
        instead: Mapping[str, Callable[[str], str]] | None = None,
        alike: Callable[[str], str] = str,
    ) -> None:
        """Do all that a page says.

        ``instead``: what is done here, by how a command begins, and what that prints; ``alike``:
        takes out of lines what differs here.
        """
        for file, text in SAVED.findall(page.read_text(encoding="utf-8")):
            (self.folder / file).write_text(text)
        for block in blocks(page):
            do = next(
                (do for words, do in (instead or {}).items() if block.command.startswith(words)),
                self.start if STAYS.match(block.command) else None,
            )
            if do is not None:
                printed = do(block.command.strip())
            else:
                printed = self.type(block.command, block.shown.startswith(REFUSED))
            assert missing(alike(block.shown), alike(printed)) == [], f"{block.command}\n{printed}"

    def type(self, command: str, refused: bool = False) -> str:
        """What a command prints; what it exports stays, and the folder that it enters."""
        exported = self.folder / ".environment"
        done = subprocess.run(
            [
                "bash",
                "-c",
                f"{self._own_runs(command)}\nended=$?; env -0 > {exported}; exit $ended",
            ],
            cwd=self.environment["PWD"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert (done.returncode != 0) == refused, f"{command}: {done.stdout}{done.stderr}"
        self.environment = dict(
            each.split("=", 1) for each in exported.read_text().split("\0") if each
        )
        return done.stdout + done.stderr

    def start(self, command: str, **more: str) -> str:
        """What a command that stays has printed when it is ready."""
        log = self.folder / f".started-{len(self.running)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self.folder,
                env=self.environment | more,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.running.append(process)
        if " up " in f" {command} ":
            ready = " joined" if "--nodes" in command else "look:"
            self.wait(lambda: ready in log.read_text(), command)
        return log.read_text()

    def wait(self, happened: Callable[[], object], what: str) -> None:
        """Until something has happened."""
        deadline = time.monotonic() + START_SECONDS
        while not happened():
            assert time.monotonic() < deadline, what
            time.sleep(0.2)

    def _own_runs(self, command: str) -> str:
        """The command with ids of the runs that were made here, in the order of the page's."""
        for run in RUN.finditer(command):
            made = sorted(path.name for path in (self.folder / "runs" / run["name"]).iterdir())
            self._runs.setdefault(run["id"], made[len(self._runs)])
            command = command.replace(run["id"], self._runs[run["id"]])
        return command
