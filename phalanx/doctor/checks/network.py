"""Network cards: links, firmware, packet sizes, GPUDirect, lossless Ethernet, errors."""

from __future__ import annotations

import re
from shlex import quote

from phalanx.cluster.causes import Cause
from phalanx.doctor.checks.check import CheckList, Judgement, bad, good, skip, write
from phalanx.doctor.checks.evidence import NodeEvidence, one_of
from phalanx.doctor.checks.os_cpu import LEAST_KERNEL, kernel_version
from phalanx.doctor.finding import Measured, MendStep
from phalanx.hardware.probe.description import NicDescription
from phalanx.hardware.probe.ethernet import FOLDER as INTERFACES
from phalanx.hardware.probe.ethernet import read_interfaces
from phalanx.hardware.probe.infiniband import FOLDER as RDMA
from phalanx.hardware.probe.infiniband import read_rdma
from phalanx.hardware.probe.nvidia_smi import DRIVER
from phalanx.hardware.probe.reader import NotThereError, ReadError

CHECKS = CheckList()

NO_RDMA = "no RDMA"
WANTED_MTU = 9000
FAST_BITS_PER_SECOND = 25 * 10**9  # from here on small packets cost a core
ROCE_PRIORITY = 3
PORT_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
# Counters of a port that stay at zero on a sound link.
PORT_COUNTERS = (
    *("link_downed", "link_error_recovery", "local_link_integrity_errors"),
    *("port_rcv_errors", "symbol_error", "excessive_buffer_overrun_errors"),
)
INTERFACE_COUNTERS = ("rx_crc_errors", "rx_errors", "tx_errors")


def _ports(evidence: NodeEvidence) -> list[NicDescription]:
    """Ports with RDMA; ReadError where the cards show none."""
    cards = read_rdma(evidence.reader, [])
    if not cards:
        raise NotThereError(f"{RDMA}/*/ports")
    return cards


def _port_folder(card: NicDescription) -> str:
    device, _, port = card.name.partition(":")
    return f"{RDMA}/{device}/ports/{port or 1}"


def _model(evidence: NodeEvidence, card: NicDescription) -> tuple[str, str]:
    """Cards that do the same work: one type, one kind of network."""
    device = card.name.partition(":")[0]
    return evidence.optional(f"{RDMA}/{device}/hca_type"), card.link_layer


def _training_ports(evidence: NodeEvidence) -> list[NicDescription]:
    """Ports of the cards that have the fastest of those that are up, and of their like."""
    cards = _ports(evidence)
    fastest = max((card.bits_per_second for card in cards if card.active), default=0)
    models = {
        _model(evidence, card) for card in cards if card.active and card.bits_per_second == fastest
    }
    return [card for card in cards if not models or _model(evidence, card) in models]


