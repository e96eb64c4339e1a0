"""How fast memory is read and written: of the host, of each GPU, and between them."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding, Verdict

HOST_BYTES, CUDA_BYTES = 128 << 20, 1 << 30
ROUNDS = 5
# Below these shares of the catalogue's figure something is wrong with the device, not the weather.
WARN_SHARE, FAIL_SHARE = 0.75, 0.5
HOST_WARN_BYTES_PER_SECOND = 2e9  # one core of any server of the last ten years does more
LINK_WARN_BYTES_PER_SECOND = 8e9  # half of PCIe 4.0 x8: lanes were lost


def check_memory(device: str) -> list[Finding]:
    """Copies within a device, and for a GPU from and to the host."""
    if device == "cpu":
        return [_host()]
    return [_gpu(device), _link(device)]


def _host() -> Finding:
    import torch

    source, target = (torch.zeros(HOST_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = best(lambda: target.copy_(source))
    rate = 2 * HOST_BYTES / seconds  # read and written
    slow = rate < HOST_WARN_BYTES_PER_SECOND
    return Finding(
        check="memory host",
        verdict="warn" if slow else "pass",
        measured={"gb_per_second": rate / 1e9},
        expected=f"at least {HOST_WARN_BYTES_PER_SECOND / 1e9:.0f} GB/s on one core",
        suggestion="see what else runs here, and whether all memory channels have a module"
        if slow
        else "",
    )


def _gpu(device: str) -> Finding:
    import torch

    from phalanx.hardware import lookup

    name = torch.cuda.get_device_name(device)
    source = torch.zeros(CUDA_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    rate = 2 * CUDA_BYTES / best(copy)
    gpu = lookup(name)
    if gpu is None:
        return Finding(
            check=f"memory {device}",
            verdict="pass",
            measured={"gb_per_second": rate / 1e9, "device": name},
            expected="(the catalogue does not know this device)",
        )
    share = rate / gpu.memory_bandwidth
    return Finding(
        check=f"memory {device}",
        verdict=graded(share),
        measured={"gb_per_second": rate / 1e9, "share_of_peak": share},
        expected=f"at least {WARN_SHARE:.0%} of {gpu.memory_bandwidth / 1e9:.0f} GB/s",
        suggestion="look for throttling, another program on the GPU, or remapped rows"
        if share < WARN_SHARE
        else "",
        cause=Cause.SLOW_COMPUTE if share < FAIL_SHARE else "",
    )


def _link(device: str) -> Finding:
    import torch

    there = torch.empty(CUDA_BYTES // 4, dtype=torch.uint8, device=device)
    here = torch.zeros(CUDA_BYTES // 4, dtype=torch.uint8, pin_memory=True)

    def to_device() -> None:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)

    def to_host() -> None:
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize(device)

    rates = [len(here) / best(copy) for copy in (to_device, to_host)]
    slow = min(rates) < LINK_WARN_BYTES_PER_SECOND
    return Finding(
        check=f"pcie {device}",
        verdict="warn" if slow else "pass",
        measured={
            "to_device_gb_per_second": rates[0] / 1e9,
            "to_host_gb_per_second": rates[1] / 1e9,
        },
        expected=f"at least {LINK_WARN_BYTES_PER_SECOND / 1e9:.0f} GB/s both ways",
        suggestion="compare the link's width and generation (`nvidia-smi -q -d PCIE`)"
        if slow
        else "",
    )


def graded(share: float) -> Verdict:
    """How much of what a device should do is still fine."""
    return "pass" if share >= WARN_SHARE else "warn" if share >= FAIL_SHARE else "fail"


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    work()
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        rates.append(time.perf_counter() - began)
    return min(rates)
