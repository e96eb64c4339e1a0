"""All checks of a node, in order; one that breaks is a finding, never the end of the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct, structs

from phalanx.cluster.causes import Cause
from phalanx.doctor.collective import GLOO_RANKS, check_collective
from phalanx.doctor.compute import check_product, check_repeats, devices
from phalanx.doctor.finding import Finding, NodeReport
from phalanx.doctor.gemm import judge_gemm, measure_gemm
from phalanx.doctor.gpus import check_driver
from phalanx.doctor.memory import check_memory
from phalanx.doctor.rates import StorageNeeds, check_files, check_rates, check_store
from phalanx.doctor.storage import check_disk, check_mounts, read_table
from phalanx.doctor.system import check_clock, check_limits, read_clock


class CheckOptions(Struct, frozen=True, kw_only=True):
    """What is examined, and how thoroughly."""

    node: str
    folder: Path  # on the disk that is to be written
    quick: bool = False
    mounts: tuple[Path, ...] = ()  # that must answer, beside all network mounts
    gpus: int = 0  # that must be there
    skew_seconds: float | None = None  # of its clock, ahead of the server's
    inject: tuple[str, ...] = ()  # checks that shall fail: a drill
    needs: StorageNeeds = StorageNeeds()
    data: Path | None = None  # a folder of data whose files are looked at
    store: str = ""  # an object store that must answer


Check = Callable[[CheckOptions], Iterable[Finding]]


def _collectives(options: CheckOptions) -> Iterator[Finding]:
    # First, because ranks are forked: no other check may have made threads or a CUDA context.
    if options.quick:
        return
    yield check_collective("gloo", GLOO_RANKS)
    from phalanx.hardware import count_cuda

    gpus = count_cuda()
    if gpus > 1:
        yield check_collective("nccl", gpus)


def _compute(options: CheckOptions) -> Iterator[Finding]:
    for device in devices():
        yield check_product(device, quick=options.quick, inject="matmul" in options.inject)
        yield check_repeats(device, quick=options.quick)


def _memory(options: CheckOptions) -> Iterator[Finding]:
    if not options.quick:
        for device in devices():
            yield from check_memory(device)


def _gemm(options: CheckOptions) -> Iterator[Finding]:
    if options.quick:
        return
    from phalanx.hardware import lookup

    rates, peaks = {}, {}
    for device in devices():
        rates[device] = measure_gemm(device)
        if device.startswith("cuda"):
            import torch

            known = lookup(torch.cuda.get_device_name(device))
            peaks[device] = known.peak_flops if known else {}
    yield from judge_gemm(rates, peaks)


def _rates(options: CheckOptions) -> Iterator[Finding]:
    yield check_rates(options.folder, options.needs)


def _files(options: CheckOptions) -> Iterator[Finding]:
    if options.data is not None:
        yield check_files(options.data)


def _store(options: CheckOptions) -> Iterator[Finding]:
    if options.store:
        yield check_store(options.store)


def _disk(options: CheckOptions) -> Iterator[Finding]:
    yield check_disk(options.folder, quick=options.quick)


def _mounts(options: CheckOptions) -> Iterator[Finding]:
    yield check_mounts(options.mounts, read_table())


def _clock(options: CheckOptions) -> Iterator[Finding]:
    yield check_clock(read_clock(), options.skew_seconds)


def _limits(_: CheckOptions) -> Iterator[Finding]:
    yield check_limits()


def _gpus(options: CheckOptions) -> Iterator[Finding]:
    yield from check_driver(options.gpus)


CHECKS: dict[str, Check] = {
    "collective": _collectives,
    "matmul": _compute,
    "memory": _memory,
    "disk": _disk,
    "mounts": _mounts,
    "clock": _clock,
    "limits": _limits,
    "gpu": _gpus,
    "gemm": _gemm,
    "rates": _rates,
    "files": _files,
    "store": _store,
}
# What an agent runs when it joins and when its node is suspected.
AGENT_CHECKS = ("collective", "matmul", "memory", "disk", "mounts", "clock", "limits", "gpu")


def check_node(
    options: CheckOptions,
    checks: Iterable[str] = AGENT_CHECKS,
    say: Callable[[Finding], None] = lambda _: None,
) -> NodeReport:
    """Run checks by name; ``say`` hears of each finding as it is made."""
    findings: list[Finding] = []
    for name in checks:
        for finding in _timed(name, CHECKS[name], options):
            findings.append(finding)
            say(finding)
    depth = "quick" if options.quick else "full"
    return NodeReport(node=options.node, time_ns=time.time_ns(), depth=depth, findings=findings)  # type: ignore[arg-type]


def _timed(name: str, check: Check, options: CheckOptions) -> Iterator[Finding]:
    began = time.perf_counter()
    if name in options.inject and name != "matmul":  # which shows it in its numbers
        suggestion = "nothing: somebody asked for a drill"
        yield Finding(check=name, verdict="fail", expected="no drill", suggestion=suggestion)
        return
    try:
        for finding in check(options):
            now = time.perf_counter()
            yield structs.replace(finding, seconds=round(now - began, 4))
            began = now
    except Exception as error:  # a device that throws is a finding
        yield Finding(
            check=name,
            verdict="fail",
            measured={"problem": f"{type(error).__name__}: {str(error)[:500]}"},
            expected="the check to run",
            suggestion="if the device is gone see `dmesg -T`; otherwise report this",
            cause=Cause.GPU_FAULT if "CUDA" in str(error) else Cause.FAILED_CHECK,
        )


def default_folder() -> Path:
    """Where a person's checks write: the current folder, if they may."""
    here = Path.cwd()
    return here if os.access(here, os.W_OK) else Path("/tmp")
