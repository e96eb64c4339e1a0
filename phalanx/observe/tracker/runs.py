"""What is known of a run, wherever it ran, and what differs between two.

A run under a server is kept by it; one of ``phalanx train`` is read from its folder. Both have the
same shape, so that they can be compared with each other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.train.exits import EndReason, ExitCode
from phalanx.train.process_identity import ProcessIdentity
from phalanx.train.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    StepRecord,
    ValidationRecord,
    read_records,
)
from phalanx.train.report.run_folder import RunFolder

Table = dict[str, Any]

NOTES_NAME = "tracker.json"
QUIET_SECONDS = 3600.0  # without a word of a run whose process cannot be seen: it is lost
VALIDATION = ("validation_step", "validation_loss")  # in a summary
EVALUATION = ("evaluation_step", "scores")  # in a summary
VALIDATED = (*VALIDATION, *EVALUATION)
NAME_LETTERS = "A-Za-z0-9_.@-"  # of a metric or a score
MOST_SCORES, MOST_SCORE_LETTERS = 256, 128  # of an evaluation, and of a score's name
SCORE_NAME = re.compile(rf"[{NAME_LETTERS}]{{1,{MOST_SCORE_LETTERS}}}")
MOST_NOTES, MOST_NOTE_LETTERS, MOST_TAGS = 1000, 10_000, 64


class Note(Struct, frozen=True):
    """What somebody wrote about a run."""

    time: float
    text: str
    by: str = ""


class Run(Struct, kw_only=True):
    """One run. What nobody has told is empty."""

    id: str
    name: str = ""
    user: str = ""
    team: str = ""
    state: str = ""
    created: float = 0.0  # seconds since 1970
    ended: float = 0.0
    exit: Table = {}  # reason, message, code
    config: Table = {}  # resolved
    provenance: Table = {}  # code, packages, seeds, data, driver, image, ...
    plan: Table = {}  # the mapping's prediction
    placements: list[Table] = []  # time, generation, nodes, replicas
    checkpoints: list[Table] = []
    summary: Table = {}  # last step, loss, speed; last validation
    folder: str = ""
    notes: list[Note] = []
    tags: list[str] = []


class RunDifference(Struct, frozen=True):
    """One thing that is not the same in two runs; None: it is not there."""

    section: str
    key: str
    a: Any
    b: Any


# Of no consequence to what a run does: where and when it was started, and how it went.
_PLACES = ("started", "command", "folder", "host", "user", "version", "generation")
_PLACE_VARIABLES = ("PHALANX_",)


def differences(a: Run, b: Run) -> list[RunDifference]:
    """What changed: settings, code, packages, data, seeds, versions; not names, times or paths."""
    differing: list[RunDifference] = []
    if bool(a.provenance) != bool(b.provenance):
        told = ["known" if run.provenance else "it has not begun" for run in (a, b)]
        differing.append(RunDifference("origin", "code, packages, data", *told))
    for section, one, other in _sections(a, b):
        left, right = dict(flat(one)), dict(flat(other))
        differing += [
            RunDifference(section, key, left.get(key), right.get(key))
            for key in dict.fromkeys([*left, *right])
            if left.get(key) != right.get(key)
        ]
    return differing


def _sections(a: Run, b: Run) -> Iterator[tuple[str, Table, Table]]:
    yield "settings", _settings(a), _settings(b)
    if not (a.provenance and b.provenance):
        return  # of one of them nothing is known yet: everything would differ
    known = dict.fromkeys([*a.provenance, *b.provenance])
    for section in known:
        if section not in _PLACES:
            yield section, _section(a, section), _section(b, section)


def _settings(run: Run) -> Table:
    return {key: value for key, value in run.config.items() if key not in ("name", "runs")}


def _section(run: Run, section: str) -> Table:
    value = run.provenance.get(section)
    if section in ("code", "project") and isinstance(value, dict):
        # The place of a working tree is of no consequence, its state is; and a change to files
        # that are not committed is one difference, not two.
        return {"commit": value.get("commit"), "changes": value.get("diff_sha256")}
    if section == "environment" and isinstance(value, dict):
        return {k: v for k, v in value.items() if not k.startswith(_PLACE_VARIABLES)}
    return value if isinstance(value, dict) else {section: value}


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a tree with their dotted keys; a tuple is the list that it becomes in a file."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat(each, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


def load_folder(path: Path) -> Run:
    """The run in a folder of ``phalanx train``; ValueError where there is none."""
    folder = RunFolder(path.absolute())
    config = _json(folder.config / "job.json")
    if not config:
        there = (folder.config / "job.json").exists()
        why = "its config/job.json cannot be read" if there else "it has no config/job.json"
        raise ValueError(f"{path}: no run ({why})")
    provenance = _json(folder.provenance / "provenance.json")
    exit_info = _json(folder.exit_info)
    own = _json(path / NOTES_NAME)
    steps = _last_steps(folder)
    state = _state(folder, exit_info, steps, int(config.get("train", {}).get("steps") or 0))
    if state == "lost":
        exit_info = {"reason": "lost", "message": _end_of_process(folder)}
    return Run(
        id=f"{path.absolute().parent.name}/{folder.id}",
        name=str(config.get("name", "")),
        user=str(provenance.get("user", "")),
        state=state,
        created=_seconds(provenance.get("started")) or folder.config.stat().st_mtime,
        ended=_seconds(exit_info.get("finished")),
        exit={name: exit_info[name] for name in ("code", "reason", "message") if name in exit_info},
        config=config,
        provenance=provenance,
        checkpoints=list(_checkpoints(folder)),
        summary=(_summary(steps) if steps else {}) | _validated(folder),
        folder=str(path.absolute()),
        notes=msgspec.convert(own.get("notes", []), list[Note]),
        tags=msgspec.convert(own.get("tags", []), list[str]),
    )


def _state(folder: RunFolder, exit_info: Table, steps: list[StepRecord], wanted: int) -> str:
    """``done``, ``stopped`` (on request, can be resumed), ``interrupted`` (without a save),
    ``failed``, ``running``, or ``lost``: it ended without a word."""
    if not exit_info:
        return "lost" if _end_of_process(folder) else "running"
    if exit_info.get("code") == ExitCode.INTERRUPTED:
        return "interrupted"
    if exit_info.get("code") == ExitCode.NOT_ARCHIVED:
        return "done"
    if exit_info.get("code") != ExitCode.DONE:
        return "failed"
    whole = exit_info.get("reason") == EndReason.DONE or bool(
        steps and wanted and steps[-1].step >= wanted
    )
    return "done" if whole else "stopped"


def _end_of_process(folder: RunFolder) -> str:
    """Why the run cannot be at work any more; "": it may be.

    Of a process that cannot be seen from here, whether the run still writes has to do.
    """
    try:
        process = msgspec.json.decode(folder.process.read_bytes(), type=ProcessIdentity)
    except (OSError, msgspec.MsgspecError):
        process = None  # an early one, or it was cut off while it began
    lives = process.lives() if process is not None else None
    if process is not None and lives is False:
        return f"its process {process.pid} on {process.host} is gone, and left no report"
    if lives:
        return ""
    silence = time.time() - max(_written(path) for path in (folder.config, *_growing(folder)))
    if silence < QUIET_SECONDS:
        return ""
    return f"it has written nothing for {silence / 3600:.0f} hours, and left no report"


def _growing(folder: RunFolder) -> Iterator[Path]:
    for place in (folder.metrics, folder.logs, folder.checkpoints):
        yield place
        yield from place.glob("*")


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def removed(path: str) -> bool:
    """Whether a checkpoint's folder is gone; of one that cannot be seen from here it is unknown."""
    where = Path(path)
    return "://" not in path and where.parent.is_dir() and not where.exists()


