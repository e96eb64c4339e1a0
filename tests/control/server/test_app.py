"""Requests find their resource: every path of the table, and nothing else."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Match

from phalanx.control.server.app import ENDPOINTS, RESOURCE, _ByWord, _Resource

BY_PATH = {each.path: {e.method: e for e in ENDPOINTS if e.path == each.path} for each in ENDPOINTS}
FOUND = _ByWord([_Resource(None, path, known) for path, known in BY_PATH.items()])  # type: ignore[arg-type]


def asked(method: str, path: str) -> tuple[Match, str]:
    scope = {"type": "http", "method": method, "path": path, "root_path": ""}
    match, found = FOUND.matches(scope)
    return match, found[RESOURCE].path if found else ""


@pytest.mark.parametrize("path", BY_PATH)
def test_every_path_is_found_with_its_methods(path: str) -> None:
    filled = re.sub(r"\{[^}]*\}", "7", path)
    for method in BY_PATH[path]:
        match, found = asked(method, filled)
        assert match is Match.FULL
        # A path with a number in it may be another one's, which stands before it in the table.
        assert found == path or list(BY_PATH).index(found) < list(BY_PATH).index(path)
    assert asked("BREW", filled)[0] is Match.PARTIAL


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/", "/v1/nothing", "/v2/jobs/7/more", "/v1/jobs/7/8/9", "//jobs"]
)
def test_other_paths_are_not_found(path: str) -> None:
    assert asked("GET", path) == (Match.NONE, "")
