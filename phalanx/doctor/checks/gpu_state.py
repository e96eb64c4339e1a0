"""Each GPU as its driver describes it: power, clocks, memory errors, modes, its PCIe link."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from xml.etree.ElementTree import Element

from phalanx.cluster.causes import Cause
from phalanx.doctor.checks.check import CheckList, Judgement, bad, good, skip
from phalanx.doctor.checks.evidence import NodeEvidence, one_of
from phalanx.doctor.finding import Measured, MendStep
from phalanx.hardware.probe.nvidia_smi import DEPRECATED, QUERY, element_text
from phalanx.hardware.probe.reader import ReadError, number

CHECKS = CheckList()

NO_GPU = "no NVIDIA GPU"
SLOWDOWNS = (
    *("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    *("sw_thermal_slowdown", "sync_boost"),
)
LEAST_HEADROOM_DEGREES = 5
LEAST_CORES_A_GPU = 4
UNCORRECTABLE = (
    *("dram_uncorrectable", "sram_uncorrectable"),
    *("sram_uncorrectable_parity", "sram_uncorrectable_secded"),
)

SMI = "nvidia-smi -q -x"
BOOST = ("nvidia-smi", "boost-slider", "-l")
ON_OFF = ("Enabled", "Disabled")
MODES = ("Default", "Exclusive_Process", "Exclusive_Thread", "Prohibited")

# What is bad about one GPU, and how to mend it.
Trouble = tuple[str, Sequence[MendStep]]


def needed(gpu: Element, *paths: str) -> str:
    """The first of an element's texts that is there; ReadError where none is."""
    for path in paths:
        if text := element_text(gpu, path):
            return text
    raise ReadError(SMI, f"does not say {paths[0]}")


def needed_number(gpu: Element, *paths: str) -> int:
    """As a number; ReadError where the text does not begin with one."""
    text = needed(gpu, *paths)
    if not text[0].isdigit():
        raise ReadError(SMI, f"{paths[0]} is no number: {text[:60]!r}")
    return number(text)


def needed_word(gpu: Element, known: tuple[str, ...], *paths: str) -> str:
    """As one of the words that are understood."""
    return one_of(needed(gpu, *paths), known, f"{SMI}: {paths[0]}")


def _each(
    evidence: NodeEvidence,
    judge: Callable[[int, Element], Trouble | None],
    advice: str,
    **shown: str,
) -> Judgement:
    """One judgement of all GPUs; ``shown`` are fields of the first."""
    if not evidence.has_gpus:
        return skip(NO_GPU)
    troubles = {
        index: found for index, gpu in enumerate(evidence.gpus) if (found := judge(index, gpu))
    }
    if not troubles:
        first = evidence.gpus[0]
        facts = {name: element_text(first, path) or "not told" for name, path in shown.items()}
        return good(gpus=len(evidence.gpus), **facts)
    measured: Measured = {f"gpu {index}": text for index, (text, _) in troubles.items()}
    steps = [step for _, steps in troubles.values() for step in steps]
    return bad(measured, *steps, advice=advice)


@CHECKS.add(
    "gpu.persistence",
    "medium",
    expected="enabled",
    why="Without it the driver is loaded anew for each first process: seconds at every start.",
    commands=(QUERY,),
)
def persistence(evidence: NodeEvidence) -> Judgement:
    def judge(index: int, gpu: Element) -> Trouble | None:
        if needed_word(gpu, ON_OFF, "persistence_mode") == "Enabled":
            return None
        step = MendStep(f"nvidia-smi -i {index} -pm 1", f"nvidia-smi -i {index} -pm 0")
        return "disabled", [step]

    return _each(evidence, judge, "")


