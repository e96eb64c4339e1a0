"""The undisturbed run that every trial is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.control.jobs import undisturbed
from tests.faults.trial import SHORT_STEPS, STEPS


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job of all trials comes to when nothing happens to it."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job of few steps comes to when nothing happens to it."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), SHORT_STEPS)


@pytest.fixture(autouse=True)
def _workers_obey_drills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of few steps are slowed down until something has happened to them."""
    monkeypatch.setenv("PHALANX_CHAOS", "1")
