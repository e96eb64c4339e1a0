"""The verdicts on a burn-in: wrong bits, rates that fall as it grows hot, slow siblings."""

from __future__ import annotations

from collections import defaultdict

from phalanx.cluster.causes import Cause
from phalanx.doctor.acceptance.ranking import stragglers
from phalanx.doctor.acceptance.report import GpuSoak, LoadFigures
from phalanx.doctor.finding import Finding, Measured, Verdict
from phalanx.doctor.gpus import BRAKE, HOT, HOT_DEGREES

KEPT_SHARE = 0.93  # of the first minute's rate, that the last one must still have


def judge(loads: list[LoadFigures], gpus: list[GpuSoak]) -> list[Finding]:
    """All findings, by load and by GPU."""
    hot = {f"cuda:{each.index}" for each in gpus if each.throttle_reasons & HOT}
    findings = [_load(each, hot=each.device in hot) for each in loads]
    findings += _siblings(loads)
    if not gpus:
        expected = "(no NVML here: temperature, clocks and ECC counters were not sampled)"
        return [*findings, Finding(check="soak", verdict="skip", expected=expected)]
    return [*findings, *(_gpu(each) for each in gpus)]


def _load(figures: LoadFigures, *, hot: bool) -> Finding:
    name = f"burn-in {figures.key}"
    if figures.problem or figures.wrong:
        facts: Measured = {"wrong_looks": figures.wrong, "looks": figures.samples}
        if figures.problem:
            facts["problem"] = figures.problem
        return Finding(
            check=name,
            verdict="fail",
            measured=facts,
            expected="it works until the end, and every look finds the right bits",
            suggestion="take the node out; if the device is gone see `dmesg -T`",
            cause=Cause.SILENT_CORRUPTION if figures.wrong else Cause.FAILED_CHECK,
        )
    if not figures.samples:
        return Finding(check=name, verdict="unknown", expected="(ended before it was measured)")
    kept = figures.last / figures.first if figures.first else 1.0
    fell = kept < KEPT_SHARE
    # A processor or a disk may have other users; a GPU under these loads has not.
    gpu = figures.device.startswith("cuda")
    verdict: Verdict = "pass" if not fell else "fail" if gpu else "warn"
    return Finding(
        check=name,
        verdict=verdict,
        measured=_shown(figures) | {"last_of_first": kept},
        expected=f"the last minute has {KEPT_SHARE:.0%} of the first one's rate",
        suggestion=_advice(hot, gpu) if fell else "",
        cause="" if verdict != "fail" else Cause.THERMAL if hot else Cause.SLOW_COMPUTE,
    )


def _advice(hot: bool, gpu: bool) -> str:
    if hot:
        return "it grew too hot: see fans, airflow, coolant and the room"
    return "see gpu.power and gpu.clocks" if gpu else "see what else ran there, and its cooling"


def _shown(figures: LoadFigures) -> Measured:
    scale, unit = (1e12, "tflops") if figures.load == "gemm" else (1e9, "gb_per_second")
    return {
        f"median_{unit}": figures.median / scale,
        f"worst_{unit}": figures.worst / scale,
        f"best_{unit}": figures.best / scale,
    }


def _siblings(loads: list[LoadFigures]) -> list[Finding]:
    """GPUs of this node that are slower than the others of it, by load."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for each in loads:
        if each.device.startswith("cuda") and each.samples:
            rates[each.load][each.device] = each.median
    return [
        Finding(
            check=f"siblings {load} {slow.name}",
            verdict="warn",
            measured={"share_of_siblings": slow.share},
            expected=f"as fast as the other {len(devices) - 1} GPUs of this node",
            suggestion="see gpu.power, gpu.clocks, gpu.pcie of this card",
        )
        for load, devices in rates.items()
        for slow in stragglers(devices)
    ]


def _gpu(soak: GpuSoak) -> Finding:
    bad, worse, cause = list[str](), list[str](), ""
    if soak.uncorrected_errors:
        worse.append("uncorrectable memory errors under load: replace the GPU")
        cause = Cause.HBM_ECC
    if soak.throttle_reasons & (HOT | BRAKE):
        worse.append("it lowered its clocks: look at cooling and power")
        cause = cause or Cause.THERMAL
    if soak.corrected_errors:
        bad.append("corrected memory errors under load: look again in a week")
    if soak.most_celsius >= HOT_DEGREES:
        bad.append("it is hot: look at cooling")
    return Finding(
        check=f"soak gpu {soak.index}",
        verdict="fail" if worse else "warn" if bad else "pass",
        measured={
            "first_celsius": soak.first_celsius,
            "most_celsius": soak.most_celsius,
            "least_sm_megahertz": soak.least_sm_megahertz,
            "most_sm_megahertz": soak.most_sm_megahertz,
            "throttle_reasons": f"{soak.throttle_reasons:#x}",
            "uncorrected_errors": soak.uncorrected_errors,
            "corrected_errors": soak.corrected_errors,
        },
        expected=f"below {HOT_DEGREES} degrees, no slowdown by hardware, no memory error",
        suggestion="; ".join([*worse, *bad]),
        cause=cause,
    )
