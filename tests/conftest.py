"""Settings that every test process needs before torch is imported, and the order of rooms."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from tests.shared_ranks import SharedRanks

# A loaded machine is slow, not wrong: no test fails for the time it took. The same code gives the
# same examples; new ones are drawn by `--hypothesis-profile=explore`, which `make soak` does.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

# Mapped shards are closed when they are collected, which may be many tests later.
OPEN_FILES = 8192
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if _soft < OPEN_FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, _hard), _hard))

# Under nohup it would be ignored, also in what tests start, and tests of closing terminals fail.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# These fork ranks from the test process, which must have one thread; libraries that other rooms
# use start threads of their own and keep them.
FORKING_ROOMS = ("parallel", "train", "checkpoint")
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the rooms that fork first; the others keep their order."""
    if settings.get_current_profile_name() == "same":
        # The same examples, whatever else was imported: no constants out of 1,200 modules, either.
        providers._get_local_constants = lambda: providers._local_constants

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(TESTS).parts[0]
        return FORKING_ROOMS.index(room) if room in FORKING_ROOMS else len(FORKING_ROOMS)

    items.sort(key=place)


_seconds: Counter[str] = Counter()  # by room


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count where the time goes."""
    parts = Path(report.nodeid.split("::")[0]).parts
    _seconds[parts[1] if len(parts) > 2 else "tests"] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the time went, when it was worth a minute."""
    if sum(_seconds.values()) > 60:
        rooms = ", ".join(f"{room} {seconds:.0f}" for room, seconds in _seconds.most_common())
        terminalreporter.write_line(f"seconds by room: {rooms}")


@pytest.fixture(scope="session", autouse=True)
def _keepers_end_with_the_tests() -> Iterator[None]:
    """Keepers of runs that were killed on purpose would hold their memory for minutes."""
    from tests.checkpoint.waiting import keepers_below

    with tempfile.TemporaryDirectory(prefix="phx-") as folder, pytest.MonkeyPatch.context() as own:
        own.setenv("XDG_RUNTIME_DIR", folder)  # short, as the names of sockets must be
        yield
        for process in keepers_below(folder):
            process.kill()


@pytest.fixture(scope="session", autouse=True)
def _clusters_fork_their_processes() -> Iterator[None]:
    """Servers, agents and commands of clusters need not import Phalanx again."""
    module = sys.modules.get("phalanx.testing.local_cluster")
    if module is None:  # no test that was collected has a cluster
        yield
        return
    from phalanx.control.backends import local
    from tests.commands import run_phalanx
    from tests.forked_process import can_fork, start_in_background

    started = module.TrialCluster.command

    def command(cluster: Any, name: str, *arguments: str) -> str:
        if not can_fork():
            return str(started(cluster, name, *arguments))
        words = (name, "--state", str(cluster.state), "--json", *arguments)
        made = run_phalanx(*words, folder=cluster.root)
        if made.returncode:
            raise RuntimeError(made.stdout + made.stderr)
        return made.stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.TrialCluster, "command", command)
        for each in (local, module):
            patch.setattr(each, "start_in_background", start_in_background)
        yield


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[SharedRanks]:
    """Ranks for one test of a file after another."""
    from tests.shared_ranks import SharedRanks  # torch, which few tests need

    ranks = SharedRanks()
    yield ranks
    ranks.close()
