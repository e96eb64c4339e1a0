"""What a report says, section by section; a terminal and a page show the same."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.observe.profile.advice import Advice, milliseconds, size
from phalanx.observe.profile.compare import PartChange, ProfileComparison
from phalanx.observe.profile.profile import JobProfile, KernelTime
from phalanx.observe.tracker.report import ReportSection

ROOFLINE, MEMORY = "Top kernels against the roofline", "Memory"  # titles


def sections(profile: JobProfile, advice: Sequence[Advice]) -> list[ReportSection]:
    """The report of a profile."""
    made = [
        ReportSection("What to change, by expected gain", lines=_advice_lines(advice)),
        ReportSection("The step", lines=_step_lines(profile)),
        ReportSection("Where a step goes", bars=_shares(profile)),
        ReportSection("Communication by axis", table=_axis_table(profile)),
        ReportSection(ROOFLINE, table=_kernel_table(profile)),
        ReportSection("Host", lines=_host_lines(profile)),
        ReportSection(MEMORY, lines=_memory_lines(profile)),
    ]
    return [each for each in made if each.lines or each.table or each.bars]


def _advice_lines(advice: Sequence[Advice]) -> list[str]:
    lines = []
    for each in advice:
        gain = f"{each.gain:.0%} of a step" if each.gain else "memory"
        setting = f"Try `--set {each.setting}={each.value}`. " if each.setting else ""
        lines.append(
            f"{gain}: {each.cause}. {each.title}. {setting}Evidence: {'; '.join(each.evidence)}. "
            f"See `{each.command}`"
        )
    return lines or ["nothing that these rules know of"]


def _step_lines(profile: JobProfile) -> list[str]:
    times, origin = profile.times, profile.origin
    commit = f", commit {origin.commit[:12]}" if origin.commit else ""
    ranks = f"{profile.world_size} rank{'s' if profile.world_size > 1 else ''}"
    lines = [
        f"{ranks} on {profile.device_name}, torch {origin.torch}{commit}",
        f"{milliseconds(times.median_seconds)} a step (median of {times.steps}, quartiles "
        f"{milliseconds(times.spread_seconds)} apart), {times.tokens_per_second:,.0f} tokens/s"
        + (f", MFU {profile.mfu:.1%}" if profile.mfu is not None else ""),
        f"{milliseconds(profile.traced_seconds)} a traced step: shares below are of it",
    ]
    if profile.synthetic is not None:
        plain = profile.synthetic
        saved = 1 - plain.median_seconds / times.median_seconds
        lines.append(
            f"with synthetic data {milliseconds(plain.median_seconds)}: the loader costs "
            f"{max(0.0, saved):.0%}"
        )
    return lines


def _shares(profile: JobProfile) -> dict[str, float]:
    ordered = sorted(profile.kinds.items(), key=lambda each: -each[1])
    return {str(kind): seconds / profile.traced_seconds for kind, seconds in ordered}


def _axis_table(profile: JobProfile) -> list[list[str]]:
    rows = [
        [
            row.axis,
            row.collective,
            f"{row.calls:.3g}",
            size(row.bytes_a_call),
            milliseconds(row.seconds),
            milliseconds(row.exposed_seconds),
            f"{row.exposed_seconds / profile.traced_seconds:.1%}",
        ]
        for row in profile.axes
    ]
    head = ["axis", "collective", "calls", "each", "time", "exposed", "of a step"]
    return [head, *rows] if rows else []


def _kernel_table(profile: JobProfile) -> list[list[str]]:
    head = ["kernel", "kind", "calls", "of a step", "GFLOP/s", "GB/s", "FLOP/B", "of the roof"]
    rows = [_kernel_row(profile, kernel) for kernel in profile.kernels[:12]]
    return [head, *rows] if rows else []


def _kernel_row(profile: JobProfile, kernel: KernelTime) -> list[str]:
    roof = kernel.roof(profile.rates)
    return [
        f"{kernel.name} {kernel.shapes}"[:72].strip(),
        kernel.kind,
        f"{kernel.calls:.3g}",
        f"{kernel.seconds / profile.traced_seconds:.1%}",
        f"{kernel.flops_per_second / 1e9:,.0f}" if kernel.flops else "",
        f"{kernel.bytes_per_second / 1e9:,.3g}" if kernel.bytes else "",
        f"{kernel.intensity:.3g}" if kernel.flops and kernel.bytes else "",
        f"{roof:.0%}" if roof is not None else "",
    ]


def _host_lines(profile: JobProfile) -> list[str]:
    rates = profile.rates
    lines = [
        f"{profile.gaps} launch gaps a step, the longest "
        f"{milliseconds(profile.longest_gap_seconds)}",
        f"{profile.graphs} compiled graphs, {profile.recompiles} of them after the first steps",
    ]
    word = "host syncs" if profile.device == "cuda" else "reads of values (no waits on CPU)"
    lines += [f"{word}: {s.calls:.3g} a step at {s.where or '?'}" for s in profile.syncs[:5]]
    products = ", ".join(f"{v / 1e12:.3g} {name}" for name, v in rates.matmul_flops.items())
    lines.append(
        f"measured here: products TFLOP/s {products}; memory "
        f"{rates.memory_bytes_per_second / 1e9:.3g} GB/s"
    )
    if profile.power is not None:
        power = profile.power
        lines.append(
            f"power limit {power.limit_watts:.0f} W (default {power.default_limit_watts:.0f} W), "
            f"{power.clock_mhz:.0f} MHz of {power.highest_clock_mhz:.0f} MHz under load"
        )
    return lines


def _memory_lines(profile: JobProfile) -> list[str]:
    memory = profile.memory
    state = ", ".join(f"{name} {size(count)}" for name, count in memory.state.items())
    lines = [f"peak {size(memory.peak_bytes)} of {size(memory.limit_bytes)}; {state}"]
    if profile.device == "cuda":
        wasted = max(0, memory.reserved_bytes - memory.peak_bytes)
        lines.append(
            f"fragmentation: {size(wasted)} held by the allocator beyond the peak in use, "
            f"{memory.retries} retries"
        )
    return lines


def comparison_sections(comparison: ProfileComparison) -> list[ReportSection]:
    """The report of a comparison."""
    head = ["part", "before", "after", "change"]
    facts = [["what", "before", "after"], *([f.name, f.before, f.after] for f in comparison.facts)]
    made = [
        ReportSection("Verdict", lines=[comparison.verdict]),
        ReportSection("What is different", table=facts if len(facts) > 1 else []),
        *(
            ReportSection(title, table=[head, *map(_change_row, rows)] if rows else [])
            for title, rows in (
                ("By kind", comparison.kinds),
                ("Exposed communication", comparison.axes),
                ("Kernels", comparison.kernels[:12]),
            )
        ),
    ]
    return [each for each in made if each.lines or each.table]


def _change_row(change: PartChange) -> list[str]:
    return [
        change.part[:72],
        milliseconds(change.before_seconds),
        milliseconds(change.after_seconds),
        f"{change.seconds * 1e3:+.4g} ms",
    ]
