"""Servers that the tests of a module share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.servers import Postgres, ServerProcess, postgres_program


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that leads, with nothing in it."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL in a private folder."""
    if postgres_program() is None:
        pytest.skip("PostgreSQL is not installed: `make postgres` as root, or apt install it")
    # Not below pytest's own folder, which only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="phalanx-postgres-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        database = Postgres(folder).start()
        yield database.url
        database.stop()
