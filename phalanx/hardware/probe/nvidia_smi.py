"""What ``nvidia-smi`` prints: the query as XML, NVLink's speeds."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from contextlib import suppress

from msgspec import Struct

from phalanx.hardware.probe.description import GpuDescription
from phalanx.hardware.probe.reader import ReadError, number

QUERY = ("nvidia-smi", "-q", "-x")
NVLINK = ("nvidia-smi", "nvlink", "-s")
DRIVER = "/proc/driver/nvidia/version"
LAST_TAG = "</nvidia_smi_log>"
DEPRECATED = "Requested functionality has been deprecated"
NOT_TOLD = ("N/A", "[N/A]", "Not Supported", "Unknown Error", DEPRECATED)
NO_CLUSTER = "00000000-0000-0000-0000-000000000000"


class SmiFacts(Struct, frozen=True, kw_only=True):
    """What the driver says of the whole machine; "" where it does not."""

    driver: str = ""
    cuda: str = ""
    domain: str = ""  # cluster and clique of the NVLink fabric beyond this machine
    gpus: tuple[GpuDescription, ...] = ()
    cliques: int = 0  # in which its GPUs are: more than one is a fault


def parse_root(text: str) -> ElementTree.Element:
    """The tree of ``nvidia-smi -q -x``; ReadError where it is something else."""
    # Warnings, such as that of a damaged infoROM, stand before or after it.
    start, end = text.find("<nvidia_smi_log"), text.rfind(LAST_TAG)
    whole = text[start : end + len(LAST_TAG)] if end > start else text[start:]
    try:
        root = ElementTree.fromstring(whole) if start >= 0 else None
    except ElementTree.ParseError as error:
        raise ReadError(" ".join(QUERY), f"no XML of nvidia-smi: {error}") from None
    if root is None:
        raise ReadError(" ".join(QUERY), f"no XML of nvidia-smi: {text.strip()[:80]!r}")
    return root


def parse_query(text: str) -> SmiFacts:
    """The facts of ``nvidia-smi -q -x``."""
    root = parse_root(text)
    elements = root.findall("gpu")
    cliques = dict.fromkeys(filter(None, map(_clique, elements)))
    return SmiFacts(
        driver=element_text(root, "driver_version"),
        cuda=element_text(root, "cuda_version"),
        domain=next(iter(cliques), ""),
        gpus=tuple(_gpu(index, element) for index, element in enumerate(elements)),
        cliques=len(cliques),
    )


def parse_nvlink(text: str) -> dict[int, tuple[int, int]]:
    """``nvidia-smi nvlink -s``: links that are up and their bytes per second together, by GPU."""
    links_of: dict[int, tuple[int, int]] = {}
    gpu = -1
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line.strip()):
            gpu = int(match[1])
        elif match := re.match(r"Link \d+: ([\d.]+) GB/s", line.strip()):
            links, rate = links_of.get(gpu, (0, 0))
            with suppress(ValueError):
                links_of[gpu] = (links + 1, rate + round(float(match[1]) * 1e9))
    return links_of


def _gpu(index: int, element: ElementTree.Element) -> GpuDescription:
    power = element.find("gpu_power_readings")
    power = element.find("power_readings") if power is None else power
    limit = ""
    if power is not None:
        limit = element_text(power, "current_power_limit") or element_text(power, "power_limit")
    return GpuDescription(
        index=index,
        product=element_text(element, "product_name"),
        uuid=element_text(element, "uuid"),
        memory_bytes=number(element_text(element, "fb_memory_usage/total")) << 20,
        pci=short_pci(element.get("id", "")),
        pcie_generation=number(
            element_text(element, "pci/pci_gpu_link_info/pcie_gen/max_link_gen")
        ),
        pcie_lanes=number(
            element_text(element, "pci/pci_gpu_link_info/link_widths/max_link_width")
        ),
        power_limit_watts=number(limit),
        firmware=element_text(element, "vbios_version"),
        fabric_state=element_text(element, "fabric/state"),
    )


def _clique(element: ElementTree.Element) -> str:
    """As GPU feature discovery writes it: "<cluster UUID>.<clique>"; "": there is no fabric."""
    cluster, clique = (
        element_text(element, "fabric/clusterUuid"),
        element_text(element, "fabric/cliqueId"),
    )
    if element_text(element, "fabric/state") != "Completed" or not cluster or cluster == NO_CLUSTER:
        return ""
    return f"{cluster}.{clique}" if clique else cluster


def short_pci(address: str) -> str:
    """An address as sysfs has it: "00000000:18:00.0" is "0000:18:00.0"."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def element_text(element: ElementTree.Element, path: str) -> str:
    """An element's text; "" where it is missing or says that it says nothing."""
    text = (element.findtext(path) or "").strip()
    return "" if text in NOT_TOLD else text
