"""Checks of the network, on good, bad and missing evidence."""

from __future__ import annotations

import pytest

from phalanx.doctor.checks.evidence import ProcessFacts
from tests.doctor.checks.played import CPU_VIRTUAL, HARDWARE, Case, played, prove

IB = "/sys/class/infiniband"
NET = "/sys/class/net"
PCI = "/sys/bus/pci/devices"
H100 = HARDWARE / "h100-4-rails"
ONLY_CARD = {f"{IB}/mlx5_0": ""}
KNOWN = ProcessFacts(cpus=(0, 1), addresses=("10.0.0.7",))


def card(name: str, interface: str = "", **port: str) -> dict[str, str]:
    """A card of sysfs with one port."""
    known = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    tree = {f"{IB}/{name}/ports/1/{key}": text for key, text in (known | port).items()}
    tree |= {f"{IB}/{name}/fw_ver": "28.39.1002", f"{IB}/{name}/hca_type": "MT4129"}
    tree[f"{IB}/{name}/device ->"] = f"0000:{name[-1]}5:00.0"
    if interface:
        tree[f"{IB}/{name}/device/net/{interface}"] = ""
    return tree


def lanes(name: str, width: str, speed: str = "32.0 GT/s PCIe") -> dict[str, str]:
    folder = f"{PCI}/0000:{name[-1]}5:00.0"
    return {
        f"{folder}/current_link_width": width,
        f"{folder}/max_link_width": "16",
        f"{folder}/current_link_speed": speed,
        f"{folder}/max_link_speed": "32.0 GT/s PCIe",
    }


def ethernet(name: str, mtu: str = "9000") -> dict[str, str]:
    return {
        f"{NET}/{name}/device ->": "0000:05:00.0",
        f"{NET}/{name}/type": "1",
        f"{NET}/{name}/operstate": "up",
        f"{NET}/{name}/speed": "100000",
        f"{NET}/{name}/mtu": mtu,
    }


def lossless(trust: str, ecn: str, pfc: str) -> dict[str, str]:
    table = (
        f"PFC configuration:\n\tpriority    0   1   2   3   4   5   6   7\n\tenabled     {pfc}   \n"
    )
    return {
        **card("mlx5_0", "ens1", link_layer="Ethernet"),
        f"{NET}/ens1/qos/trust": trust,
        f"{NET}/ens1/ecn/roce_np/enable/3": ecn,
        f"{NET}/ens1/ecn/roce_rp/enable/3": ecn,
        "$ mlnx_qos -i ens1": f"DCBX mode: OS controlled\nPriority trust state: {trust}\n{table}",
    }


GPU = {"/dev/nvidia0": "", "/proc/sys/kernel/osrelease": "5.15.0-112-generic"}
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07"
SNMP = "Tcp: RtoAlgorithm OutSegs RetransSegs\nTcp: 1 {sent} {again}\n"
BUFFERS = {
    "/proc/sys/net/core/rmem_max": "67108864",
    "/proc/sys/net/core/wmem_max": "67108864",
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t67108864",
    "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t67108864",
}
CLOSED = "-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n"

