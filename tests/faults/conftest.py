"""The undisturbed run that every trial is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.control.jobs import undisturbed
from tests.faults.trial import STEPS


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job of all trials comes to when nothing happens to it."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)
