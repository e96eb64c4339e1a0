"""What a process may use: limits, shared memory, cgroups, threads; and the clock."""

from __future__ import annotations

import re
from contextlib import suppress

from phalanx.doctor.checks.check import CheckList, Judgement, bad, good, profiles_of, skip
from phalanx.doctor.checks.evidence import NodeEvidence
from phalanx.doctor.finding import Measured, MendStep
from phalanx.doctor.system import LEAST_FILES, WANTED_FILES, WANTED_SHARED_BYTES, check_clock
from phalanx.hardware.probe.reader import NotThereError, ReadError

CHECKS = CheckList()

UNLIMITED = 1 << 63
LEAST_PROCESSES = 4096
LEAST_MEMORY_SHARE = 0.5  # of the machine's, that a cgroup should leave to a job
CGROUP = "/sys/fs/cgroup"
# A cgroup without a limit says so in words, or with a number beyond any machine.
NO_LIMIT_BYTES = 1 << 60


def _limit(evidence: NodeEvidence, name: str) -> tuple[int, int]:
    """Soft and hard limit in /proc/self/limits."""
    match = re.search(rf"(?m)^{name}\s+(\w+)\s+(\w+)", evidence.text("/proc/self/limits"))
    if match is None:
        raise ReadError("/proc/self/limits", f"has no {name!r}")
    soft, hard = (UNLIMITED if text == "unlimited" else int(text) for text in match.groups())
    return soft, hard


def _shown(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _raise(item: str, value: str) -> str:
    unit = {"nofile": "LimitNOFILE", "memlock": "LimitMEMLOCK", "nproc": "LimitNPROC"}[item]
    return (
        f"write `* - {item} {value}` into /etc/security/limits.d/90-phalanx.conf and log in "
        f"again (of a unit: {unit}={'infinity' if value == 'unlimited' else value}; "
        f"of a container: --ulimit {item}={-1 if value == 'unlimited' else value})"
    )


@CHECKS.add(
    "os.nofile",
    "high",
    expected=f"a process may open {WANTED_FILES} files or more",
    why=f"Sockets of many ranks and mapped shards run out at a few thousand; below {LEAST_FILES} "
    "a large job does not start.",
)
def open_files(evidence: NodeEvidence) -> Judgement:
    soft, hard = _limit(evidence, "Max open files")
    measured: Measured = {"nofile": _shown(soft), "at_most": _shown(hard)}
    if hard >= WANTED_FILES:
        return good(**measured)
    return bad(measured, advice=_raise("nofile", str(WANTED_FILES)))


@CHECKS.add(
    "os.memlock",
    "high",
    expected="unlimited where there is RDMA",
    why="RDMA locks its buffers: registration fails, and NCCL falls back to sockets.",
)
def locked_memory(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_rdma:
        return skip("no RDMA")
    _, hard = _limit(evidence, "Max locked memory")
    if hard == UNLIMITED:
        return good(memlock="unlimited")
    return bad({"memlock": _shown(hard)}, advice=_raise("memlock", "unlimited"))


@CHECKS.add(
    "os.nproc",
    "medium",
    expected=f"{LEAST_PROCESSES} processes or more",
    why="Ranks, loaders and their threads all count; the one that is refused takes a rank down.",
)
def processes(evidence: NodeEvidence) -> Judgement:
    soft, _ = _limit(evidence, "Max processes")
    if soft >= LEAST_PROCESSES:
        return good(nproc=_shown(soft))
    return bad({"nproc": _shown(soft)}, advice=_raise("nproc", str(LEAST_PROCESSES)))


@CHECKS.add(
    "os.shm",
    "high",
    expected="/dev/shm of 1 GiB or more",
    why="Loaders, NCCL and snapshots share memory there: one that is full ends a rank (SIGBUS).",
)
def shared_memory(evidence: NodeEvidence) -> Judgement:
    mount = evidence.mount_of("/dev/shm")
    if mount.folder != "/dev/shm":
        raise NotThereError("a mount at /dev/shm")
    size = next((each[5:] for each in mount.options if each.startswith("size=")), "")
    total = _bytes(size) if size else evidence.memory_bytes // 2  # the kernel's default
    measured: Measured = {"shm_gib": total / 2**30}
    if total >= WANTED_SHARED_BYTES:
        return good(**measured)
    if "container" in profiles_of(evidence):
        return bad(measured, advice="start the container with --shm-size=16g")
    both = [f"mount -o remount,size={each} /dev/shm" for each in ("50%", size)]
    return bad(measured, MendStep(both[0], both[1]), advice="for good: in /etc/fstab")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmgKMG]?)", text)
    if match is None:
        raise ReadError("/proc/self/mountinfo", f"no size: {text[:20]!r}")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


@CHECKS.add(
    "os.clock",
    "low",
    expected="synchronised, within 0.5 s",
    why="Logs and traces of several nodes cannot be put in order, and certificates look expired.",
)
def clock(evidence: NodeEvidence) -> Judgement:
    if evidence.process.clock is None:
        raise ReadError("adjtimex", "the kernel does not say")
    finding = check_clock(evidence.process.clock)
    if finding.verdict == "pass":
        return good(**finding.measured)
    with suppress(ReadError):
        said = evidence.run("timedatectl", "show", "--property=CanNTP", "--property=NTP").split()
        if said == ["CanNTP=yes", "NTP=no"]:
            step = MendStep("timedatectl set-ntp true", "timedatectl set-ntp false")
            return bad(finding.measured, step)
    return bad(finding.measured, advice=finding.suggestion)


