"""Network cards and links, by the kernel's counters: which are down, flap, or drop packets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.messages import THIS_NODE, DeviceError

FLAPS = 3  # times that a link went away and came back between two looks
ERRORS_PER_SECOND = 100.0  # of received packets that were broken
ACTIVE = "ACTIVE"


class PortState(Struct, frozen=True):
    """One port at one moment."""

    name: str
    kind: str  # "net" or "infiniband"
    up: bool
    downs: int  # times that it was lost
    errors: int


def read_links(root: Path = Path("/sys/class")) -> dict[str, PortState]:
    """Physical ports by name; what has no device behind it is no hardware."""
    ports = {}
    for folder in sorted((root / "net").glob("*")):
        if (folder / "device").exists():
            link = PortState(
                name=folder.name,
                kind="net",
                up=_text(folder / "operstate") in ("up", "unknown"),
                downs=_number(folder / "carrier_down_count")
                or _number(folder / "carrier_changes") // 2,
                errors=_number(folder / "statistics" / "rx_errors"),
            )
            ports[link.name] = link
    for port in sorted((root / "infiniband").glob("*/ports/*")):
        counters = port / "counters"
        errors = ("symbol_error", "port_rcv_errors", "link_error_recovery")
        link = PortState(
            name=f"{port.parent.parent.name}/{port.name}",
            kind="infiniband",
            up=ACTIVE in _text(port / "state"),
            downs=_number(counters / "link_downed"),
            errors=sum(_number(counters / name) for name in errors),
        )
        ports[link.name] = link
    return ports


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _number(path: Path) -> int:
    with suppress(ValueError):
        return int(_text(path) or 0)
    return 0


def link_faults(
    before: dict[str, PortState],
    after: dict[str, PortState],
    seconds: float,
    rails: Mapping[str, int] | None = None,
) -> list[DeviceError]:
    """What happened between two looks to ports that were up at the first.

    ``rails``: of ports by name, as the node describes itself; without it each is one of its own.
    """
    faults = []
    for fabric in ("infiniband", "net"):
        ports = [link for link in before.values() if link.kind == fabric and link.up]
        alive = [link for link in ports if link.name in after and after[link.name].up]
        for number, was in enumerate(ports):
            problem = _problem(was, after.get(was.name), seconds)
            if problem:
                # One of several is a slower node; the last one is no node.
                cause = Cause.NIC if len(alive) > 0 and was not in alive else Cause.NETWORK_LINK
                rail = rails.get(was.name, -1) if rails else number
                on_rail = rail if fabric == "infiniband" else -1
                said = f"{was.name}: {problem}"
                faults.append(DeviceError(node=THIS_NODE, cause=cause, rail=on_rail, detail=said))
    return faults


def _problem(was: PortState, now: PortState | None, seconds: float) -> str:
    if now is None:
        return "the device is gone"
    if not now.up:
        return "the link is down"
    if now.downs - was.downs >= FLAPS:
        return f"the link was lost {now.downs - was.downs} times within {seconds:.0f} s"
    rate = (now.errors - was.errors) / max(seconds, 1e-9)
    if rate > ERRORS_PER_SECOND:
        return f"{rate:.0f} errors a second"
    return ""


class LinkMonitor:
    """Looks again and again, each time since the last."""

    def __init__(self, root: Path, rails: Callable[[], Mapping[str, int]]) -> None:
        self._root, self._rails = root, rails
        self._before, self._then = read_links(root), time.monotonic()

    def look(self) -> list[DeviceError]:
        after, now = read_links(self._root), time.monotonic()
        found = link_faults(self._before, after, now - self._then, self._rails())
        self._before, self._then = after, now
        return found