@CHECKS.add(
    "network.link",
    "critical",
    expected="every card for training has a port that is up",
    why="A rail that is down takes its GPUs' traffic to another, which then carries both.",
    cause=Cause.NIC,
)
def link_state(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_rdma:
        return skip(NO_RDMA)
    cards = _training_ports(evidence)
    for card in cards:
        path = f"{_port_folder(card)}/state"
        one_of(evidence.text(path).partition(": ")[2], PORT_STATES, path)
    # The second port of a card may be left without a cable.
    up = {card.name.partition(":")[0] for card in cards if card.active}
    down = [card.name for card in cards if card.name.partition(":")[0] not in up]
    if not down:
        return good(ports=len(cards))
    measured: Measured = {"ports": len(cards), "down": ", ".join(down)}
    return bad(measured, advice="see cable and switch port (`ibstat`, `mlxlink -d DEVICE`)")


@CHECKS.add(
    "network.rate",
    "high",
    expected="all training ports at one rate, each at its full width (4X)",
    why="A port that came up at half its rate or width halves the rail, and a ring is as slow.",
)
def link_rate(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_rdma:
        return skip(NO_RDMA)
    rates: dict[str, str] = {}
    by_model: dict[str, set[str]] = {}
    for card in _ports(evidence):
        if card.active:
            rate = rates[card.name] = evidence.text(f"{_port_folder(card)}/rate")
            by_model.setdefault(" ".join(_model(evidence, card)).strip(), set()).add(rate)
    if not rates:
        raise ReadError(RDMA, "no port is up")
    narrow = {name: text for name, text in rates.items() if re.search(r"\((1|2)X\b", text)}
    mixed = {model: ", ".join(sorted(each)) for model, each in by_model.items() if len(each) > 1}
    if not narrow and not mixed:
        return good(ports=len(rates), rate=", ".join(sorted(set(rates.values()))))
    return bad({**narrow, **mixed}, advice="compare cable, transceiver and the switch port's speed")


@CHECKS.add(
    "network.pcie",
    "high",
    expected="every card has all its PCIe lanes, at its own speed",
    why="A 400 Gb/s card on half its lanes moves half, whatever the link on its other side says.",
)
def card_pcie(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_rdma:
        return skip(NO_RDMA)
    slow: Measured = {}
    cards = [card for card in _ports(evidence) if card.pci]
    if not cards:
        raise NotThereError(f"{RDMA}/*/device")
    for card in cards:
        folder = f"/sys/bus/pci/devices/{card.pci}"
        for kind in ("width", "speed"):
            now = evidence.text(f"{folder}/current_link_{kind}")
            most = evidence.text(f"{folder}/max_link_{kind}")
            if float(now.split()[0]) < float(most.split()[0]):
                slow[f"{card.name} {kind}"] = f"{now} of {most}"
    if not slow:
        return good(cards=len(cards))
    return bad(slow, advice="reseat the card; see its slot's bifurcation in the firmware")


@CHECKS.add(
    "network.firmware",
    "low",
    expected="cards of one model have one firmware",
    why="Firmware decides about congestion control and known faults; a mixed fleet fails oddly.",
)
def card_firmware(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_rdma:
        return skip(NO_RDMA)
    by_model: dict[str, set[str]] = {}
    for device in evidence.names(RDMA):
        model = evidence.optional(f"{RDMA}/{device}/board_id")
        model = model or evidence.optional(f"{RDMA}/{device}/hca_type")
        version = evidence.text(f"{RDMA}/{device}/fw_ver")
        if not version[:1].isdigit():
            raise ReadError(f"{RDMA}/{device}/fw_ver", f"no version: {version[:40]!r}")
        # The first number of a firmware is the generation of its card.
        by_model.setdefault(model or version.split(".")[0], set()).add(version)
    shown = {model: ", ".join(sorted(found)) for model, found in by_model.items()}
    if all(len(found) == 1 for found in by_model.values()):
        return good(**shown)
    return bad({**shown}, advice="bring them to one version (`mlxfwmanager -u`, `flint`)")


@CHECKS.add(
    "network.mtu",
    "medium",
    expected=f"MTU {WANTED_MTU} on Ethernet of 25 Gb/s and more",
    why="With 1,500 bytes a packet six times as many packets carry the same data.",
)
def packet_size(evidence: NodeEvidence) -> Judgement:
    evidence.names(INTERFACES)
    fast = [
        card.interface
        for card in read_interfaces(evidence.reader)
        if card.active and card.bits_per_second >= FAST_BITS_PER_SECOND
    ]
    if not fast:
        return skip("no Ethernet of 25 Gb/s or more")
    sizes = {name: evidence.number(f"{INTERFACES}/{name}/mtu") for name in fast}
    measured: Measured = dict(sizes)
    small = {name: size for name, size in sizes.items() if size < WANTED_MTU}
    if not small:
        return good(**measured)
    steps = []
    for name, size in small.items():
        command = f"ip link set dev {quote(name)} mtu"
        steps.append(MendStep(f"{command} {WANTED_MTU}", f"{command} {size}"))
    return bad(measured, *steps, advice="the switches must carry them too")


@CHECKS.add(
    "network.gpudirect",
    "high",
    expected="nvidia_peermem is loaded, or driver and kernel export dma-bufs",
    why="Without GPUDirect every byte is copied through host memory on its way to the card.",
)
def gpudirect(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip("no NVIDIA GPU")
    if not evidence.has_rdma:
        return skip(NO_RDMA)
    modules = evidence.names("/sys/module")
    if "nvidia_peermem" in modules or "nv_peer_mem" in modules:
        return good(by="nvidia_peermem")
    open_driver = "Open Kernel Module" in evidence.text(DRIVER)
    release = evidence.text("/proc/sys/kernel/osrelease")
    if open_driver and kernel_version(release) >= LEAST_KERNEL:
        return good(by="dma-buf", kernel=release)
    kind = "open" if open_driver else "proprietary"
    step = MendStep("modprobe nvidia-peermem", "modprobe -r nvidia-peermem")
    return bad({"peermem": "not loaded", "driver": kind, "kernel": release}, step)


@CHECKS.add(
    "network.roce",
    "high",
    expected=f"on RoCE, DSCP is trusted, and priority {ROCE_PRIORITY} has ECN and PFC",
    why="On lossy Ethernet a dropped packet sends a whole window again: bandwidth collapses.",
)
def roce(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_rdma:
        return skip(NO_RDMA)
    cards = [c for c in _training_ports(evidence) if c.active and c.link_layer == "Ethernet"]
    if not cards:
        return skip("no RoCE")
    steps: tuple[MendStep, ...] = ()
    measured: Measured = {}
    for card in cards:
        folder = f"{INTERFACES}/{card.interface}"
        qos = f"mlnx_qos -i {quote(card.interface)}"
        trust = evidence.text(f"{folder}/qos/trust")
        if trust != "dscp":
            measured[f"{card.interface} trust"] = trust
            steps += (MendStep(f"{qos} --trust dscp", f"{qos} --trust {quote(trust)}"),)
        for side in ("roce_np", "roce_rp"):
            path = f"{folder}/ecn/{side}/enable/{ROCE_PRIORITY}"
            if evidence.text(path) != "1":
                measured[f"{card.interface} {side}"] = "off"
                steps += write({path: evidence.text(path)}, "1")
        lossless = _lossless(evidence.run("mlnx_qos", "-i", card.interface))
        if lossless[ROCE_PRIORITY] != "1":
            wanted = [*lossless[:ROCE_PRIORITY], "1", *lossless[ROCE_PRIORITY + 1 :]]
            measured[f"{card.interface} pfc"] = " ".join(lossless)
            both = [f"{qos} --pfc {','.join(each)}" for each in (wanted, lossless)]
            steps += (MendStep(both[0], both[1]),)
    if not steps:
        return good(cards=len(cards), priority=ROCE_PRIORITY)
    return bad(measured, *steps, advice="the switches must have the same priority")


def _lossless(text: str) -> list[str]:
    """Which of the eight priorities have PFC, in what ``mlnx_qos`` prints."""
    match = re.search(r"PFC configuration:.*?\n\s*enabled\s+((?:[01]\s+){7}[01])", text, re.DOTALL)
    if match is None:
        raise ReadError("mlnx_qos", "has no PFC configuration")
    return match[1].split()


@CHECKS.add(
    "network.errors",
    "high",
    expected="counters of errors at zero on every port and interface",
    why="A link with errors sends again and again; one that went down takes a job with it.",
)
def port_errors(evidence: NodeEvidence) -> Judgement:
    counted = 0
    counters: Measured = {}
    folders = {
        card.name: f"{_port_folder(card)}/counters" for card in read_rdma(evidence.reader, [])
    }
    for card in read_interfaces(evidence.reader):
        if card.active:
            folders[card.interface] = f"{INTERFACES}/{card.interface}/statistics"
    for name, folder in folders.items():
        for counter in (*PORT_COUNTERS, *INTERFACE_COUNTERS):
            text = evidence.optional(f"{folder}/{counter}")
            counted += text.isdigit()
            if text.isdigit() and int(text):
                counters[f"{name} {counter}"] = int(text)
    if not counted:
        raise NotThereError(f"{RDMA}/*/ports/*/counters and {INTERFACES}/*/statistics")
    if not counters:
        return good(counters=counted)
    return bad(counters, advice="see whether they grow; clean or replace cable and transceiver")
