"""What connects GPUs: NVLink, the fabric, peers, PCIe, cards and cores near them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from shlex import quote
from typing import Any

from phalanx.cluster.causes import Cause
from phalanx.doctor.checks.check import HARDWARE, CheckList, Judgement, bad, good, skip
from phalanx.doctor.checks.evidence import NodeEvidence, one_of
from phalanx.doctor.checks.gpu_state import NO_GPU, SMI, needed
from phalanx.doctor.checks.os_cpu import parse_list
from phalanx.doctor.finding import Measured, MendStep
from phalanx.hardware.probe.gpu_topology import (
    ONE_SWITCH,
    TOPOLOGY,
    GpuTopology,
    nearest_nics,
    parse_topology,
)
from phalanx.hardware.probe.nvidia_smi import DRIVER, NVLINK, QUERY, parse_nvlink, short_pci
from phalanx.hardware.probe.reader import NotThereError, ReadError, listed

CHECKS = CheckList()

LINK_ERRORS = ("nvidia-smi", "nvlink", "-e")
PEERS = ("nvidia-smi", "topo", "-p2p", "r")
BRIDGES = ("lspci", "-vvv")
# Bits of PCIe's ACS control register, as lspci names them.
ACS_BITS = (
    *("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl"),
    "DirectTrans",
)
FABRIC_STATES = ("N/A", "Not Started", "In Progress", "Completed")
IOMMU_KINDS = ("identity", "DMA", "DMA-FQ", "unmanaged", "blocked")
ENGINES = ("dockerd", "containerd")
CDI = ("/etc/cdi", "/var/run/cdi")  # where the toolkit describes the cards for containers
DOCKER_FILE, CONTAINERD_FILE = "/etc/docker/daemon.json", "/etc/containerd/config.toml"
CONTAINERD_FOLDER = "/etc/containerd/conf.d"  # where the toolkit writes since 1.18
ACS_DETOURS = ("ReqRedir", "CmpltRedir", "UpstreamFwd")


@CHECKS.add(
    "gpu.versions",
    "critical",
    expected="driver and module agree; the driver knows the CUDA that torch was built for",
    why="A CUDA runtime newer than the driver's, or a torch for CPUs only, runs on no GPU here.",
    commands=(QUERY,),
    cause=Cause.DEPENDENCY,
)
def versions(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    driver, cuda = needed(evidence.smi, "driver_version"), needed(evidence.smi, "cuda_version")
    packages = evidence.process.packages
    if "torch" not in packages:
        raise NotThereError("torch among the installed packages")
    measured: Measured = {"driver": driver, "cuda": cuda, **packages}
    module = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", evidence.optional(DRIVER))
    if module and module[1] != driver:
        measured["module"] = module[1]
        return bad(measured, advice="boot again: the loaded module is not the installed driver's")
    if packages["torch"].endswith("+cpu"):
        return bad(measured, advice="install a torch that is built for CUDA")
    runtime = next((v for name, v in packages.items() if "cuda-runtime" in name), "")
    built = re.search(r"\+cu(\d+)\d$", packages["torch"])
    major = int(runtime.split(".")[0]) if runtime else int(built[1]) if built else 0
    if not major:
        raise ReadError("packages", "none says which CUDA torch was built for")
    if major > int(cuda.split(".")[0]):
        return bad(measured, advice=f"install a driver for CUDA {major}, or an older torch")
    return good(**measured)


@CHECKS.add(
    "gpu.libraries",
    "medium",
    expected="NCCL, cuDNN and CUDA's libraries are those that torch was built with",
    why="Another NCCL or cuDNN than torch was tested with is slower, or fails in one odd kernel.",
)
def libraries(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    packages, wanted = evidence.process.packages, evidence.process.wanted
    if "torch" not in packages:
        raise NotThereError("torch among the installed packages")
    if not wanted:
        raise ReadError("packages", f"torch {packages['torch']} names no version of a library")
    wrong: Measured = {
        name: f"{packages.get(name, 'not installed')}, torch wants {version}"
        for name, version in wanted.items()
        if packages.get(name) != version
    }
    if not wrong:
        return good(torch=packages["torch"], **wanted)
    pins = " ".join(f"{name}=={wanted[name]}" for name in wrong)
    return bad(wrong, advice=f"pip install {pins}")


@CHECKS.add(
    "gpu.containers",
    "high",
    expected="Docker and containerd, where installed, give containers the GPUs (CDI or runtime)",
    why="A job in a container sees no GPU: it fails at its start, or trains on the CPU.",
    profiles=("metal", "vm", "cloud"),
)
def containers(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    engines = [name for name in ENGINES if evidence.has("/usr/bin", name)]
    if not engines:
        return skip("no Docker, no containerd")
    by = [folder for folder in CDI if evidence.has(folder, "nvidia*")]
    with suppress(NotThereError):
        docker = json.loads(evidence.text(DOCKER_FILE) or "{}")
        if not isinstance(docker, dict):
            raise ReadError(DOCKER_FILE, "is no table")
        by += [DOCKER_FILE] if _names_runtime(docker.get("runtimes")) else []
    for path, config in _containerd_files(evidence):
        by += [path] if any(map(_names_runtime, _runtimes(config))) else []
    if by:
        return good(engines=", ".join(engines), by=", ".join(by))
    advice = (
        "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml (of the NVIDIA Container Toolkit)"
    )
    return bad({"engines": ", ".join(engines), "by": "none"}, advice=advice)


def _containerd_files(evidence: NodeEvidence) -> Iterator[tuple[str, dict[str, Any]]]:
    """Its configuration, and the files beside it that this names; without it all of them count."""
    patterns = [f"{CONTAINERD_FOLDER}/*.toml"]
    with suppress(NotThereError):
        config = tomllib.loads(evidence.text(CONTAINERD_FILE))
        yield CONTAINERD_FILE, config
        imports = config.get("imports")
        patterns = [str(each) for each in imports] if isinstance(imports, list) else []
    for name in listed(evidence.reader, CONTAINERD_FOLDER, "*.toml"):
        path = f"{CONTAINERD_FOLDER}/{name}"
        if any(fnmatch(path, pattern) for pattern in patterns):
            yield path, tomllib.loads(evidence.text(path))


def _runtimes(table: dict[str, Any]) -> Iterator[object]:
    """Every table of runtimes in a configuration of containerd, of whatever version."""
    for name, value in table.items():
        if name == "runtimes":
            yield value
        elif isinstance(value, dict):
            yield from _runtimes(value)


def _names_runtime(runtimes: object) -> bool:
    """Whether NVIDIA's runtime is one of a table's, by its name or by what it runs."""
    if not isinstance(runtimes, dict):
        return False
    runs = (
        word
        for runtime in runtimes.values()
        if isinstance(runtime, dict)
        for word in (runtime.get("path"), *_values(runtime.get("options")))
    )
    return "nvidia" in runtimes or any("nvidia-container-runtime" in str(word) for word in runs)


def _values(options: object) -> tuple[object, ...]:
    return tuple(options.values()) if isinstance(options, dict) else ()


@CHECKS.add(
    "gpu.nvlink",
    "critical",
    expected="every NVLink of every GPU is up, as many on each",
    why="NCCL's rings run as fast as their slowest hop: one lost link slows the whole node.",
    commands=(QUERY, NVLINK),
    cause=Cause.NVLINK,
)
def nvlink(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    text = evidence.run(*NVLINK)
    if len(evidence.gpus) < 2 and not text.strip():
        return skip("one GPU, no NVLink")
    if not text.strip():
        return skip("the driver lists no NVLink")
    links = {gpu: count for gpu, (count, _) in parse_nvlink(text).items()}
    down = len(re.findall(r"Link \d+: <inactive>", text))
    if not links and not down:
        raise ReadError(" ".join(NVLINK), "lists no link")
    measured: Measured = {"links": max(links.values(), default=0), "inactive": down}
    short = [gpu for gpu, count in links.items() if count < max(links.values())]
    if not down and not short and links:
        return good(**measured)
    measured["gpus"] = ", ".join(map(str, short)) or "all"
    return bad(measured, advice="reset the GPUs and NVSwitches; then have the board looked at")


@CHECKS.add(
    "gpu.nvlink_errors",
    "high",
    expected="no replay, recovery or CRC error on any NVLink",
    why="Each error is a packet sent again; a link that recovers stops its GPU's traffic.",
    commands=(LINK_ERRORS,),
)
def nvlink_errors(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    text = evidence.run(*LINK_ERRORS)
    # Symbol errors are corrected on the way and normal on fast links.
    found = re.findall(r"Link (\d+): ([\w ]+) Errors: (\d+)", text)
    counts = [each for each in found if each[1] not in ("Symbol", "Effective")]
    if not counts:
        if not text.strip():
            return skip("the driver lists no NVLink")
        raise ReadError(" ".join(LINK_ERRORS), "has no counters")
    errors = sum(int(count) for _, _, count in counts)
    if not errors:
        return good(counters=len(counts), errors=0)
    links = sorted({link for link, _, count in counts if int(count)})
    advice = "see whether they grow; reset the GPU, then have its board looked at"
    return bad({"errors": errors, "links": ", ".join(links)}, advice=advice)


@CHECKS.add(
    "gpu.fabric",
    "critical",
    expected="the fabric is registered (Completed, Success) where there are NVSwitches",
    why="Until Fabric Manager has set the switches up, CUDA starts on none of their GPUs.",
    commands=(QUERY,),
    cause=Cause.NVLINK,
)
def fabric(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    states = [(gpu.findtext("fabric/state") or "").strip() for gpu in evidence.gpus]
    for state in states:
        one_of(state, FABRIC_STATES, f"{SMI}: fabric/state")
    if set(states) == {"N/A"}:
        return skip("no NVSwitch")
    status = {(gpu.findtext("fabric/status") or "").strip() for gpu in evidence.gpus}
    measured: Measured = {"state": ", ".join(sorted(set(states))), "status": ", ".join(status)}
    if set(states) == {"Completed"} and status <= {"Success", "N/A", ""}:
        return good(**measured)
    unit = "nvidia-fabricmanager"
    step = MendStep(f"systemctl restart {unit}", f"systemctl restart {unit}")
    return bad(measured, step, advice="drain the node first: a restart ends what its GPUs run")


@CHECKS.add(
    "gpu.peers",
    "high",
    expected="every GPU reads every other's memory (OK)",
    why="GPUs that cannot reach each other copy through the host: a fraction of NVLink or PCIe.",
    commands=(QUERY, PEERS),
)
def peers(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    if len(evidence.gpus) < 2:
        return skip("one GPU")
    rows = re.findall(r"(?m)^\s*GPU\d+\s+(.*)$", evidence.run(*PEERS))
    cells = [cell for row in rows for cell in row.split() if not cell.startswith("GPU")]
    pairs = [cell for cell in cells if cell != "X"]
    if not pairs:
        raise ReadError(" ".join(PEERS), "has no matrix")
    blocked = [cell for cell in pairs if cell != "OK"]
    if not blocked:
        return good(pairs=len(pairs) // 2)
    advice = "see gpu.acs and gpu.iommu; CNS: chipset, GNS: GPU, TNS: topology does not support it"
    return bad(
        {"blocked": len(blocked) // 2, "reason": ", ".join(sorted(set(blocked)))}, advice=advice
    )


@CHECKS.add(
    "gpu.acs",
    "high",
    expected="no bridge redirects peer traffic (ReqRedir, CmpltRedir, UpstreamFwd off)",
    why="With ACS, traffic between a GPU and its NIC climbs to the root complex and back.",
    profiles=HARDWARE,
    commands=(BRIDGES,),
)
def acs(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    text = evidence.run(*BRIDGES)
    controls: dict[str, str] = {}
    for block in re.split(r"\n\s*\n", text):
        found = re.search(r"ACSCtl:\s*(.*)", block)
        if found and "bridge" in block.partition("\n")[0].lower():
            controls[block.split()[0]] = found[1]
    if not controls:
        denied = "<access denied>" in text
        raise ReadError("lspci -vvv", "must be root to see ACSCtl" if denied else "has no ACSCtl")
    steps = []
    for address, flags in controls.items():
        if any(f"{name}+" in flags for name in ACS_DETOURS):
            was = sum(1 << bit for bit, name in enumerate(ACS_BITS) if f"{name}+" in flags)
            register = f"setpci -s {quote(address)} ECAP_ACS+0x6.w"
            steps.append(MendStep(f"{register}=0000", f"{register}={was:04x}"))
    if not steps:
        return good(bridges=len(controls))
    return bad({"bridges": len(controls), "redirecting": len(steps)}, *steps)


@CHECKS.add(
    "gpu.iommu",
    "medium",
    expected="off, or passing addresses through (identity)",
    why="An IOMMU that translates slows transfers between devices down, or blocks them.",
    profiles=HARDWARE,
    commands=(QUERY,),
)
def iommu(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    command_line = evidence.text("/proc/cmdline")
    if not evidence.has("/sys/class/iommu", "*"):
        return good(iommu="off")
    kinds = set()
    for gpu in evidence.gpus:
        address = short_pci(gpu.get("id", ""))
        path = f"/sys/bus/pci/devices/{address}/iommu_group/type"
        kinds.add(one_of(evidence.text(path), IOMMU_KINDS, path))
    if kinds == {"identity"}:
        return good(iommu="identity")
    shown = " ".join(word for word in command_line.split() if "iommu" in word) or "no option"
    advice = "boot with iommu=pt (or off, where no virtual machines run)"
    return bad({"iommu": ", ".join(sorted(kinds)), "boot": shown}, advice=advice)


def _topology(evidence: NodeEvidence) -> GpuTopology:
    """The matrix of nvidia-smi; ReadError where a GPU is not in it."""
    topology = parse_topology(evidence.run(*TOPOLOGY))
    if len(topology.cpus) < len(evidence.gpus):
        listed = f"lists {len(topology.cpus)} of {len(evidence.gpus)} GPUs"
        raise ReadError(" ".join(TOPOLOGY), listed)
    return topology


@CHECKS.add(
    "gpu.nics",
    "high",
    expected="each GPU has a card with RDMA behind its own PCIe switch (PIX, PXB)",
    why="To a far card a GPU's traffic crosses the processors, at a fraction of the card's rate.",
    commands=(QUERY, TOPOLOGY),
)
def near_nics(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    if not evidence.has_rdma:
        return skip("no RDMA")
    topology = _topology(evidence)
    far = {}
    for gpu, row in topology.nics.items():
        near = nearest_nics(row)
        if not near:
            raise ReadError(" ".join(TOPOLOGY), "lists no network card")
        if row[near[0]] not in ONE_SWITCH:
            far[f"gpu {gpu}"] = f"{near[0]} by {row[near[0]]}"
    if not far:
        return good(gpus=len(topology.nics))
    measured: Measured = dict(far)
    return bad(measured, advice="move cards to the GPUs' switches, or expect less of the network")


@CHECKS.add(
    "gpu.cpus",
    "medium",
    expected="this process may run near every GPU, and the topology says where that is",
    why="Copies and launches from the other socket cross its link; ranks then differ in speed.",
    commands=(QUERY, TOPOLOGY),
)
def near_cpus(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    topology = _topology(evidence)
    mine = set(evidence.process.cpus)
    if not mine:
        raise ReadError("sched_getaffinity", "not there")
    far = []
    for gpu, cpus in topology.cpus.items():
        if not re.fullmatch(r"[\d,-]+", cpus):
            raise ReadError(" ".join(TOPOLOGY), f"does not say the cores near GPU {gpu}")
        if not mine & set(parse_list(cpus)):
            far.append(gpu)
    if not far:
        return good(gpus=len(topology.cpus))
    shown = ", ".join(map(str, far))
    return bad({"gpus_without_near_cores": shown}, advice="widen the cpuset, or bind by the GPU")
