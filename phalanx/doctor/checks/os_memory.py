"""Memory: NUMA, huge pages, swap, dirty pages, overcommitment."""

from __future__ import annotations

import re
from collections.abc import Callable
from shlex import quote

from phalanx.doctor.checks.check import (
    CheckList,
    Judgement,
    bad,
    good,
    set_sysctl,
    skip,
    sysctl_path,
    write,
)
from phalanx.doctor.checks.evidence import NodeEvidence
from phalanx.doctor.finding import Measured, MendStep
from phalanx.doctor.storage import unescape
from phalanx.hardware.probe.reader import ReadError

CHECKS = CheckList()

NODES = "/sys/devices/system/node"
THP = "/sys/kernel/mm/transparent_hugepage"
MOST_NUMA_DIFFERENCE = 0.2  # between nodes that have memory
MOST_RESERVED = 0.1  # of memory, in huge pages that nobody uses
MOST_SWAPPED = 0.01
MOST_DIRTY_BYTES = 16 << 30
MOST_SWAPPINESS = 10
NEEDS_MEMORY = "it takes as much free memory as was swapped out"


def _sysctl(
    evidence: NodeEvidence, name: str, fine: Callable[[int], bool], wanted: int
) -> Judgement:
    value = evidence.number(sysctl_path(name))
    measured: Measured = {name: value}
    if fine(value):
        return good(**measured)
    return bad(measured, set_sysctl(name, str(wanted), str(value)))


def _numa_nodes(evidence: NodeEvidence) -> list[str]:
    return evidence.names(NODES, "node[0-9]*")


@CHECKS.add(
    "os.numa_balancing",
    "medium",
    expected="kernel.numa_balancing 0 where there are several NUMA nodes",
    why="The kernel unmaps pages to see who uses them; pinned ranks pay the faults for nothing.",
)
def numa_balancing(evidence: NodeEvidence) -> Judgement:
    if len(_numa_nodes(evidence)) < 2:
        return skip("one NUMA node")
    return _sysctl(evidence, "kernel.numa_balancing", lambda value: value == 0, 0)


@CHECKS.add(
    "os.zone_reclaim",
    "medium",
    expected="vm.zone_reclaim_mode 0",
    why="A full NUMA node would drop its page cache instead of taking memory of its neighbour.",
)
def zone_reclaim(evidence: NodeEvidence) -> Judgement:
    return _sysctl(evidence, "vm.zone_reclaim_mode", lambda value: value == 0, 0)


@CHECKS.add(
    "os.numa_memory",
    "high",
    expected=f"NUMA nodes with cores have the same memory within {MOST_NUMA_DIFFERENCE:.0%}",
    why="A socket that lacks modules has fewer channels, and its GPUs copy at the other's mercy.",
)
def numa_memory(evidence: NodeEvidence) -> Judgement:
    sizes = {}
    for node in _numa_nodes(evidence):
        if not evidence.text(f"{NODES}/{node}/cpulist"):
            continue  # memory of a GPU, as GH200 and GB200 show it
        match = re.search(r"MemTotal:\s+(\d+) kB", evidence.text(f"{NODES}/{node}/meminfo"))
        if match is None:
            raise ReadError(f"{NODES}/{node}/meminfo", "has no MemTotal")
        sizes[node] = int(match[1]) / 2**20
    if not sizes:
        raise ReadError(NODES, "no node has cores")
    least, most = min(sizes.values()), max(sizes.values())
    measured: Measured = {"nodes": len(sizes), "least_gib": least, "most_gib": most}
    if least >= (1 - MOST_NUMA_DIFFERENCE) * most:
        return good(**measured)
    return bad(measured, advice="compare `dmidecode -t memory` with the slots that shall be filled")


@CHECKS.add(
    "os.thp",
    "medium",
    expected="enabled madvise or always, defrag not always",
    why="Without huge pages large host buffers miss the TLB; with direct defrag they stall.",
)
def transparent_huge_pages(evidence: NodeEvidence) -> Judgement:
    enabled = evidence.choice(f"{THP}/enabled")
    defrag = evidence.choice(f"{THP}/defrag")
    steps: tuple[MendStep, ...] = ()
    if enabled == "never":
        steps += write({f"{THP}/enabled": enabled}, "madvise")
    if defrag == "always":
        steps += write({f"{THP}/defrag": defrag}, "madvise")
    measured: Measured = {"enabled": enabled, "defrag": defrag}
    return bad(measured, *steps) if steps else good(**measured)


