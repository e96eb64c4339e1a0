"""Cards with RDMA: ``ibstat``, their files in sysfs, and the switch at the other end."""

from __future__ import annotations

import re

from msgspec import Struct

from phalanx.hardware.probe.description import NicDescription
from phalanx.hardware.probe.reader import Reader, linked, listed, number, read

IBSTAT = ("ibstat",)
FOLDER = "/sys/class/infiniband"


class IbPort(Struct, frozen=True, kw_only=True):
    """One port as ``ibstat`` prints it."""

    device: str
    port: int
    firmware: str = ""
    state: str = ""
    gigabits_per_second: int = 0
    link_layer: str = ""


def parse_ibstat(text: str) -> list[IbPort]:
    """Every port of every adapter."""
    ports: list[IbPort] = []
    for block in re.split(r"(?m)^CA '", text)[1:]:
        device, _, rest = block.partition("'")
        head, *bodies = re.split(r"(?m)^\s*Port (\d+):\s*$", rest)
        firmware = _field(head, "Firmware version")
        for number_text, body in zip(bodies[::2], bodies[1::2], strict=True):
            ports.append(
                IbPort(
                    device=device,
                    port=int(number_text),
                    firmware=firmware,
                    state=_field(body, "State"),
                    gigabits_per_second=number(_field(body, "Rate")),
                    link_layer=_field(body, "Link layer"),
                )
            )
    return ports


def parse_neighbour(text: str) -> str:
    """The switch's name in what ``smpquery nodedesc`` prints; "": it does not say one.

    A switch calls itself "MF0;leaf-a1:MQM9700/U1"; others have any name.
    """
    match = re.search(r"Node Description:\.*(.*)", text)
    if match is None:
        return ""
    said = match[1].strip()
    named = re.match(r"[^;]*;([^:]+):", said)
    return (named[1] if named else said).strip()


def neighbour_command(device: str) -> tuple[str, ...]:
    """Asks the switch that the first port of a card is connected to for its name."""
    return ("smpquery", "-C", device, "-P", "1", "-D", "nodedesc", "0,1")


def read_rdma(reader: Reader, ibstat: list[IbPort]) -> list[NicDescription]:
    """Every port with RDMA, by sysfs, and by ``ibstat`` where sysfs does not say."""
    ibstat_ports = {(port.device, port.port): port for port in ibstat}
    cards = []
    for device in listed(reader, FOLDER):
        folder = f"{FOLDER}/{device}"
        for port_text in listed(reader, f"{folder}/ports"):
            port = f"{folder}/ports/{port_text}"
            said = ibstat_ports.get((device, number(port_text)), IbPort(device=device, port=0))
            pci = linked(reader, f"{folder}/device")
            rate = number(read(reader, f"{port}/rate")) or said.gigabits_per_second
            state = read(reader, f"{port}/state") or said.state
            cards.append(
                NicDescription(
                    name=device if port_text == "1" else f"{device}:{port_text}",
                    interface=next(iter(listed(reader, f"{folder}/device/net")), ""),
                    link_layer=read(reader, f"{port}/link_layer") or said.link_layer,
                    bits_per_second=rate * 10**9,
                    active="active" in state.lower(),
                    pci=pci,
                    numa_node=numa_of(reader, pci),
                    firmware=read(reader, f"{folder}/fw_ver") or said.firmware,
                )
            )
    return cards


def numa_of(reader: Reader, pci: str) -> int:
    """The NUMA node of a PCIe device; -1: there is one only, or nobody says."""
    text = read(reader, f"/sys/bus/pci/devices/{pci}/numa_node") if pci else ""
    return int(text) if text.isdigit() else -1


def _field(text: str, name: str) -> str:
    match = re.search(rf"(?m)^\s*{re.escape(name)}: *(.*?)\s*$", text)
    return match[1] if match else ""
