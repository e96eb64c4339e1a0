"""Every test has keepers of its own and leaves none behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.waiting import eventually, keepers_below


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the sockets are; not in tmp_path, since their names must be short."""
    with tempfile.TemporaryDirectory(prefix="phx-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        for process in keepers_below(folder):
            process.kill()
        assert eventually(lambda: not keepers_below(folder))