@CHECKS.add(
    "gpu.power",
    "high",
    expected="the power limit is the card's default",
    why="A card below its default power lowers its clocks under load; every rank waits for it.",
    commands=(QUERY,),
)
def power_limit(evidence: NodeEvidence) -> Judgement:
    def judge(index: int, gpu: Element) -> Trouble | None:
        limits = []
        for name in ("current_power_limit", "default_power_limit"):
            older = name.replace("current_", "")
            text = needed(gpu, f"gpu_power_readings/{name}", f"power_readings/{older}")
            limits.append(round(float(text.split()[0])))
        current, usual = limits
        if current >= usual:
            return None
        smi = f"nvidia-smi -i {index} -pl"
        return f"{current} W of {usual} W", [MendStep(f"{smi} {usual}", f"{smi} {current}")]

    return _each(evidence, judge, "", watts="gpu_power_readings/current_power_limit")


@CHECKS.add(
    "gpu.clocks",
    "high",
    expected="application clocks are the card's defaults",
    why="Application clocks below the default hold the card there however cool it is.",
    commands=(QUERY,),
)
def clocks(evidence: NodeEvidence) -> Judgement:
    clock = "applications_clocks/graphics_clock"
    if evidence.has_gpus and all(gpu.findtext(clock) == DEPRECATED for gpu in evidence.gpus):
        return skip("this driver has no application clocks")

    def judge(index: int, gpu: Element) -> Trouble | None:
        said = [
            [needed_number(gpu, f"{kind}/{clock}") for clock in ("mem_clock", "graphics_clock")]
            for kind in ("applications_clocks", "default_applications_clocks")
        ]
        now, usual = said
        if now[0] >= usual[0] and now[1] >= usual[1]:
            return None
        smi = f"nvidia-smi -i {index}"
        step = MendStep(f"{smi} -rac", f"{smi} -ac {now[0]},{now[1]}")
        return f"{now[1]} MHz of {usual[1]} MHz", [step]

    return _each(evidence, judge, "", graphics=clock)


@CHECKS.add(
    "gpu.throttle",
    "high",
    expected="no slowdown by heat, power brake or sync boost",
    why="A card that slows down for heat or power makes every rank of its gang as slow.",
    commands=(QUERY,),
)
def throttle(evidence: NodeEvidence) -> Judgement:
    def judge(_: int, gpu: Element) -> Trouble | None:
        prefix = "clocks_event_reasons/clocks_event_reason"
        if gpu.find("clocks_event_reasons") is None:
            prefix = "clocks_throttle_reasons/clocks_throttle_reason"
        needed_word(gpu, ("Active", "Not Active"), f"{prefix}_{SLOWDOWNS[0]}")
        active = [name for name in SLOWDOWNS if element_text(gpu, f"{prefix}_{name}") == "Active"]
        return (", ".join(active), ()) if active else None

    return _each(evidence, judge, "look at inlet temperature, fans and power supplies")


@CHECKS.add(
    "gpu.temperature",
    "medium",
    expected=f"{LEAST_HEADROOM_DEGREES} degrees or more below where it slows down",
    why="A card at its limit slows down with the next warm day or the next hard step.",
    commands=(QUERY,),
)
def temperature(evidence: NodeEvidence) -> Judgement:
    def judge(_: int, gpu: Element) -> Trouble | None:
        left = element_text(gpu, "temperature/gpu_temp_tlimit")
        if left:
            headroom = int(left.split()[0])
        else:
            limit = needed_number(gpu, "temperature/gpu_temp_slow_threshold")
            headroom = limit - needed_number(gpu, "temperature/gpu_temp")
        return None if headroom >= LEAST_HEADROOM_DEGREES else (f"{headroom} degrees left", ())

    return _each(evidence, judge, "look at inlet temperature and fans", now="temperature/gpu_temp")


@CHECKS.add(
    "gpu.ecc",
    "critical",
    expected="ECC on, no uncorrectable error since the driver was loaded",
    why="Without ECC a flipped bit goes into the weights unseen; an uncorrectable one ends a rank.",
    commands=(QUERY,),
    cause=Cause.HBM_ECC,
)
def ecc(evidence: NodeEvidence) -> Judgement:
    def judge(index: int, gpu: Element) -> Trouble | None:
        if needed_word(gpu, ON_OFF, "ecc_mode/current_ecc") != "Enabled":
            smi = f"nvidia-smi -i {index} -e"
            return "ECC is off", [MendStep(f"{smi} 1", f"{smi} 0")]
        counts = [element_text(gpu, f"ecc_errors/volatile/{name}") for name in UNCORRECTABLE]
        if not any(counts):
            raise ReadError(SMI, "does not say ecc_errors")
        errors = sum(int(text) for text in counts if text)
        return (f"{errors} uncorrectable errors", ()) if errors else None

    return _each(evidence, judge, "reset the GPU (after -e too); if errors return, replace it")


