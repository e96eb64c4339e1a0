"""The dashboard is one that Grafana takes: its schema as far as it is used, and a sound layout."""

from __future__ import annotations

from importlib import resources
from itertools import combinations
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

DASHBOARD = resources.files("phalanx.observe") / "monitoring" / "grafana.json"
COLUMNS = 24  # of Grafana's grid
# Of github.com/grafana/grafana: kinds/dashboard, public/app/plugins/panel, and
# packages/grafana-data/src/valueFormats/categories.ts.
Unit = Literal["none", "short", "percent", "percentunit", "s", "ms", "bytes", "decbytes", "ops"]
Unit = Unit | Literal["celsius", "watt", "joule", "currencyUSD", "Bps", "dtdurations", "h"]
PanelType = Literal["timeseries", "stat", "gauge", "bargauge", "table", "text", "row", "heatmap"]


class Part(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A part of a dashboard that has these keys and no others."""


class DataSource(Part, frozen=True):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]  # whichever the site has


class Place(Part, frozen=True):
    h: Annotated[int, Meta(ge=1)]
    w: Annotated[int, Meta(ge=1, le=COLUMNS)]
    x: Annotated[int, Meta(ge=0, lt=COLUMNS)]
    y: Annotated[int, Meta(ge=0)]


class Target(Part, frozen=True):
    ref_id: Annotated[str, Meta(min_length=1)]
    expr: Annotated[str, Meta(min_length=1)]
    datasource: DataSource
    legend_format: str = ""


class FieldDefaults(Part, frozen=True):
    unit: Unit = "none"
    min: float | None = None
    max: float | None = None


class FieldConfig(Part, frozen=True):
    defaults: FieldDefaults
    overrides: list[dict[str, Any]]


class Panel(Part, frozen=True):
    id: Annotated[int, Meta(ge=1)]
    type: PanelType
    title: Annotated[str, Meta(min_length=1)]
    datasource: DataSource
    grid_pos: Place
    field_config: FieldConfig
    targets: Annotated[list[Target], Meta(min_length=1)]


class Variable(Struct, frozen=True):
    name: str
    type: Literal["datasource", "query"]


class Templating(Part, frozen=True):
    variables: list[Variable] = msgspec.field(name="list")


class TimeRange(Part, frozen=True):
    to: str
    since: str = msgspec.field(name="from")


class Dashboard(Part, frozen=True):
    title: str
    uid: Annotated[str, Meta(max_length=40)]
    schema_version: Annotated[int, Meta(ge=36, le=41)]
    version: int
    editable: bool
    tags: list[str]
    time: TimeRange
    refresh: str
    templating: Templating
    panels: list[Panel]


def read(text: str) -> Dashboard:
    return msgspec.json.decode(text, type=Dashboard)


def overlap(one: Place, other: Place) -> bool:
    beside = one.x + one.w <= other.x or other.x + other.w <= one.x
    return not beside and not (one.y + one.h <= other.y or other.y + other.h <= one.y)


def test_the_dashboard_has_the_shape_that_grafana_reads() -> None:
    board = read(DASHBOARD.read_text())
    assert len({panel.id for panel in board.panels}) == len(board.panels) > 10
    for panel in board.panels:
        names = [target.ref_id for target in panel.targets]
        assert len(set(names)) == len(names), panel.title


def test_panels_fit_the_grid_and_cover_nothing_of_each_other() -> None:
    panels = read(DASHBOARD.read_text()).panels
    for panel in panels:
        assert panel.grid_pos.x + panel.grid_pos.w <= COLUMNS, panel.title
    for one, other in combinations(panels, 2):
        assert not overlap(one.grid_pos, other.grid_pos), (one.title, other.title)


def test_every_variable_that_a_query_uses_is_defined() -> None:
    text = DASHBOARD.read_text()
    defined = {variable.name for variable in read(text).templating.variables}
    assert defined == {"datasource", "job"}
    for target in (each for panel in read(text).panels for each in panel.targets):
        for word in target.expr.split("$")[1:]:
            assert word.startswith(("job", "__rate_interval")), target.expr


@pytest.mark.parametrize(
    ("good", "bad"),
    [('"timeseries"', '"graph2"'), ('"refId"', '"refid"'), ('"short"', '"furlongs"')],
)
def test_what_grafana_does_not_know_is_found(good: str, bad: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        read(DASHBOARD.read_text().replace(good, bad))
