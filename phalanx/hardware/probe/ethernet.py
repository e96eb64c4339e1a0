"""Network interfaces in sysfs, and their neighbours by LLDP."""

from __future__ import annotations

import json
from typing import Any

from phalanx.hardware.probe.description import LLDP, NicDescription
from phalanx.hardware.probe.infiniband import numa_of
from phalanx.hardware.probe.reader import Reader, ReadError, linked, listed, read

FOLDER = "/sys/class/net"
NEIGHBOURS = ("lldpctl", "-f", "json")
ETHERNET = "1"  # ARPHRD_ETHER in an interface's ``type``


def read_interfaces(reader: Reader) -> list[NicDescription]:
    """Ethernet interfaces that have a device behind them, those with RDMA among them."""
    cards = []
    for name in listed(reader, FOLDER):
        folder = f"{FOLDER}/{name}"
        pci = linked(reader, f"{folder}/device")
        if not pci or read(reader, f"{folder}/type") != ETHERNET:
            continue
        speed = read(reader, f"{folder}/speed")  # "-1" where the link is down
        cards.append(
            NicDescription(
                name=name,
                interface=name,
                link_layer="Ethernet",
                bits_per_second=int(speed) * 10**6 if speed.isdigit() else 0,
                active=read(reader, f"{folder}/operstate") == "up",
                pci=pci,
                numa_node=numa_of(reader, pci),
            )
        )
    return cards


def parse_lldp(text: str) -> dict[str, str]:
    """``lldpctl -f json``: the neighbour's name by interface; ReadError where it is none."""
    try:
        root = json.loads(text)
        interfaces = root["lldp"].get("interface", [])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ReadError(
            " ".join(NEIGHBOURS), f"no JSON of lldpctl: {text.strip()[:80]!r}"
        ) from None
    neighbours: dict[str, str] = {}
    # One interface is an object, several are a list of objects of one name each.
    for entry in interfaces if isinstance(interfaces, list) else [interfaces]:
        if not isinstance(entry, dict):
            continue
        for interface, said in entry.items():
            name = _chassis_name(said.get("chassis") if isinstance(said, dict) else None)
            if name:
                neighbours.setdefault(interface, name)
    return neighbours


def _chassis_name(chassis: Any) -> str:
    """Its name is the key, or, of one without a name, its identifier."""
    if not isinstance(chassis, dict) or not chassis:
        return ""
    if isinstance(chassis.get("id"), dict):
        return str(chassis["id"].get("value", ""))
    return str(next(iter(chassis)))


def neighbour_of(card: NicDescription, neighbours: dict[str, str]) -> tuple[str, str]:
    """The switch of a card and who says so; ("", ""): nobody."""
    name = neighbours.get(card.interface, "")
    return (name, LLDP) if name else ("", "")
