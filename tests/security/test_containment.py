"""What a job's processes cannot do: gain rights, outlive the agent, or leave their bounds."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper.frames import framed
from phalanx.control.agent.config import AgentConfig, ContainmentOptions
from phalanx.control.agent.spawn.cgroups import KILL, Cgroups, own_group
from phalanx.control.agent.spawn.containment import (
    JOB_OOM_SCORE,
    bound_group,
    contain,
    memory_share,
)
from phalanx.control.wire.zygote_messages import Containment, Spawn, decode_to_zygote
from tests.control.servers import ServerProcess
from tests.security.agents import RootAgent, wait_for
from tests.security.test_jobs_apart import submit

SHOW = (
    "grep -E 'NoNewPrivs|Umask|CapEff' /proc/self/status; cat /proc/self/oom_score_adj; "
    "ulimit -c; ls -l /proc/$$/fd; echo seen; sleep 600"
)


def test_a_contained_process_gains_no_rights_and_ends_before_the_agent() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        contain(Containment(), "member")
        status = Path("/proc/self/status").read_text()
        score = Path("/proc/self/oom_score_adj").read_text().strip()
        core = resource.getrlimit(resource.RLIMIT_CORE)[0]
        held = "NoNewPrivs:\t1" in status and "Umask:\t0022" in status
        os.write(writer, f"{held} {score} {core}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100).decode() == f"True {JOB_OOM_SCORE} 0"


def test_a_site_can_let_programs_gain_rights() -> None:
    pid = os.fork()
    if pid == 0:
        before = Path("/proc/self/status").read_text()
        contain(Containment(no_new_privileges=False), "member")
        line = next(each for each in before.splitlines() if each.startswith("NoNewPrivs"))
        os._exit(0 if line in Path("/proc/self/status").read_text() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_control_group_bounds_memory_processes_and_cores(tmp_path: Path) -> None:
    """A folder stands in for the kernel's: what is written is what counts."""
    bound_group(tmp_path, Containment(memory_bytes=8 << 30, processes=100, cpu_weight=50))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {
        "memory.max": str(8 << 30),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "100",
        "cpu.weight": "50",
    }


def test_a_group_that_cannot_be_bounded_keeps_the_job_from_starting() -> None:
    own = own_group()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control groups of version 2 can be made here")
    if "memory" in (own / "cgroup.controllers").read_text().split():
        pytest.skip("groups can be bounded here")
    groups = Cgroups("hostile-suite")
    with pytest.raises(OSError, match="no bounds for a job below"):
        groups.make("job1/worker0", Containment(group=str(own), memory_bytes=1 << 30))
    made = own / groups._name
    for each in (made / "job1" / "worker0", made / "job1", made):
        if each.exists():
            each.rmdir()


def test_a_job_s_groups_end_with_its_last_program() -> None:
    own = own_group()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control groups of version 2 can be made here")
    groups = Cgroups("hostile-suite-ends")
    made = [groups.make(f"job1/worker{index}", Containment()) for index in range(2)]
    if made[0] is None or made[1] is None:
        pytest.skip(f"the kernel has no {KILL}")
    groups.end("job1/worker0")
    assert not made[0].exists() and made[1].exists()
    groups.end("job1/worker1")
    assert not made[1].exists() and not made[1].parent.exists()
    groups.close()


def test_a_job_s_share_of_memory_is_that_of_its_gpus() -> None:
    assert memory_share(101 << 30, 4, 8) == 50 << 30
    assert memory_share(101 << 30, 0, 8) == memory_share(101 << 30, 8, 8) == 100 << 30
    assert memory_share(1 << 30, 0, 0) == 1 << 29  # a small machine keeps half of it


def test_bounds_travel_to_the_zygote() -> None:
    order = Spawn(key="k", role="program", containment=Containment(group="/g", processes=7))
    assert decode_to_zygote(framed(order)[4:]) == order
    assert AgentConfig().containment == ContainmentOptions()


def test_a_program_of_a_user_has_no_rights_no_dumps_and_no_files_of_the_agent(
    users: tuple[str, str], open_folder: Path
) -> None:
    with (
        ServerProcess(open_folder / "server") as server,
        RootAgent(server, open_folder, "real") as agent,
    ):
        assert wait_for(lambda: server.call("GET", "/v1/nodes")[1]["nodes"])
        job = submit(server, open_folder, users[0], SHOW)
        log = agent.state / "jobs" / str(job) / "worker-0.log"
        assert wait_for(lambda: log.exists() and "seen" in log.read_text()), agent.log()
        lines = log.read_text().splitlines()
        assert "NoNewPrivs:\t1" in lines and "Umask:\t0022" in lines
        assert "CapEff:\t0000000000000000" in lines
        assert str(JOB_OOM_SCORE) in lines and "0" in lines
        files = [line for line in lines if " -> " in line]
        assert len(files) == 3, files  # input, output and errors
