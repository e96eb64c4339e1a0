"""A private Slurm for tests: the real daemons, or a visible skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def opened_sandbox(folder: Path, **settings: object) -> Iterator[Sandbox]:
    """A sandbox that Slurm's programs find while it is open, and of which nothing is left."""
    try:
        require_programs()
    except SandboxError as error:
        pytest.skip(str(error))
    nodes = int(str(settings.get("nodes", 8)))
    port = free_port(*range(1, nodes + 4)) + 3
    options = SandboxOptions(root=folder / "slurm", port=port, **settings)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(options.conf))
        patch.setenv("HOME", str(folder))  # where bad nodes are remembered
        with Sandbox(options) as sandbox:
            yield sandbox
    assert sandbox.job_processes() == []
    assert sandbox.step_daemons() == []
    assert not sandbox.running()


@pytest.fixture
def make_sandbox(tmp_path: Path) -> Iterator[Callable[..., Sandbox]]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(opened_sandbox(tmp_path, **settings))
