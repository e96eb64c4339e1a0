"""What the numbers mean that NVIDIA's driver (Xid) and NVSwitch's driver (SXid) report.

After NVIDIA's "Xid Errors" and "Fabric Manager" guides, release 575.
"""

from __future__ import annotations

from phalanx.cluster.protocol.messages import Fault

# Code: cause of cluster/recovery/causes.py, what it is. A cause of "" is the program's own doing.
XIDS = {
    13: ("", "graphics engine exception: usually an index out of range in a kernel"),
    31: ("", "page fault of the GPU: usually an illegal address in a kernel"),
    32: ("pcie", "corrupted push buffer"),
    38: ("driver", "driver firmware error"),
    43: ("", "the GPU stopped processing: a fault of the program"),
    45: ("", "preemptive cleanup after an earlier error"),
    48: ("hbm_ecc", "double bit ECC error"),
    54: ("power", "auxiliary power is not connected"),
    61: ("gpu_fault", "internal micro-controller breakpoint"),
    62: ("gpu_fault", "internal micro-controller halt"),
    63: ("xid", "a row or page of memory is to be remapped"),
    64: ("hbm_ecc", "a row could not be remapped"),
    69: ("", "graphics engine class error"),
    74: ("nvlink", "NVLink error"),
    79: ("gpu_unavailable", "the GPU has fallen off the bus"),
    92: ("xid", "a high rate of single bit ECC errors"),
    94: ("xid", "contained uncorrectable error"),
    95: ("hbm_ecc", "uncontained uncorrectable error"),
    109: ("xid", "context switch timed out"),
    110: ("gpu_fault", "security fault"),
    119: ("gpu_system_processor", "the system processor does not answer"),
    120: ("gpu_system_processor", "the system processor failed"),
    121: ("nvlink", "NVLink C2C error"),
    136: ("nvlink", "link training failed"),
    140: ("hbm_ecc", "unrecovered ECC error"),
    142: ("gpu_fault", "NVENC3 error"),
    143: ("gpu_fault", "GPU initialisation error"),
    145: ("nvlink", "NVLink RLW error"),
    149: ("nvlink", "NVLink NETIR error"),
    150: ("gpu_fault", "memory processing error"),
    154: ("xid", "the GPU asks for a recovery action"),
    155: ("nvlink", "NVLink software defined error"),
    158: ("gpu_fault", "fatal timeout"),
}


def xid_fault(code: int, gpu: int, detail: str) -> Fault | None:
    """The fact behind an Xid; None where the program and not the device is at fault."""
    cause, what = XIDS.get(code, ("xid", "unknown"))
    if not cause:
        return None
    return Fault(cause=cause, gpu=gpu, detail=f"Xid {code}, {what}: {detail}"[:500])