def find_folders(runs: Path) -> list[Path]:
    """Folders of runs below ``runs/``, newest last."""
    found = [path.parent.parent for path in runs.glob("*/*/config/job.json")]
    return sorted(found, key=lambda path: (path / "config" / "job.json").stat().st_mtime)


def annotate_folder(path: Path, run: Run) -> None:
    """Keep notes and tags beside a run's files."""
    text = msgspec.json.encode({"notes": run.notes, "tags": run.tags})
    draft = path / f"{NOTES_NAME}.tmp"
    draft.write_bytes(msgspec.json.format(text, indent=2) + b"\n")
    draft.replace(path / NOTES_NAME)


def _last_steps(folder: RunFolder) -> list[StepRecord]:
    """The last records of a run; lines that cannot be read are left out."""
    try:
        lines = folder.steps.read_bytes()[-(256 << 10) :].splitlines(keepends=True)
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = msgspec.json.decode(line, type=StepRecord)
        except msgspec.MsgspecError:
            continue  # cut at the beginning, or in the middle of a write
        records.append(record)
    return records


def _summary(steps: list[StepRecord]) -> Table:
    last = steps[-1]
    recent = steps[-50:]
    seconds = sum(record.step_seconds for record in recent)
    return {
        "step": last.step,
        "loss": last.loss,
        "tokens_seen": last.tokens_seen,
        "tokens_per_second": sum(record.tokens for record in recent) / seconds if seconds else 0.0,
        "mfu": last.mfu,
        "step_seconds": seconds / len(recent),
        "peak_memory_bytes": max(record.peak_memory_bytes for record in recent),
    }


