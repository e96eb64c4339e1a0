"""One description of everything that is known: what can be read is read side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec import Struct, structs

from phalanx.hardware.gpus import lookup
from phalanx.hardware.probe import ethernet, gpu_topology, infiniband, nvidia_smi
from phalanx.hardware.probe.description import (
    CATALOGUE,
    INFINIBAND,
    LLDP,
    NVIDIA_SMI,
    PRECEDENCE,
    READ,
    SYSFS,
    Fact,
    GpuDescription,
    NicDescription,
    NodeDescription,
)
from phalanx.hardware.probe.gpu_topology import GpuTopology, nearest_nics
from phalanx.hardware.probe.host import read_drives, read_host
from phalanx.hardware.probe.rails import Rails, find_rails
from phalanx.hardware.probe.reader import Reader, ReadError, listed, read

T = TypeVar("T")
NO_TOPOLOGY = GpuTopology(paths={}, nics={}, cpus={}, numa={})
OF_RAILS = ("rails", "leaf", "nic_bits_per_second", "nic_firmware")
MOST_NEIGHBOURS = 32  # cards whose switches are asked for their names


class Known(Struct, frozen=True, kw_only=True):
    """What is known before anything is read."""

    facts: tuple[Fact, ...] = ()  # options, site file, engines
    before: NodeDescription | None = (
        None  # what could be read last time holds where it cannot be now
    )


class Attempts:
    """Reads that may fail: what did is noted, and the rest goes on."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def parsed(self, read_text: Callable[[], str], parse: Callable[[str], T]) -> T | None:
        """What a text means; None where it cannot be had, which is noted."""
        try:
            return parse(read_text())
        except ReadError as error:
            self.unread.append(str(error))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            self.unread.append(f"cannot be understood: {type(error).__name__}: {error}"[:200])
        return None


class Programs(Struct, frozen=True, kw_only=True):
    """What programs printed, as each was asked."""

    query: Callable[[], str]
    topology: Callable[[], str]
    nvlink: Callable[[], str]
    ibstat: Callable[[], str]
    lldp: Callable[[], str]


def describe(reader: Reader, known: Known) -> NodeDescription:
    """Everything that can be read of a machine, with what is known of it."""
    attempts = Attempts()
    has_gpus = bool(listed(reader, "/dev", "nvidia[0-9]*")) or bool(read(reader, nvidia_smi.DRIVER))
    with ThreadPoolExecutor(max_workers=8) as pool:
        ask = _asker(reader, pool)
        programs = Programs(
            query=ask(nvidia_smi.QUERY),
            topology=ask(gpu_topology.TOPOLOGY),
            nvlink=ask(nvidia_smi.NVLINK),
            ibstat=ask(infiniband.IBSTAT),
            lldp=ask(ethernet.NEIGHBOURS),
        )
        smi, topology = _read_gpus(programs, attempts, has_gpus=has_gpus)
        cards = _read_cards(reader, ask, programs, attempts)
    gpus = _kept_gpus(_gpus(smi, topology, programs, attempts), known.before, smi)
    cards = [_kept_card(card, known.before) for card in cards]
    rails = find_rails(cards, topology or NO_TOPOLOGY, len(gpus))
    if topology is None and known.before is not None:
        rails = _kept_rails(cards, known.before)
    said = [
        *known.facts,
        *_of_driver(smi, gpus),
        *_of_network(rails),
        *read_host(reader),
        *_remembered(known.before, driver=smi is not None, matrix=topology is not None),
    ]
    facts = _chosen(said)
    facts, unknown = _with_kind(facts)
    drives = read_drives(reader)
    if drives:
        total = sum(drive.size_bytes for drive in drives)
        facts = (*facts, Fact("local_disk_bytes", total, SYSFS))
    warnings = [rails.warning, unknown, _several(smi)]
    return NodeDescription(
        facts=facts,
        gpus=gpus,
        nics=rails.nics,
        drives=drives,
        unread=tuple(attempts.unread),
        warnings=tuple(filter(None, warnings)),
    )


def until_read(configured: tuple[Fact, ...], before: NodeDescription | None) -> NodeDescription:
    """What is known while the machine is being read: what was told, and what was read before."""
    remembered = before or NodeDescription()
    said = [*configured, *(fact for fact in remembered.facts if fact.source in READ)]
    facts, _ = _with_kind(_chosen(said))
    return structs.replace(remembered, facts=facts, unread=(), warnings=())


