"""Limits of control groups: of the process's own, and of those around it."""

from __future__ import annotations

from phalanx.doctor.checks.evidence import ProcessFacts
from tests.doctor.checks.played import played

GIB = 1 << 20  # in KiB
ROOT = "/sys/fs/cgroup"
JOB = f"{ROOT}/slurm/job_7"
STEP = f"{JOB}/step_0/task_0"
SLURM = {
    "/proc/self/cgroup": "0::/slurm/job_7/step_0/task_0",
    "/proc/meminfo": f"MemTotal: {64 * GIB} kB",
    f"{STEP}/cpu.max": "max 100000",
    f"{STEP}/memory.max": "max",
    f"{STEP}/memory.events": "oom_kill 0",
}
EIGHT = ProcessFacts(cpus=tuple(range(8)))


def test_a_limit_around_the_own_group_holds() -> None:
    assert played("os.cgroup_cpu", SLURM, EIGHT).verdict == "pass"
    assert played("os.cgroup_memory", SLURM).verdict == "pass"
    tight = SLURM | {f"{JOB}/cpu.max": "200000 100000", f"{JOB}/memory.max": str(1 << 30)}
    found = played("os.cgroup_cpu", tight, EIGHT)
    assert found.verdict == "warn" and found.measured["of"] == JOB
    found = played("os.cgroup_memory", tight)
    assert found.verdict == "warn" and found.measured["of"] == JOB


def test_version_1_is_read_outwards_too() -> None:
    job = f"{ROOT}/cpu/slurm/job_7"
    tree = {
        "/proc/self/cgroup": "3:cpu,cpuacct:/slurm/job_7/step_0\n0::/",
        f"{job}/step_0/cpu.cfs_quota_us": "-1",
        f"{job}/cpu.cfs_quota_us": "100000",
        f"{job}/cpu.cfs_period_us": "50000",
    }
    assert played("os.cgroup_cpu", tree, EIGHT).measured["quota_cpus"] == 2.0


def test_kills_that_cannot_be_counted_are_unknown() -> None:
    silent = {path: text for path, text in SLURM.items() if not path.endswith("events")}
    assert played("os.cgroup_memory", silent).verdict == "unknown"


def test_a_period_of_zero_is_not_understood() -> None:
    found = played("os.cgroup_cpu", SLURM | {f"{STEP}/cpu.max": "100000 0"}, EIGHT)
    assert found.verdict == "unknown"


def test_a_cgroup_of_version_2_is_read_in_its_own_folder() -> None:
    own = "/sys/fs/cgroup/system.slice/job.service"
    tree = {
        "/proc/self/cgroup": "0::/system.slice/job.service",
        "/proc/meminfo": f"MemTotal: {64 * GIB} kB",
        f"{own}/cpu.max": "200000 100000",
        f"{own}/memory.max": "max",
        f"{own}/memory.events": "low 0\noom_kill 3",
    }
    few, many = ProcessFacts(cpus=(0, 1)), ProcessFacts(cpus=tuple(range(8)))
    assert played("os.cgroup_cpu", tree, few).verdict == "pass"
    assert played("os.cgroup_cpu", tree, many).measured["quota_cpus"] == 2.0
    found = played("os.cgroup_memory", tree)
    assert found.verdict == "warn" and found.measured["killed"] == 3


def test_the_root_of_the_cgroups_has_no_limit() -> None:
    tree = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cgroup.controllers": "cpu memory"}
    assert played("os.cgroup_cpu", tree).verdict == "pass"
    assert played("os.cgroup_memory", tree).verdict == "pass"
    assert played("os.cgroup_cpu", {"/proc/self/cgroup": "0::/"}).verdict == "unknown"
