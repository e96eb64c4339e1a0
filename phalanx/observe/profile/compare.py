"""What changed between two profiles: of two commits, machines or days."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from phalanx.observe.profile.profile import JobProfile
from phalanx.observe.tracker.runs import flat

LEAST = 0.01  # of a step, that a change must take or give to be told
NOISE = 0.02  # of a step: two runs of the same differ by as much


class PartChange(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step, before and after."""

    part: str
    before_seconds: float
    after_seconds: float

    @property
    def seconds(self) -> float:
        return self.after_seconds - self.before_seconds


class FactChange(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, a version or a machine that is another one."""

    name: str
    before: str
    after: str


class ProfileComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one profile to another."""

    before_seconds: float  # of an undisturbed step
    after_seconds: float
    facts: list[FactChange]
    kinds: list[PartChange]
    kernels: list[PartChange]
    axes: list[PartChange]  # exposed communication

    @property
    def change(self) -> float:
        """Of the step's time; positive: slower."""
        return self.after_seconds / self.before_seconds - 1

    @property
    def verdict(self) -> str:
        """One sentence."""
        if abs(self.change) < NOISE:
            return f"as fast as before ({self.change:+.1%}, within what two runs differ by)"
        word = "slower" if self.change > 0 else "faster"
        same = [each for each in self.kinds if (each.seconds > 0) == (self.change > 0)]
        because = f", most of it in {same[0].part}" if same else ""
        return f"{abs(self.change):.1%} {word}{because}"


def compare(before: JobProfile, after: JobProfile) -> ProfileComparison:
    """Parts by how much they changed, the most first.

    Traced steps are longer than undisturbed ones: parts are told as shares of the latter.
    """
    scales = [p.times.median_seconds / p.traced_seconds for p in (before, after)]
    return ProfileComparison(
        before_seconds=before.times.median_seconds,
        after_seconds=after.times.median_seconds,
        facts=list(_facts(before, after)),
        kinds=_changes(before.kinds, after.kinds, scales, before),
        kernels=_changes(_kernels(before), _kernels(after), scales, before),
        axes=_changes(_axes(before), _axes(after), scales, before),
    )


def _changes(
    one: dict[str, float], two: dict[str, float], scales: list[float], before: JobProfile
) -> list[PartChange]:
    made = [
        PartChange(
            part=part,
            before_seconds=one.get(part, 0.0) * scales[0],
            after_seconds=two.get(part, 0.0) * scales[1],
        )
        for part in dict.fromkeys([*one, *two])
    ]
    told = (each for each in made if abs(each.seconds) >= LEAST * before.times.median_seconds)
    return sorted(told, key=lambda each: -abs(each.seconds))


def _kernels(profile: JobProfile) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for kernel in profile.kernels:
        name = f"{kernel.name} {kernel.shapes}".strip()
        seconds[name] = seconds.get(name, 0.0) + kernel.seconds
    return seconds


def _axes(profile: JobProfile) -> dict[str, float]:
    return {f"{row.collective} of {row.axis}": row.exposed_seconds for row in profile.axes}


def _facts(before: JobProfile, after: JobProfile) -> Iterator[FactChange]:
    """Machine, code and versions first, then settings."""
    pairs = [
        ("device", before.device_name, after.device_name),
        ("ranks", str(before.world_size), str(after.world_size)),
        ("host", before.origin.host, after.origin.host),
        ("commit", _commit(before), _commit(after)),
        ("torch", before.origin.torch, after.origin.torch),
        ("day", before.origin.created[:10], after.origin.created[:10]),
    ]
    own, others = dict(flat(before.job)), dict(flat(after.job))
    pairs += [(key, str(own.get(key)), str(others.get(key))) for key in {**own, **others}]
    for name, one, two in pairs:
        if one != two:
            yield FactChange(name=name, before=one, after=two)


def _commit(profile: JobProfile) -> str:
    origin = profile.origin
    return origin.commit[:12] + ("+changes" if origin.changed and origin.commit else "")
