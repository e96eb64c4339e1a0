"""The folder of one run: ``runs/<name>/<id>/`` and the files that have a fixed place in it."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from phalanx.config import Job, to_toml
from phalanx.train.exits import ExitInfo

ROOMS = ("config", "logs", "metrics", "checkpoints", "provenance")


class RunFolder:
    """Paths inside a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config"
        self.logs = path / "logs"
        self.metrics = path / "metrics"
        self.checkpoints = path / "checkpoints"
        self.provenance = path / "provenance"
        self.exit_info = path / "exit_info.json"
        self.steps = self.metrics / "steps.jsonl"
        self.validation = self.metrics / "validation.jsonl"

    @property
    def id(self) -> str:
        return self.path.name

    def log(self, rank: int) -> Path:
        """Where the output of a rank goes."""
        return self.logs / f"rank-{rank}.log"

    def read_exit(self) -> ExitInfo | None:
        """How the run ended, or None while it runs."""
        try:
            return msgspec.json.decode(self.exit_info.read_bytes(), type=ExitInfo)
        except FileNotFoundError:
            return None

    def write_exit(self, info: ExitInfo) -> ExitInfo:
        """Keep ``info`` as the run's end, unless its cause is known already; returns what stands.

        The first failure stands, since those after it are mostly its consequences; only a rank
        that merely lost a peer gives way to the rank that caused it.
        """
        text = msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"
        draft = self.exit_info.with_suffix(f".{os.getpid()}.tmp")
        write_synced(draft, text)
        try:
            # A link, unlike a rename, refuses to replace a report that another rank made first.
            os.link(draft, self.exit_info)
            return info
        except FileExistsError:
            standing = self.read_exit()
            if standing is not None and (info.is_symptom or not standing.is_symptom):
                return standing
            draft.replace(self.exit_info)
            return info
        finally:
            draft.unlink(missing_ok=True)


def create(job: Job) -> RunFolder:
    """Make the folder of a new run and write the resolved configuration into it."""
    parent = Path(job.runs) / job.name
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = parent / f"{stamp}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
            break
        except FileExistsError:
            continue
    for room in ROOMS:
        (path / room).mkdir()
    folder = RunFolder(path.absolute())
    encoded = msgspec.json.format(msgspec.json.encode(job), indent=2)
    (folder.config / "job.json").write_bytes(encoded + b"\n")
    (folder.config / "job.toml").write_text(to_toml(job))
    return folder


def write_synced(path: Path, text: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
