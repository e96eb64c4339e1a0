"""Processors: clocks, idle states, cores that are missing, interrupts, kernel and firmware."""

from __future__ import annotations

import re
from contextlib import suppress

from phalanx.doctor.checks.check import (
    HARDWARE,
    CheckList,
    Judgement,
    bad,
    good,
    skip,
    write,
    write_all,
)
from phalanx.doctor.checks.evidence import NodeEvidence, one_of
from phalanx.doctor.finding import Measured, MendStep
from phalanx.hardware.probe.reader import NotThereError, ReadError

CHECKS = CheckList()

CPU = "/sys/devices/system/cpu"
CLOCKSOURCE = "/sys/devices/system/clocksource/clocksource0"
MOST_WAKE_MICROSECONDS = 100
FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")
LEAST_KERNEL = (5, 12)
# Of interrupts of devices that one core may take, once there are enough to matter.
MOST_SHARE, LEAST_INTERRUPTS, LEAST_CORES = 0.9, 1_000_000, 4


def parse_list(text: str) -> list[int]:
    """CPUs as the kernel lists them: "0-3,8"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _cpus(evidence: NodeEvidence, path: str) -> list[int]:
    """The CPUs in a file that must name one."""
    cpus = parse_list(evidence.text(path))
    if not cpus:
        raise ReadError(path, "names no CPU")
    return cpus


@CHECKS.add(
    "os.governor",
    "medium",
    expected="performance (or an energy preference of performance) on every core",
    why="A core that clocks down between launches makes every small kernel wait for the host.",
    profiles=HARDWARE,
)
def governor(evidence: NodeEvidence) -> Judgement:
    folder = f"{CPU}/cpufreq"
    policies = evidence.names(folder, "policy[0-9]*")
    slow = {}
    for policy in policies:
        path = f"{folder}/{policy}/scaling_governor"
        preference = evidence.optional(f"{folder}/{policy}/energy_performance_preference")
        if evidence.text(path) != "performance" and preference != "performance":
            slow[path] = evidence.text(path)
    if not slow:
        return good(policies=len(policies), governor="performance")
    names = ", ".join(dict.fromkeys(slow.values()))
    return bad({"policies": len(slow), "governor": names}, *write(slow, "performance"))


@CHECKS.add(
    "os.cstates",
    "low",
    expected=f"no enabled idle state that takes more than {MOST_WAKE_MICROSECONDS} µs to leave",
    why="A core in a deep idle state adds its wake-up time to every interrupt and launch.",
    profiles=HARDWARE,
)
def idle_states(evidence: NodeEvidence) -> Judgement:
    enabled: dict[str, list[str]] = {}  # switches that are on, of deep states
    switches: dict[str, int] = {}  # that there are, by state
    most = 0
    for cpu in evidence.names(CPU, "cpu[0-9]*"):
        folder = f"{CPU}/{cpu}/cpuidle"
        for state in evidence.reader.names(folder, "state[0-9]*"):
            latency = evidence.number(f"{folder}/{state}/latency")
            switches[state] = switches.get(state, 0) + 1
            if evidence.number(f"{folder}/{state}/disable"):
                continue
            most = max(most, latency)
            if latency > MOST_WAKE_MICROSECONDS:
                enabled.setdefault(state, []).append(f"{folder}/{state}/disable")
    if not switches:
        raise NotThereError(f"{CPU}/cpu*/cpuidle")
    if not enabled:
        return good(wake_microseconds=most)
    steps: tuple[MendStep, ...] = ()
    for state, paths in enabled.items():
        # Of all cores in one word; where some are off already, each by its name: undo leaves them.
        every = len(paths) == switches[state] > 1
        steps += write_all([f"{CPU}/cpu*/cpuidle/{state}/disable"] if every else paths, "0", "1")
    cores = max(map(len, enabled.values()))
    measured: Measured = {"wake_microseconds": most, "states": ", ".join(enabled), "cores": cores}
    return bad(measured, *steps)


@CHECKS.add(
    "os.turbo",
    "medium",
    expected="on",
    why="Without turbo a core stays at its base clock, often two thirds of what it can do.",
    profiles=HARDWARE,
)
def turbo(evidence: NodeEvidence) -> Judgement:
    off = f"{CPU}/intel_pstate/no_turbo"
    boost = f"{CPU}/cpufreq/boost"
    path, on = (off, "0") if evidence.exists(off) else (boost, "1")
    value = one_of(evidence.text(path), ("0", "1"), path)
    return good(turbo="on") if value == on else bad({"turbo": "off"}, *write({path: value}, on))


@CHECKS.add(
    "os.smt",
    "low",
    expected="off, or no more threads asked for than there are cores",
    why="Two busy threads on one core share its units: each gets about half of it.",
)
def smt(evidence: NodeEvidence) -> Judgement:
    active = evidence.text(f"{CPU}/smt/active") == "1"
    siblings = parse_list(evidence.text(f"{CPU}/cpu0/topology/thread_siblings_list"))
    online = len(_cpus(evidence, f"{CPU}/online"))
    cores = online // max(1, len(siblings)) if active else online
    measured: Measured = {
        "smt": "on" if active else "off",
        "cores": cores,
        "cpus": online,
    }
    threads = evidence.process.environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if active and threads.isdigit() and int(threads) > cores:
        measured["omp_num_threads"] = int(threads)
        return bad(measured, advice=f"set OMP_NUM_THREADS to {cores} or less")
    return good(**measured)


@CHECKS.add(
    "os.cores",
    "medium",
    expected="no core is offline or isolated",
    why="Ranks and loaders never run on a core that is offline or isolated: it is paid and idle.",
)
def usable_cores(evidence: NodeEvidence) -> Judgement:
    # Offline ones beyond what the machine has are room for hot-plug, not lost cores.
    present = set(_cpus(evidence, f"{CPU}/present"))
    offline = sorted(present & set(parse_list(evidence.text(f"{CPU}/offline"))))
    # With SMT switched off each core's other threads are offline, as somebody wants it.
    control = evidence.optional(f"{CPU}/smt/control")
    if control in ("off", "forceoff") and 2 * len(offline) <= len(present):
        offline = []
    isolated = parse_list(evidence.text(f"{CPU}/isolated"))
    if not offline and not isolated:
        return good(cpus=len(present))
    steps = write({f"{CPU}/cpu{cpu}/online": "0" for cpu in offline}, "1")
    advice = "take isolcpus= off the kernel's command line and boot again" if isolated else ""
    return bad({"offline": len(offline), "isolated": len(isolated)}, *steps, advice=advice)


@CHECKS.add(
    "os.clocksource",
    "medium",
    expected=f"none of {', '.join(SLOW_CLOCKS)}",
    why="A clock outside the core turns each reading of time, thousands a step, into microseconds.",
)
def clocksource(evidence: NodeEvidence) -> Judgement:
    path = f"{CLOCKSOURCE}/current_clocksource"
    source = one_of(evidence.text(path), (*FAST_CLOCKS, *SLOW_CLOCKS), path)
    if source in FAST_CLOCKS:
        return good(clocksource=source)
    available = evidence.text(f"{CLOCKSOURCE}/available_clocksource").split()
    better = [name for name in available if name in FAST_CLOCKS]
    if better:
        return bad({"clocksource": source}, *write({path: source}, better[0]))
    advice = "see `dmesg | grep -i tsc` for why the TSC was given up"
    return bad({"clocksource": source}, advice=advice)


@CHECKS.add(
    "os.kernel",
    "low",
    expected=f"Linux {LEAST_KERNEL[0]}.{LEAST_KERNEL[1]} or later",
    why="Older kernels cannot hand GPU memory to a network card as a dma-buf.",
)
def kernel(evidence: NodeEvidence) -> Judgement:
    release = evidence.text("/proc/sys/kernel/osrelease")
    version = kernel_version(release)
    if version >= LEAST_KERNEL:
        return good(kernel=release)
    return bad({"kernel": release}, advice="install the distribution's newer kernel and boot it")


def kernel_version(release: str) -> tuple[int, int]:
    """The first two numbers of a release."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        raise ReadError("/proc/sys/kernel/osrelease", f"no version: {release[:40]!r}")
    return int(match[1]), int(match[2])


