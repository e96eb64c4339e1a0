"""Fault models: what breaks, how often, how it shows and how long a repair takes, as data."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, structs

from phalanx.cluster.causes import CAUSES
from phalanx.config.errors import ConfigError, did_you_mean, problem
from phalanx.config.load import read_table
from phalanx.config.section import Count, NonNegative, Positive, Section
from phalanx.config.tree import build, mistakes
from phalanx.plan.failures import NODE_GPUS, failures_per_day

Symptom = Literal[
    "exit",  # a worker ends or a device reports an error
    "silent",  # the node is gone, its memory with it
    "cut",  # the node cannot be reached; its memory is not lost
    "hang",  # no more steps, and nobody says why
    "corruption",  # wrong numbers, found when replicas are compared
]
Scope = Literal["node", "rack", "power", "leaf", "scattered"]


class CauseRow(Section, frozen=True, kw_only=True):
    """One cause."""

    name: str
    """A cause of the core's table."""
    count: NonNegative = 0.0
    """How often it was counted in gpus and days of the model."""
    share: NonNegative = 0.0
    """Or its part of the model's rate (shares are scaled to sum to one)."""
    symptom: Symptom = "exit"
    """How it shows."""
    scope: Scope = "node"
    """What fails together."""
    nodes: Count = 1
    """Nodes of a "scattered" fault."""
    repair_hours: NonNegative = 24.0
    """Mean time until the node can be tested again; 0: nothing is broken."""


class ModelFile(Section, frozen=True, kw_only=True):
    """A fault model as a file describes it."""

    about: str = ""
    """What it is, in a sentence."""
    source: str = ""
    """Where its figures come from."""
    assumed: str = ""
    """What of it is not published."""
    correlation: Literal["included", "excluded"] = "included"
    """Whether faults of whole domains are already in the rate."""
    gpus: Count | None = None
    """GPUs that were watched, for counts."""
    days: Positive | None = None
    """Days that they were watched, for counts."""
    per_1000_node_days: Annotated[float, Meta(ge=0)] | None = None
    """Rate of all causes together, for shares; nodes of eight GPUs."""
    like: str = ""
    """Model whose causes are used."""
    cause: tuple[CauseRow, ...] = ()
    """Faults of nodes."""
    domain: tuple[CauseRow, ...] = ()
    """Faults of domains, added where correlation is excluded."""


class Cause(Section, frozen=True, kw_only=True):
    """A cause with its rate in a fleet."""

    name: str
    per_day: float  # in the whole fleet
    symptom: Symptom
    scope: Scope
    nodes: int
    repair_hours: float


def model_names() -> list[str]:
    """The models that come with Phalanx."""
    folder = resources.files("phalanx.simulate").joinpath("faults")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


@cache
def model(name: str) -> ModelFile:
    """A model by name, or from a file."""
    known = model_names()
    if name in known:
        text = resources.files("phalanx.simulate").joinpath("faults", f"{name}.toml").read_text()
        table = tomllib.loads(text)
    elif name.endswith(".toml"):
        table = read_table(Path(name))
    else:
        raise ConfigError("faults.model", name, "no such fault model", did_you_mean(name, known))
    found = mistakes(ModelFile, table)
    if found:
        raise ConfigError.of([structs.replace(one, key=f"{name}: {one.key}") for one in found])
    file = build(ModelFile, table)
    if file.like:
        file = structs.replace(file, cause=model(file.like).cause)
    _check(name, file)
    return file


def _check(name: str, file: ModelFile) -> None:
    problems = [
        problem(f"{name}: cause", row.name, "is not in the table of causes", _near(row.name))
        for row in (*file.cause, *file.domain)
        if row.name not in CAUSES
    ]
    counted = file.gpus is not None and file.days is not None
    if not counted and file.per_1000_node_days is None:
        fix = "give gpus and days for counts, or per_1000_node_days for shares"
        problems.append(problem(name, "", "says nothing about how often faults happen", fix))
    if not any(row.count or row.share for row in file.cause):
        problems.append(
            problem(f"{name}: cause", "", "no cause has a count or a share", "add share = 1")
        )
    if problems:
        raise ConfigError.of(problems)


def _near(name: str) -> str:
    return did_you_mean(name, list(CAUSES))


def rate_of(file: ModelFile) -> float:
    """Faults of nodes per 1000 node-days (nodes of eight GPUs), without domains."""
    if file.per_1000_node_days is not None:
        return file.per_1000_node_days
    assert file.gpus is not None and file.days is not None
    return sum(row.count for row in file.cause) / (file.gpus / NODE_GPUS * file.days) * 1000


def causes_in(
    file: ModelFile,
    *,
    gpus: int,
    node_gpus: int,
    per_1000: float | None = None,
    own: dict[str, float] | None = None,
    domains: bool = True,
) -> list[Cause]:
    """Every cause with its rate in a fleet of this many GPUs.

    ``per_1000`` scales all rates so that they sum to it; ``own`` sets those of single causes.
    """
    nodes = gpus / node_gpus
    # A node with more GPUs has more that can break: rates are of nodes of eight.
    per_day = rate_of(file) / 1000 * gpus / NODE_GPUS
    rows = [
        (row, per_day * weight / total)
        for row, weight, total in _weighted(file.cause)
        if row.name not in (own or {})
    ]
    if domains and file.correlation == "excluded" and file.domain:
        added = failures_per_day(gpus, 0.0)
        rows += [(row, added * weight / total) for row, weight, total in _weighted(file.domain)]
    if per_1000 is not None:
        sum_now = sum(rate for _, rate in rows)
        wanted = per_1000 / 1000 * nodes
        rows = [(row, rate * wanted / sum_now) for row, rate in rows] if sum_now else rows
    known = {row.name: row for row in file.cause}
    for name, rate in (own or {}).items():
        if name not in CAUSES:
            raise ConfigError(f"faults.causes.{name}", rate, "no such cause", _near(name))
        rows.append((known.get(name, CauseRow(name=name)), rate / 1000 * nodes))
    return [
        Cause(
            name=row.name,
            per_day=rate,
            symptom=row.symptom,
            scope=row.scope,
            nodes=row.nodes,
            repair_hours=row.repair_hours,
        )
        for row, rate in rows
        if rate > 0
    ]


def _weighted(rows: tuple[CauseRow, ...]) -> list[tuple[CauseRow, float, float]]:
    total = sum(row.count or row.share for row in rows)
    return [(row, row.count or row.share, total) for row in rows if row.count or row.share]
