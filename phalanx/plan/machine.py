"""The few figures of a cluster that the step model reads."""

from __future__ import annotations

from msgspec import Struct

from phalanx.hardware import Cluster, Gpu

# Watts for each 16-bit TFLOP/s of peak on the board for which a family's shares are stated. A
# board with less power behind its peak cannot keep its clocks up under large products.
REFERENCE_WATTS = {
    "volta": 300 / 125,
    "ampere": 400 / 312,
    "hopper": 700 / 989.4,
    "blackwell": 1200 / 2500,
    "blackwell-ultra": 1400 / 2500,
}

WIDER = {
    "nvfp4": ("fp4", "fp8", "bfloat16", "float16"),
    "mxfp8": ("fp8", "bfloat16", "float16"),
    "fp8": ("fp8", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "float32": ("tf32", "float32"),
}


class Machine(Struct, frozen=True, kw_only=True):
    """One kind of GPU in one kind of fabric. Bandwidths are bytes/s of one GPU, one way."""

    family: str
    peak_flops: dict[str, float]  # dense, by precision
    memory_bytes: float
    memory_bandwidth: float
    multiprocessors: int
    power: float  # watts behind the peak, over the family's reference; at most 1
    domain: int  # GPUs that share NVLink (or its like)
    link_bandwidth: float  # that a large collective reaches
    network_bandwidth: float  # line rate less headers, inside a pod
    pod: int  # GPUs that reach each other at that rate; 0: all of the job's
    oversubscription: float  # rate inside a pod over that between pods
    host_bandwidth: float  # to host memory
    host_memory_bytes: float  # a GPU's share of its host, as the four below
    host_memory_bandwidth: float
    nvme_bytes: float
    nvme_read: float
    nvme_write: float
    in_switch_reduction: bool  # by NVSwitch, inside a domain
    in_network_reduction: bool  # by the network's switches

    def peak(self, precision: str) -> float:
        """Dense peak of a precision; what a device lacks runs in the next wider format."""
        return next(self.peak_flops[name] for name in WIDER[precision] if name in self.peak_flops)


def machine_of(cluster: Cluster, gpus: int) -> Machine:
    """What a job of so many GPUs sees of a cluster."""
    gpu = cluster.gpu
    return Machine(
        family=family_of(gpu),
        peak_flops=gpu.peak_flops,
        memory_bytes=float(gpu.memory_bytes),
        memory_bandwidth=gpu.memory_bandwidth,
        multiprocessors=gpu.sms,
        power=power_of(gpu),
        domain=_even_domain(cluster.domain_gpus, gpus),
        link_bandwidth=cluster.link.bandwidth * cluster.link.efficiency,
        network_bandwidth=cluster.network_bandwidth * cluster.nic.payload_share,
        pod=cluster.fabric.pod_gpus if cluster.fabric.pod_gpus < gpus else 0,
        oversubscription=cluster.fabric.oversubscription,
        host_bandwidth=cluster.host_bandwidth,
        host_memory_bytes=cluster.host_memory_per_gpu,
        host_memory_bandwidth=cluster.host_memory_bandwidth,
        nvme_bytes=cluster.nvme.capacity_bytes,
        nvme_read=cluster.nvme.read_bandwidth,
        nvme_write=cluster.nvme.write_bandwidth,
        in_switch_reduction=cluster.link.in_network_reduction,
        in_network_reduction=cluster.fabric.in_network_reduction,
    )


def computes(gpu: Gpu, precision: str) -> bool:
    """Whether a device has a precision, or a wider one in its place."""
    return any(name in gpu.peak_flops for name in WIDER[precision])


def family_of(gpu: Gpu) -> str:
    """Blackwell Ultra has other units for exponentials and 4-bit products than Blackwell."""
    return "blackwell-ultra" if gpu.key in ("b300", "gb300") else gpu.family


def power_of(gpu: Gpu) -> float:
    """Watts behind a GPU's peak over those of its family's reference board; at most 1."""
    peak = gpu.peak_flops.get("bfloat16", gpu.peak_flops.get("float16", 0.0)) / 1e12
    reference = REFERENCE_WATTS.get(family_of(gpu))
    return min(1.0, gpu.tdp_watts / peak / reference) if reference and peak else 1.0


def _even_domain(domain: int, gpus: int) -> int:
    """GPUs of a domain that a job uses: 64 of a rack of 72, where that divides the job evenly."""
    if gpus <= domain:
        return gpus
    even = next(size for size in range(domain, 0, -1) if gpus % size == 0)
    return even if 2 * even > domain else domain