@CHECKS.add(
    "gpu.remap",
    "critical",
    expected="no row remapping failed or pends",
    why="A bad row that could not be remapped goes on failing; one that pends waits for a reset.",
    commands=(QUERY,),
    cause=Cause.HBM_ECC,
)
def remapped_rows(evidence: NodeEvidence) -> Judgement:
    def judge(_: int, gpu: Element) -> Trouble | None:
        failed = needed_word(gpu, ("Yes", "No"), "remapped_rows/remapped_row_failure")
        pends = needed_word(gpu, ("Yes", "No"), "remapped_rows/remapped_row_pending")
        if failed != "No":
            return "remapping failed", ()
        return ("a row waits to be remapped", ()) if pends != "No" else None

    return _each(evidence, judge, "reset the GPU when it is idle; if it failed, replace it")


@CHECKS.add(
    "gpu.mig",
    "high",
    expected="MIG disabled",
    why="A slice of a card has a part of its units and no NVLink: collectives go over the host.",
    commands=(QUERY,),
)
def mig(evidence: NodeEvidence) -> Judgement:
    def judge(index: int, gpu: Element) -> Trouble | None:
        # Cards that cannot be sliced say N/A.
        raw = (gpu.findtext("mig_mode/current_mig") or "").strip()
        if raw in ("Disabled", "N/A"):
            return None
        one_of(raw, ON_OFF, f"{SMI}: mig_mode")
        smi = f"nvidia-smi -i {index} -mig"
        return "MIG is on", [MendStep(f"{smi} 0", f"{smi} 1")]

    return _each(evidence, judge, "then reset the GPU")


@CHECKS.add(
    "gpu.compute_mode",
    "high",
    expected="Default or Exclusive_Process, and no MPS pipe in the environment",
    why="A prohibited card takes no process; through MPS one rank's fault ends its neighbours.",
    commands=(QUERY,),
)
def compute_mode(evidence: NodeEvidence) -> Judgement:
    def judge(index: int, gpu: Element) -> Trouble | None:
        mode = needed_word(gpu, MODES, "compute_mode")
        if mode != "Prohibited":
            return None
        smi = f"nvidia-smi -i {index} -c"
        return mode, [MendStep(f"{smi} DEFAULT", f"{smi} PROHIBITED")]

    pipe = evidence.process.environment.get("CUDA_MPS_PIPE_DIRECTORY", "")
    if pipe and evidence.has_gpus:
        return bad({"mps_pipe": pipe}, advice="unset CUDA_MPS_PIPE_DIRECTORY for training")
    return _each(evidence, judge, "", mode="compute_mode")


@CHECKS.add(
    "gpu.pcie",
    "high",
    expected="every lane, and the generation that the card can do",
    why="Half of the lanes, or one generation less, is half of the bandwidth to host and NICs.",
    commands=(QUERY,),
)
def pcie(evidence: NodeEvidence) -> Judgement:
    link = "pci/pci_gpu_link_info"

    def judge(_: int, gpu: Element) -> Trouble | None:
        width = [
            needed_number(gpu, f"{link}/link_widths/{name}_link_width")
            for name in ("current", "max")
        ]
        if width[0] < width[1]:
            return f"{width[0]} of {width[1]} lanes", ()
        # An idle link rests at a lower generation: what the slot can do is compared instead,
        # and what it does only where the card works.
        most = needed_number(gpu, f"{link}/pcie_gen/max_link_gen")
        card = number(element_text(gpu, f"{link}/pcie_gen/max_device_link_gen")) or most
        now = number(element_text(gpu, f"{link}/pcie_gen/current_link_gen"))
        busy = number(element_text(gpu, "utilization/gpu_util")) > 0
        if busy and now:
            most = min(most, now)
        return (f"generation {most} of {card}", ()) if most < card else None

    return _each(
        evidence,
        judge,
        "reseat the card; see the slot's setting in the firmware",
        lanes=f"{link}/link_widths/current_link_width",
        generation=f"{link}/pcie_gen/max_link_gen",
    )


