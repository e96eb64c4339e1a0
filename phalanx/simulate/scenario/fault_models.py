"""Fault models: what breaks, how often, how it shows and how long a repair takes, as data."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, structs

from phalanx.cluster.causes import CAUSES
from phalanx.config.errors import ConfigError, ConfigProblem, did_you_mean, problem
from phalanx.config.load import read_table
from phalanx.config.section import Section
from phalanx.config.tree import build, mistakes
from phalanx.plan.cost.failures import NODE_GPUS
from phalanx.simulate.scenario.scenario import MOST_RATE, Hours, Rate

Symptom = Literal[
    "exit",  # a worker ends or a device reports an error
    "silent",  # the node is gone, its memory with it
    "cut",  # the node cannot be reached; its memory is not lost
    "hang",  # no more steps, and nobody says why
    "corruption",  # wrong numbers, found when replicas are compared
]
Scope = Literal["node", "rack", "power", "leaf", "scattered"]
Weight = Annotated[float, Meta(ge=0, le=1e9)]
Gpus = Annotated[int, Meta(ge=1, le=10**9)]
Days = Annotated[float, Meta(ge=1e-3, le=1e6)]
Together = Annotated[int, Meta(ge=1, le=10**6)]


class CauseRow(Section, frozen=True, kw_only=True):
    """One cause."""

    name: str
    """A cause of the core's table."""
    count: Weight | None = None
    """How often it was counted in gpus and days of the model."""
    share: Weight | None = None
    """Or its part of the model's rate (shares are scaled to sum to one)."""
    symptom: Symptom = "exit"
    """How it shows."""
    scope: Scope = "node"
    """What fails together."""
    nodes: Together = 1
    """Nodes of a "scattered" fault."""
    repair_hours: Hours = 24.0
    """Mean time until the node can be tested again; 0: nothing is broken."""

    @property
    def weight(self) -> float:
        """Its part of the model's rate, of what all rows have."""
        return self.count or self.share or 0.0


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
    gpus: Gpus | None = None
    """GPUs that were watched, for counts."""
    days: Days | None = None
    """Days that they were watched, for counts."""
    per_1000_node_days: Rate | None = None
    """Rate of all causes together, for shares; nodes of eight GPUs."""
    like: str = ""
    """Model whose causes are used."""
    cause: tuple[CauseRow, ...] = ()
    """Faults of nodes."""
    domain: tuple[CauseRow, ...] = ()
    """Faults of domains, added where correlation is excluded."""


def model_names() -> list[str]:
    """The models that come with Phalanx."""
    folder = resources.files("phalanx.simulate").joinpath("faults")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


@cache
def model(name: str) -> ModelFile:
    """A model by name, or from a file."""
    return _read(name, ())


def _read(name: str, readers: tuple[str, ...]) -> ModelFile:
    """A model; ``readers``: those whose causes are said to be like its own."""
    names = model_names()
    if name in names:
        text = resources.files("phalanx.simulate").joinpath("faults", f"{name}.toml").read_text()
        table = tomllib.loads(text)
    elif name.endswith(".toml"):
        table = read_table(Path(name))
    else:
        raise ConfigError("faults.model", name, "no such fault model", did_you_mean(name, names))
    found = mistakes(ModelFile, table)
    if found:
        raise ConfigError.of([structs.replace(one, key=f"{name}: {one.key}") for one in found])
    file = build(ModelFile, table)
    if file.like in (*readers, name):
        rule = "says that its causes are like its own, in a circle"
        raise ConfigError(f"{name}: like", file.like, rule, "name a model with causes, e.g. llama3")
    _check(name, file)
    if file.like:
        # Its counts are of other GPUs and days: they divide this model's rate.
        file = structs.replace(file, cause=_read(file.like, (*readers, name)).cause)
        _check_rate(name, file)
    return file


def _check(name: str, file: ModelFile) -> None:
    rows = (*file.cause, *file.domain)
    problems = [
        problem(f"{name}: cause", row.name, "is not in the table of causes", near(row.name))
        for row in rows
        if row.name not in CAUSES
    ]
    problems += _weights(name, file)
    if file.like and file.cause:
        rule = "cannot stand beside causes of the model's own"
        problems.append(problem(f"{name}: like", file.like, rule, "leave one of them out"))
    if not file.like and not any(row.weight for row in file.cause):
        rule, fix = "no cause has a count or a share", "add share = 1"
        problems.append(problem(f"{name}: cause", "", rule, fix))
    if file.domain and file.correlation == "included":
        rule = "faults of domains are in the rate already (correlation is included)"
        fix = 'set correlation = "excluded", or leave [[domain]] out'
        problems.append(problem(f"{name}: domain", file.domain[0].name, rule, fix))
    if file.domain and not any(row.weight for row in file.domain):
        rule = "no domain has a share"
        problems.append(problem(f"{name}: domain", "", rule, "add share = 1"))
    if problems:
        raise ConfigError.of(problems)
    if not file.like:
        _check_rate(name, file)


def _weights(name: str, file: ModelFile) -> list[ConfigProblem]:
    """Rows must be weighed the way the model's rate is given."""
    counted = file.gpus is not None and file.days is not None
    problems = []
    if (counted or file.gpus or file.days) and file.per_1000_node_days is not None:
        rule = "cannot be given together with gpus and days: counts give the rate"
        value = file.per_1000_node_days
        problems.append(problem(f"{name}: per_1000_node_days", value, rule, "leave one out"))
    elif not counted and file.per_1000_node_days is None:
        fix = "give gpus and days for counts, or per_1000_node_days for shares"
        problems.append(problem(name, "", "says nothing about how often faults happen", fix))
    if counted and file.like:
        fix = "give per_1000_node_days"
        rule = "has counts of other GPUs and days"
        problems.append(problem(f"{name}: like", file.like, rule, fix))
    for key, rows, wanted in (
        ("cause", file.cause, "count" if counted else "share"),
        ("domain", file.domain, "share"),
    ):
        other = "share" if wanted == "count" else "count"
        for row in rows:
            if getattr(row, wanted) is None or getattr(row, other) is not None:
                why = "gpus and days" if wanted == "count" else "a rate"
                rule = f"needs a {wanted} and nothing else, because the model has {why}"
                fix = f"{wanted} = …; 0 where it never happens"
                problems.append(problem(f"{name}: {key}", row.name, rule, fix))
    return problems


def _check_rate(name: str, file: ModelFile) -> None:
    rate = rate_of(file)
    if rate > MOST_RATE:
        rule = f"is more than {MOST_RATE:,.0f} faults in 1000 node-days"
        raise ConfigError(f"{name}: count", f"{rate:g}", rule, "check count, gpus and days")


def near(name: str) -> str:
    """The cause that was meant."""
    return did_you_mean(name, list(CAUSES))


def rate_of(file: ModelFile) -> float:
    """Faults of nodes per 1000 node-days (nodes of eight GPUs), without domains."""
    if file.per_1000_node_days is not None:
        return file.per_1000_node_days
    assert file.gpus is not None and file.days is not None
    return sum(row.weight for row in file.cause) / (file.gpus / NODE_GPUS * file.days) * 1000
