"""TCP and names: retransmissions, buffers, which interface, who the host is, firewalls."""

from __future__ import annotations

import re
from contextlib import suppress

from phalanx.cluster.causes import Cause
from phalanx.doctor.checks.check import (
    CheckList,
    Judgement,
    bad,
    good,
    set_sysctl,
    sysctl_path,
)
from phalanx.doctor.checks.evidence import NodeEvidence
from phalanx.doctor.finding import Measured
from phalanx.hardware.probe.ethernet import FOLDER as INTERFACES
from phalanx.hardware.probe.infiniband import FOLDER as RDMA
from phalanx.hardware.probe.reader import NotThereError, ReadError

CHECKS = CheckList()

MOST_RETRANSMITTED = 0.01
LEAST_SEGMENTS = 100_000
LEAST_BUFFER_BYTES = 16 << 20
FIREWALL, NFT_RULES = ("iptables", "-S", "INPUT"), ("nft", "list", "ruleset")
# A rule that takes a whole network, of whatever port; and one that refuses what came so far.
NFT_TRUSTING = re.compile(
    r'(ip6? saddr (?!127\.)|iifname (?!"lo"))(\{[^}]*\}|\S+)( counter packets \d+ bytes \d+)?'
    r" (accept|goto filter_IN_trusted)\b"
)
NFT_REFUSING = re.compile(r"(counter packets \d+ bytes \d+ )?(drop|reject)\b")
NFT_ADVICE = (
    "firewall-cmd --permanent --zone=trusted --add-source=NETWORK/BITS and --reload; where there "
    "is no firewalld, a rule of nft: ip saddr NETWORK/BITS accept"
)
# Variables of NCCL that turn a fast path off, and the value that does.
DISABLING = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET_GDR_LEVEL": "LOC",
}


@CHECKS.add(
    "network.retransmits",
    "medium",
    expected=f"less than {MOST_RETRANSMITTED:.0%} of TCP segments sent again",
    why="Each loss holds its connection up for a round trip or 200 ms: rendezvous and data stall.",
)
def retransmits(evidence: NodeEvidence) -> Judgement:
    rows = [line.split() for line in evidence.text("/proc/net/snmp").splitlines()]
    tcp = [row for row in rows if row and row[0] == "Tcp:"]
    if len(tcp) != 2:
        raise ReadError("/proc/net/snmp", "has no Tcp")
    fields = dict(zip(*tcp, strict=False))
    sent, again = int(fields["OutSegs"]), int(fields["RetransSegs"])
    measured: Measured = {"segments": sent, "share": again / max(1, sent)}
    if sent < LEAST_SEGMENTS or again <= MOST_RETRANSMITTED * sent:
        return good(**measured)
    return bad(measured, advice="look for a bad cable or an overrun switch (`nstat -az`)")


@CHECKS.add(
    "network.buffers",
    "medium",
    expected=f"sockets may have buffers of {LEAST_BUFFER_BYTES >> 20} MiB",
    why="One connection moves at most its buffer a round trip: too little for a fast link.",
)
def socket_buffers(evidence: NodeEvidence) -> Judgement:
    limits = {
        name: evidence.number(sysctl_path(name))
        for name in ("net.core.rmem_max", "net.core.wmem_max")
    }
    steps = [
        set_sysctl(name, str(LEAST_BUFFER_BYTES), str(value))
        for name, value in limits.items()
        if value < LEAST_BUFFER_BYTES
    ]
    for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
        least, usual, most = map(int, evidence.text(sysctl_path(name)).split())
        limits[name] = most
        if most < LEAST_BUFFER_BYTES:
            wanted = f"{least} {usual} {LEAST_BUFFER_BYTES}"
            steps.append(set_sysctl(name, wanted, f"{least} {usual} {most}"))
    measured: Measured = dict(limits)
    return bad(measured, *steps) if steps else good(**measured)


@CHECKS.add(
    "network.interface",
    "critical",
    expected="interfaces and cards that NCCL and Gloo are told to use are there and up",
    why="Told a name that is not there, NCCL and Gloo do not start; told a slow one, they crawl.",
    cause=Cause.DEPENDENCY,
)
def interfaces(evidence: NodeEvidence) -> Judgement:
    names = evidence.names(INTERFACES)
    wrong: Measured = {}
    told = 0
    up = [name for name in names if _up(evidence, name)]
    environment = evidence.process.environment
    if value := environment.get("NCCL_SOCKET_IFNAME", ""):
        told += 1
        if not any(_matches(value, name) for name in up):
            wrong["NCCL_SOCKET_IFNAME"] = value
    if value := environment.get("GLOO_SOCKET_IFNAME", ""):
        told += 1
        if not set(value.split(",")) <= set(up):  # Gloo takes whole names, and every one
            wrong["GLOO_SOCKET_IFNAME"] = value
    cards = environment.get("NCCL_IB_HCA", "")
    if cards:
        told += 1
        devices = evidence.reader.names(RDMA)
        if not any(_matches(cards, name) for name in devices):
            wrong["NCCL_IB_HCA"] = cards
    if wrong:
        return bad(wrong, advice=f"name one of {', '.join(names)}, or unset it")
    return good(told=told, up=", ".join(name for name in up if name != "lo") or "none")


