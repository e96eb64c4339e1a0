"""Units of work and the folder that remembers which are done.

A unit writes into a folder of its own, which gets its name (the unit's key) by one rename when it
is complete: what a killed worker left has another name. The key says all that it depends on.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from phalanx.data.durable_files import sync_folder, write_atomically
from phalanx.data.errors import DataError
from phalanx.data.prepare.recipe import PrepareRecipe

# Results that no unit but the run itself makes, each under a key of its own.
NGRAMS_FOLDER = "ngrams"
REMOVED_FOLDER = "removed"
REMOVED_NAME = "copies.npy"  # [2, documents] number, and number of the one that stays
TOKENIZERS_FOLDER = "tokenizers"


class GroupLayout(msgspec.Struct, frozen=True, gc=False):
    """A group of input files after their filters."""

    key: str  # of the unit that filtered them
    files: int
    documents: int  # that passed


class IdentifyFiles(msgspec.Struct, frozen=True, tag=True):
    """Identify the content of input files."""

    folder: ClassVar[str] = "inputs"
    key: str
    paths: tuple[str, ...]


class FilterFiles(msgspec.Struct, frozen=True, tag=True):
    """Read a group of files and keep what passes the rules."""

    folder: ClassVar[str] = "filtered"
    key: str
    paths: tuple[str, ...]
    versions: tuple[str, ...]  # of the files when they were identified
    ngrams: str = ""  # of evaluation sets: name of the file


class FindBuckets(msgspec.Struct, frozen=True, tag=True):
    """Find documents with equal keys: of one band, or (band -1) of the whole content."""

    folder: ClassVar[str] = "buckets"
    key: str
    band: int
    partition: int
    partitions: int
    without: tuple[str, ...] = ()  # units of exact duplicates, which bands leave out


class VerifyPairs(msgspec.Struct, frozen=True, tag=True):
    """Measure the similarity of candidates whose first document lies in a range."""

    folder: ClassVar[str] = "verified"
    key: str
    first: int
    past: int
    buckets: tuple[str, ...]  # units with candidates
    jaccard: float


class TokenizeFiles(msgspec.Struct, frozen=True, tag=True):
    """Encode the documents of a group of files that are left."""

    folder: ClassVar[str] = "tokenized"
    key: str
    filtered: str  # unit that filtered the files
    removed: str  # result with the numbers of duplicates
    first: int  # number of the group's first document
    tokenizer: str  # name of the file
    end_of_document: int
    dtype: str


WorkUnit = IdentifyFiles | FilterFiles | FindBuckets | VerifyPairs | TokenizeFiles


class UnitPhase(msgspec.Struct, frozen=True):
    """Units that may run at the same time, anywhere."""

    name: str
    recipe: PrepareRecipe
    recipe_folder: str  # where a user's own modules are found
    units: tuple[WorkUnit, ...]
    layout: tuple[GroupLayout, ...] = ()


class UnitFailure(msgspec.Struct, frozen=True):
    """A mistake that made a unit end: running it again would not help."""

    key: str
    value: str
    rule: str
    fix: str


class WorkFolder:
    """All units of a recipe, done and to do; on many machines, a folder that they share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, unit: WorkUnit) -> Path:
        """Where a unit's result is, or will be."""
        return self.result(unit.folder, unit.key)

    def result(self, folder: str, key: str) -> Path:
        """Where the result of a unit with that key is."""
        return self.path / folder / key

    def done(self, unit: WorkUnit) -> bool:
        """Whether a unit is complete."""
        return self.of(unit).is_dir()

    @contextmanager
    def commit(self, final: Path) -> Iterator[Path]:
        """A folder to fill, which becomes ``final`` when the block ends without an error."""
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:12]}")
        draft.mkdir()
        try:
            yield draft
            for path in draft.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(draft)
            try:
                draft.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
                # Another worker was first with the same result.
            sync_folder(final.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def remove_drafts(self) -> None:
        """Remove what workers that died have left; no worker may be at work."""
        for draft in self.path.glob("*/.*"):
            shutil.rmtree(draft, ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse where another run is at work here; a run that was killed holds nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                rule = "another run is using it"
                raise DataError("work", self.path, rule, "wait for it, or stop it") from None
            yield

    # Phases, for workers that are told their units by name.

    def write_phase(self, phase: UnitPhase) -> Path:
        """Let workers know the units of a phase; the file that says so."""
        path = self.path / "phases" / f"{phase.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(phase))
        return path

    @classmethod
    def of_phase(cls, path: Path) -> tuple[WorkFolder, UnitPhase]:
        """What ``write_phase`` wrote, and the folder that it is about."""
        try:
            return cls(path.parent.parent), msgspec.json.decode(path.read_bytes(), type=UnitPhase)
        except (OSError, msgspec.DecodeError) as error:
            rule = f"describes no units ({error})"
            raise DataError(
                "unit", path, rule, "run `phalanx data prepare` without --unit"
            ) from None

    # Failures.

    def record_failure(self, unit: WorkUnit, failure: UnitFailure) -> None:
        """Say why a unit cannot be done."""
        folder = self.path / "failures"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{unit.key}.json", msgspec.json.encode(failure))

    def failure(self, unit: WorkUnit) -> UnitFailure | None:
        """Why a unit cannot be done, if it said so."""
        try:
            content = (self.path / "failures" / f"{unit.key}.json").read_bytes()
        except OSError:
            return None
        return msgspec.json.decode(content, type=UnitFailure)

    def forget_failures(self) -> None:
        """What failed before is tried again."""
        shutil.rmtree(self.path / "failures", ignore_errors=True)
