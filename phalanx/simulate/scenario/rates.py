"""How often each cause happens in a fleet: a fault model's rates, and what was set over them.

Settings go from the narrow to the wide: ``faults.causes.NAME@SCOPE``, ``faults.causes.NAME``,
``faults.domain_per_1000_node_days``, ``faults.per_1000_node_days``. Each is the sum of all it
names: what a narrower one has set stays, and the others share the rest as the model has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

from msgspec import Struct, structs

from phalanx.cluster.causes import CAUSES
from phalanx.config.errors import ConfigError, did_you_mean
from phalanx.plan.cost.failures import NODE_GPUS, failures_per_day
from phalanx.simulate.scenario.fault_models import (
    CauseRow,
    ModelFile,
    Scope,
    Symptom,
    model,
    near,
    rate_of,
)
from phalanx.simulate.scenario.scenario import FaultPart, Scenario

TOTAL = "faults.per_1000_node_days"
DOMAINS = "faults.domain_per_1000_node_days"


class CauseRate(Struct, frozen=True, kw_only=True):
    """A cause with its rate in a fleet."""

    name: str
    per_day: float  # on the nodes that jobs run on
    symptom: Symptom
    scope: Scope
    nodes: int
    repair_hours: float
    key: str  # tells it from every other of the model


class _Row(Struct):
    """A row of the model while rates are being set."""

    row: CauseRow
    per_day: float
    domain: bool = False
    settled: bool = False  # by a setting that names it alone, or fewer with it


def causes_in(file: ModelFile, faults: FaultPart, *, gpus: int, node_gpus: int) -> list[CauseRate]:
    """Every cause with its rate in a fleet of this many GPUs."""
    nodes = gpus / node_gpus
    rows = _of_model(file, gpus, faults.domains)
    # Names with a scope first: what they set stays where the name alone is set too.
    for key in sorted(faults.causes, key=lambda key: "@" not in key):
        _set_cause(rows, key, faults.causes[key], nodes)
    if faults.domain_per_1000_node_days is not None:
        _check_domains(file, faults)
        whole = [row for row in rows if row.domain]
        _share_out(whole, DOMAINS, faults.domain_per_1000_node_days, nodes)
    elif not faults.domains:
        _check_domains(file, faults)
    if faults.per_1000_node_days == 0:  # none but those that are set by name
        rows = [row for row in rows if row.settled]
    elif faults.per_1000_node_days is not None:
        _share_out(rows, TOTAL, faults.per_1000_node_days, nodes)
    return _named(rows)


def _of_model(file: ModelFile, gpus: int, domains: bool) -> list[_Row]:
    """What the model says by itself."""
    # A node with more GPUs has more that can break: rates are of nodes of eight.
    rows = _divided(file.cause, rate_of(file) / 1000 * gpus / NODE_GPUS)
    if domains and file.domain:
        rows += _divided(file.domain, failures_per_day(gpus, 0.0), domain=True)
    return rows


def _divided(rows: Sequence[CauseRow], per_day: float, domain: bool = False) -> list[_Row]:
    total = sum(row.weight for row in rows)
    return [_Row(row, per_day * row.weight / total, domain) for row in rows]


def _set_cause(rows: list[_Row], key: str, per_1000: float, nodes: float) -> None:
    """``NAME`` sets all faults of a cause together, ``NAME@SCOPE`` those of one kind of domain."""
    name, at, scope = key.partition("@")
    full = f"faults.causes.{key}"
    if name not in CAUSES:
        raise ConfigError(full, per_1000, "no such cause", near(name))
    same = [row for row in rows if row.row.name == name]
    if at:
        if scope not in get_args(Scope):
            fix = did_you_mean(scope, list(get_args(Scope)))
            raise ConfigError(full, per_1000, "no such kind of domain", fix)
        chosen = [row for row in same if row.row.scope == scope]
    else:
        chosen = same
    if not chosen:
        chosen = [_new(same, name, scope or "node", full)]
        rows += chosen
    _share_out(chosen, full, per_1000, nodes)


def _new(same: list[_Row], name: str, scope: str, key: str) -> _Row:
    """A fault that the model does not have: it shows as others of its cause do."""
    if scope == "scattered":
        rule = "the model does not say how many nodes it takes"
        raise ConfigError(key, scope, rule, "add it to a model file of your own")
    known = same[0].row if same else CauseRow(name=name)
    row = structs.replace(known, scope=scope, nodes=1, count=None, share=None)
    return _Row(row, 0.0, domain=scope != "node")


def _share_out(rows: list[_Row], key: str, per_1000: float, nodes: float) -> None:
    """Makes rows sum to a rate; those that were set before keep theirs."""
    wanted = per_1000 / 1000 * nodes
    fixed = sum(row.per_day for row in rows if row.settled)
    others = [row for row in rows if not row.settled]
    left = wanted - fixed
    if math.isclose(wanted, fixed, rel_tol=1e-9):
        left = 0.0
    if left < 0 or (left and not others):
        told = f"{fixed / nodes * 1000:g}"
        rule = f"cannot be: {told} are set by narrower keys" + ("" if others else ", and no other")
        raise ConfigError(key, per_1000, rule, f"{'at least' if others else 'set it to'} {told}")
    for row, share in zip(others, _shares(others), strict=True):
        row.per_day = left * share
    for row in rows:
        row.settled = True


def _shares(rows: list[_Row]) -> list[float]:
    """As the model divides them: by their rates here, or by their weights where those are none."""
    measures: tuple[Callable[[_Row], float], ...] = (
        lambda row: row.per_day,
        lambda row: row.row.weight,
        lambda row: 1.0,
    )
    for measure in measures:
        total = sum(map(measure, rows))
        if total:
            return [measure(row) / total for row in rows]
    return []


def _check_domains(file: ModelFile, faults: FaultPart) -> None:
    """Refuses settings about domains that would change nothing."""
    if faults.domain_per_1000_node_days is not None and not faults.domains:
        rule = "cannot be set where faults.domains is false"
        raise ConfigError(DOMAINS, faults.domain_per_1000_node_days, rule, "leave one of them out")
    if not file.domain:
        key = "faults.domains" if not faults.domains else DOMAINS
        value = faults.domain_per_1000_node_days if faults.domains else False
        rule = f"means nothing: the rate of {faults.model} has faults of domains in it"
        fix = "leave it out; faults.causes.NAME@rack sets one of a rack, @power and @leaf likewise"
        raise ConfigError(key, value, rule, fix)


def _named(rows: list[_Row]) -> list[CauseRate]:
    seen: dict[str, int] = {}
    rates = []
    for entry in rows:
        row = entry.row
        key = f"{row.name}@{row.scope}"
        seen[key] = seen.get(key, 0) + 1
        cause = CauseRate(
            name=row.name,
            per_day=entry.per_day,
            symptom=row.symptom,
            scope=row.scope,
            nodes=row.nodes,
            repair_hours=row.repair_hours,
            key=key if seen[key] == 1 else f"{key}#{seen[key]}",
        )
        if cause.per_day > 0:
            rates.append(cause)
    return rates


def of_job_per_day(scenario: Scenario, gpus: int) -> float:
    """Faults a day of the program of a job that runs on so many GPUs."""
    classes = {int(least): rate for least, rate in scenario.faults.by_job_gpus.items()}
    least = max((least for least in classes if least <= gpus), default=0)
    return classes.get(least, 0.0) / 1000 * gpus / scenario.fleet.node_gpus


def causes_of(scenario: Scenario) -> list[CauseRate]:
    """Every cause with its rate for nodes that jobs run on."""
    faults, fleet = scenario.faults, scenario.fleet
    return causes_in(model(faults.model), faults, gpus=fleet.gpus, node_gpus=fleet.node_gpus)