# As firewalld sets them on RHEL 9; `iptables -S` shows none of it.
FIREWALLD = """\
table inet firewalld {
\tchain filter_INPUT {
\t\ttype filter hook input priority filter + 10; policy accept;
\t\tct state { established, related } accept
\t\tiifname "lo" accept
\t\tct state invalid drop
\t\tjump filter_INPUT_ZONES
\t\treject with icmpx admin-prohibited
\t}

\tchain filter_INPUT_ZONES {
\t\tiifname "eth0" goto filter_IN_public
\t\tgoto filter_IN_public
\t}
}
"""
CASES = [
    Case(
        check="network.link",
        good=card("mlx5_0") | card("mlx5_1"),
        bad=card("mlx5_0") | card("mlx5_1", state="1: DOWN"),
        missing=ONLY_CARD,
        mends="cable",
    ),
    Case(
        check="network.rate",
        good=card("mlx5_0") | card("mlx5_1"),
        bad=card("mlx5_0") | card("mlx5_1", rate="100 Gb/sec (1X NDR)"),
        missing=ONLY_CARD,
        mends="transceiver",
    ),
    Case(
        check="network.pcie",
        good=card("mlx5_0") | lanes("mlx5_0", "16"),
        bad=card("mlx5_0") | lanes("mlx5_0", "8"),
        missing=card("mlx5_0"),
        mends="reseat",
    ),
    Case(
        check="network.firmware",
        good=card("mlx5_0") | card("mlx5_1"),
        bad=card("mlx5_0") | card("mlx5_1") | {f"{IB}/mlx5_1/fw_ver": "28.36.1010"},
        missing=ONLY_CARD,
        mends="mlxfwmanager",
    ),
    Case(
        check="network.mtu",
        good=ethernet("ens1"),
        bad=ethernet("ens1", mtu="1500"),
        mends="ip link set dev ens1 mtu 9000",
        undoes="ip link set dev ens1 mtu 1500",
    ),
    Case(
        check="network.gpudirect",
        good=GPU | ONLY_CARD | {"/sys/module/nvidia_peermem": ""},
        bad=GPU
        | ONLY_CARD
        | {"/sys/module/nvidia": "", "/proc/driver/nvidia/version": CLOSED_DRIVER},
        missing=GPU | ONLY_CARD,
        mends="modprobe nvidia-peermem",
        undoes="modprobe -r nvidia-peermem",
    ),
    Case(
        check="network.roce",
        good=lossless("dscp", "1", "0   0   0   1   0   0   0   0"),
        bad=lossless("pcp", "0", "0   0   0   0   0   0   0   0"),
        missing=card("mlx5_0", "ens1", link_layer="Ethernet"),
        mends="mlnx_qos -i ens1 --pfc 0,0,0,1,0,0,0,0",
        undoes="mlnx_qos -i ens1 --trust pcp",
    ),
    Case(
        check="network.errors",
        below=CPU_VIRTUAL,
        good={},
        bad=card("mlx5_0") | {f"{IB}/mlx5_0/ports/1/counters/link_downed": "3"},
        mends="transceiver",
    ),
    Case(
        check="network.retransmits",
        below=CPU_VIRTUAL,
        good={},
        bad={"/proc/net/snmp": SNMP.format(sent=1_000_000, again=40_000)},
        mends="cable",
    ),
    Case(
        check="network.buffers",
        good=BUFFERS,
        below=CPU_VIRTUAL,
        bad={},  # 4 MiB, as they were recorded
        mends="sysctl -w net.core.rmem_max=16777216",
        undoes='sysctl -w "net.ipv4.tcp_wmem=4096 16384 4194304"',
    ),
    Case(
        check="network.interface",
        below=CPU_VIRTUAL,
        good={},
        bad={},
        bad_process=ProcessFacts(environment={"NCCL_SOCKET_IFNAME": "ib0"}),
        mends="eth0",
    ),
    Case(
        check="network.nccl",
        good={},
        good_process=KNOWN,
        bad={},
        bad_process=ProcessFacts(environment={"NCCL_IB_DISABLE": "1"}),
        mends="unset NCCL_IB_DISABLE",
    ),
    Case(
        check="network.hostname",
        good={},
        good_process=KNOWN,
        bad={},
        bad_process=ProcessFacts(addresses=("127.0.1.1", "::1")),
        mends="/etc/hosts",
    ),
    Case(
        check="network.firewall",
        good={"$ iptables -S INPUT": "-P INPUT ACCEPT\n"},
        bad={"$ iptables -S INPUT": CLOSED},
        missing={"$ iptables -S INPUT": "!ended with 4: Permission denied (you must be root)"},
        mends="-j ACCEPT",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_good_bad_and_missing_evidence(case: Case) -> None:
    prove(case)


def test_what_only_root_sees_is_said() -> None:
    denied = {"$ iptables -S INPUT": "!ended with 4: Permission denied (you must be root)"}
    found = played("network.firewall", denied, ProcessFacts(root=False))
    assert "root may see more" in str(found.measured["missing"])


def test_a_firewall_that_trusts_the_training_network_is_open_enough() -> None:
    rules = f"{CLOSED}-A INPUT -s 10.0.0.0/16 -j ACCEPT\n"
    assert played("network.firewall", {"$ iptables -S INPUT": rules}).verdict == "pass"


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ("-s 127.0.0.0/8 -j ACCEPT", "warn"),
        ("-s 10.0.0.0/16 -p icmp -j ACCEPT", "warn"),
        ("-s 10.0.0.0/16 -p tcp -m tcp --sport 53 -j ACCEPT", "warn"),
        ("-s 10.0.0.0/16 -i eth1 -j ACCEPT", "pass"),
    ],
)
def test_only_a_rule_that_takes_all_of_a_network_opens_it(rule: str, verdict: str) -> None:
    tree = {"$ iptables -S INPUT": f"{CLOSED}-A INPUT {rule}\n"}
    assert played("network.firewall", tree).verdict == verdict