def _asker(
    reader: Reader, pool: ThreadPoolExecutor
) -> Callable[[tuple[str, ...]], Callable[[], str]]:
    """Starts programs; what they print is waited for when it is wanted."""
    return lambda command: pool.submit(reader.run, *command).result


def _read_gpus(
    programs: Programs, attempts: Attempts, *, has_gpus: bool
) -> tuple[nvidia_smi.SmiFacts | None, GpuTopology | None]:
    if not has_gpus:  # a machine without GPUs lacks nothing
        attempts = Attempts()
    smi = attempts.parsed(programs.query, nvidia_smi.parse_query)
    if smi is None or not smi.gpus:
        return smi, None
    return smi, attempts.parsed(programs.topology, gpu_topology.parse_topology)


def _gpus(
    smi: nvidia_smi.SmiFacts | None,
    topology: GpuTopology | None,
    programs: Programs,
    attempts: Attempts,
) -> tuple[GpuDescription, ...]:
    if smi is None or not smi.gpus:
        return ()
    near = topology or NO_TOPOLOGY
    links = attempts.parsed(programs.nvlink, nvidia_smi.parse_nvlink) or {}
    return tuple(
        structs.replace(
            gpu,
            numa_node=near.numa.get(gpu.index, -1),
            cpus=near.cpus.get(gpu.index, ""),
            paths=near.paths.get(gpu.index, ()),
            nics=nearest_nics(near.nics.get(gpu.index, {})),
            nvlinks=links.get(gpu.index, (0, 0))[0],
            nvlink_bytes_per_second=links.get(gpu.index, (0, 0))[1],
        )
        for gpu in smi.gpus
    )


def _read_cards(
    reader: Reader,
    ask: Callable[[tuple[str, ...]], Callable[[], str]],
    programs: Programs,
    attempts: Attempts,
) -> list[NicDescription]:
    """Ports with RDMA, interfaces without, and the switch of each."""
    quiet = Attempts()  # sysfs has all that ibstat says, where both are there
    ports = quiet.parsed(programs.ibstat, infiniband.parse_ibstat) or []
    rdma = infiniband.read_rdma(reader, ports)
    interfaces = {card.interface: card for card in ethernet.read_interfaces(reader)}
    for number, card in enumerate(rdma):
        if not card.interface:  # by its device, where sysfs lists no interface below it
            mine = [name for name, other in interfaces.items() if other.pci == card.pci]
            rdma[number] = structs.replace(card, interface=mine[0] if mine else "")
    with_rdma = {card.interface for card in rdma}
    cards = [*rdma, *(card for name, card in interfaces.items() if name not in with_rdma)]
    lldp: dict[str, str] = {}
    if any(card.link_layer == "Ethernet" and card.active for card in cards):
        lldp = attempts.parsed(programs.lldp, ethernet.parse_lldp) or {}
    asked = {
        card.name: ask(infiniband.neighbour_command(card.name))
        for card in [card for card in rdma if _on_fabric(card)][:MOST_NEIGHBOURS]
    }
    failed = Attempts()
    described = []
    for card in cards:
        switch, source = ethernet.neighbour_of(card, lldp)
        if card.name in asked:
            switch = failed.parsed(asked[card.name], infiniband.parse_neighbour) or ""
            source = INFINIBAND if switch else ""
        described.append(structs.replace(card, switch=switch, switch_source=source))
    attempts.unread += failed.unread[:1]  # the others say the same
    return sorted(described, key=lambda card: _natural(card.name))


def _on_fabric(card: NicDescription) -> bool:
    return card.link_layer == "InfiniBand" and card.active and ":" not in card.name


def _of_driver(smi: nvidia_smi.SmiFacts | None, gpus: tuple[GpuDescription, ...]) -> list[Fact]:
    if smi is None:
        return []
    first = gpus[0] if gpus else GpuDescription(index=0)
    facts_read: dict[str, str | int] = {
        "product": first.product,
        "gpu_count": len(gpus),
        "gpu_memory_bytes": first.memory_bytes,
        "driver": smi.driver,
        "cuda": smi.cuda,
        "domain": smi.domain,
        "gpu_firmware": first.firmware,
        "power_limit_watts": sum(gpu.power_limit_watts for gpu in gpus),
        "nvlinks": first.nvlinks,
    }
    return [Fact(key, value, NVIDIA_SMI) for key, value in facts_read.items() if value]


