"""Programs that are over leave nothing behind, and no output fills a disk."""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.control.agent.socket_paths import runtime_folder
from phalanx.control.agent.spawn.cgroups import Cgroups
from phalanx.control.agent.spawn.log_keeping import MOST_BYTES
from phalanx.control.backends.local import processes_of
from phalanx.control.host.process_tree import read_stat
from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import worker_pids

# How long they sleep is how they are found: other tests, and other runs, have their own.
DAEMON = """
import os, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", sys.argv[2]], start_new_session=True)
if os.fork() == 0:  # as daemons do: nobody waits for what it starts
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execve("/bin/sleep", ["sleep", sys.argv[2]], {})
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
"""
FLOOD = "import os\nblock = b'x' * 127 + b'\\n'\nblock *= 8192\nwhile True: os.write(1, block)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    root = tmp_path_factory.mktemp("programs")
    (root / "daemon.py").write_text(DAEMON)
    (root / "flood.py").write_text(FLOOD)
    with TrialCluster(root, nodes=1, gpus_per_node=2) as running:
        yield running


def own_seconds(folder: Path) -> str:
    """So long nobody else sleeps."""
    return f"1000.{zlib.crc32(str(folder).encode())}"


def sleepers(seconds: str) -> list[int]:
    """Processes that sleep so long: the daemons of the script above."""
    wanted = f"sleep\0{seconds}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_many_short_programs_leave_no_process_behind(cluster: TrialCluster) -> None:
    node = cluster.local.nodes[0]
    cluster.wait_ended(cluster.submit("--world-size", "2", "--", "true"), 60)
    before = len(processes_of(node))
    jobs = [cluster.submit("--world-size", "2", "--", "true") for _ in range(6)]
    assert [cluster.wait_ended(job, 60) for job in jobs] == ["done"] * 6
    cluster.wait(lambda: len(processes_of(node)) <= before, "their processes to end", 120)


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_what_a_program_started_in_another_session_ends_with_it(
    cluster: TrialCluster, tmp_path: Path, killed: bool
) -> None:
    own = own_seconds(tmp_path)
    started = lambda: sleepers(own)  # noqa: E731
    job = cluster.submit("--", sys.executable, "daemon.py", "1000" if killed else "1", own)
    cluster.wait(lambda: len(started()) == 2, "its daemons", 60)
    main = worker_pids(cluster.local.nodes[0], job)[0]
    assert [read_stat(pid).parent for pid in started()] == [main, main]  # type: ignore[union-attr]
    if killed:
        cluster.command("cancel", str(job))
    cluster.wait_ended(job, 60)
    cluster.wait(lambda: not started(), "its daemons to end", 120)


def test_a_flood_of_output_stays_within_the_bound_of_a_log(cluster: TrialCluster) -> None:
    job = cluster.submit("--world-size", "2", "--", sys.executable, "flood.py")
    logs = [cluster.local.nodes[0].state / "jobs" / str(job) / f"worker-{i}.log" for i in (0, 1)]
    cluster.wait(lambda: all(log.exists() for log in logs), "the flood", 60)
    highest, most, until = 0, 2 * MOST_BYTES, time.monotonic() + 120
    while min(log.stat().st_size for log in logs) < most and time.monotonic() < until:
        highest = max(highest, *(log.stat().st_blocks * 512 for log in logs))
        time.sleep(0.002)
    assert all(log.stat().st_size > MOST_BYTES for log in logs), "they wrote more than is kept"
    assert highest <= MOST_BYTES
    pid = worker_pids(cluster.local.nodes[0], job)[0]
    cluster.command("cancel", str(job))
    cluster.wait(lambda: not Path(f"/proc/{pid}").exists(), "it to end", 120)


def test_the_last_words_of_a_program_are_in_its_log_when_it_has_ended(
    cluster: TrialCluster,
) -> None:
    job = cluster.submit("--", "sh", "-c", "seq 20000; echo last words")
    assert cluster.wait_ended(job, 60) == "done"
    log = cluster.local.nodes[0].state / "jobs" / str(job) / "worker-0.log"
    lines = log.read_text().splitlines()
    assert len(lines) == 20001 and lines[-1] == "last words"


def test_a_zygote_that_is_killed_leaves_none_of_its_programs(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    own = own_seconds(tmp_path)
    started = lambda: sleepers(own)  # noqa: E731
    with TrialCluster(tmp_path, nodes=1) as cluster:
        job = cluster.submit("--", sys.executable, "daemon.py", "1000", own)
        cluster.wait(lambda: len(started()) == 2, "its daemons", 60)
        first = set(started())
        node = cluster.local.nodes[0]
        main = read_stat(worker_pids(node, job)[0])
        assert main is not None
        os.kill(main.parent, signal.SIGKILL)
        cluster.wait(lambda: node.agent is None or node.agent.poll() is not None, "its agent", 30)
        cluster.restart_node(node)
        ended = "the daemons of the first start to end"
        cluster.wait(lambda: first.isdisjoint(started()), ended, 60)
    cluster.wait(lambda: not started(), "all of them to end", 120)


def test_a_cluster_whose_agent_is_dead_leaves_none_of_its_programs(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    own = own_seconds(tmp_path)
    started = lambda: sleepers(own)  # noqa: E731
    with TrialCluster(tmp_path, nodes=1) as cluster:
        cluster.submit("--", sys.executable, "daemon.py", "1000", own)
        cluster.wait(lambda: len(started()) == 2, "its daemons", 60)
        cluster.kill_agent(cluster.local.nodes[0])
    cluster.wait(lambda: not started(), "all of them to end", 120)


def test_the_control_groups_of_programs_go_with_their_node(tmp_path: Path) -> None:
    with TrialCluster(tmp_path, nodes=1) as cluster:
        node = cluster.local.nodes[0]
        folder = Cgroups(str(runtime_folder(node.state) / "zygote.sock"))._folder
        job = cluster.submit("--", "sleep", "1000")
        cluster.wait(lambda: worker_pids(node, job), "its process", 60)
        if folder is None or not folder.is_dir():
            pytest.skip("control groups cannot be used here")
        assert [path.parent.name for path in folder.glob("*/worker0")] == ["job1"]
    assert not folder.exists()