@CHECKS.add(
    "os.firmware",
    "low",
    expected="one microcode on all cores",
    why="Cores with different microcode differ in speed and in which faults are worked around.",
    profiles=HARDWARE,
)
def firmware(evidence: NodeEvidence) -> Judgement:
    found = re.findall(r"(?m)^microcode\s*:\s*(\S+)", evidence.text("/proc/cpuinfo"))
    versions = sorted(set(found))
    if not versions:
        raise ReadError("/proc/cpuinfo", "has no microcode")
    bios = evidence.optional("/sys/class/dmi/id/bios_version") or "not told"
    if len(versions) == 1:
        return good(microcode=versions[0], bios=bios)
    advice = "install the vendor's microcode package and boot again"
    return bad({"microcode": ", ".join(versions), "bios": bios}, advice=advice)


@CHECKS.add(
    "os.interrupts",
    "medium",
    expected=f"no core takes {MOST_SHARE:.0%} of the devices' interrupts",
    why="One core that takes every card's interrupts caps the network at what one core can do.",
)
def interrupts(evidence: NodeEvidence) -> Judgement:
    lines = evidence.text("/proc/interrupts").splitlines()
    cpus = len(lines[0].split()) if lines else 0
    if not lines or not lines[0].lstrip().startswith("CPU0"):
        raise ReadError("/proc/interrupts", "has no CPU0")
    if cpus < LEAST_CORES:
        return skip(f"{cpus} cores")
    counts = [0] * cpus
    for line in lines[1:]:
        fields = line.split()
        if fields and re.fullmatch(r"\d+:", fields[0]):  # a device's; names are the kernel's own
            for cpu, count in enumerate(fields[1 : cpus + 1]):
                counts[cpu] += int(count) if count.isdigit() else 0
    total = sum(counts)
    measured: Measured = {"interrupts": total, "largest_share": max(counts) / max(1, total)}
    if total < LEAST_INTERRUPTS or max(counts) < MOST_SHARE * total:
        return good(**measured)
    measured["core"] = counts.index(max(counts))
    with suppress(ReadError):  # it ends with an error where the service does not run
        evidence.run("systemctl", "is-active", "irqbalance")
        return bad(measured, advice="irqbalance runs: see its bans, and who pins the interrupts")
    # Not enabled: the next boot shall be as it was.
    return bad(measured, MendStep("systemctl start irqbalance", "systemctl stop irqbalance"))
