"""What nodes say of their cards and GPUs, and the rate of a rail that follows by the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.hardware.links import nics, pcie_bandwidth
from phalanx.hardware.probe import NodeDescription

FLOOR_SHARE = 0.8  # of the payload rate, below which something is wrong


class NodeLinks(Struct, frozen=True, kw_only=True):
    """What one node's description says of the way from a GPU to its rail."""

    node: str
    bits_per_second: int = 0  # of a card; 0: nobody says
    gpus_per_card: int = 1
    pcie_generation: int = 0  # of its GPUs; 0: nobody says
    pcie_lanes: int = 0

    @property
    def cards(self) -> str:
        """Its cards in words."""
        shared = f", shared by {self.gpus_per_card} GPUs each" if self.gpus_per_card > 1 else ""
        return f"cards of {self.bits_per_second / 1e9:g} Gbit/s{shared}"

    @property
    def bytes_per_second(self) -> float:
        """What a GPU can send by its card, or by PCIe where that is less; 0: it is not known.

        Of cards with this rate in the catalogue the one with the longest headers counts.
        """
        shares = [
            card.payload_share
            for card in nics().values()
            if round(card.bandwidth * 8) == self.bits_per_second
        ]
        if not shares:
            return 0.0
        rate = self.bits_per_second / 8 * min(shares) / self.gpus_per_card
        with suppress(ConfigError):  # a generation that the catalogue does not have bounds nothing
            if self.pcie_lanes:
                rate = min(rate, pcie_bandwidth(self.pcie_generation, self.pcie_lanes))
        return rate


def links_of(node: str, described: NodeDescription) -> NodeLinks:
    """The links of a node by its description."""
    cards = [card for card in described.nics if card.rail >= 0]
    slots = [(gpu.pcie_generation, gpu.pcie_lanes) for gpu in described.gpus]
    generation, lanes = min(slots, default=(0, 0))
    return NodeLinks(
        node=node,
        bits_per_second=min((card.bits_per_second for card in cards), default=0),
        gpus_per_card=max((len(card.gpus) for card in cards), default=1),
        pcie_generation=generation,
        pcie_lanes=lanes,
    )


class ReportedFloor(Struct, frozen=True, kw_only=True):
    """What rails have to reach by what most nodes say, and which nodes say that they have less."""

    bytes_per_second: float
    why: str
    less: tuple[NodeLinks, ...] = ()


def reported_floor(links: Sequence[NodeLinks]) -> ReportedFloor | None:
    """The floor of most nodes; None where fewer than half of them say what they have."""
    telling = [one for one in links if one.bytes_per_second]
    if 2 * len(telling) < len(links) or not telling:
        return None
    counted = Counter(one.bytes_per_second for one in telling)
    usual = max(counted, key=lambda rate: (counted[rate], -rate))
    one = next(one for one in telling if one.bytes_per_second == usual)
    return ReportedFloor(
        bytes_per_second=FLOOR_SHARE * usual,
        why=f"{FLOOR_SHARE:.0%} of what {one.cards} carry",
        less=tuple(each for each in telling if each.bytes_per_second < usual),
    )
