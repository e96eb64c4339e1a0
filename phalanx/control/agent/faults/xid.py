"""What the numbers mean that NVIDIA's driver (Xid) and NVSwitch's driver (SXid) report.

After NVIDIA's "Xid Errors" and "Fabric Manager" guides, release 575.
"""

from __future__ import annotations

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.messages import THIS_NODE, DeviceError

# Code: cause of cluster/causes.py, what it is. A cause of "" is the program's own doing.
XIDS = {
    13: ("", "graphics engine exception: usually an index out of range in a kernel"),
    31: ("", "page fault of the GPU: usually an illegal address in a kernel"),
    32: (Cause.PCIE, "corrupted push buffer"),
    38: (Cause.DRIVER, "driver firmware error"),
    43: ("", "the GPU stopped processing: a fault of the program"),
    45: ("", "preemptive cleanup after an earlier error"),
    48: (Cause.HBM_ECC, "double bit ECC error"),
    54: (Cause.POWER, "auxiliary power is not connected"),
    61: (Cause.GPU_FAULT, "internal micro-controller breakpoint"),
    62: (Cause.GPU_FAULT, "internal micro-controller halt"),
    63: (Cause.XID, "a row or page of memory is to be remapped"),
    64: (Cause.HBM_ECC, "a row could not be remapped"),
    69: ("", "graphics engine class error"),
    74: (Cause.NVLINK, "NVLink error"),
    79: (Cause.GPU_UNAVAILABLE, "the GPU has fallen off the bus"),
    92: (Cause.XID, "a high rate of single bit ECC errors"),
    94: (Cause.XID, "contained uncorrectable error"),
    95: (Cause.HBM_ECC, "uncontained uncorrectable error"),
    109: (Cause.XID, "context switch timed out"),
    110: (Cause.GPU_FAULT, "security fault"),
    119: (Cause.GPU_SYSTEM_PROCESSOR, "the system processor does not answer"),
    120: (Cause.GPU_SYSTEM_PROCESSOR, "the system processor failed"),
    121: (Cause.NVLINK, "NVLink C2C error"),
    136: (Cause.NVLINK, "link training failed"),
    140: (Cause.HBM_ECC, "unrecovered ECC error"),
    142: (Cause.GPU_FAULT, "NVENC3 error"),
    143: (Cause.GPU_FAULT, "GPU initialisation error"),
    145: (Cause.NVLINK, "NVLink RLW error"),
    149: (Cause.NVLINK, "NVLink NETIR error"),
    150: (Cause.GPU_FAULT, "memory processing error"),
    154: (Cause.XID, "the GPU asks for a recovery action"),
    155: (Cause.NVLINK, "NVLink software defined error"),
    158: (Cause.GPU_FAULT, "fatal timeout"),
}


def xid_fault(code: int, gpu: int, detail: str) -> DeviceError | None:
    """The fact behind an Xid; None where the program and not the device is at fault."""
    cause, what = XIDS.get(code, (Cause.XID, "unknown"))
    if not cause:
        return None
    detail = f"Xid {code}, {what}: {detail}"[:500]
    return DeviceError(node=THIS_NODE, cause=cause, gpu=gpu, detail=detail)
