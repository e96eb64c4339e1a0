"""What the driver says of each GPU: by NVML where its module is there, else by nvidia-smi."""

from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding
from phalanx.hardware.probe.reader import MachineReader, NotThereError, Reader, ReadError

# Reasons for which the driver lowers clocks that mean trouble: hardware slowdown (power brake,
# too hot) and software's thermal slowdown. A power cap is how the card is meant to run.
HOT, BRAKE = 0x20 | 0x40, 0x8 | 0x80
HOT_DEGREES = 90
SMI_SECONDS = 30.0
THROTTLE, OLDER_THROTTLE = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
FIELDS = (
    "index",
    "name",
    "driver_version",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.failure",
    "remapped_rows.pending",
    THROTTLE,
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)


class GpuFacts(Struct, frozen=True, kw_only=True):
    """One GPU; -1: the driver does not say."""

    index: int
    name: str
    driver: str
    degrees: int = -1
    uncorrected: int = -1  # ECC errors since the driver was loaded
    remap_failed: bool = False
    remap_pending: bool = False
    throttle: int = 0
    pcie_width: int = -1
    pcie_width_most: int = -1
    links_down: int = 0  # NVLinks that are there and inactive


def read_gpus() -> list[GpuFacts]:
    """All GPUs of this machine; none where there is no driver, or it does not answer."""
    with suppress(ReadError):
        return ask_gpus()
    return []


def ask_gpus() -> list[GpuFacts]:
    """All GPUs of this machine; ReadError where there is a driver's program, and no answer."""
    found = _from_nvml()
    return found if found is not None else ask_smi(MachineReader(SMI_SECONDS))


def _from_nvml() -> list[GpuFacts] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return [_nvml_facts(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _nvml_facts(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *args: Any, otherwise: Any = -1) -> Any:
        try:
            return getattr(nvml, name)(handle, *args)
        except (nvml.NVMLError, AttributeError):
            return otherwise

    remapped = ask("nvmlDeviceGetRemappedRows", otherwise=(0, 0, 0, 0))
    down = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        down += ask("nvmlDeviceGetNvLinkState", link, otherwise=1) == 0
    uncorrected = ask(
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    return GpuFacts(
        index=index,
        name=_text(ask("nvmlDeviceGetName", otherwise="")),
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        degrees=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        uncorrected=uncorrected,
        remap_failed=bool(remapped[3]),
        remap_pending=bool(remapped[2]),
        throttle=ask("nvmlDeviceGetCurrentClocksThrottleReasons", otherwise=0),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_most=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        links_down=down,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def ask_smi(reader: Reader) -> list[GpuFacts]:
    """What nvidia-smi says; none where it is not there."""
    query = f"--query-gpu={','.join(FIELDS)}"
    options = ("--format=csv,noheader,nounits",)
    try:
        text = reader.run("nvidia-smi", query, *options)
    except NotThereError:
        return []
    except ReadError as error:
        if THROTTLE not in error.why:
            raise
        # A driver before 535 has only the older name.
        text = reader.run("nvidia-smi", query.replace(THROTTLE, OLDER_THROTTLE), *options)
    facts = parse_smi(text)
    if not facts:
        raise ReadError("nvidia-smi", f"lists no GPU: {text.strip()[:200]!r}")
    return facts


def parse_smi(text: str) -> list[GpuFacts]:
    """What ``nvidia-smi --query-gpu`` printed for our fields."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS):
            continue
        fields = dict(zip(FIELDS, row, strict=True))
        gpus.append(
            GpuFacts(
                index=int(fields["index"]),
                name=fields["name"],
                driver=fields["driver_version"],
                degrees=_number(fields["temperature.gpu"]),
                uncorrected=_number(fields["ecc.errors.uncorrected.volatile.total"]),
                remap_failed=fields["remapped_rows.failure"] in ("1", "Yes"),
                remap_pending=fields["remapped_rows.pending"] in ("1", "Yes"),
                throttle=max(0, _number(fields[THROTTLE])),
                pcie_width=_number(fields["pcie.link.width.current"]),
                pcie_width_most=_number(fields["pcie.link.width.max"]),
            )
        )
    return gpus


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return -1  # "[N/A]", "[Not Supported]"


def check_gpu(facts: GpuFacts) -> Finding:
    """The verdict on what the driver says of one GPU."""
    bad, worse, cause = [], [], ""
    if facts.uncorrected > 0:
        worse.append("uncorrectable memory errors: reset the GPU, and replace it if they return")
        cause = Cause.HBM_ECC
    if facts.remap_failed:
        worse.append("rows can no longer be remapped: replace it")
        cause = Cause.HBM_ECC
    if facts.links_down:
        worse.append("NVLinks are down: reset it, then reseat or replace it")
        cause = cause or Cause.NVLINK
    if facts.remap_pending:
        bad.append("a row waits to be remapped: reset the GPU when it is idle")
    if facts.throttle & (HOT | BRAKE) or facts.degrees >= HOT_DEGREES:
        bad.append("it lowers its clocks: look at cooling and power")
    if 0 < facts.pcie_width < facts.pcie_width_most:
        bad.append("PCIe lanes are lost: reseat it")
    return Finding(
        check=f"gpu {facts.index}",
        verdict="fail" if worse else "warn" if bad else "pass",
        measured={
            "name": facts.name,
            "driver": facts.driver,
            "degrees": facts.degrees,
            "uncorrected_errors": facts.uncorrected,
            "pcie_width": f"{facts.pcie_width} of {facts.pcie_width_most}",
            "nvlinks_down": facts.links_down,
        },
        expected=f"no uncorrectable error, all links up, below {HOT_DEGREES} degrees",
        suggestion="; ".join([*worse, *bad]),
        cause=cause,
    )


def check_driver(expected: int, ask: Callable[[], list[GpuFacts]] = ask_gpus) -> list[Finding]:
    """Every GPU; a driver that does not answer is not taken for none."""
    try:
        return check_gpus(ask(), expected)
    except ReadError as error:
        silent = Finding(
            check="gpu",
            verdict="unknown",
            measured={"missing": str(error)},
            expected="nvidia-smi lists the GPUs",
            suggestion="see `dmesg -T | grep NVRM`",
        )
        return [silent, *(check_gpus([], expected) if expected else ())]


def check_gpus(facts: list[GpuFacts], expected: int) -> list[Finding]:
    """Every GPU, and that none is gone."""
    if not facts and not expected:
        return [Finding(check="gpu", verdict="skip", expected="(no NVIDIA driver here)")]
    findings = [check_gpu(each) for each in facts]
    if len(facts) < expected:
        findings.append(
            Finding(
                check="gpu count",
                verdict="fail",
                measured={"gpus": len(facts)},
                expected=f"{expected}",
                suggestion="a GPU fell off the bus: see `dmesg -T | grep NVRM`, then reboot",
                cause=Cause.GPU_UNAVAILABLE,
            )
        )
    return findings