def validations(folder: RunFolder) -> list[ValidationRecord]:
    """Losses on held-out samples, oldest first; a step that was made again counts as it was last.

    Lines that cannot be read are left out.
    """
    try:
        records = list(read_records(folder.validation, ValidationRecord))
    except (OSError, msgspec.MsgspecError):
        return []
    return sorted({record.step: record for record in records}.values(), key=lambda each: each.step)


def evaluations(folder: RunFolder) -> list[EvaluationRecord]:
    """Scores on tasks and domains, oldest first, by the same rules."""
    try:
        records = list(read_records(folder.evaluation, EvaluationRecord))
    except (OSError, msgspec.MsgspecError):
        return []
    return sorted({record.step: record for record in records}.values(), key=lambda each: each.step)


def _validated(folder: RunFolder) -> Table:
    summary: Table = {}
    if found := validations(folder):
        summary |= validation_summary(found[-1].step, found[-1].loss)
    if scored := evaluations(folder):
        summary |= evaluation_summary(scored[-1].step, scored[-1].scores)
    return summary


def validation_summary(step: int, loss: float | None) -> Table:
    """What a run's summary says of its newest validation; a loss of None is not finite."""
    return dict(zip(VALIDATION, (step, loss), strict=True))


def evaluation_summary(step: int, scores: dict[str, float]) -> Table:
    """What a run's summary says of its newest evaluation."""
    return dict(zip(EVALUATION, (step, known_scores(scores)), strict=True))


def known_scores(scores: dict[str, float]) -> dict[str, float]:
    """Those that can be shown: ranks say what they like."""
    good = {n: v for n, v in scores.items() if math.isfinite(v) and SCORE_NAME.fullmatch(n)}
    return dict(islice(good.items(), MOST_SCORES))


def _checkpoints(folder: RunFolder) -> Iterator[Table]:
    try:
        for record in read_records(folder.metrics / "checkpoints.jsonl", CheckpointRecord):
            if not record.problem:
                yield {"step": record.step, "path": record.path, "seconds": record.seconds}
    except (OSError, msgspec.MsgspecError):
        return


def _json(path: Path) -> Table:
    try:
        decoded = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _seconds(stamp: object) -> float:
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return 0.0
