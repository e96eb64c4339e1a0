"""The folder of one run: ``runs/<name>/<id>/`` and the files that have a fixed place in it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from phalanx.config import ConfigError, Job, to_toml
from phalanx.data.durable_files import write_synced
from phalanx.plan.memory.model_counts import parameters
from phalanx.plan.workload import MOMENT_BYTES
from phalanx.train.exits import ExitInfo
from phalanx.train.process_identity import own_process

FOLDERS = ("config", "logs", "metrics", "checkpoints", "provenance")
OWNER = "owner"  # the file that names whose job's run it is, made together with the folder


class RunFolder:
    """Paths inside a run's folder. ``owner``: the mark that it gets when it is made; "": none."""

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path, self.owner = path, owner
        self.config = path / "config"
        self.logs = path / "logs"
        self.metrics = path / "metrics"
        self.checkpoints = path / "checkpoints"
        self.provenance = path / "provenance"
        self.process = self.provenance / "process.json"
        self.exit_info = path / "exit_info.json"
        self.steps = self.metrics / "steps.jsonl"
        self.validation = self.metrics / "validation.jsonl"
        self.evaluation = self.metrics / "evaluation.jsonl"
        self.scores = self.metrics / "scores"  # a file an evaluation, which gates read

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
        try:
            write_synced(draft, text)
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

    def clear_drafts(self) -> None:
        """Remove what ranks that were killed in the middle of their report left behind."""
        for draft in self.path.glob(f"{self.exit_info.stem}.*.tmp"):
            draft.unlink(missing_ok=True)


def create(job: Job) -> RunFolder:
    """Make the folder of a new run and write the resolved configuration into it.

    Raises ``ConfigError`` where ``runs`` cannot hold it; no half-made run is left then.
    """
    parent = Path(job.runs) / job.name
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = RunFolder((parent / f"{stamp}-{secrets.token_hex(3)}").absolute())
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.path.mkdir()
        for name in FOLDERS:
            (folder.path / name).mkdir()
        _write_config(job, folder)
        _write_process(folder)
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise _no_place(job, error) from None
    return folder


def make(job: Job, folder: RunFolder) -> None:
    """Make a run's folder at a place that was chosen, unless an earlier generation did.

    Raises ``ConfigError`` where we may not.
    """
    try:
        if folder.owner and not folder.path.exists():
            make_owned(folder.path, folder.owner)
        for name in FOLDERS:
            (folder.path / name).mkdir(parents=True, exist_ok=True)
        folder.exit_info.unlink(missing_ok=True)
        _write_process(folder)
        if not (folder.config / "job.json").exists():
            _write_config(job, folder)
    except PermissionError as error:
        raise _no_place(job, error) from None


def make_owned(path: Path, owner: str) -> None:
    """Make a folder with its mark in one step, so that nobody sees the one without the other.

    Where somebody else came first, theirs stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        (draft / OWNER).write_text(owner)
        draft.rename(path)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (path / OWNER).exists():
            raise


def _write_process(folder: RunFolder) -> None:
    """Name the process whose end is the run's end."""
    folder.process.write_bytes(msgspec.json.encode(own_process()) + b"\n")


def _write_config(job: Job, folder: RunFolder) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(job), indent=2)
    (folder.config / "job.json").write_bytes(encoded + b"\n")
    (folder.config / "job.toml").write_text(to_toml(job))


def check_free_space(job: Job) -> None:
    """Refuse a job whose first checkpoint would not fit on the disk under ``runs``."""
    if not (job.checkpoint.every or job.checkpoint.at_end):
        return
    # The master weights and at least one moment of each: AdamW keeps two, Muon one.
    moments = 4 if job.optimizer.kind == "muon" else MOMENT_BYTES[job.optimizer.state]
    moments += 4 if job.train.ema is not None else 0
    # Frozen weights have none, and may be of two bytes.
    each = 2 if job.adapter.kind != "none" else 4 + moments
    needed_bytes = each * parameters(job.model).total
    runs = Path(job.runs).absolute()
    existing = next(path for path in (runs, *runs.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        unit, name = (2**30, "GiB") if needed_bytes >= 2**30 else (2**20, "MiB")
        rule = (
            f"a checkpoint of this model takes {needed_bytes / unit:.1f} {name}, "
            f"and the disk has {free_bytes / unit:.1f} {name} left"
        )
        fix = "free space, set runs to a larger disk, or set checkpoint.at_end = false"
        raise ConfigError("runs", f'"{job.runs}"', rule, fix)


def _no_place(job: Job, error: OSError) -> ConfigError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free space, or set it to a larger disk" if full else "set it to a folder you may write"
    rule = f"cannot hold the run: {error.strerror} ({error.filename or job.runs})"
    return ConfigError("runs", f'"{job.runs}"', rule, fix)