def _cgroups(evidence: NodeEvidence, controller: str) -> tuple[list[str], bool]:
    """This process's cgroup and those around it, and whether they are of version 2.

    A limit of any of them holds: Slurm sets a job's around its steps, systemd a slice's.
    """
    unified = ""
    for line in evidence.text("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return _outwards(f"{CGROUP}/{controller}", path), False
        if not names:
            unified = path
    if not unified:
        raise ReadError("/proc/self/cgroup", f"has no {controller}")
    return _outwards(CGROUP, unified), True


def _outwards(top: str, path: str) -> list[str]:
    """The folders from a cgroup to the top of its tree."""
    parts = path.strip("/").split("/") if path.strip("/") else []
    return ["/".join([top, *parts[:length]]) for length in range(len(parts), -1, -1)]


def _limits(evidence: NodeEvidence, folders: list[str], name: str) -> dict[str, str]:
    """What a file says in each cgroup; the top of the tree has none."""
    own, top = folders[0], folders[-1]
    limits = {own: evidence.text(f"{own}/{name}")} if own != top else {}
    for folder in folders[len(limits) :]:
        with suppress(NotThereError):
            limits[folder] = evidence.text(f"{folder}/{name}")
    if not limits:  # no limit can be set on the top; but it must be one
        evidence.names(top, "cgroup.*")
    return limits


@CHECKS.add(
    "os.cgroup_cpu",
    "high",
    expected="no quota, or one of all cores",
    why="A quota stops every thread of the group for the rest of its period: steps stutter.",
)
def cpu_quota(evidence: NodeEvidence) -> Judgement:
    folders, unified = _cgroups(evidence, "cpu")
    quotas: dict[str, float] = {}
    name = "cpu.max" if unified else "cpu.cfs_quota_us"
    for folder, text in _limits(evidence, folders, name).items():
        quota, *rest = text.split()
        if quota in ("max", "-1"):
            continue
        period = "100000" if unified else evidence.text(f"{folder}/cpu.cfs_period_us")
        quotas[folder] = int(quota) / int((rest or [period])[0])
    if not quotas:
        return good(quota="none")
    folder = min(quotas, key=quotas.__getitem__)
    allowed, cpus = quotas[folder], len(evidence.process.cpus)
    measured: Measured = {"quota_cpus": allowed, "cpus": cpus, "of": folder}
    if cpus and allowed >= cpus:
        return good(**measured)
    return bad(measured, advice="give the container whole cores (a cpuset), or no --cpus limit")


@CHECKS.add(
    "os.cgroup_memory",
    "high",
    expected=f"no limit, or one of {LEAST_MEMORY_SHARE:.0%} of memory or more, and nothing killed",
    why="The kernel kills a rank at the limit, and the page cache of the corpus counts towards it.",
)
def memory_limit(evidence: NodeEvidence) -> Judgement:
    folders, unified = _cgroups(evidence, "memory")
    name = "memory.max" if unified else "memory.limit_in_bytes"
    limits = {
        folder: NO_LIMIT_BYTES if text == "max" else int(text)
        for folder, text in _limits(evidence, folders, name).items()
    }
    if not limits:
        return good(limit="none")
    folder = min(limits, key=limits.__getitem__)
    limit = limits[folder]
    measured: Measured = {"limit": "none"}
    if limit < NO_LIMIT_BYTES:
        measured = {"limit": f"{limit / 2**30:.0f} GiB", "of": folder}
    advice = "raise the container's or the unit's memory limit"
    if limit < LEAST_MEMORY_SHARE * evidence.memory_bytes:
        return bad(measured, advice=advice)
    events = f"{next(iter(limits))}/{'memory.events' if unified else 'memory.oom_control'}"
    killed = re.search(r"(?m)^oom_kill (\d+)", evidence.text(events))
    if killed is None:
        raise ReadError(events, "has no oom_kill")
    measured["killed"] = int(killed[1])
    return bad(measured, advice=advice) if int(killed[1]) else good(**measured)


@CHECKS.add(
    "os.threads",
    "medium",
    expected="threads of all ranks together fit on the cores",
    why="Ranks whose thread pools overlap take turns on cores, and each step waits for the last.",
)
def threads(evidence: NodeEvidence) -> Judgement:
    cpus = len(evidence.process.cpus)
    if not cpus:
        raise ReadError("sched_getaffinity", "not there")
    ranks = len(evidence.gpus) if evidence.has_gpus else 1
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    given = {name: evidence.process.environment.get(name, "") for name in names}
    numbers = [int(text) for text in given.values() if text.isdigit()]
    measured: Measured = {"cpus": cpus, "ranks": ranks}
    measured.update({name.lower(): text for name, text in given.items() if text})
    # Unset, each rank starts one thread a core; launchers set 1 for several ranks.
    if not numbers or max(numbers) * ranks <= cpus:
        return good(**measured)
    return bad(measured, advice=f"export OMP_NUM_THREADS={max(1, cpus // ranks)}")


@CHECKS.add(
    "os.overlay",
    "medium",
    expected="the working folder is not on a container's overlay",
    why="The first write to a file copies it whole, and everything there goes with the container.",
)
def overlay(evidence: NodeEvidence) -> Judgement:
    mount = evidence.mount_of(evidence.process.folder)
    measured: Measured = {"mount": mount.folder, "type": mount.kind}
    if mount.kind in ("overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs"):
        return bad(measured, advice="mount a volume of the host's (docker run -v) and work there")
    return good(**measured)
