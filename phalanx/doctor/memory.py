"""How fast memory is read and written: of the host, of each GPU, and between them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding, Measured, Verdict

ASK_SECONDS = 10.0  # for the driver to answer
HOST_BYTES, CUDA_BYTES = 128 << 20, 1 << 30
ROUNDS = 5
# Below these shares of the catalogue's figure something is wrong with the device, not the weather.
WARN_SHARE, FAIL_SHARE = 0.75, 0.5
HOST_WARN_BYTES_PER_SECOND = 2e9  # one core of any server of the last ten years does more
LINK_WARN_BYTES_PER_SECOND = 8e9  # half of PCIe 4.0 x8: lanes were lost
# Of a lane, by generation; pinned copies reach 80 % of a link and more.
LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
LINK_SHARE = 0.6
LINK_FIELDS = ("link.gen.current", "link.gen.max", "link.width.current", "link.width.max")


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

    rates = (len(here) / best(to_device), len(here) / best(to_host))
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return judge_link(device, rates, _asked_under_load(f"GPU-{uuid}", to_device) if uuid else "")


def _asked_under_load(uuid: str, work: Callable[[], object]) -> str:
    """What the driver says of a link that works: an idle one rests at a lower generation."""
    query = f"--query-gpu={','.join(f'pcie.{field}' for field in LINK_FIELDS)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", uuid]
    deadline = time.monotonic() + ASK_SECONDS
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asked:
            while asked.poll() is None and time.monotonic() < deadline:
                work()
            if asked.poll() is None:
                asked.kill()
            return asked.communicate()[0]
    except OSError:
        return ""


def judge_link(device: str, rates: tuple[float, float], said: str) -> Finding:
    """Rates to the device and back, against the link that ``nvidia-smi`` described meanwhile."""
    wanted = LINK_WARN_BYTES_PER_SECOND
    measured: Measured = {}
    lost = False
    numbers = [int(text) for text in said.split(",") if text.strip().isdigit()]
    if len(numbers) == len(LINK_FIELDS):
        generation, most, lanes, most_lanes = numbers
        measured = {"generation": f"{generation} of {most}", "lanes": f"{lanes} of {most_lanes}"}
        lost = generation < most or lanes < most_lanes
        wanted = LINK_SHARE * most_lanes * LANE_BYTES_PER_SECOND.get(most, 0.0) or wanted
    slow = lost or min(rates) < wanted
    return Finding(
        check=f"pcie {device}",
        verdict="warn" if slow else "pass",
        measured={
            "to_device_gb_per_second": rates[0] / 1e9,
            "to_host_gb_per_second": rates[1] / 1e9,
            **measured,
        },
        expected=f"at least {wanted / 1e9:.0f} GB/s both ways, on the whole link",
        suggestion="reseat the card; see gpu.pcie, and `nvidia-smi -q -d PCIE` under load"
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
