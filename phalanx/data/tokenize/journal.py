"""How far tokenising has come: one line for each finished shard, so that a killed run goes on."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from phalanx.data.corpus.manifest import ShardFile
from phalanx.data.errors import DataError
from phalanx.data.tokenize.records import Unreadable

JOURNAL_NAME = "progress.jsonl"


class Counts(msgspec.Struct, frozen=True):
    """What has been passed so far."""

    text_bytes: int = 0
    empty: int = 0
    unreadable: int = 0
    input_bytes: int = 0


class JournalStart(msgspec.Struct, frozen=True):
    """First line: what is being made, and from what."""

    identity: str


class JournalEntry(msgspec.Struct, frozen=True):
    """Finished shards, and where to go on: run of pieces, less its tokens already written."""

    shards: tuple[ShardFile, ...]
    file: int
    piece: int
    skip_tokens: int
    counts: Counts  # of everything before that run
    unreadable: tuple[Unreadable, ...]  # found since the entry before


class TokenizeJournal:
    """Appends entries; a torn last line, the mark of a kill, is as if never written."""

    def __init__(self, folder: Path, identity: str, fresh: bool) -> None:
        self._path = folder / JOURNAL_NAME
        self._identity = identity
        self.entries: list[JournalEntry] = []
        if fresh:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._load()

    def append(self, entry: JournalEntry) -> None:
        """Make an entry durable."""
        lines = (
            b""
            if self._path.exists()
            else msgspec.json.encode(JournalStart(self._identity)) + b"\n"
        )
        with self._path.open("ab") as file:
            file.write(lines + msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The corpus is complete."""
        self._path.unlink(missing_ok=True)

    def _load(self) -> None:
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            self._path.unlink()
            return
        try:
            start = msgspec.json.decode(lines[0], type=JournalStart)
            self.entries = [msgspec.json.decode(line, type=JournalEntry) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise self._refuse(f"is corrupt ({error})") from None
        if start.identity != self._identity:
            raise self._refuse("is of a run with another tokenizer, other inputs or settings")

    def _refuse(self, rule: str) -> DataError:
        fix = "repeat that run's command to continue it, or start afresh with --force"
        return DataError("out", self._path, rule, fix)
