"""Disks and file systems as they are set up."""

from __future__ import annotations

import re
from shlex import quote

from phalanx.doctor.checks.check import CheckList, Judgement, bad, good, skip, write
from phalanx.doctor.checks.evidence import Mount, NodeEvidence
from phalanx.doctor.finding import Measured, MendStep
from phalanx.doctor.storage import NETWORK_KINDS
from phalanx.hardware.probe.host import read_drives
from phalanx.hardware.probe.reader import NotThereError, ReadError

CHECKS = CheckList()

LEAST_READ_AHEAD_KIB, LEAST_NETWORK_READ_AHEAD_KIB = 128, 1024
LEAST_TRANSFER_BYTES = 256 << 10
# One of these is shown where a read does not write the time of the access.
LAZY_ATIME = {"ro", "noatime", "relatime", "lazytime"}
SCHEDULERS = {"0": ("none", "mq-deadline", "kyber"), "1": ("mq-deadline", "bfq")}


def is_network(kind: str) -> bool:
    """Whether a file system comes over the network."""
    return kind.rpartition(".")[2].startswith(NETWORK_KINDS)


@CHECKS.add(
    "storage.mount_type",
    "medium",
    expected="the working folder is on a local disk or a parallel file system",
    why="NFS has one server and weak locks; memory is lost with the node; FUSE costs a core.",
)
def mount_type(evidence: NodeEvidence) -> Judgement:
    mount = evidence.mount_of(evidence.process.folder)
    measured: Measured = {"mount": mount.folder, "type": mount.kind}
    if mount.kind.startswith(("nfs", "cifs", "smb", "9p", "tmpfs", "ramfs", "fuse")):
        return bad(measured, advice="give --folder on a local disk or a parallel file system")
    return good(**measured)


@CHECKS.add(
    "storage.mount_options",
    "medium",
    expected="no strictatime or sync; NFS in transfers of 256 KiB or more, hard",
    why="Reading a shard would write its access time; small or soft transfers stall or lose data.",
)
def mount_options(evidence: NodeEvidence) -> Judgement:
    wrong: Measured = {}
    steps = []
    looked = 0
    for mount in evidence.mounts:
        if not mount.source.startswith("/dev/") and not is_network(mount.kind):
            continue
        looked += 1
        faults = ["sync"] if "sync" in mount.options else []
        # The kernel shows it by leaving out what would be said instead. On NFS it is the server's.
        if not is_network(mount.kind) and not LAZY_ATIME & {*mount.options}:
            faults.append("strictatime")
        if "strictatime" in faults:
            folder = quote(mount.folder)
            both = [f"mount -o remount,{name} {folder}" for name in ("noatime", "strictatime")]
            steps.append(MendStep(both[0], both[1]))
        if mount.kind.startswith("nfs"):
            faults += [name for name in ("soft",) if name in mount.options]
            faults += [
                each
                for each in mount.options
                if re.fullmatch(r"[rw]size=\d+", each) and int(each[6:]) < LEAST_TRANSFER_BYTES
            ]
        if faults:
            wrong[mount.folder] = ", ".join(faults)
    if not looked:
        raise ReadError("/proc/self/mountinfo", "has no disk and no network mount")
    if not wrong:
        return good(mounts=looked)
    return bad(wrong, *steps, advice="change the rest in /etc/fstab and mount again")


@CHECKS.add(
    "storage.readahead",
    "medium",
    expected=f"{LEAST_READ_AHEAD_KIB} KiB or more on disks, {LEAST_NETWORK_READ_AHEAD_KIB} KiB on "
    "NFS",
    why="Linux reads NFS ahead by 128 KiB since 5.4: one stream waits for each round trip.",
)
def read_ahead(evidence: NodeEvidence) -> Judgement:
    small: dict[str, tuple[str, int]] = {}
    looked = 0
    for drive in read_drives(evidence.reader):
        path = f"/sys/block/{drive.name}/queue/read_ahead_kb"
        value, looked = evidence.number(path), looked + 1
        if value < LEAST_READ_AHEAD_KIB:
            small[path] = (str(value), LEAST_READ_AHEAD_KIB)
    for mount in evidence.mounts:
        if mount.kind.startswith("nfs"):
            path = f"/sys/class/bdi/{mount.device}/read_ahead_kb"
            value, looked = evidence.number(path), looked + 1
            if value < LEAST_NETWORK_READ_AHEAD_KIB:
                small[path] = (str(value), LEAST_NETWORK_READ_AHEAD_KIB)
    if not looked:
        raise NotThereError("/sys/block/*/queue/read_ahead_kb")
    if not small:
        return good(devices=looked)
    steps = [
        step for path, (was, value) in small.items() for step in write({path: was}, str(value))
    ]
    measured: Measured = {path.split("/")[3]: int(was) for path, (was, _) in small.items()}
    return bad(measured, *steps)