@CHECKS.add(
    "os.hugepages",
    "low",
    expected=f"less than {MOST_RESERVED:.0%} of memory reserved in huge pages that nobody uses",
    why="Reserved huge pages are taken from the page cache and from snapshots in host memory.",
)
def reserved_huge_pages(evidence: NodeEvidence) -> Judgement:
    text = evidence.text("/proc/meminfo")
    fields = dict(re.findall(r"(?m)^(\w+):\s+(\d+)", text))
    if "HugePages_Free" not in fields or "Hugepagesize" not in fields:
        raise ReadError("/proc/meminfo", "has no huge pages")
    # Free ones include those that are promised to somebody who has not touched them yet.
    unused = max(0, int(fields["HugePages_Free"]) - int(fields.get("HugePages_Rsvd", "0")))
    free = unused * int(fields["Hugepagesize"]) << 10
    total = fields.get("HugePages_Total", "0")
    measured: Measured = {"pages": int(total), "unused_gib": free / 2**30}
    if free <= MOST_RESERVED * evidence.memory_bytes:
        return good(**measured)
    return bad(measured, set_sysctl("vm.nr_hugepages", str(int(total) - unused), total))


def _swaps(evidence: NodeEvidence) -> list[list[str]]:
    lines = evidence.text("/proc/swaps").splitlines()
    if not lines or not lines[0].startswith("Filename"):
        raise ReadError("/proc/swaps", "is no table of swaps")
    return [line.split() for line in lines[1:] if len(line.split()) >= 5]


@CHECKS.add(
    "os.swap",
    "high",
    expected=f"less than {MOST_SWAPPED:.0%} of memory swapped out",
    why="A rank that waits for a page from disk holds up every rank of its gang.",
)
def swap(evidence: NodeEvidence) -> Judgement:
    swaps = _swaps(evidence)
    used = sum(int(fields[3]) << 10 for fields in swaps)
    if used <= MOST_SWAPPED * evidence.memory_bytes:
        return good(swapped_gib=used / 2**30)
    steps = []
    for name, *_, priority in swaps:
        # Each by its name: `swapon -a` would know those of /etc/fstab only.
        target = quote(unescape(name))
        # Below zero the kernel chose it, and none can be asked for.
        again = f"-p {int(priority)} {target}" if int(priority) >= 0 else target
        steps.append(MendStep(f"swapoff {target}", f"swapon {again}"))
    return bad({"swapped_gib": used / 2**30}, *steps, advice=NEEDS_MEMORY)


@CHECKS.add(
    "os.swappiness",
    "low",
    expected=f"vm.swappiness {MOST_SWAPPINESS} or less where there is swap",
    why="The page cache of a corpus would push processes' memory out to disk.",
)
def swappiness(evidence: NodeEvidence) -> Judgement:
    if not _swaps(evidence):
        return skip("no swap")
    return _sysctl(
        evidence, "vm.swappiness", lambda value: value <= MOST_SWAPPINESS, MOST_SWAPPINESS
    )


@CHECKS.add(
    "os.dirty",
    "low",
    expected=f"writing starts at {MOST_DIRTY_BYTES >> 30} GiB of dirty pages or before",
    why="Gigabytes of a checkpoint pile up in memory, and then all writers stall at once.",
)
def dirty_pages(evidence: NodeEvidence) -> Judgement:
    in_bytes, ratio, starts = _dirty(evidence, "vm.dirty_background")
    _, _, stops = _dirty(evidence, "vm.dirty")
    if starts >= stops:  # the kernel starts at half of where writers stop
        starts = stops // 2
    if starts <= MOST_DIRTY_BYTES:
        return good(starts_gib=starts / 2**30, writers_stop_gib=stops / 2**30)
    name = "vm.dirty_background_bytes"
    # The kernel keeps one of the two: setting the bytes clears the ratio.
    undo = set_sysctl(name, str(in_bytes), str(in_bytes)).do
    if not in_bytes:
        undo = f"sysctl -w vm.dirty_background_ratio={ratio}"
    step = MendStep(f"sysctl -w {name}={MOST_DIRTY_BYTES}", undo)
    return bad({"starts_gib": starts / 2**30, "writers_stop_gib": stops / 2**30}, step)


def _dirty(evidence: NodeEvidence, name: str) -> tuple[int, int, int]:
    """A limit of dirty pages: its bytes and percents, of which one is zero, and what they make."""
    in_bytes = evidence.number(sysctl_path(f"{name}_bytes"))
    ratio = evidence.number(sysctl_path(f"{name}_ratio"))
    return in_bytes, ratio, in_bytes or ratio * evidence.memory_bytes // 100


@CHECKS.add(
    "os.overcommit",
    "high",
    expected="vm.overcommit_memory 0 or 1",
    why="CUDA reserves address space far beyond memory, and forks of a rank would be refused.",
)
def overcommit(evidence: NodeEvidence) -> Judgement:
    return _sysctl(evidence, "vm.overcommit_memory", lambda value: value in (0, 1), 0)