def _of_network(rails: Rails) -> list[Fact]:
    """Rails, and the leaf: the switch of the first rail, or of the only cards that have one."""
    on_rails = sorted((card for card in rails.nics if card.rail >= 0), key=lambda card: card.rail)
    facts = []
    if on_rails:
        source = next((card.switch_source for card in on_rails if card.switch), SYSFS)
        facts.append(Fact("rails", rails.count, source))
        facts.append(Fact("nic_bits_per_second", on_rails[0].bits_per_second, SYSFS))
        firmware = on_rails[0].firmware
        facts += [Fact("nic_firmware", firmware, SYSFS)] if firmware else []
    named = [card for card in on_rails or rails.nics if card.switch]
    if named:
        source = named[0].switch_source or LLDP
        facts.append(Fact("leaf", named[0].switch, source))
    return facts


def _remembered(before: NodeDescription | None, *, driver: bool, matrix: bool) -> list[Fact]:
    """A driver that does not answer now is still what it was, and so is what is near its GPUs."""
    facts = before.facts if before is not None else ()
    return [
        fact
        for fact in facts
        if (fact.source == NVIDIA_SMI and not driver)
        or (fact.key in OF_RAILS and fact.source in (INFINIBAND, LLDP, SYSFS) and not matrix)
    ]


def _kept_rails(cards: list[NicDescription], before: NodeDescription) -> Rails:
    """Nobody says which card is near which GPU: as it was."""
    old = {card.name: card for card in before.nics}
    nics = [
        structs.replace(card, gpus=old[card.name].gpus, rail=old[card.name].rail)
        if card.name in old
        else card
        for card in cards
    ]
    return Rails(count=1 + max((card.rail for card in nics), default=-1) or 1, nics=tuple(nics))


def _kept_gpus(
    gpus: tuple[GpuDescription, ...],
    before: NodeDescription | None,
    smi: nvidia_smi.SmiFacts | None,
) -> tuple[GpuDescription, ...]:
    return before.gpus if smi is None and before is not None else gpus


def _kept_card(card: NicDescription, before: NodeDescription | None) -> NicDescription:
    """A card whose link is down, or whose switch does not answer, is where it was."""
    for old in before.nics if before is not None else ():
        if old.name == card.name and old.pci == card.pci:
            rate = card.bits_per_second if card.active else old.bits_per_second
            switch, source = card.switch, card.switch_source
            if not switch:
                switch, source = old.switch, old.switch_source
            return structs.replace(card, bits_per_second=rate, switch=switch, switch_source=source)
    return card


def _chosen(said: list[Fact]) -> tuple[Fact, ...]:
    """Of each key what the source says that comes first."""
    order = {source: place for place, source in enumerate(PRECEDENCE)}
    best: dict[str, Fact] = {}
    for fact in said:
        known = best.get(fact.key)
        if known is None or order.get(fact.source, 99) < order.get(known.source, 99):
            best[fact.key] = fact
    return tuple(best.values())


def _with_kind(facts: tuple[Fact, ...]) -> tuple[tuple[Fact, ...], str]:
    """The short name of the GPUs by the catalogue, and what is to be said of unknown ones."""
    by_key = {fact.key: fact for fact in facts}
    product = by_key.get("product")
    if product is None:
        return facts, ""
    catalogued = lookup(str(product.value)) or lookup(str(product.value).replace("-", " "))
    if "kind" in by_key:
        return facts, ""
    if catalogued is not None:
        return (*facts, Fact("kind", catalogued.key, CATALOGUE)), ""
    kind_fact = Fact("kind", slug(str(product.value)), product.source)
    warning = (
        f'"{product.value}" is not in the catalogue of GPUs: its kind is "{kind_fact.value}", and '
        "plans do not know it; name a file with it in PHALANX_GPU_CATALOGUE, or set --kind"
    )
    return (*facts, kind_fact), warning


def slug(product: str) -> str:
    """A product's name as a word that constraints can name."""
    return re.sub(r"[^\w.+]+", "-", product.casefold()).strip("-")[:64] or "unknown"


def _several(smi: nvidia_smi.SmiFacts | None) -> str:
    if smi is None:
        return ""
    if smi.cliques > 1:
        return f"GPUs of this node are in {smi.cliques} NVLink cliques: the first one is its domain"
    products = dict.fromkeys(gpu.product for gpu in smi.gpus)
    if len(products) > 1:
        return f"GPUs of several products: {', '.join(products)}; the first one is its kind"
    return ""


def _natural(name: str) -> tuple[str | int, ...]:
    """ "mlx5_10" comes after "mlx5_9"."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
