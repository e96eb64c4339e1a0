"""A private Slurm for tests: the real daemons, or a visible skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.testing.slurm.files import SandboxOptions
from phalanx.testing.slurm.sandbox import Sandbox, SandboxError, require_programs
from tests.ports import free_port

# Real daemons and jobs: what a test waits for itself says more when it is missing. One that waits
# for longer has a mark of its own.
SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        waits = item.get_closest_marker("timeout") is not None
        if "make_sandbox" in getattr(item, "fixturenames", ()) and not waits:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture
def make_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Sandbox]]:
    try:
        require_programs()
    except SandboxError as error:
        pytest.skip(str(error))
    made: list[Sandbox] = []
    stack = ExitStack()

    def make(**settings: object) -> Sandbox:
        nodes = int(str(settings.get("nodes", 8)))
        port = free_port(*range(1, nodes + 4)) + 3
        options = SandboxOptions(root=tmp_path / "slurm", port=port, **settings)  # type: ignore[arg-type]
        sandbox = Sandbox(options)
        stack.enter_context(sandbox)
        made.append(sandbox)
        monkeypatch.setenv("SLURM_CONF", str(options.conf))
        monkeypatch.setenv("HOME", str(tmp_path))  # where bad nodes are remembered
        return sandbox

    with stack:
        yield make
    for sandbox in made:
        assert sandbox.job_processes() == []
        assert sandbox.step_daemons() == []
        assert not sandbox.running()