def _matches(value: str, name: str) -> bool:
    """As NCCL reads such a list: "=" exact, "^" all but, else the start of a name."""
    without = value.lstrip("^=")
    parts = [part.partition(":")[0].lstrip("=") for part in without.split(",")]
    exact = "=" in value[:2]
    hit = any(name == part if exact else name.startswith(part) for part in parts)
    return hit != value.startswith("^")


def _up(evidence: NodeEvidence, name: str) -> bool:
    try:
        state = evidence.text(f"{INTERFACES}/{name}/operstate")
    except NotThereError:
        return False  # a file of the kernel's beside the interfaces, such as bonding_masters
    return state in ("up", "unknown")  # the loopback's state is "unknown" while it is up


@CHECKS.add(
    "network.nccl",
    "high",
    expected="no variable turns one of NCCL's fast paths off",
    why="A variable left over from debugging sends all traffic through sockets or host memory.",
)
def nccl_variables(evidence: NodeEvidence) -> Judgement:
    environment = evidence.process.environment
    wrong: Measured = {}
    for name, value in DISABLING.items():
        if environment.get(name, "") == value:
            wrong[name] = value
    if environment.get("NCCL_DEBUG", "").upper() == "TRACE":
        wrong["NCCL_DEBUG"] = environment["NCCL_DEBUG"]
    if wrong:
        return bad(wrong, advice=f"unset {' '.join(wrong)}")
    if not evidence.process.cpus:  # nothing is known of the process
        raise ReadError("environment", "not there")
    return good(variables=sum(name.startswith("NCCL_") for name in environment))


@CHECKS.add(
    "network.hostname",
    "high",
    expected="the host's name leads to an address that others can reach",
    why="Gloo and rendezvous give out what the name leads to: peers would call themselves.",
)
def hostname(evidence: NodeEvidence) -> Judgement:
    addresses = evidence.process.addresses
    if addresses is None:
        if not evidence.process.cpus:
            raise ReadError("getaddrinfo", "not there")
        return bad({"addresses": "none"}, advice="give the name an address (DNS or /etc/hosts)")
    shown = ", ".join(addresses)
    if any(not each.startswith("127.") and each != "::1" for each in addresses):
        return good(addresses=shown)
    advice = "let /etc/hosts give the name its own address, or set GLOO_SOCKET_IFNAME"
    return bad({"addresses": shown}, advice=advice)


@CHECKS.add(
    "network.firewall",
    "high",
    expected="the kernel takes what other nodes of the gang send (policy ACCEPT, or a rule)",
    why="Ranks listen on ports that the system chooses: a closed one is a start that times out.",
    commands=(FIREWALL, NFT_RULES),
)
def firewall(evidence: NodeEvidence) -> Judgement:
    # Each shows rules that the other does not: firewalld's, and those of older kernels.
    seen = []
    for command, judge in ((FIREWALL, _judge_iptables), (NFT_RULES, _judge_nft)):
        with suppress(NotThereError):
            seen.append(judge(evidence.run(*command)))
    if not seen:
        raise NotThereError("iptables and nft")
    return next((each for each in seen if each.verdict == "bad"), seen[0])


def _judge_iptables(text: str) -> Judgement:
    rules = text.splitlines()
    policy = next((found for line in rules if (found := re.match(r"-P INPUT (\w+)", line))), None)
    if policy is None:
        raise ReadError(" ".join(FIREWALL), "has no policy")
    if "iptables-legacy tables present" in text:
        raise ReadError(" ".join(FIREWALL), "does not show the rules of iptables-legacy")
    # A rule that takes a whole network, of whatever port.
    trusting = [
        line
        for line in rules
        if re.fullmatch(r"-A INPUT -s (?!127\.)\S+( -i \S+)? -j ACCEPT", line)
    ]
    closing = [
        line for line in rules if re.search(r"-j (DROP|REJECT)", line) and " -s " not in line
    ]
    measured: Measured = {"policy": policy[1], "networks": len(trusting), "refusing": len(closing)}
    if policy[1] == "ACCEPT" and not closing:
        return good(**measured)
    if trusting:
        return good(**measured)
    return bad(measured, advice="iptables -I INPUT -s NETWORK/BITS -j ACCEPT, of the training net")


def _judge_nft(text: str) -> Judgement:
    if text.strip() and "table " not in text:
        raise ReadError(" ".join(NFT_RULES), "has no table")
    refusing = trusting = 0
    for chain in re.findall(r"(?ms)^\s*chain \S+ \{\n(.*?)^\s*\}", text):
        lines = [line.strip() for line in chain.splitlines()]
        trusting += sum(NFT_TRUSTING.match(line) is not None for line in lines)
        if any("hook input" in line for line in lines):
            refusing += "policy drop" in chain or any(map(NFT_REFUSING.match, lines))
    measured: Measured = {"refusing": refusing, "networks": trusting}
    if not refusing or trusting:
        return good(**measured)
    return bad(measured, advice=NFT_ADVICE)
