"""The scores file of an evaluation, which gates and pipelines read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.config import ConfigError
from phalanx.data.durable_files import write_atomically


class Scores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scores of one checkpoint by ``task.metric``, and errors of what could not be scored."""

    checkpoint: str
    step: int
    average: bool = False  # of the moving average of its weights
    scores: dict[str, float]
    problems: dict[str, str] = {}


def write_scores(path: Path, scores: Scores) -> None:
    """Write the JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(scores), indent=2) + b"\n"
    write_atomically(path, text)


def read_scores(path: Path) -> Scores:
    """Read a file that ``phalanx eval --out`` or a training run wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scores)
    except OSError as error:
        rule, fix = f"cannot be read: {error.strerror}", "phalanx eval --out writes one"
    except msgspec.MsgspecError as error:
        rule, fix = f"holds no scores: {error}", 'it has "checkpoint", "step" and "scores"'
    raise ConfigError("scores", f'"{path}"', rule, fix)
