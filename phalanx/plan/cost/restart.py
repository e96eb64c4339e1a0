"""How long a job takes from a failure to its next step, part by part.

Starting processes and forming groups follow no data sheet: the times below stand at the slow end of
what large sites report, since deadlines are derived from them, and measurements replace them with
the first start. Reading state back is its bytes over the rate of what holds it.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.hardware import Cluster

START_SECONDS = 30.0  # interpreter, torch, the device's context, from shared storage
STANDBY_SECONDS = 15.0  # the same where a process waits with torch loaded
REJOIN_SECONDS = 5.0  # a worker that lives leaves its collective
FORM_SECONDS = 5.0  # process groups of a small gang
FORM_SECONDS_PER_RANK = 0.3e-3  # addresses of all ranks are gathered in one place
# To find, open and verify what is restored, whatever its size.
PEER_SECONDS, DISK_SECONDS, REMOTE_SECONDS = 5.0, 10.0, 60.0
USUAL_DISK_BANDWIDTH = 1e9  # bytes/s of a node, where no drives are catalogued


class RestartTimes(Struct, frozen=True, kw_only=True):
    """Seconds of each part of a restart."""

    start: float
    standby: float
    rejoin: float
    form: float
    restore_peer: float
    restore_disk: float
    restore_remote: float


def restart_times(
    cluster: Cluster, checkpoint_bytes: float, storage_bandwidth_per_node: float
) -> RestartTimes:
    """The restart of a job that fills a cluster; bandwidth in bytes/s."""
    own_bytes = checkpoint_bytes / cluster.gpus
    network = cluster.network_bandwidth * cluster.nic.payload_share
    disk = cluster.nvme.read_bandwidth or USUAL_DISK_BANDWIDTH / cluster.gpus_per_node
    remote = storage_bandwidth_per_node / cluster.gpus_per_node
    return RestartTimes(
        start=START_SECONDS,
        standby=STANDBY_SECONDS,
        rejoin=REJOIN_SECONDS,
        form=FORM_SECONDS + FORM_SECONDS_PER_RANK * cluster.gpus,
        restore_peer=PEER_SECONDS + own_bytes / network,
        restore_disk=DISK_SECONDS + own_bytes / disk,
        restore_remote=REMOTE_SECONDS + own_bytes / remote,
    )
