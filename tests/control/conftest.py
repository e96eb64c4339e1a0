"""Servers that the tests of a module share."""

from __future__ import annotations

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
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real PostgreSQL in a private folder."""
    if postgres_program() is None:
        pytest.skip("PostgreSQL is not installed: `make postgres` as root, or apt install it")
    folder = tmp_path_factory.mktemp("postgres")
    for parent in (folder, *folder.parents):
        if parent == Path("/tmp"):
            break
        parent.chmod(0o755)  # its own user must reach the socket
    database = Postgres(folder).start()
    yield database.url
    database.stop()
