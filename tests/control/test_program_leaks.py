"""Programs that are over leave nothing behind, and no output fills a disk."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.control.agent.inspect.log_keeping import MOST_BYTES
from phalanx.control.agent.socket_paths import runtime_folder
from phalanx.control.agent.spawn.cgroups import Cgroups
from phalanx.control.backends.local import processes_of
from phalanx.control.host.process_tree import read_stat
from phalanx.testing.local_cluster import Stage
from phalanx.testing.local_processes import worker_pids

DAEMON = """
import os, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "1000"], start_new_session=True)
if os.fork() == 0:  # as daemons do: nobody waits for what it starts
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execve("/bin/sleep", ["sleep", "1001"], {})
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
"""
FLOOD = "import os\nblock = b'x' * 127 + b'\\n'\nblock *= 8192\nwhile True: os.write(1, block)"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("programs")
    (root / "daemon.py").write_text(DAEMON)
    (root / "flood.py").write_text(FLOOD)
    with Stage(root, nodes=1, gpus_per_node=2) as running:
        yield running


def sleepers(*seconds: int) -> list[int]:
    """Processes that sleep so long, and were started by the script above."""
    wanted = [f"sleep\0{each}\0".encode() for each in seconds]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() in wanted:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_many_short_programs_leave_no_process_behind(stage: Stage) -> None:
    node = stage.cluster.nodes[0]
    stage.wait_ended(stage.submit("--world-size", "2", "--", "true"), 60)
    before = len(processes_of(node))
    jobs = [stage.submit("--world-size", "2", "--", "true") for _ in range(6)]
    assert [stage.wait_ended(job, 60) for job in jobs] == ["done"] * 6
    stage.wait(lambda: len(processes_of(node)) <= before, "their processes to end", 20)


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_what_a_program_started_in_another_session_ends_with_it(stage: Stage, killed: bool) -> None:
    others = sleepers(1000, 1001)
    seconds = "1000" if killed else "1"
    job = stage.submit("--", sys.executable, "daemon.py", seconds)

    def started() -> list[int]:
        return [pid for pid in sleepers(1000, 1001) if pid not in others]

    stage.wait(lambda: len(started()) == 2, "its daemons", 60)
    main = worker_pids(stage.cluster.nodes[0], job)[0]
    assert [read_stat(pid).parent for pid in started()] == [main, main]  # type: ignore[union-attr]
    if killed:
        stage.command("cancel", str(job))
    stage.wait_ended(job, 60)
    stage.wait(lambda: not started(), "its daemons to end", 20)


def test_a_flood_of_output_stays_within_the_bound_of_a_log(stage: Stage) -> None:
    job = stage.submit("--world-size", "2", "--", sys.executable, "flood.py")
    logs = [stage.cluster.nodes[0].state / "jobs" / str(job) / f"worker-{i}.log" for i in (0, 1)]
    stage.wait(lambda: all(log.exists() for log in logs), "the flood", 60)
    highest, until = 0, time.monotonic() + 4
    while time.monotonic() < until:
        highest = max(highest, *(log.stat().st_blocks * 512 for log in logs))
        time.sleep(0.002)
    assert all(log.stat().st_size > MOST_BYTES for log in logs), "they wrote more than is kept"
    assert highest <= MOST_BYTES
    pid = worker_pids(stage.cluster.nodes[0], job)[0]
    stage.command("cancel", str(job))
    stage.wait(lambda: not Path(f"/proc/{pid}").exists(), "it to end", 20)


def test_the_last_words_of_a_program_are_in_its_log_when_it_has_ended(stage: Stage) -> None:
    job = stage.submit("--", "sh", "-c", "seq 20000; echo last words")
    assert stage.wait_ended(job, 60) == "done"
    log = stage.cluster.nodes[0].state / "jobs" / str(job) / "worker-0.log"
    lines = log.read_text().splitlines()
    assert len(lines) == 20001 and lines[-1] == "last words"


def test_a_zygote_that_is_killed_leaves_none_of_its_programs(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    others = sleepers(1000, 1001)
    with Stage(tmp_path, nodes=1) as stage:
        job = stage.submit("--", sys.executable, "daemon.py", "1000")

        def started() -> list[int]:
            return [pid for pid in sleepers(1000, 1001) if pid not in others]

        stage.wait(lambda: len(started()) == 2, "its daemons", 60)
        first = set(started())
        node = stage.cluster.nodes[0]
        main = read_stat(worker_pids(node, job)[0])
        assert main is not None
        os.kill(main.parent, signal.SIGKILL)
        stage.wait(lambda: node.agent is None or node.agent.poll() is not None, "its agent", 30)
        stage.restart_node(node)
        ended = "the daemons of the first start to end"
        stage.wait(lambda: first.isdisjoint(started()), ended, 60)
    stage.wait(lambda: not started(), "all of them to end", 20)


def test_a_cluster_whose_agent_is_dead_leaves_none_of_its_programs(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    others = sleepers(1000, 1001)

    def started() -> list[int]:
        return [pid for pid in sleepers(1000, 1001) if pid not in others]

    with Stage(tmp_path, nodes=1) as stage:
        stage.submit("--", sys.executable, "daemon.py", "1000")
        stage.wait(lambda: len(started()) == 2, "its daemons", 60)
        stage.kill_agent(stage.cluster.nodes[0])
    stage.wait(lambda: not started(), "all of them to end", 20)


def test_the_control_groups_of_programs_go_with_their_node(tmp_path: Path) -> None:
    with Stage(tmp_path, nodes=1) as stage:
        node = stage.cluster.nodes[0]
        folder = Cgroups(str(runtime_folder(node.state) / "zygote.sock"))._folder
        job = stage.submit("--", "sleep", "1000")
        stage.wait(lambda: worker_pids(node, job), "its process", 60)
        if folder is None or not folder.is_dir():
            pytest.skip("control groups cannot be used here")
        assert [path.parent.name for path in folder.glob("*/worker0")] == ["job1"]
    assert not folder.exists()
