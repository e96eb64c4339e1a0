"""Which network cards carry training, which GPU uses which, and how many rails that makes."""

from __future__ import annotations

from msgspec import Struct, structs

from phalanx.hardware.probe.description import NicDescription
from phalanx.hardware.probe.gpu_topology import ONE_SWITCH, GpuTopology, distance


class Rails(Struct, frozen=True, kw_only=True):
    """The network planes of a node."""

    count: int
    nics: tuple[NicDescription, ...]  # all cards, with their rails and GPUs
    warning: str = ""


def find_rails(cards: list[NicDescription], topology: GpuTopology, gpus: int) -> Rails:
    """Rails by the switches of the cards, or, where nobody says those, one a card."""
    near = {
        card.name: {gpu: row[card.name] for gpu, row in topology.nics.items() if card.name in row}
        for card in cards
    }
    training = training_cards(cards, near)
    used = assign(training, near, gpus)
    order = [card for card in training if card.name in used.values()]
    order.sort(key=lambda card: min(gpu for gpu, name in used.items() if name == card.name))
    planes = [card.switch or card.name for card in order]
    by_switch = all(card.switch for card in order)
    named = list(dict.fromkeys(planes if by_switch else [card.name for card in order]))
    rail_of = {card.name: named.index(card.switch if by_switch else card.name) for card in order}
    count, warning = max(1, len(named)), ""
    wrong = [gpu for gpu, name in used.items() if rail_of[name] != gpu % count]
    if wrong:
        warning = (
            f"GPU {wrong[0]} is near {used[wrong[0]]}, which is on rail {rail_of[used[wrong[0]]]} "
            f"and not {wrong[0] % count}: cards and cables do not follow the order of GPUs"
        )
    nics = tuple(
        structs.replace(
            card,
            gpus=tuple(gpu for gpu, name in used.items() if name == card.name),
            rail=rail_of.get(card.name, -1),
        )
        for card in cards
    )
    return Rails(count=count, nics=nics, warning=warning)


def training_cards(
    cards: list[NicDescription], near: dict[str, dict[int, str]]
) -> list[NicDescription]:
    """The fastest cards with RDMA; where some share a PCIe switch with GPUs, only those.

    The others are for storage and people.
    """
    able = [card for card in cards if near.get(card.name)]
    fastest = max((card.bits_per_second for card in able), default=0)
    able = [card for card in able if card.bits_per_second == fastest]
    close = [card for card in able if any(path in ONE_SWITCH for path in near[card.name].values())]
    return close or able


def assign(
    cards: list[NicDescription], near: dict[str, dict[int, str]], gpus: int
) -> dict[int, str]:
    """The card that each GPU uses: the nearest; of equals the least used."""
    uses = dict.fromkeys((card.name for card in cards), 0)
    chosen: dict[int, str] = {}
    for gpu in range(gpus if cards else 0):
        order = [(distance(near[name].get(gpu, "")), used, name) for name, used in uses.items()]
        name = min(order, key=lambda each: each[:2])[2]  # of equals the first
        chosen[gpu] = name
        uses[name] += 1
    return chosen