@CHECKS.add(
    "storage.scheduler",
    "low",
    expected="none, mq-deadline or kyber on flash; mq-deadline or bfq on spinning disks",
    why="A fair scheduler costs a fast disk much of its rate, and a slow disk needs one.",
)
def scheduler(evidence: NodeEvidence) -> Judgement:
    drives = read_drives(evidence.reader)
    if not drives:
        raise NotThereError("/sys/block/*/size")
    wrong: Measured = {}
    steps: tuple[MendStep, ...] = ()
    for drive in drives:
        folder = f"/sys/block/{drive.name}/queue"
        fitting = SCHEDULERS[evidence.text(f"{folder}/rotational")]
        chosen = evidence.choice(f"{folder}/scheduler")
        if chosen not in fitting:
            wrong[drive.name] = chosen
            offered = re.findall(r"[\w-]+", evidence.text(f"{folder}/scheduler"))
            better = next((name for name in fitting if name in offered), fitting[0])
            steps += write({f"{folder}/scheduler": chosen}, better)
    return bad(wrong, *steps) if wrong else good(drives=len(drives))


@CHECKS.add(
    "storage.stripe",
    "high",
    expected="files of the folder on more than one target (Lustre), over several connections (NFS)",
    why="A file on one target is read and written at that target's rate, whatever the others do.",
)
def stripe(evidence: NodeEvidence) -> Judgement:
    folder = evidence.process.folder
    mount = evidence.mount_of(folder)
    if mount.kind == "gpfs":
        return good(stripes="over all disks of the file system, as GPFS does by itself")
    if mount.kind.startswith("nfs"):
        return _connections(mount)
    if mount.kind != "lustre":
        return skip("no Lustre, GPFS or NFS")
    text = evidence.run("lfs", "getstripe", "-d", folder)
    counts = [int(count) for count in re.findall(r"stripe_count:\s+(-?\d+)", text)]
    if not counts:
        raise ReadError("lfs getstripe", "has no stripe_count")
    if max(counts) > 1 or -1 in counts:
        return good(stripe_count=max(counts))
    most = max(counts)
    both = [f"lfs setstripe -c {count} {quote(folder)}" for count in (-1, most)]
    return bad({"stripe_count": most}, MendStep(both[0], both[1]))


def _connections(mount: Mount) -> Judgement:
    """NFS has one server, and over TCP one stream to it unless more are asked for."""
    options = dict(each.split("=", 1) for each in mount.options if "=" in each)
    connections = int(options.get("nconnect", "1"))
    measured: Measured = {"mount": mount.folder, "nconnect": connections}
    if connections > 1 or options.get("proto", "tcp").startswith("rdma"):
        return good(**measured)
    return bad(measured, advice="unmount it, and mount it with nconnect=8 (Linux 5.3 or later)")


@CHECKS.add(
    "storage.local",
    "medium",
    expected="local disks that hold as much as the host's memory",
    why="Checkpoints and staged shards then depend on shared storage, at the hour all use it.",
)
def local_disk(evidence: NodeEvidence) -> Judgement:
    evidence.names("/sys/block")
    drives = read_drives(evidence.reader)
    total = sum(drive.size_bytes for drive in drives)
    measured: Measured = {"drives": len(drives), "gib": total / 2**30}
    if total >= evidence.memory_bytes:
        return good(**measured)
    return bad(measured, advice="add a local disk, or plan checkpoints for the shared one")
