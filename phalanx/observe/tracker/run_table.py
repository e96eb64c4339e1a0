"""Many runs in one answer: a short row each, and the settings in which they differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.config import ConfigError, Model, resolve_model
from phalanx.observe.tracker.runs import Run, flat
from phalanx.plan.memory.model_counts import flops_per_token

MOST_SETTINGS = 40  # in which runs differ; of more, those with the fewest different values
MOST_LETTERS = 120  # of one setting's value
PLACES = ("name", "log", "checkpoint.folder", "data.path", "argv", "folder", "train.device")
MOST_SCORES = 40
COUNTED = ".tokens"  # how much was scored: no score
LAST = ("step", "loss", "validation_loss", "tokens_per_second", "mfu")

Value = str | int | float | bool | None


class RunRow(Struct, frozen=True, kw_only=True):
    """A run as a table shows it; what nobody has told is empty."""

    job: int
    name: str
    user: str
    team: str
    state: str
    created: float  # seconds since 1970
    ended: float
    tags: list[str]
    notes: int
    last: dict[str, float | None]  # of the newest step
    settings: dict[str, Value]  # of those in which runs differ
    flops_per_token: float = 0.0  # 0: not known
    scores: list[str] = []  # names of what was scored while it trained


class RunTable(Struct, frozen=True, kw_only=True):
    """Rows in the order of their jobs. ``settings``: keys that are not the same in all."""

    settings: tuple[str, ...]
    rows: list[RunRow]


class DescribedRun(Struct, frozen=True):
    """A run with its settings, flat and as one text, and the work of a token."""

    run: Run
    settings: dict[str, Value]
    settings_text: bytes
    flops_per_token: float


@lru_cache(maxsize=1200)  # what a run was is asked for again and again, and seldom changes
def described(body: bytes) -> DescribedRun:
    """A run as it is stored."""
    run = msgspec.json.decode(body, type=Run)
    settings = {
        key: _short(value) for key, value in flat(run.config) if key and not key.startswith(PLACES)
    }
    flops = _flops(run)
    run.config, run.provenance, run.placements, run.checkpoints = {}, {}, [], []
    return DescribedRun(run, settings, msgspec.json.encode(settings), flops)


def run_table(runs: Sequence[tuple[int, DescribedRun]]) -> RunTable:
    """Rows of runs, with the settings that tell them apart."""
    keys = _differing(tuple(dict.fromkeys(run_entry.settings_text for _, run_entry in runs)))
    return RunTable(
        settings=keys,
        rows=[
            RunRow(
                job=job,
                name=run_entry.run.name,
                user=run_entry.run.user,
                team=run_entry.run.team,
                state=run_entry.run.state,
                created=run_entry.run.created,
                ended=run_entry.run.ended,
                tags=run_entry.run.tags,
                notes=len(run_entry.run.notes),
                last={name: _number(run_entry.run.summary.get(name)) for name in LAST},
                settings={
                    key: run_entry.settings[key] for key in keys if key in run_entry.settings
                },
                flops_per_token=run_entry.flops_per_token,
                scores=_scored(run_entry.run.summary.get("scores")),
            )
            for job, run_entry in runs
        ],
    )


@lru_cache(maxsize=32)  # comparing every setting of a thousand runs takes longer than all the rest
def _differing(texts: tuple[bytes, ...]) -> tuple[str, ...]:
    return differing([msgspec.json.decode(text, type=dict[str, Value]) for text in texts])


def differing(trees: Sequence[dict[str, Value]]) -> tuple[str, ...]:
    """Keys whose values are not all the same, then those that only some have."""
    values: dict[str, set[Value]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for tree in trees:
        counts.update(tree.keys())
        for key, value in tree.items():
            values[key].add(value)
    differing_keys = [
        key for key, each in values.items() if len(each) > 1 or counts[key] < len(trees)
    ]
    # A program among job files has none of their keys: that alone tells little.
    differing_keys.sort(key=lambda key: (len(values[key]) == 1, len(values[key]), key))
    shown = differing_keys[:MOST_SETTINGS]
    return tuple(sorted(shown, key=lambda key: (len(values[key]) == 1, key)))


def _short(value: Any) -> Value:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text[:MOST_LETTERS]


def _scored(scores: Any) -> list[str]:
    names = list(scores) if isinstance(scores, dict) else []
    return [name for name in names if not name.endswith(COUNTED)][:MOST_SCORES]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _flops(run: Run) -> float:
    """Of one token, so that curves can be drawn over the work that was done."""
    model, data = run.config.get("model"), run.config.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return 0.0
    sequence = data.get("sequence")
    return _flops_of(msgspec.json.encode(model), sequence) if isinstance(sequence, int) else 0.0


@lru_cache(maxsize=256)  # most runs of a team train few models
def _flops_of(model: bytes, sequence: int) -> float:
    try:
        resolved = resolve_model(msgspec.json.decode(model, type=Model))
        return float(flops_per_token(resolved, sequence).model_flops)
    except (ConfigError, msgspec.MsgspecError, ArithmeticError, ValueError):
        return 0.0
