"""Checks of the operating system, on good, bad and missing evidence."""

from __future__ import annotations

import pytest

from phalanx.doctor.checks.evidence import ProcessFacts
from phalanx.doctor.system import KernelClock
from tests.doctor.checks.played import CPU_VIRTUAL, H200_VIRTUAL, Case, played, prove

CPU = "/sys/devices/system/cpu"
IDLE = f"{CPU}/cpu0/cpuidle"
THP = "/sys/kernel/mm/transparent_hugepage"
NODE = "/sys/devices/system/node"
CLOCKS = "/sys/devices/system/clocksource/clocksource0"
ONE_POLICY = f"{CPU}/cpufreq/policy0/scaling_governor"
TWO_NODES = {f"{NODE}/node0/cpulist": "0-3", f"{NODE}/node1/cpulist": "4-7"}
SWAPS = "Filename Type Size Used Priority\n/swap.img file 8388604 {used} -2\n"
INTERRUPTS = """\
           CPU0       CPU1       CPU2       CPU3
  24:  {first}     400000     300000     200000  PCI-MSIX-0000:15:00.0   0-edge      mlx5_async0
 LOC:  9000000    9000000    9000000    9000000  Local timer interrupts
"""
MEMORY = (
    "MemTotal: {kib} kB\nHugePages_Total: {pages}\nHugePages_Free: {pages}\nHugepagesize: 2048 kB"
)
MOUNTS = """\
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size={size}
27 1 254:0 / / rw - {kind} /dev/vda rw
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes}          96349                processes
Max open files            1024                 {files}              files
Max locked memory         8388608              {locked}             bytes
"""
GOOD_LIMITS = LIMITS.format(processes=96349, files=1048576, locked="unlimited")
BAD_LIMITS = LIMITS.format(processes=1024, files=4096, locked=65536)
RDMA = {"/sys/class/infiniband/mlx5_0": ""}
GIB = 1 << 20  # in KiB


def sysctl(name: str, value: str) -> dict[str, str]:
    return {f"/proc/sys/{name.replace('.', '/')}": value}


