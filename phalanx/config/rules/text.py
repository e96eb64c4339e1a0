"""Refuses texts that no folder, log or terminal can carry, and addresses of no known kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from phalanx.config.errors import ConfigProblem, did_you_mean, problem, written
from phalanx.config.schema import Job

# File systems take 255 bytes; temporary names beside a run's folder need some of them.
MOST_NAME_BYTES = 200
STORES = ("s3", "gs", "az", "abfs", "abfss", "http", "https", "file", "memory")
ENGINE = "backend."  # addresses there are an engine's or a program's: ray://, docker://, sqlite://

LOCAL = {
    "runs": "set it to a folder; checkpoint.archive.url may be an address, and receives copies",
    "checkpoint.load_hf": "download the model first",
    "data.store.cache": "set it to a folder on a fast disk of the node",
}


def text_problems(job: Job) -> Iterator[ConfigProblem]:
    """Rules for the run's name, and for every setting that is text."""
    for key, text in _texts(msgspec.to_builtins(job), ""):
        yield from _unprintable(key, text)
        if not key.startswith(ENGINE):
            yield from _address(key, text)
    yield from _folder_name("name", job.name)


def name_problems(key: str, name: str) -> Iterator[ConfigProblem]:
    """The same rules for a name that is given in place of the job's."""
    yield from _unprintable(key, name)
    yield from _folder_name(key, name)


def _folder_name(key: str, name: str) -> Iterator[ConfigProblem]:
    if not name or "/" in name or name.startswith("."):
        yield problem(
            key,
            written(name),
            "must be a folder's name: not empty, no slash, no leading dot",
            f'nearest: "{name.replace("/", "-").lstrip(".") or "run"}"',
        )
    if len(name.encode(errors="replace")) > MOST_NAME_BYTES:
        short = name.encode(errors="replace")[:32].decode(errors="ignore")
        rule = f"must take at most {MOST_NAME_BYTES} bytes, since it names a folder"
        yield problem(key, written(f"{short}..."), rule, f'e.g. "{short}"')


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, below in value.items():
            yield from _texts(below, f"{key}.{name}" if key else name)


def _unprintable(key: str, text: str) -> Iterator[ConfigProblem]:
    if not text.isprintable() and any(map(_unwelcome, text)):
        plain = "".join(char for char in text if not _unwelcome(char)).strip()
        quoted = text.encode("unicode_escape").decode()
        rule = "must be text without control characters"
        yield problem(key, f'"{quoted}"', rule, f'nearest: "{plain}"')


def _address(key: str, text: str) -> Iterator[ConfigProblem]:
    scheme, separator, _ = text.partition("://")
    if separator and key in LOCAL:
        # Taken as a path, it would make a folder of that odd name here.
        rule = "must be a folder of this machine, not an address"
        yield problem(key, f'"{text}"', rule, LOCAL[key])
    elif separator and scheme not in STORES:
        rule = f'"{scheme}" is no known kind of store'
        yield problem(key, f'"{text}"', rule, did_you_mean(scheme, STORES))


def _unwelcome(char: str) -> bool:
    # A lone surrogate is a byte of the command line that was no UTF-8.
    return char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff"
