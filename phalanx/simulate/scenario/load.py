"""Scenarios by name or from a file, with ``--set`` laid over them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources
from math import isclose
from pathlib import Path
from typing import Any

from msgspec import structs

from phalanx.config.errors import ConfigError, ConfigProblem, did_you_mean
from phalanx.config.load import overridden, read_table
from phalanx.config.tree import build, file_mistakes, mistakes
from phalanx.simulate.scenario.check import READ, problems_of
from phalanx.simulate.scenario.rates import causes_of
from phalanx.simulate.scenario.scenario import MOST_LOAD, FleetPart, Scenario
from phalanx.simulate.scenario.workload import load_of


def scenario_names() -> list[str]:
    """The scenarios that come with Phalanx."""
    folder = resources.files("phalanx.simulate").joinpath("scenarios")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def load_scenario(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """A scenario by name, or from a TOML file; every mistake is refused with the nearest fix."""
    return scenario_of(_table(name), overrides)


def scenario_of(table: dict[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """The scenario that a table describes, with what is laid over it."""
    given = {override.partition("=")[0].strip() for override in overrides}
    merged, problems = overridden(table, overrides, Scenario)
    merged = _spares_meant(table, _load_meant(_meant(table, merged, given), given), given)
    problems += file_mistakes(Scenario, merged) or _hidden(table, overrides)
    if problems:
        raise ConfigError.of(problems)
    scenario = build(Scenario, merged)
    problems = problems_of(scenario, given)
    if problems:
        raise ConfigError.of(problems)
    scenario = _with_load(scenario, merged)
    if scenario.chaos is None:
        causes_of(scenario)  # an unknown model or cause is refused here
        for variant, changes in scenario.variants.items():
            _check_variant(merged, variant, changes)
    return scenario


def _hidden(table: dict[str, Any], overrides: Sequence[str]) -> list[ConfigProblem]:
    """Mistakes in values that a later one of the same key hides."""
    last = {override.partition("=")[0].strip(): override for override in overrides}
    hidden = [one for one in overrides if last[one.partition("=")[0].strip()] is not one]
    return [
        found
        for override in hidden
        for found in mistakes(Scenario, overridden(table, [override], Scenario)[0])
    ]


def _meant(table: dict[str, Any], merged: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Without what a scenario says about its own kind of workload, where another one is asked."""
    workload = merged.get("workload")
    if not isinstance(workload, dict):
        return merged
    asked_kind, before = (
        workload.get("kind", "one-job"),
        table.get("workload", {}).get("kind", "one-job"),
    )
    if asked_kind == before or asked_kind not in READ:
        return merged
    kept = {k: v for k, v in workload.items() if k in READ[asked_kind] or f"workload.{k}" in given}
    return {**merged, "workload": kept}


def _spares_meant(table: dict[str, Any], merged: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """A fleet of another size has as large a share of spares, unless their number is given too."""
    before, fleet = table.get("fleet", {}), merged.get("fleet", {})
    gpus = fleet.get("gpus") if isinstance(fleet, dict) else None
    if "fleet.gpus" not in given or "fleet.spare_nodes" in given or not isinstance(gpus, int):
        return merged
    usual, spares = before.get("gpus", FleetPart().gpus), before.get("spare_nodes", 0)
    if gpus < 1 or not spares:
        return merged  # the number of GPUs is refused elsewhere
    return {**merged, "fleet": {**fleet, "spare_nodes": max(1, -(-spares * gpus // usual))}}


def _load_meant(merged: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Jobs a day and load are two words for one thing: what is given replaces the scenario's."""
    keys = ("workload.jobs_per_day", "workload.utilisation")
    workload = merged.get("workload")
    if not isinstance(workload, dict) or len(given.intersection(keys)) != 1:
        return merged
    other = "utilisation" if keys[0] in given else "jobs_per_day"
    return {**merged, "workload": {k: v for k, v in workload.items() if k != other}}


def _with_load(scenario: Scenario, merged: dict[str, Any]) -> Scenario:
    """The scenario with the load that its jobs a day give."""
    load = scenario.workload
    if scenario.chaos is not None or load.kind != "multi-tenant" or load.jobs_per_day is None:
        return scenario
    asked = load_of(scenario)
    most = load.jobs_per_day * MOST_LOAD / asked
    if asked > MOST_LOAD:
        rule = f"asks for {asked:.2f} times the GPU time that there is"
        raise ConfigError("workload.jobs_per_day", load.jobs_per_day, rule, f"at most {most:.0f}")
    known = merged["workload"]
    if "utilisation" in known and not isclose(load.utilisation, asked, rel_tol=0.01):
        rule = (
            f"contradicts workload.jobs_per_day = {load.jobs_per_day:g}, which asks for {asked:.3f}"
        )
        raise ConfigError("workload.utilisation", load.utilisation, rule, "leave one of them out")
    return structs.replace(scenario, workload=structs.replace(load, utilisation=asked))


def _check_variant(table: dict[str, Any], variant: str, changes: Sequence[str]) -> None:
    merged, problems = overridden(table, changes, Scenario)
    problems += mistakes(Scenario, merged)
    if problems:
        rule = f"variant cannot be used: {problems[0]}"
        raise ConfigError(f"variants.{variant}", list(changes), rule, "correct the file")


def _table(name: str) -> dict[str, Any]:
    names = scenario_names()
    if name in names:
        folder = resources.files("phalanx.simulate").joinpath("scenarios")
        return tomllib.loads(folder.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    if name.endswith(".toml"):
        return read_table(Path(name))
    raise ConfigError("scenario", name, "no such scenario", did_you_mean(name, names))
