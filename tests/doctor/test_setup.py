"""What is compared between nodes: what somebody set, within bounds; not what changes by itself."""

from __future__ import annotations

from phalanx.doctor.finding import Finding
from phalanx.doctor.setup import NodeSetup, bad_setup, settings_of


def test_a_long_value_does_not_keep_the_others_from_the_server() -> None:
    mounts = {f"/mnt/share-{number}": "rsize=32768, soft" for number in range(60)}
    findings = [
        Finding(check="storage.mount_options", verdict="warn", measured=mounts),
        Finding(check="os.thp", verdict="pass", measured={"enabled": "madvise"}),
    ]
    settings = settings_of(findings)
    assert settings["os.thp"] == "pass: enabled madvise"
    assert bad_setup(NodeSetup(versions={}, settings=settings)) == ""


def test_interfaces_of_containers_are_no_drift() -> None:
    up = {"told": 0, "up": ", ".join(f"veth{number:08x}" for number in range(200))}
    finding = Finding(check="network.interface", verdict="pass", measured=up)
    assert settings_of([finding]) == {"network.interface": "pass"}
