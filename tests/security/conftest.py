"""Two real Unix users and a root agent, for attacks across the boundary between them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.conftest import postgres_url  # noqa: F401
from tests.control.servers import ServerProcess


@pytest.fixture(scope="session")
def users() -> Iterator[tuple[str, str]]:
    """Two Unix users that nobody else on the machine uses."""
    if os.getuid() != 0:
        pytest.skip("only root can make users and run jobs as them")
    names = (f"phx-a{os.getpid()}", f"phx-b{os.getpid()}")
    try:
        for name in names:
            command = ["useradd", "--no-create-home", "--shell", "/bin/sh", name]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no user can be made here: {made.stderr}")
        yield names
    finally:
        for name in names:
            subprocess.run(["userdel", name], capture_output=True, check=False)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="phalanx-users-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that leads, with nothing in it."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running