def test_rules_that_iptables_does_not_show_are_seen() -> None:
    tree = {"$ iptables -S INPUT": "-P INPUT ACCEPT\n", "$ nft list ruleset": FIREWALLD}
    found = played("network.firewall", tree)
    assert found.verdict == "warn" and "--zone=trusted" in found.suggestion
    source = "\t\tip saddr { 10.0.0.0/16, 10.2.0.0/16 } goto filter_IN_trusted\n"
    trusting = FIREWALLD.replace("\t\tgoto filter_IN_public\n", source)
    assert played("network.firewall", tree | {"$ nft list ruleset": trusting}).verdict == "pass"
    assert played("network.firewall", tree | {"$ nft list ruleset": ""}).verdict == "pass"
    denied = tree | {"$ nft list ruleset": "!ended with 1: Operation not permitted"}
    assert played("network.firewall", denied).verdict == "unknown"
    older = tree | {"$ iptables -S INPUT": "# Warning: iptables-legacy tables present, use\n"}
    assert played("network.firewall", older).verdict == "unknown"


@pytest.mark.parametrize(
    ("value", "verdict"), [("eth0", "pass"), ("eth", "fail"), ("eth0,eth9", "fail")]
)
def test_gloo_takes_whole_names_and_all_of_them(value: str, verdict: str) -> None:
    process = ProcessFacts(environment={"GLOO_SOCKET_IFNAME": value})
    assert played("network.interface", {}, process, below=CPU_VIRTUAL).verdict == verdict


def test_gpudirect_by_dma_buf_needs_the_open_driver_and_a_newer_kernel() -> None:
    tree = GPU | ONLY_CARD | {"/sys/module/nvidia": "", "/proc/driver/nvidia/version": OPEN_DRIVER}
    assert played("network.gpudirect", tree).measured["by"] == "dma-buf"
    old = tree | {"/proc/sys/kernel/osrelease": "5.4.0-200-generic"}
    assert played("network.gpudirect", old).verdict == "warn"


@pytest.mark.parametrize(
    ("value", "verdict"),
    [("eth", "pass"), ("=eth0", "pass"), ("=eth", "fail"), ("^lo", "pass"), ("ifb0", "fail")],
)
def test_interfaces_are_matched_as_nccl_does(value: str, verdict: str) -> None:
    process = ProcessFacts(environment={"NCCL_SOCKET_IFNAME": value})
    assert played("network.interface", {}, process, below=CPU_VIRTUAL).verdict == verdict


def test_infiniband_is_no_roce_and_a_rail_node_passes() -> None:
    assert played("network.roce", {}, below=H100).verdict == "skip"
    assert played("network.rate", {}, below=H100).verdict == "pass"
    assert played("network.firmware", {}, below=H100).verdict == "pass"
    assert played("network.link", {}, below=H100).verdict == "pass"  # a port for storage is down
    assert played("gpu.nics", {}, below=H100).verdict == "pass"


def test_a_host_without_a_name_in_any_table_is_found() -> None:
    found = played("network.hostname", {}, ProcessFacts(cpus=(0,), addresses=None))
    assert found.verdict == "warn" and found.measured["addresses"] == "none"


def test_an_interface_with_an_odd_name_is_quoted_in_commands() -> None:
    found = played("network.mtu", ethernet("a;reboot", mtu="1500"))
    assert found.steps[0].do == "ip link set dev 'a;reboot' mtu 9000"
