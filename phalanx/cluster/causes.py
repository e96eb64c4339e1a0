"""What can go wrong, as data: whose fault it is, what it does to the node, whether it comes back.

``domain`` user: the job's own code; software: ours, the site's or a library's; hardware: a part.
``node``: keep (it is fine), suspect (test it before more work), replace (it cannot go on).
``recur_ppm``: chance that the same node fails at once again if it is simply used on.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

Domain = Literal["user", "software", "hardware"]
Verdict = Literal["keep", "suspect", "replace"]
# outside: the gang stops, and somebody or something outside of the job did it, by no fault of the
# job; goes_on: it need not stop, but is slower.
Effect = Literal["stops", "outside", "goes_on"]


class Cause(StrEnum):
    """What went wrong. A stored one is read back as its value: compare with ``==``, not ``is``."""

    domain: Domain
    node: Verdict
    recur_ppm: int
    what: str
    effect: Effect

    def __new__(
        cls,
        value: str,
        domain: Domain,
        node: Verdict,
        recur_ppm: int,
        what: str,
        effect: Effect = "stops",
    ) -> Self:
        """One row of the table below."""
        self = str.__new__(cls, value)
        self._value_ = value
        self.domain, self.node, self.recur_ppm = domain, node, recur_ppm
        self.what, self.effect = what, effect
        return self

    # fmt: off
    # The job's own.
    USER_ERROR = "user_error", "user", "keep", 900_000, "the program ended with an error"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory", "user", "keep", 950_000, "GPU memory ran out"
    HOST_OUT_OF_MEMORY = "host_out_of_memory", "user", "keep", 700_000, "host memory ran out"
    DATA_EXHAUSTED = "data_exhausted", "user", "keep", 1_000_000, "the samples ran out"
    NON_FINITE = "non_finite", "user", "keep", 900_000, "the loss is not a finite number"
    CONFIGURATION = "configuration", "user", "keep", 1_000_000, "the job's configuration cannot run"
    # Software around it.
    WORKER_KILLED = "worker_killed", "software", "keep", 50_000, "killed from outside", "outside"
    KEEPER_LOST = "keeper_lost", "software", "keep", 50_000, "its keeper was killed", "outside"
    SOFTWARE_BUG = "software_bug", "software", "keep", 100_000, "a library or our own code failed"
    LOST_PEER = (
        "lost_peer", "software", "keep", 20_000,
        "a peer was lost (another rank says why)", "outside",
    )
    DISPUTED = (
        "disputed", "software", "keep", 300_000, "ranks disagree, and nobody knows who errs"
    )
    GAVE_WAY = (
        "gave_way", "software", "replace", 300_000, "it or its replica errs: a third one is asked"
    )
    NCCL_TIMEOUT = "nccl_timeout", "software", "suspect", 150_000, "a collective timed out"
    HANG = "hang", "software", "suspect", 150_000, "no step within the deadline"
    NO_PROGRESS = (
        "no_progress", "software", "keep", 150_000, "it hung, and Phalanx ended its processes"
    )
    NO_ANSWER = "no_answer", "software", "keep", 100_000, "nobody answered in time"
    DRIVER = "driver", "software", "replace", 600_000, "the driver failed"
    BUS_ERROR = (
        "bus_error", "software", "suspect", 300_000,
        "mapped memory failed: a full /dev/shm, a disk, or a faulty memory module",
    )
    SYSTEM_SERVICE = (
        "system_service", "software", "suspect", 200_000, "a service of the node failed"
    )
    FILESYSTEM_MOUNT = (
        "filesystem_mount", "software", "suspect", 400_000, "a mount is gone or hangs"
    )
    DEPENDENCY = "dependency", "software", "keep", 100_000, "a service outside of the node failed"
    AGENT_RESTARTED = (
        "agent_restarted", "software", "keep", 20_000,
        "the node's agent came back without them", "outside",
    )
    CHECKPOINT = "checkpoint", "software", "keep", 300_000, "a checkpoint could not be used"
    DISK_FULL = "disk_full", "software", "keep", 900_000, "there is no room for a checkpoint"
    STORAGE = "storage", "software", "keep", 500_000, "the storage of its folder failed"
    # Parts.
    GPU_UNAVAILABLE = "gpu_unavailable", "hardware", "replace", 950_000, "a GPU is gone"
    GPU_FAULT = "gpu_fault", "hardware", "replace", 800_000, "a GPU is faulty"
    XID = "xid", "hardware", "suspect", 400_000, "the driver reported an Xid"
    GPU_SYSTEM_PROCESSOR = (
        "gpu_system_processor", "hardware", "replace", 700_000, "a GPU's system processor"
    )
    HBM_ECC = "hbm_ecc", "hardware", "replace", 600_000, "uncorrectable error in GPU memory"
    SRAM_ECC = "sram_ecc", "hardware", "replace", 700_000, "uncorrectable error in on-chip memory"
    NVLINK = "nvlink", "hardware", "replace", 700_000, "an NVLink failed"
    NVSWITCH = "nvswitch", "hardware", "replace", 850_000, "an NVSwitch failed"
    PCIE = "pcie", "hardware", "replace", 700_000, "a PCIe error"
    DRAM = "dram", "hardware", "replace", 700_000, "uncorrectable error in host memory"
    CPU = "cpu", "hardware", "replace", 800_000, "a processor failed"
    SSD = "ssd", "hardware", "replace", 800_000, "a disk failed"
    CHASSIS = "chassis", "hardware", "replace", 900_000, "chassis or board"
    NETWORK_LINK = (
        "network_link", "hardware", "suspect", 300_000, "an InfiniBand or Ethernet link is down"
    )
    NIC = "nic", "hardware", "suspect", 800_000, "a network card failed", "goes_on"
    RAIL = "rail", "hardware", "keep", 900_000, "a whole rail is gone", "goes_on"
    THERMAL = "thermal", "hardware", "suspect", 500_000, "too hot", "goes_on"
    POWER = "power", "hardware", "replace", 900_000, "power lost"
    HOST_MAINTENANCE = (
        "host_maintenance", "hardware", "replace", 1_000_000, "the site takes the node"
    )
    SILENT_CORRUPTION = (
        "silent_corruption", "hardware", "replace", 900_000, "it computes wrong numbers"
    )
    SLOW_COMPUTE = (
        "slow_compute", "hardware", "suspect", 900_000, "a GPU computes slowly", "goes_on"
    )
    SLOW_HOST = "slow_host", "hardware", "suspect", 700_000, "GPUs wait for their host", "goes_on"
    SLOW_NETWORK = "slow_network", "hardware", "suspect", 600_000, "slow on the network", "goes_on"
    NODE_SILENT = "node_silent", "hardware", "replace", 900_000, "no heartbeat"
    CONNECTION_LOST = "connection_lost", "hardware", "replace", 900_000, "its connection broke"
    STUCK = "stuck", "hardware", "suspect", 500_000, "it did not answer in time"
    FAILED_CHECK = "failed_check", "hardware", "replace", 900_000, "it failed a check"
    NODE_CHANGED = (
        "node_changed", "hardware", "replace", 1_000_000, "it came back as another machine"
    )
    UNKNOWN = "unknown", "software", "suspect", 300_000, "nobody knows"
    # fmt: on

    @classmethod
    def of(cls, name: str) -> Cause:
        """The cause of this name; one that is not in the table is suspicious software."""
        return CAUSES.get(name, Cause.UNKNOWN)

    @property
    def blames_job(self) -> bool:
        """Whether it counts against the job where it comes again without progress."""
        return self.effect != "outside" and self.domain != "hardware" and self.node != "replace"


class FormationCause(StrEnum):
    """Why a gang forms, where nothing went wrong."""

    START = "start"
    RESIZE = "resize"


CAUSES: dict[str, Cause] = {cause.value: cause for cause in Cause if cause is not Cause.UNKNOWN}
