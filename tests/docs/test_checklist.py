"""The checklist names checks, settings and commands that exist, and counts what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generator import checklist
from docs.generator.checklist import Point, points
from phalanx.config import Job
from phalanx.config.tree import paths
from phalanx.doctor.checks.registry import SETTINGS
from tests.docs.test_commands import split, unknown

EVERY = points()
NODE_POINTS, TOOL_POINTS, ALL_POINTS = 46, 72, 173
LEAST_CHECKED = 44


def test_node_decidable_points_are_checked() -> None:
    nodes = [point for point in EVERY if point.who == "node"]
    assert len(nodes) == NODE_POINTS
    assert sum(point.by == "checked" for point in nodes) >= LEAST_CHECKED


def test_the_points_are_as_many_as_the_page_says() -> None:
    assert len(EVERY) == ALL_POINTS
    assert sum(point.who == "tool" for point in EVERY) == TOOL_POINTS
    assert len({point.text for point in EVERY}) == ALL_POINTS
    page = "\n".join(checklist.lines())
    served = sum(point.served for point in EVERY)
    assert f"| all | {ALL_POINTS} | {served} |" in page


def test_every_check_serves_a_point() -> None:
    named = {name for point in EVERY for name in point.checks}
    assert set(SETTINGS) <= named, set(SETTINGS) - named


@pytest.mark.parametrize("point", EVERY, ids=lambda point: point.text[:40])
def test_settings_and_commands_exist(point: Point) -> None:
    settings = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", point.how)
    assert [name for name in settings if name not in paths(Job)] == []
    if point.command:
        program, *words = split(point.command)
        assert program == "phalanx" and unknown(words) == []
        if words[:2] == ["config", "explain"]:
            assert words[2] in paths(Job)
    if point.by in ("checked", "not ours", "not yet"):
        return
    assert point.how or point.command or point.who == "practice"


def test_a_row_that_names_no_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "checklist.toml"
    bad.write_text(
        '[[section]]\ntitle = "S"\npoints = [["node", "P.", "checked", "os.spleen", ""]]\n'
    )
    monkeypatch.setattr(checklist, "TABLE", bad)
    with pytest.raises(ValueError, match=r"os\.spleen"):
        points()
