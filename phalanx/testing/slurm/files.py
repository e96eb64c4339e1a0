"""The files of a private Slurm: its configuration, topology, and devices that stand for GPUs."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
from pathlib import Path

from msgspec import Struct

SLURM_CONF = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock,cred_expire={cred_expire}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdSpoolDir={root}/spool/%n
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout={node_timeout}
KillWait=10
MpiDefault=none
MaxArraySize=1001
EnforcePartLimits=ALL
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobs.txt
{accounting}
# Several nodes on one machine: each has more cores than it has, and an address of its own port.
SlurmdParameters=config_overrides
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} \
CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory_mb} Gres={gres}
PartitionName=batch Nodes=ALL Default=YES PriorityTier=10 MaxTime=7-0 GraceTime={grace_seconds}
PartitionName=prod Nodes=ALL PriorityTier=100 MaxTime=7-0 PreemptMode=OFF
"""


class SandboxOptions(Struct, frozen=True, kw_only=True):
    """What a private Slurm looks like."""

    root: Path
    nodes: int = 8
    gpus_per_node: int = 8
    cpus_per_node: int = 8
    memory_mb: int = 4000
    leaves: int = 2
    port: int = 16817  # of slurmctld; nodes take those behind it, slurmdbd the one before
    grace_seconds: int = 30  # that a preempted job has
    node_timeout: int = 4  # seconds of silence before a node is down; a site's is 300
    accounting: bool = False  # slurmdbd and its database as well

    @property
    def node_names(self) -> list[str]:
        """The nodes, in order."""
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def conf(self) -> Path:
        """What SLURM_CONF must name."""
        return self.root / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run" / "munge.sock"


def write_files(options: SandboxOptions) -> None:
    """Everything that the daemons read."""
    root = options.root
    for name in ("etc", "run", "log", "state", "spool", "dev", "munge"):
        (root / name).mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in options.node_names:
        (root / "spool" / name).mkdir(exist_ok=True)
    for folder in ("run", "munge", "log"):  # munged wants nobody else to write here
        (root / folder).chmod(0o755)
    key = root / "munge" / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
    options.conf.write_text(slurm_conf(options))
    (root / "etc" / "topology.conf").write_text(topology_conf(options))
    (root / "etc" / "gres.conf").write_text(_gres_conf(options))
    for number in range(options.gpus_per_node):
        device = root / "dev" / f"gpu{number}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")  # a device file: a bare count of GPUs is refused


def slurm_conf(options: SandboxOptions) -> str:
    """slurm.conf."""
    accounting = "AccountingStorageType=accounting_storage/none"
    if options.accounting:
        accounting = (
            "AccountingStorageType=accounting_storage/slurmdbd\n"
            "AccountingStorageHost=127.0.0.1\n"
            f"AccountingStoragePort={options.port - 1}\n"
            f"AccountingStoragePass={options.munge_socket}\n"
            "AccountingStorageTRES=gres/gpu\n"
            "AccountingStorageEnforce=associations"
        )
    first, last = options.port + 1, options.port + options.nodes
    gpus = options.gpus_per_node
    return SLURM_CONF.format(
        host=socket.gethostname(),
        port=options.port,
        root=options.root,
        user=getpass.getuser(),
        cred_expire=5,  # a requeued job may start this much later, and not the default 120 s
        node_timeout=options.node_timeout,
        accounting=accounting,
        nodes=f"n[1-{options.nodes}]" if options.nodes > 1 else "n1",
        node_ports=f"[{first}-{last}]" if options.nodes > 1 else first,
        cpus=options.cpus_per_node,
        memory_mb=options.memory_mb,
        gres=f"gpu:h100:{gpus}" if gpus else "(null)",
        grace_seconds=options.grace_seconds,
    )


def topology_conf(options: SandboxOptions) -> str:
    """Leaves of equal size below one spine."""
    size = -(-options.nodes // options.leaves)
    lines, leaf = [], 0
    for first in range(1, options.nodes + 1, size):
        leaf += 1
        lines.append(
            f"SwitchName=leaf{leaf} Nodes=n[{first}-{min(first + size - 1, options.nodes)}]"
        )
    lines.append(f"SwitchName=spine Switches=leaf[1-{leaf}]")
    return "\n".join(lines) + "\n"


def _gres_conf(options: SandboxOptions) -> str:
    gpus = options.gpus_per_node
    if not gpus:
        return ""
    files = f"{options.root}/dev/gpu[0-{gpus - 1}]" if gpus > 1 else f"{options.root}/dev/gpu0"
    return f"Name=gpu Type=h100 File={files}\n"


def find_program(name: str) -> str:
    """Daemons lie where a user's PATH does not look."""
    places = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=places) or ""
