"""Which way bytes went: counters of the kernel before and after, whatever is configured."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.doctor.fabric.report import GpuDirect, Transport
from phalanx.doctor.fabric.report import Path as Way

WORD = 4  # port_xmit_data counts words of four bytes
MOST = 0.5  # of what was sent, that shows the way it went


class Counters(Struct, frozen=True, kw_only=True):
    """Bytes sent since the node started; None: it has no such counter."""

    rdma: int | None = None
    sockets: int | None = None
    loopback: int | None = None
    registrations: int | None = None  # of GPU memory, by nvidia-peermem


def read_counters(root: Path = Path("/")) -> Counters:
    """What this node's kernel counts now."""
    ports = (root / "sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data")
    words = _counted(ports)
    peers = (root / "sys/kernel/mm/memory_peers").glob("nv*/num_alloc_mrs")
    registered = _counted(peers)
    interfaces = _interfaces(root / "proc/net/dev")
    others = [sent for name, sent in interfaces.items() if name != "lo"]
    return Counters(
        rdma=sum(words) * WORD if words else None,
        sockets=sum(others) if others else None,
        loopback=interfaces.get("lo"),
        registrations=sum(registered) if registered else None,
    )


def _counted(paths: Iterable[Path]) -> list[int]:
    """The numbers in files; a card without a counter says so in words, or refuses to be read."""
    numbers = []
    for path in paths:
        with suppress(OSError, ValueError):
            numbers.append(int(path.read_text()))
    return numbers


def _interfaces(path: Path) -> dict[str, int]:
    """Bytes that each interface of this network namespace has sent."""
    try:
        lines = path.read_text().splitlines()[2:]
    except OSError:
        return {}
    table = [
        (name.strip(), rest.split()) for name, _, rest in (line.partition(":") for line in lines)
    ]
    return {name: int(fields[8]) for name, fields in table if len(fields) > 8}


def transport_of(node: str, before: Counters, after: Counters, sent: int, gpus: bool) -> Transport:
    """The way that what a node sent took, where a counter grew by enough of it."""
    rdma = _growth(before.rdma, after.rdma)
    sockets = _growth(before.sockets, after.sockets)
    loopback = _growth(before.loopback, after.loopback)
    path: Way = "unknown"
    if sent and rdma >= MOST * sent:
        path = "rdma"
    elif sent and sockets >= MOST * sent:
        path = "sockets"
    elif sent and loopback >= MOST * sent:
        path = "loopback"
    direct: GpuDirect = "none"
    if gpus:  # registrations over dma-buf are not counted anywhere
        grown = _growth(before.registrations, after.registrations) > 0
        direct = "used" if grown and path == "rdma" else "unknown"
    return Transport(
        node=node,
        path=path,
        sent_bytes=sent,
        rdma_bytes=rdma,
        socket_bytes=sockets,
        loopback_bytes=loopback,
        gpu_direct=direct,
    )


def _growth(before: int | None, after: int | None) -> int:
    return -1 if before is None or after is None else max(0, after - before)
