"""What can go wrong, as data: whose fault it is, what it does to the node, whether it comes back.

``domain`` user: the job's own code; software: ours, the site's or a library's; hardware: a part.
``node``: keep (it is fine), suspect (test it before more work), replace (it cannot go on).
``recur_ppm``: chance that the same node fails at once again if it is simply used on.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Domain = Literal["user", "software", "hardware"]
Verdict = Literal["keep", "suspect", "replace"]


class Cause(Struct, frozen=True):
    """One row of the table."""

    name: str
    domain: Domain
    node: Verdict
    recur_ppm: int
    what: str
    stops: bool = True  # the gang; False: it may go on, slower
    outside: bool = False  # somebody or something outside of the job did it: no fault of the job

    @property
    def blames_job(self) -> bool:
        """Whether it counts against the job where it comes again without progress."""
        return not self.outside and self.domain != "hardware" and self.node != "replace"


_ROWS = (
    # The job's own.
    Cause("user_error", "user", "keep", 900_000, "the program ended with an error"),
    Cause("gpu_out_of_memory", "user", "keep", 950_000, "GPU memory ran out"),
    Cause("host_out_of_memory", "user", "keep", 700_000, "host memory ran out"),
    Cause("data_exhausted", "user", "keep", 1_000_000, "the samples ran out"),
    Cause("non_finite", "user", "keep", 900_000, "the loss is not a finite number"),
    Cause("configuration", "user", "keep", 1_000_000, "the job's configuration cannot run"),
    # Software around it.
    Cause("worker_killed", "software", "keep", 50_000, "killed from outside", outside=True),
    Cause("keeper_lost", "software", "keep", 50_000, "its keeper was killed", outside=True),
    Cause("software_bug", "software", "keep", 100_000, "a library or our own code failed"),
    Cause(
        "lost_peer",
        "software",
        "keep",
        20_000,
        "a peer was lost (another rank says why)",
        outside=True,
    ),
    Cause("disputed", "software", "keep", 300_000, "replicas disagree, and nobody knows who errs"),
    Cause(
        "gave_way", "software", "replace", 300_000, "it or its replica errs: a third one is asked"
    ),
    Cause("nccl_timeout", "software", "suspect", 150_000, "a collective timed out"),
    Cause("hang", "software", "suspect", 150_000, "no step within the deadline"),
    Cause("no_progress", "software", "keep", 150_000, "it hung, and Phalanx ended its processes"),
    Cause("no_answer", "software", "keep", 100_000, "nobody answered in time"),
    Cause("driver", "software", "replace", 600_000, "the driver failed"),
    Cause(
        "bus_error",
        "software",
        "suspect",
        300_000,
        "mapped memory failed: a full /dev/shm, a disk, or a faulty memory module",
    ),
    Cause("system_service", "software", "suspect", 200_000, "a service of the node failed"),
    Cause("filesystem_mount", "software", "suspect", 400_000, "a mount is gone or hangs"),
    Cause("dependency", "software", "keep", 100_000, "a service outside of the node failed"),
    Cause(
        "agent_restarted",
        "software",
        "keep",
        20_000,
        "the node's agent came back without them",
        outside=True,
    ),
    Cause("checkpoint", "software", "keep", 300_000, "a checkpoint could not be used"),
    Cause("disk_full", "software", "keep", 900_000, "there is no room for a checkpoint"),
    Cause("storage", "software", "keep", 500_000, "the storage of its folder failed"),
    # Parts.
    Cause("gpu_unavailable", "hardware", "replace", 950_000, "a GPU is gone"),
    Cause("gpu_fault", "hardware", "replace", 800_000, "a GPU is faulty"),
    Cause("xid", "hardware", "suspect", 400_000, "the driver reported an Xid"),
    Cause("gpu_system_processor", "hardware", "replace", 700_000, "a GPU's system processor"),
    Cause("hbm_ecc", "hardware", "replace", 600_000, "uncorrectable error in GPU memory"),
    Cause("sram_ecc", "hardware", "replace", 700_000, "uncorrectable error in on-chip memory"),
    Cause("nvlink", "hardware", "replace", 700_000, "an NVLink failed"),
    Cause("nvswitch", "hardware", "replace", 850_000, "an NVSwitch failed"),
    Cause("pcie", "hardware", "replace", 700_000, "a PCIe error"),
    Cause("dram", "hardware", "replace", 700_000, "uncorrectable error in host memory"),
    Cause("cpu", "hardware", "replace", 800_000, "a processor failed"),
    Cause("ssd", "hardware", "replace", 800_000, "a disk failed"),
    Cause("chassis", "hardware", "replace", 900_000, "chassis or board"),
    Cause(
        "network_link",
        "hardware",
        "suspect",
        300_000,
        "an InfiniBand or Ethernet link is down",
    ),
    Cause("nic", "hardware", "suspect", 800_000, "a network card failed", stops=False),
    Cause("rail", "hardware", "keep", 900_000, "a whole rail is gone", stops=False),
    Cause("thermal", "hardware", "suspect", 500_000, "too hot", stops=False),
    Cause("power", "hardware", "replace", 900_000, "power lost"),
    Cause("host_maintenance", "hardware", "replace", 1_000_000, "the site takes the node"),
    Cause("silent_corruption", "hardware", "replace", 900_000, "it computes wrong numbers"),
    Cause("slow_compute", "hardware", "suspect", 900_000, "a GPU computes slowly", stops=False),
    Cause("slow_network", "hardware", "suspect", 600_000, "slow on the network", stops=False),
    Cause("node_silent", "hardware", "replace", 900_000, "no heartbeat"),
    Cause("connection_lost", "hardware", "replace", 900_000, "its connection broke"),
    Cause("stuck", "hardware", "suspect", 500_000, "it did not answer in time"),
    Cause("failed_check", "hardware", "replace", 900_000, "it failed a check"),
    Cause("node_changed", "hardware", "replace", 1_000_000, "it came back as another machine"),
)
CAUSES = {row.name: row for row in _ROWS}
UNKNOWN = Cause("unknown", "software", "suspect", 300_000, "nobody knows")


def cause_of(name: str) -> Cause:
    """The row of a cause; one that is not in the table is suspicious software."""
    return CAUSES.get(name, UNKNOWN)