CASES = [
    Case(
        check="os.governor",
        good={ONE_POLICY: "performance"},
        bad={ONE_POLICY: "schedutil"},
        mends=f"echo performance > {ONE_POLICY}",
        undoes=f"echo schedutil > {ONE_POLICY}",
    ),
    Case(
        check="os.cstates",
        good={},
        below=CPU_VIRTUAL,
        bad={f"{IDLE}/state3/latency": "133", f"{IDLE}/state3/disable": "0"},
        mends="state3/disable",
        undoes=f"echo 0 > {IDLE}/state3/disable",
    ),
    Case(
        check="os.turbo",
        good={f"{CPU}/cpufreq/boost": "1"},
        bad={f"{CPU}/intel_pstate/no_turbo": "1"},
        mends=f"echo 0 > {CPU}/intel_pstate/no_turbo",
        undoes=f"echo 1 > {CPU}/intel_pstate/no_turbo",
    ),
    Case(
        check="os.smt",
        below=CPU_VIRTUAL,
        good={},
        bad={f"{CPU}/smt/active": "1", f"{CPU}/cpu0/topology/thread_siblings_list": "0-1"},
        bad_process=ProcessFacts(environment={"OMP_NUM_THREADS": "2"}),
        mends="OMP_NUM_THREADS to 1",
    ),
    Case(
        check="os.cores",
        below=CPU_VIRTUAL,
        good={},
        bad={f"{CPU}/present": "0-7", f"{CPU}/offline": "6-7", f"{CPU}/isolated": "1-2"},
        mends="isolcpus",
        undoes=f"echo 0 | tee {CPU}/cpu6/online {CPU}/cpu7/online > /dev/null",
    ),
    Case(
        check="os.clocksource",
        below=CPU_VIRTUAL,
        good={},
        bad={
            f"{CLOCKS}/current_clocksource": "hpet",
            f"{CLOCKS}/available_clocksource": "tsc hpet",
        },
        mends="echo tsc",
        undoes=f"echo hpet > {CLOCKS}/current_clocksource",
    ),
    Case(
        check="os.kernel",
        below=CPU_VIRTUAL,
        good={},
        bad=sysctl("kernel.osrelease", "4.18.0-553.el8_10.x86_64"),
        mends="newer kernel",
    ),
    Case(
        check="os.firmware",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/cpuinfo": "microcode\t: 0x1000065\n\nmicrocode\t: 0x1000061\n"},
        mends="microcode",
    ),
    Case(
        check="os.interrupts",
        good={"/proc/interrupts": INTERRUPTS.format(first=500000)},
        bad={"/proc/interrupts": INTERRUPTS.format(first=50000000)},
        mends="systemctl start irqbalance",
        undoes="systemctl stop irqbalance",
    ),
    Case(
        check="os.numa_balancing",
        good=TWO_NODES | sysctl("kernel.numa_balancing", "0"),
        bad=TWO_NODES | sysctl("kernel.numa_balancing", "1"),
        missing=TWO_NODES,
        mends="sysctl -w kernel.numa_balancing=0",
        undoes="sysctl -w kernel.numa_balancing=1",
    ),
    Case(
        check="os.zone_reclaim",
        below=CPU_VIRTUAL,
        good={},
        bad=sysctl("vm.zone_reclaim_mode", "1"),
        mends="sysctl -w vm.zone_reclaim_mode=0",
        undoes="sysctl -w vm.zone_reclaim_mode=1",
    ),
    Case(
        check="os.numa_memory",
        below=CPU_VIRTUAL,
        good={},
        bad={f"{NODE}/node1/cpulist": "2-3", f"{NODE}/node1/meminfo": "Node 1 MemTotal: 1024 kB"},
        missing={f"{NODE}/node0/cpulist": "0-3"},
        mends="dmidecode",
    ),
    Case(
        check="os.thp",
        below=CPU_VIRTUAL,
        good={},
        bad={f"{THP}/enabled": "always madvise [never]"},
        mends=f"echo madvise > {THP}/enabled",
        undoes=f"echo never > {THP}/enabled",
    ),
    Case(
        check="os.hugepages",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/meminfo": MEMORY.format(kib=64 * GIB, pages=16384)},
        mends="sysctl -w vm.nr_hugepages=0",
        undoes="sysctl -w vm.nr_hugepages=16384",
    ),
    Case(
        check="os.swap",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/swaps": SWAPS.format(used=4 * GIB)},
        mends="swapoff /swap.img",
        undoes="swapon /swap.img",
    ),
    Case(
        check="os.swappiness",
        good={"/proc/swaps": SWAPS.format(used=0)} | sysctl("vm.swappiness", "1"),
        bad={"/proc/swaps": SWAPS.format(used=0)} | sysctl("vm.swappiness", "60"),
        mends="sysctl -w vm.swappiness=10",
        undoes="sysctl -w vm.swappiness=60",
    ),
    Case(
        check="os.dirty",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/meminfo": MEMORY.format(kib=2048 * GIB, pages=0)},
        mends="sysctl -w vm.dirty_background_bytes=17179869184",
        undoes="sysctl -w vm.dirty_background_ratio=10",
    ),
    Case(
        check="os.overcommit",
        below=CPU_VIRTUAL,
        good={},
        bad=sysctl("vm.overcommit_memory", "2"),
        mends="sysctl -w vm.overcommit_memory=0",
        undoes="sysctl -w vm.overcommit_memory=2",
    ),
    Case(
        check="os.nofile",
        good={"/proc/self/limits": GOOD_LIMITS},
        bad={},
        below=CPU_VIRTUAL,  # 20,000
        mends="nofile 65536",
    ),
    Case(
        check="os.memlock",
        good=RDMA | {"/proc/self/limits": GOOD_LIMITS},
        bad=RDMA | {"/proc/self/limits": BAD_LIMITS},
        missing=RDMA,
        mends="memlock unlimited",
    ),
    Case(
        check="os.nproc",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/self/limits": BAD_LIMITS},
        mends="nproc 4096",
    ),
    Case(
        check="os.shm",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/self/mountinfo": MOUNTS.format(size="65536k", kind="ext4")},
        missing={"/proc/self/mountinfo": "27 1 254:0 / / rw - ext4 /dev/vda rw"},
        mends="mount -o remount,size=50% /dev/shm",
        undoes="mount -o remount,size=65536k /dev/shm",
    ),
    Case(
        check="os.clock",
        good={},
        good_process=ProcessFacts(clock=KernelClock(True, 0.001)),
        bad={},
        bad_process=ProcessFacts(clock=KernelClock(False, 0.0)),
        mends="chrony",
    ),
    Case(
        check="os.cgroup_cpu",
        below=CPU_VIRTUAL,
        good={},
        bad={"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000"},
        bad_process=ProcessFacts(cpus=(0, 1)),
        mends="cpuset",
    ),
    Case(
        check="os.cgroup_memory",
        below=CPU_VIRTUAL,
        good={},
        bad={"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1073741824"},
        mends="memory limit",
    ),
    Case(
        check="os.threads",
        good={},
        good_process=ProcessFacts(cpus=(0, 1)),
        bad={},
        bad_process=ProcessFacts(cpus=(0, 1), environment={"MKL_NUM_THREADS": "8"}),
        mends="OMP_NUM_THREADS=2",
    ),
    Case(
        check="os.overlay",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/self/mountinfo": MOUNTS.format(size="1g", kind="overlay")},
        mends="docker run -v",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_good_bad_and_missing_evidence(case: Case) -> None:
    prove(case)


def test_an_energy_preference_of_performance_does_for_a_governor() -> None:
    tree = {
        ONE_POLICY: "powersave",
        f"{CPU}/cpufreq/policy0/energy_performance_preference": "performance",
    }
    assert played("os.governor", tree).verdict == "pass"


def test_cores_with_several_governors_get_their_own_back() -> None:
    tree = {
        f"{CPU}/cpufreq/policy{n}/scaling_governor": g
        for n, g in enumerate(("ondemand", "powersave"))
    }
    found = played("os.governor", tree)
    assert [step.undo.split()[1] for step in found.steps] == ["ondemand", "powersave"]


def idle(cpu: int, state: int, *, latency: int, off: bool = False) -> dict[str, str]:
    folder = f"{CPU}/cpu{cpu}/cpuidle/state{state}"
    return {f"{folder}/latency": str(latency), f"{folder}/disable": str(int(off))}


def test_a_deep_idle_state_of_any_core_is_seen() -> None:
    first = idle(0, 1, latency=1) | idle(0, 3, latency=133, off=True)
    tree = first | idle(1, 1, latency=1) | idle(1, 3, latency=133)
    found = played("os.cstates", tree)
    assert found.verdict == "warn" and found.measured["cores"] == 1
    path = f"{CPU}/cpu1/cpuidle/state3/disable"
    assert [(step.do, step.undo) for step in found.steps] == [
        (f"echo 1 > {path}", f"echo 0 > {path}")  # the first core's was off, and stays so
    ]
    assert played("os.cstates", first | idle(1, 1, latency=1)).verdict == "pass"


def test_a_deep_idle_state_of_all_cores_is_switched_off_in_one_word() -> None:
    tree = {path: text for cpu in range(64) for path, text in idle(cpu, 2, latency=170).items()}
    found = played("os.cstates", tree)
    every = f"{CPU}/cpu*/cpuidle/state2/disable"
    assert [step.undo for step in found.steps] == [f"echo 0 | tee {every} > /dev/null"]


def test_writing_starts_no_later_than_half_way_to_where_writers_stop() -> None:
    tree = {"/proc/meminfo": MEMORY.format(kib=100 * GIB, pages=0)}
    tree |= sysctl("vm.dirty_bytes", str(8 << 30))
    found = played("os.dirty", tree, below=CPU_VIRTUAL)
    assert found.measured == {"starts_gib": 4.0, "writers_stop_gib": 8.0}


def test_a_container_is_given_shared_memory_from_outside() -> None:
    tree = {"/proc/self/mountinfo": MOUNTS.format(size="64m", kind="ext4"), "/.dockerenv": ""}
    found = played("os.shm", tree, below=CPU_VIRTUAL)
    assert not found.steps and "--shm-size" in found.suggestion


def test_a_service_for_the_clock_that_is_off_is_switched_on() -> None:
    clock = ProcessFacts(clock=KernelClock(False, 0.0))
    asked = "$ timedatectl show --property=CanNTP --property=NTP"
    found = played("os.clock", {asked: "CanNTP=yes\nNTP=no\n"}, clock)
    assert [(step.do, step.undo) for step in found.steps] == [
        ("timedatectl set-ntp true", "timedatectl set-ntp false")
    ]
    for answer in ("CanNTP=yes\nNTP=yes\n", "CanNTP=no\nNTP=no\n", "!no bus"):
        found = played("os.clock", {asked: answer}, clock)
        assert found.verdict == "warn" and not found.steps, answer


def test_direct_defragmentation_is_mended_with_the_pages() -> None:
    tree = {f"{THP}/enabled": "always madvise [never]", f"{THP}/defrag": "[always] madvise never"}
    assert len(played("os.thp", tree).steps) == 2


def test_what_a_machine_does_not_have_is_skipped() -> None:
    assert played("os.memlock", {}, below=CPU_VIRTUAL).verdict == "skip"
    assert played("os.swappiness", {}, below=CPU_VIRTUAL).verdict == "skip"
    assert played("os.numa_balancing", {}, below=CPU_VIRTUAL).verdict == "skip"
    assert played("os.interrupts", {}, below=CPU_VIRTUAL).verdict == "skip"  # two cores


def test_threads_are_counted_for_every_gpu() -> None:
    process = ProcessFacts(cpus=tuple(range(16)), environment={"OMP_NUM_THREADS": "16"})
    found = played("os.threads", {}, process, below=H200_VIRTUAL)
    assert found.verdict == "pass" and found.measured["ranks"] == 1


def test_each_swap_comes_back_by_its_name_and_priority() -> None:
    swaps = "Filename Type Size Used Priority\n/dev/zram0 partition 8388604 4194304 100\n"
    swaps += "/a\\040swap file 8388604 4194304 -2\n"
    found = played("os.swap", {"/proc/swaps": swaps}, below=CPU_VIRTUAL)
    assert [step.do for step in found.steps] == ["swapoff /dev/zram0", "swapoff '/a swap'"]
    undone = [step.undo for step in found.steps]
    assert undone == ["swapon -p 100 /dev/zram0", "swapon '/a swap'"]


def test_threads_that_are_offline_because_smt_is_off_are_no_lost_cores() -> None:
    tree = {
        f"{CPU}/present": "0-7",
        f"{CPU}/offline": "4-7",
        f"{CPU}/isolated": "",
        f"{CPU}/smt/control": "off",
    }
    assert played("os.cores", tree).verdict == "pass"
    assert played("os.cores", tree | {f"{CPU}/smt/control": "on"}).verdict == "warn"
    assert played("os.cores", tree | {f"{CPU}/offline": "3-7"}).verdict == "warn"


def test_no_core_in_a_file_is_nothing_that_was_looked_at() -> None:
    empty = {f"{CPU}/{name}": "" for name in ("present", "offline", "isolated", "online")}
    assert played("os.cores", empty).verdict == "unknown"
    tree = empty | {f"{CPU}/smt/active": "0", f"{CPU}/cpu0/topology/thread_siblings_list": "0"}
    assert played("os.smt", tree).verdict == "unknown"


def test_a_balancer_that_runs_is_not_started_and_not_stopped() -> None:
    tree = {
        "/proc/interrupts": INTERRUPTS.format(first=90_000_000),
        "$ systemctl is-active irqbalance": "active\n",
    }
    found = played("os.interrupts", tree)
    assert found.verdict == "warn" and not found.steps and "bans" in found.suggestion


def test_huge_pages_that_are_promised_are_used() -> None:
    pages = MEMORY.format(kib=64 * GIB, pages=8192) + "\nHugePages_Rsvd: 8192"
    assert played("os.hugepages", {"/proc/meminfo": pages}).verdict == "pass"
