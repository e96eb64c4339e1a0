"""Files of scores, as evaluations write them: ``{"scores": {metric: number}}``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.config.errors import plain_reason


class ScoresError(Exception):
    """A file holds no valid scores; the message says why."""


class ScoresFile(Struct, frozen=True):
    """The keys that are read."""

    scores: dict[str, float]


def read_scores(path: Path) -> dict[str, float]:
    """The scores in a file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ScoresFile).scores
    except (OSError, msgspec.MsgspecError) as error:
        raise ScoresError(f"scores of {path.name} cannot be read: {plain_reason(error)}") from None


def scores_content(scores: dict[str, float]) -> str:
    """Hash of the scores only, since other keys such as paths differ between folders."""
    return hashlib.sha256(msgspec.json.encode(scores, order="sorted")).hexdigest()
