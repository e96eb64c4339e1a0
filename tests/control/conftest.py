"""Servers that the tests of a module share."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.servers import Postgres, ServerProcess, postgres_program


@pytest.fixture(scope="session", autouse=True)
def _clusters_fork_their_commands() -> Iterator[None]:
    """What a cluster has the command line do need not import Phalanx again."""
    module = sys.modules.get("phalanx.testing.local_cluster")
    if module is None:  # no test that was collected has a cluster
        yield
        return
    from tests.commands import run_phalanx

    def command(cluster: Any, name: str, *arguments: str) -> str:
        words = (name, "--state", str(cluster.state), "--json", *arguments)
        made = run_phalanx(*words, folder=cluster.root)
        if made.returncode:
            raise RuntimeError(made.stdout + made.stderr)
        return made.stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.TrialCluster, "command", command)
        yield


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
