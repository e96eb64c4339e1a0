"""The roofline and the memory's line as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from phalanx.observe.profile.advice import size
from phalanx.observe.profile.costs import Kind
from phalanx.observe.profile.profile import JobProfile, KernelTime

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 800, 320, 64, 12, 22, 34
TONES = {Kind.MATMUL: "good", Kind.ATTENTION: "rank"}  # of points
GIB = 1 << 30


class AxisScale:
    """A logarithmic or linear axis onto pixels."""

    def __init__(self, least: float, most: float, first: float, last: float, log: bool) -> None:
        self._log = log
        self._least, self._most = (math.log10(v) if log else v for v in (least, most))
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        place = math.log10(value) if self._log else value
        share = (place - self._least) / ((self._most - self._least) or 1.0)
        return self._first + (self._last - self._first) * share


def roofline(profile: JobProfile) -> str:
    """Kernels with FLOPs under the measured roof; a point is as large as its share of a step."""
    points = [k for k in profile.kernels if k.flops and k.bytes and k.seconds]
    bandwidth = profile.rates.memory_bytes_per_second
    peaks = {name: peak for name, peak in profile.rates.matmul_flops.items() if peak}
    if not points or not bandwidth or not peaks:
        return ""
    ridge = max(peaks.values()) / bandwidth
    most = 10 ** math.ceil(math.log10(max(*(p.intensity for p in points), 4 * ridge)))
    least = min(0.1, *(p.intensity / 2 for p in points))
    top = max(*peaks.values(), *(p.flops_per_second for p in points)) * 2
    low = min(least * bandwidth, *(p.flops_per_second for p in points)) / 2
    across = AxisScale(least, most, LEFT, WIDE - RIGHT, log=True)
    up = AxisScale(low, top, HIGH - BOTTOM, TOP, log=True)
    parts = [_decades(across, up, least, most, low, top)]
    for name, peak in peaks.items():
        corner = min(max(peak / bandwidth, least), most)
        parts.append(
            f'<path d="M{across.at(least):.1f},{up.at(least * bandwidth):.1f}'
            f'L{across.at(corner):.1f},{up.at(peak):.1f}L{across.at(most):.1f},{up.at(peak):.1f}"/>'
            f'<text x="{WIDE - RIGHT}" y="{up.at(peak) - 5:.1f}" text-anchor="end">'
            f"{escape(name)} {peak / 1e12:.3g} TFLOP/s, measured</text>"
        )
    parts += [_point(profile, point, across, up) for point in reversed(points)]
    return _figure("FLOP/s over FLOP a byte, under the measured roof", parts)


def _decades(
    across: AxisScale, up: AxisScale, least: float, most: float, low: float, top: float
) -> str:
    parts = []
    for power in range(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1):
        x = across.at(10.0**power)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HIGH - BOTTOM}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{HIGH - 18}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(top)) + 1):
        y = up.at(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        words = f"{10.0 ** (power - 9):g} G" if power < 12 else f"{10.0 ** (power - 12):g} T"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
    parts.append(f'<text x="{LEFT}" y="{HIGH - 3}">FLOP a byte</text>')
    return "".join(parts)


def _point(profile: JobProfile, kernel: KernelTime, across: AxisScale, up: AxisScale) -> str:
    share = kernel.seconds / profile.traced_seconds
    caption = (
        f"{kernel.name} {kernel.shapes}: {kernel.flops_per_second / 1e9:,.0f} GFLOP/s, "
        f"{share:.1%} of a step"
    )
    tone = next((tone for kind, tone in TONES.items() if kind == kernel.kind), "wait")
    return (
        f'<circle class="{tone}" cx="{across.at(kernel.intensity):.1f}" '
        f'cy="{up.at(kernel.flops_per_second):.1f}" r="{4 + 30 * math.sqrt(share):.1f}" '
        f'opacity=".75"><title>{escape(caption)}</title></circle>'
    )


def memory_line(profile: JobProfile) -> str:
    """Bytes in use over the traced steps, and what the allocator held."""
    points = profile.memory_line
    if len(points) < 2:
        return ""
    most = max(max(point.used, point.reserved) for point in points) or 1
    across = AxisScale(0.0, points[-1].seconds or 1.0, LEFT, WIDE - RIGHT, log=False)
    up = AxisScale(0.0, float(most), HIGH - BOTTOM, TOP, log=False)
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{up.at(v):.1f}" y2="{up.at(v):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{up.at(v) + 4:.1f}" text-anchor="end">{size(v)}</text>'
        for v in (float(most), most / 2)
    )
    used = _path([(across.at(p.seconds), up.at(p.used)) for p in points])
    parts = [lines, f'<path d="{used}"/>']
    if any(point.reserved for point in points):
        held = _path([(across.at(p.seconds), up.at(p.reserved)) for p in points])
        parts.append(f'<path d="{held}" stroke-dasharray="4 4" opacity=".6"/>')
    caption = f"{points[-1].seconds * 1e3:.4g} ms"
    parts.append(
        f'<text x="{LEFT}" y="{HIGH - 16}">0</text>'
        f'<text x="{WIDE - RIGHT}" y="{HIGH - 16}" text-anchor="end">{caption}</text>'
    )
    what = "allocated by tensors over the traced steps"
    if profile.device == "cpu":
        what += ", beyond what was there when the trace began"
    return _figure(what, parts)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _figure(name: str, parts: Sequence[str]) -> str:
    return (
        f'<figure><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(name)}">'
        f'<text class="name" x="{LEFT}" y="13">{escape(name)}</text>{"".join(parts)}</svg></figure>'
    )
