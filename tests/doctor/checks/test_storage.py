"""Checks of disks and file systems, on good, bad and missing evidence."""

from __future__ import annotations

import pytest

from phalanx.doctor.checks.evidence import ProcessFacts
from tests.doctor.checks.played import CPU_VIRTUAL, Case, played, prove

MOUNTS = "/proc/self/mountinfo"
ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw"
NFS = (
    f"{ROOT}\n60 27 0:52 / /data rw,relatime - nfs4 10.0.0.1:/data rw,vers=4.2,rsize={{size}},"
    "wsize={size},{mode}"
)
LUSTRE = f"{ROOT}\n61 27 0:53 / /scratch rw - lustre 10.0.0.2@o2ib:/scratch rw,flock"
ON_LUSTRE = ProcessFacts(folder="/scratch/job")
STRIPES = (
    "/scratch/job\nstripe_count:  {count} stripe_size:   1048576 pattern: raid0 stripe_offset: -1\n"
)
QUEUE = "/sys/block/nvme0n1/queue"
NVME = {
    "/sys/block/nvme0n1/size": "7501476528",
    "/sys/block/nvme0n1/removable": "0",
    f"{QUEUE}/rotational": "0",
}

CASES = [
    Case(
        check="storage.mount_type",
        below=CPU_VIRTUAL,
        good={},
        bad={MOUNTS: NFS.format(size=1048576, mode="hard")},
        bad_process=ProcessFacts(folder="/data/job"),
        mends="--folder",
    ),
    Case(
        check="storage.mount_options",
        below=CPU_VIRTUAL,
        good={},
        bad={MOUNTS: ROOT.replace(",relatime", "")},
        mends="mount -o remount,noatime /",
        undoes="mount -o remount,strictatime /",
    ),
    Case(
        check="storage.readahead",
        below=CPU_VIRTUAL,
        good={},
        bad={
            MOUNTS: NFS.format(size=1048576, mode="hard"),
            "/sys/class/bdi/0:52/read_ahead_kb": "128",
        },
        mends="echo 1024 > /sys/class/bdi/0:52/read_ahead_kb",
        undoes="echo 128 > /sys/class/bdi/0:52/read_ahead_kb",
    ),
    Case(
        check="storage.scheduler",
        good=NVME | {f"{QUEUE}/scheduler": "[none] mq-deadline kyber bfq"},
        bad=NVME | {f"{QUEUE}/scheduler": "none mq-deadline kyber [bfq]"},
        missing=NVME,
        mends=f"echo none > {QUEUE}/scheduler",
        undoes=f"echo bfq > {QUEUE}/scheduler",
    ),
    Case(
        check="storage.stripe",
        good={MOUNTS: LUSTRE, "$ lfs getstripe -d /scratch/job": STRIPES.format(count=8)},
        good_process=ON_LUSTRE,
        bad={MOUNTS: LUSTRE, "$ lfs getstripe -d /scratch/job": STRIPES.format(count=1)},
        mends="lfs setstripe -c -1 /scratch/job",
        undoes="lfs setstripe -c 1 /scratch/job",
    ),
    Case(
        check="storage.local",
        below=CPU_VIRTUAL,
        good={},
        bad={"/sys/block/vda/size": "2097152"},
        mends="local disk",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_good_bad_and_missing_evidence(case: Case) -> None:
    prove(case)


def test_small_or_soft_transfers_of_nfs_are_named() -> None:
    tree = {MOUNTS: NFS.format(size=65536, mode="soft")}
    found = played("storage.mount_options", tree)
    assert found.measured["/data"] == "soft, rsize=65536, wsize=65536"
    good = {MOUNTS: NFS.format(size=1048576, mode="hard")}
    assert played("storage.mount_options", good).verdict == "pass"


def test_a_folder_with_a_space_is_quoted_in_commands() -> None:
    spaced = ProcessFacts(folder="/scratch/my job")
    tree = {MOUNTS: LUSTRE, "$ lfs getstripe -d /scratch/my job": STRIPES.format(count=1)}
    assert played("storage.stripe", tree, spaced).steps[0].do.endswith("'/scratch/my job'")


def test_stripes_are_asked_for_on_lustre_only() -> None:
    assert played("storage.stripe", {}, below=CPU_VIRTUAL).verdict == "skip"
    assert played("storage.stripe", {MOUNTS: LUSTRE}, ON_LUSTRE).verdict == "unknown"
