"""Whether a description of work can be started at all: checked before a job is taken."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath

from phalanx.cluster.jobs.job import GangShape
from phalanx.config import ConfigError, Job, check, job_from_table, resolve
from phalanx.config.own_code import MOST_CODE_BYTES, code_problem, digest
from phalanx.config.toml_text import parse_toml
from phalanx.control.wire.payload import Payload, Script, TrainingWork

MOST_WORDS = 4096  # of a program's command line
MOST_WORD_BYTES = 128 << 10  # Linux: MAX_ARG_STRLEN
MOST_BYTES = 1 << 20  # of all words, and of all variables
MOST_VARIABLES = 1000
MOST_PATH_BYTES = 4096
MOST_TOML_BYTES = 256 << 10
MOST_RANKS = 1_000_000
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,250}\.py")


class WorkError(Exception):
    """What is wrong with a description of work, in a sentence."""


def checked_work(work: Payload) -> Job | None:
    """The trainer's job that is described, resolved; None: a program. WorkError names mistakes."""
    for key, rule in _problems(work):
        raise WorkError(f"work.{key}: {rule}")
    return _checked_job(work) if isinstance(work, TrainingWork) else None


def refuse_elastic(job: Job | None, gang: GangShape) -> None:
    """WorkError for a gang that loses replicas one by one where its bits allow halves only."""
    elastic = gang.least_replicas or gang.most_replicas
    if job is not None and job.train.virtual_replicas and elastic:
        raise WorkError(
            f"train.virtual_replicas = {job.train.virtual_replicas}: an elastic gang may be left "
            "with any number of replicas, and this job runs on those that divide them; leave out "
            "the least and most replicas: without nodes it goes on with half of them by itself"
        )


def _problems(work: Payload) -> Iterator[tuple[str, str]]:
    if work.folder and not work.folder.startswith("/"):
        yield "folder", "must be an absolute path"
    yield from _text("folder", work.folder, MOST_PATH_BYTES)
    yield from _variables(work.environment)
    if isinstance(work, Script):
        yield from _command(work.argv)
    elif not 1 <= work.world_size <= MOST_RANKS:
        yield "world_size", f"must be 1 to {MOST_RANKS}"


def _command(argv: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if not argv or not argv[0]:
        yield "argv", "names no program"
    if len(argv) > MOST_WORDS:
        yield "argv", f"must not have more than {MOST_WORDS} words"
    for index, word in enumerate(argv):
        yield from _text(f"argv[{index}]", word, MOST_WORD_BYTES)
    if sum(map(len, argv)) > MOST_BYTES:
        yield "argv", f"must not be longer than {MOST_BYTES} bytes"


def _variables(environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    if len(environment) > MOST_VARIABLES:
        yield "environment", f"must not have more than {MOST_VARIABLES} variables"
    for name, value in environment.items():
        if not VARIABLE.fullmatch(name):
            yield "environment", f"{name[:64]!r} is no name: letters, digits and _, no digit first"
        yield from _text(f"environment.{name[:64]}", value, MOST_WORD_BYTES)
    if sum(map(len, environment.values())) > MOST_BYTES:
        yield "environment", f"must not be longer than {MOST_BYTES} bytes"


def _text(key: str, text: str, most_bytes: int) -> Iterator[tuple[str, str]]:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        yield key, "is not Unicode text"
        return
    if "\0" in text:
        yield key, "has a NUL character"
    if size > most_bytes:
        yield key, f"must not be longer than {most_bytes} bytes"


def _checked_job(work: TrainingWork) -> Job:
    for key, rule in _text("toml", work.toml, MOST_TOML_BYTES):
        raise WorkError(f"work.{key}: {rule}")
    try:
        job = job_from_table(parse_toml(work.toml))
        for rule in _file_problems(work, job):
            raise WorkError(f"work.files: {rule}")
        check(job, work.world_size)
        job = resolve(job, work.world_size)
    except tomllib.TOMLDecodeError as error:
        raise WorkError(f"work.toml is no TOML: {error}") from None
    except ConfigError as error:
        raise WorkError(f"work.toml: {error}") from None
    return job


def _file_problems(work: TrainingWork, job: Job) -> Iterator[str]:
    """Files that came along: those that the job names, whole, and not too large."""
    names = tuple(file.name for file in work.files)
    if names and names != job.code.files:
        yield "must be those of code.files, in their order"
        return
    for file in work.files:
        shown = repr(file.name[:64])
        for _, rule in _text("", file.text, MOST_CODE_BYTES):
            yield f"{shown} {rule}"
        if not MODULE.fullmatch(PurePosixPath(file.name).name):
            yield f"{shown} is no module's name"
        if digest(file.text) != file.sha256:
            yield f"{shown} is another text than its digest says"
    if rule := code_problem({file.name: file.text for file in work.files}):
        yield f"they {rule}"