@CHECKS.add(
    "gpu.pcie_replays",
    "medium",
    expected="no replay on the PCIe link",
    why="Packets that are sent again cost bandwidth now, and announce a link that will drop.",
    commands=(QUERY,),
)
def pcie_replays(evidence: NodeEvidence) -> Judgement:
    def judge(_: int, gpu: Element) -> Trouble | None:
        replays = needed_number(gpu, "pci/replay_counter")
        return (f"{replays} replays", ()) if replays else None

    return _each(evidence, judge, "reseat the card and its riser; watch whether it grows")


@CHECKS.add(
    "gpu.bar1",
    "medium",
    expected="BAR1 as large as the card's memory",
    why="Through a small window peers and NICs reach a part of the memory only, with staging.",
    commands=(QUERY,),
)
def bar1(evidence: NodeEvidence) -> Judgement:
    def judge(_: int, gpu: Element) -> Trouble | None:
        window = needed_number(gpu, "bar1_memory_usage/total")
        memory = needed_number(gpu, "fb_memory_usage/total")
        return (f"{window} of {memory} MiB", ()) if window < memory else None

    return _each(
        evidence,
        judge,
        "enable Above 4G Decoding and Resizable BAR in the firmware",
        window="bar1_memory_usage/total",
    )


@CHECKS.add(
    "gpu.dvfs",
    "low",
    expected="(reported: what sets the clocks beside the limits; the same on all cards)",
    why="Cards with different boost or smoothing settings run at different speeds in one gang.",
    commands=(QUERY, BOOST),
)
def dvfs(evidence: NodeEvidence) -> Judgement:
    def settings(gpu: Element, vboost: str) -> str:
        needed(gpu, "performance_state")
        paths = ("clock_policy/auto_boost", "power_smoothing")
        texts = {path.rpartition("/")[2]: (gpu.findtext(path) or "").strip() for path in paths}
        texts["vboost"] = vboost
        return ", ".join(f"{name} {text or 'not told'}" for name, text in texts.items())

    if not evidence.has_gpus:
        return skip(NO_GPU)
    text = ""
    with suppress(ReadError):  # cards and drivers without the slider end it with an error
        text = evidence.run(*BOOST)
    # A row a card: the slider's name, its end, and where it stands.
    rows = re.findall(r"(?m)^.*\bvboost\b\D*(\d+)\D+(\d+)\D*$", text)
    sliders = [f"{now} of {most}" for most, now in rows]
    if len(sliders) != len(evidence.gpus):
        sliders = [""] * len(evidence.gpus)
    said = [settings(gpu, slider) for gpu, slider in zip(evidence.gpus, sliders, strict=True)]
    if len(set(said)) == 1:
        return good(gpus=len(said), settings=said[0])
    measured: Measured = {f"gpu {index}": text for index, text in enumerate(said)}
    advice = "give all cards the same settings (`nvidia-smi boost-slider --vboost N`)"
    return bad(measured, advice=advice)


@CHECKS.add(
    "gpu.cpu_ratio",
    "high",
    expected=f"{LEAST_CORES_A_GPU} cores or more a GPU",
    why="A rank, its loader and the network's threads share too few cores, and the GPU waits.",
    commands=(QUERY,),
)
def cpu_ratio(evidence: NodeEvidence) -> Judgement:
    if not evidence.has_gpus:
        return skip(NO_GPU)
    cpus = len(evidence.process.cpus)
    if not cpus:
        raise ReadError("sched_getaffinity", "not there")
    gpus = len(evidence.gpus)
    measured: Measured = {"cpus": cpus, "gpus": gpus}
    if cpus >= LEAST_CORES_A_GPU * gpus:
        return good(**measured)
    return bad(measured, advice="give the job more cores, or the container a larger cpuset")
