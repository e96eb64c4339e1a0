"""The folder of a pipeline: finished results by key, what is being made, and its runs.

store/KEY/      outputs of a task, renamed there when all are whole
work/KEY/       outputs that are being made
outputs/        links into the store, by the paths that the file gives
runs/NUMBER/    record, logs, orders of people and manifest of a run
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from phalanx.cluster.pipelines.description import PipelineStep
from phalanx.cluster.pipelines.events import Output, TaskResult
from phalanx.cluster.pipelines.rules import SCORES
from phalanx.data.durable_files import sync_folder, write_atomically, write_synced
from phalanx.pipelines.run.content import folder_files, output_content
from phalanx.pipelines.run.record import read_record
from phalanx.pipelines.run.scores_file import ScoresError, read_scores, scores_content

RESULT_FILE = ".result.json"  # hidden, so that no output has its name
RECORD_FILE = "record.log"


class WorkspaceError(Exception):
    """The folder cannot be used; the message says why."""


class UnfinishedOutput(Exception):  # noqa: N818 - what a step did, no fault of ours
    """A step ended without making all its outputs."""


class StoredFile(Struct, frozen=True, array_like=True):
    """A file's size, time and inode when it was hashed."""

    path: str
    size: int
    mtime_ns: int


class StoredResult(Struct, frozen=True):
    """The record stored beside finished outputs."""

    task: str
    key: str
    result: TaskResult
    files: tuple[StoredFile, ...]


class Workspace:
    """Paths in a pipeline's folder, and access to its verified results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.store = self.folder / "store"
        self.work = self.folder / "work"
        self.links = self.folder / "outputs"
        self.runs = self.folder / "runs"
        self.hashes = self.folder / "hashes.json"

    def create(self) -> None:
        """Make the folders."""
        for path in (self.store, self.work, self.links, self.runs):
            path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the pipeline for one driver; WorkspaceError if another process holds the lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                who = file.read().strip() or "another process"
                raise WorkspaceError(f"{self.folder} is being run by {who}") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} of {os.uname().nodename}\n")
            file.flush()
            yield

    # Runs.

    def run_folder(self, number: int) -> Path:
        """The folder of a run."""
        return self.runs / f"{number:04d}"

    def last_run(self) -> int:
        """The number of the newest run; 0 if there is none."""
        if not self.runs.is_dir():
            return 0
        numbers = sorted(int(path.name) for path in self.runs.iterdir() if path.name.isdigit())
        begun = (each for each in reversed(numbers) if read_record(self.record(each)))
        return next(begun, 0)

    def record(self, number: int) -> Path:
        """The file of a run's events."""
        return self.run_folder(number) / RECORD_FILE

    # Results.

    def look_up(self, key: str) -> TaskResult | None:
        """The stored result of a key, if it exists and is unchanged."""
        folder = self.store / key
        try:
            stored = msgspec.json.decode((folder / RESULT_FILE).read_bytes(), type=StoredResult)
        except (OSError, msgspec.MsgspecError):
            return None
        if _files(folder) == stored.files:
            return stored.result
        return stored.result if self._stands(stored.result) else None

    def _stands(self, result: TaskResult) -> bool:
        """Whether outputs whose files look changed still have the recorded content."""
        for name, output in result.outputs.items():
            path = self.folder / output.path
            if not path.exists():
                return False
            try:
                scored = name == SCORES and bool(result.scores)
                found = scores_content(read_scores(path)) if scored else output_content(path)
            except ScoresError:
                return False
            if found != output.content:
                return False
        return True

    def prepare(self, key: str, keep: bool) -> Path:
        """Make the work folder of a task; ``keep``: with what an earlier attempt left in it."""
        folder = self.work / key
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, key: str, name: str, step: PipelineStep) -> TaskResult:
        """Publish a task's outputs as a result, atomically."""
        folder = self.work / key
        outputs: dict[str, Output] = {}
        for output, text in step.outputs.items():
            if not (folder / text).exists():
                raise UnfinishedOutput(f"it succeeded, but did not write its output {output}")
            _sync(folder / text)
            path = (self.store / key / text).relative_to(self.folder)
            outputs[output] = Output(str(path), output_content(folder / text))
        scores: dict[str, float] = {}
        if step.scores:
            scores = _read_scores(folder / step.outputs[SCORES], step)
            outputs[SCORES] = structs.replace(outputs[SCORES], content=scores_content(scores))
        result = TaskResult(outputs, scores)
        _remove_all_but(folder, set(step.outputs.values()))
        stored = StoredResult(name, key, result, _files(folder))
        write_synced(folder / RESULT_FILE, msgspec.json.encode(stored))
        _sync_folders(folder)
        final = self.store / key
        shutil.rmtree(final, ignore_errors=True)  # one that was changed by somebody
        folder.rename(final)
        sync_folder(self.store)
        return result

    def link(self, step: PipelineStep, result: TaskResult) -> None:
        """Link outputs at the paths that the pipeline file gives."""
        for name, text in step.outputs.items():
            link = self.links / text
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(self.folder / result.outputs[name].path, link.parent)
            if link.is_symlink() and str(link.readlink()) == target:
                continue
            draft = link.with_name(f"{link.name}.tmp")
            draft.unlink(missing_ok=True)
            draft.symlink_to(target)
            draft.replace(link)

    # Orders of people.

    def order(self, number: int, name: str, body: object) -> None:
        """Leave an order for the driver of a run."""
        folder = self.run_folder(number) / "orders"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{name}.json", msgspec.json.encode(body))

    def orders(self, number: int) -> list[Path]:
        """Files of pending orders."""
        with suppress(FileNotFoundError):
            return sorted((self.run_folder(number) / "orders").glob("*.json"))
        return []


def _files(folder: Path) -> tuple[StoredFile, ...]:
    """States of all files of a result except its own record."""
    listed = []
    for path in folder_files(folder):
        name = str(path.relative_to(folder))
        if name != RESULT_FILE:
            seen = path.stat()
            listed.append(StoredFile(name, seen.st_size, seen.st_mtime_ns))
    return tuple(listed)


def _read_scores(path: Path, step: PipelineStep) -> dict[str, float]:
    try:
        scores = read_scores(path)
    except ScoresError as error:
        raise UnfinishedOutput(str(error)) from None
    if missing := [name for name in step.scores if name not in scores]:
        has = ", ".join(scores) or "none"
        raise UnfinishedOutput(f"its scores have no {', '.join(missing)} (they have {has})")
    return scores


def _remove_all_but(folder: Path, outputs: set[str]) -> None:
    """Remove everything in a folder except the step's outputs."""
    keep = {folder / text for text in outputs}
    above = {parent for path in keep for parent in path.parents}

    def clean(where: Path) -> None:
        for path in where.iterdir():
            if path in keep:
                continue
            if path in above:
                clean(path)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    clean(folder)


def _sync(path: Path) -> None:
    for each in folder_files(path) if path.is_dir() else [path]:
        sync_folder(each)  # a file is synced in the same way


def _sync_folders(folder: Path) -> None:
    for where, _, _ in os.walk(folder):
        sync_folder(Path(where))
