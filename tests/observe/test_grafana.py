"""The dashboard is one that Grafana takes: its published models, and a sound layout."""

from __future__ import annotations

import json
import types
import typing
from enum import Enum
from importlib import resources
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import panelcfg_config
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard, GridPos, Panel
from grafana_foundation_sdk.models.prometheus import Dataquery

DASHBOARD = resources.files("phalanx.observe") / "monitoring" / "grafana.json"
COLUMNS = 24  # of Grafana's grid
SCHEMAS = range(36, 42)  # that Grafana 10 and 11 write; newer ones migrate them
UNITS = {value for name, value in vars(units).items() if name[0].isupper()}

register_default_plugins()


def read(text: str) -> Dashboard:
    return Dashboard.from_json(json.loads(text))


def panels(board: Dashboard) -> list[Panel]:
    return [panel for panel in board.panels or () if isinstance(panel, Panel)]


def problems(text: str) -> list[str]:
    """What of a dashboard Grafana's models do not know, or know to be something else."""
    board = read(text)
    found = unknown(json.loads(text), json.loads(JSONEncoder().encode(board)))
    found += mistyped(board, Dashboard)
    for panel in panels(board):
        if panelcfg_config(panel.type_val) is None:
            found.append(f"{panel.title}: a panel of type {panel.type_val}")
        for target in panel.targets or ():
            if not isinstance(target, Dataquery) or not target.ref_id or not target.expr:
                found.append(f"{panel.title}: a query without a name or an expression")
        if panel.field_config is None or panel.field_config.defaults.unit not in UNITS:
            found.append(f"{panel.title}: no unit of Grafana's")
    return found


def unknown(given: Any, taken: Any, path: str = "") -> list[str]:
    """Where something is missing in what Grafana's models made of it."""
    if isinstance(given, dict):
        lost = [f"{path}.{key} is not known" for key in given if key not in taken]
        both = [key for key in given if key in taken]
        return lost + [each for key in both for each in unknown(given[key], taken[key], key)]
    if isinstance(given, list):
        pairs = zip(given, taken, strict=True)
        return [each for one, other in pairs for each in unknown(one, other, path)]
    return [] if given == taken else [f"{path}: {given!r} becomes {taken!r}"]


def mistyped(value: Any, hint: Any, path: str = "") -> list[str]:
    """Where a value is not what the model says of it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return []
    if origin in (typing.Union, types.UnionType):
        return min((mistyped(value, each, path) for each in inner), key=len)
    if origin is typing.Literal:
        good = value in inner
    elif isinstance(hint, type) and issubclass(hint, Enum):
        good = value in [each.value for each in hint]
    else:
        kind = (int, float) if hint is float else origin or hint
        good = isinstance(value, kind) and not (isinstance(value, bool) and hint is int)
    if not good:
        return [f"{path}: {value!r} is no {hint}"]
    if origin is list:
        return [each for item in value for each in mistyped(item, inner[0], path)]
    if origin is dict:
        return [each for item in value.values() for each in mistyped(item, inner[1], path)]
    if not hasattr(value, "from_json"):
        return []
    hints = typing.get_type_hints(type(value)).items()
    return [each for name, of in hints for each in mistyped(getattr(value, name), of, name)]


def overlap(one: GridPos, other: GridPos) -> bool:
    beside = one.x + one.w <= other.x or other.x + other.w <= one.x
    return not beside and not (one.y + one.h <= other.y or other.y + other.h <= one.y)


def test_the_dashboard_is_what_grafanas_own_models_describe() -> None:
    assert problems(DASHBOARD.read_text()) == []
    board = read(DASHBOARD.read_text())
    assert board.schema_version in SCHEMAS and len(board.uid or "") <= 40
    assert len({panel.id_val for panel in panels(board)}) == len(board.panels or ()) > 10
    for panel in panels(board):
        names = [target.ref_id for target in panel.targets or () if isinstance(target, Dataquery)]
        assert names and len(set(names)) == len(names), panel.title


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"timeseries"', '"graph2"'),
        ('"refId"', '"refid"'),
        ('"short"', '"furlongs"'),
        ('"schemaVersion": 39', '"schemaVersion": "39"'),
        ('"hide": 0', '"hide": 7'),
        ('"gridPos"', '"gridpos"'),
        ('"editable": true', '"editable": "yes"'),
    ],
)
def test_what_grafana_does_not_know_is_found(good: str, bad: str) -> None:
    text = DASHBOARD.read_text()
    assert good in text and problems(text.replace(good, bad))


def test_panels_fit_the_grid_and_cover_nothing_of_each_other() -> None:
    places = [(panel.title, panel.grid_pos) for panel in panels(read(DASHBOARD.read_text()))]
    taken = [(title, place) for title, place in places if place is not None]
    assert taken == places
    for title, place in taken:
        assert min(place.x, place.y) >= 0 < min(place.w, place.h), title
        assert place.x + place.w <= COLUMNS, title
    for (one, here), (other, there) in combinations(taken, 2):
        assert not overlap(here, there), (one, other)


def test_every_variable_that_a_query_uses_is_defined() -> None:
    board = read(DASHBOARD.read_text())
    assert {each.name for each in board.templating.list_val or ()} == {"datasource", "job"}
    for panel in panels(board):
        assert panel.datasource is not None and panel.datasource.uid == "${datasource}"
        for target in panel.targets or ():
            assert isinstance(target, Dataquery) and target.datasource is not None
            assert target.datasource.uid == "${datasource}"  # whichever the site has
            for word in target.expr.split("$")[1:]:
                assert word.startswith(("job", "__rate_interval")), target.expr
