"""Events that cannot be true, whoever sent them: they are told, and change nothing.

Whatever is stored must fit into a snapshot and its sums into 64 bits; so numbers have bounds and
texts are Unicode. What only the state can tell (a job that is not there) its handler answers.
"""

from __future__ import annotations

from msgspec import Struct, structs

from phalanx.cluster.context import Context
from phalanx.cluster.node import MOST_RAILS
from phalanx.cluster.protocol.commands import Refuse
from phalanx.cluster.protocol.events import (
    Corruption,
    DataStarved,
    DrainNode,
    EventBody,
    GangStopped,
    JobFinished,
    LossSpike,
    NodeSilent,
    NoProgress,
    Progress,
    SlowRank,
    StorageSlow,
    ThroughputRegression,
)
from phalanx.cluster.protocol.messages import (
    DeviceError,
    KeeperSilent,
    NodeNotice,
    StepsPrinted,
    WorkerExited,
)
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.units import MILLION

MOST = 1 << 62
SHOWN = 60  # characters of a value that is refused


def refused(ctx: Context, body: EventBody) -> bool:
    """Whether an event makes no sense; whoever sent it, or a person, is told why."""
    why = _progress(body) if isinstance(body, Progress) else _others(body)
    if why is None:
        return False
    request = getattr(body, "request", None)
    if request is None:
        ctx.notify(why, level="warning")
    else:
        ctx.emit((), Refuse(reason=why, request=request if _readable(request) else ""))
    return True


def _progress(fact: Progress) -> Reason | None:
    """Most events are of this kind: what is right is seen at a glance."""
    if (
        0 <= fact.committed <= fact.step <= MOST
        and 0 <= fact.durable <= MOST
        and 0 <= fact.at_ns <= MOST
        and 0 <= fact.flush_ns <= MOST
        and min(fact.data_wait_ns, fact.checkpoint_ns, fact.straggler_ns, fact.busy_ns) >= 0
        and max(fact.data_wait_ns, fact.checkpoint_ns, fact.straggler_ns, fact.busy_ns) <= MOST
        and 0 <= fact.job <= MOST
        and 0 <= fact.generation <= MOST
    ):
        return None
    for key in Progress.__struct_fields__:
        value = getattr(fact, key)
        if not 0 <= value <= MOST:
            return nonsense(fact, key, value, f"must be 0 to {MOST}")
    return nonsense(fact, "committed", fact.committed, f"must not be above its step {fact.step}")


# What is measured or counted, by kind of event: (field, least, most).
RANGES: dict[type[EventBody], tuple[tuple[str, int, int], ...]] = {
    DeviceError: (("rail", -1, MOST_RAILS - 1),),
    WorkerExited: (("step", -1, MOST), ("rank", -1, MOST)),
    GangStopped: (("step", 0, MOST), ("committed", 0, MOST), ("durable", 0, MOST)),
    NoProgress: (
        ("step", 0, MOST),
        ("limit_ns", 0, MOST),
        ("quiet_ns", 0, MOST),
        ("cpu_ns", -1, MOST),
        ("output_bytes", -1, MOST),
        ("gpu_ppm", -1, MILLION),
    ),
    SlowRank: (("slowdown_ppm", 1, MOST), ("rank", 0, MOST), ("step_ns", 0, MOST)),
    ThroughputRegression: (("slowdown_ppm", 1, MOST), ("step", 0, MOST)),
    DataStarved: (("share_ppm", 0, MILLION),),
    LossSpike: (("step", 0, MOST),),
    Corruption: (("step", 0, MOST), ("clean_step", 0, MOST)),
    JobFinished: (("step", 0, MOST),),
    StorageSlow: (("bytes_per_second", -1, MOST),),
    KeeperSilent: (("seconds", 0, MOST),),
    DrainNode: (("deadline_ns", 0, MOST),),
    StepsPrinted: (("step", 0, MOST), ("steps", 0, MOST), ("at_ns", 0, MOST)),
    NodeSilent: (("broke_ns", -1, MOST), ("heard_ns", -MOST, MOST)),
    NodeNotice: (("deadline_ns", 0, MOST),),
}


def _others(body: EventBody) -> Reason | None:
    for key, least, most in RANGES.get(type(body), ()):
        value = getattr(body, key)
        if not least <= value <= most:
            return nonsense(body, key, value, f"must be {least} to {most}")
    checked: EventBody = body
    if isinstance(body, Corruption):  # fingerprints have 64 bits, all other numbers 62
        for node, fingerprint in body.claims:
            if not -(1 << 63) <= fingerprint < 1 << 64:  # as an integer with a sign, or without
                return nonsense(body, "claims", (node, fingerprint), "a fingerprint has 64 bits")
        checked = structs.replace(body, claims=tuple((node, 0) for node, _ in body.claims))
    if _can_be_kept(checked):
        return None
    found = _walk(checked, "")
    return None if found is None else nonsense(body, *found)


def _can_be_kept(value: object) -> bool:
    """Whether nothing inside a value is for ``_walk`` to name: what nearly all events are."""
    left: list[object] = [value]
    while left:
        inner = left.pop()
        if inner is None:
            continue
        if isinstance(inner, int):
            if not -MOST <= inner <= MOST:
                return False
        elif isinstance(inner, str):
            if not _readable(inner):
                return False
        elif isinstance(inner, Struct):
            left.extend(structs.astuple(inner))
        elif isinstance(inner, tuple):
            left.extend(inner)
    return True


def _walk(value: object, key: str) -> tuple[str, object, str] | None:
    """(where, what, rule) of the first thing inside a value that cannot be kept."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return None if -MOST <= value <= MOST else (key, value, f"must be within +-{MOST}")
    if isinstance(value, str):
        return None if _readable(value) else (key, value, "is not Unicode text")
    if isinstance(value, Struct):
        parts = ((name, getattr(value, name)) for name in value.__struct_fields__)
        prefix = f"{key}." if key else ""
    elif isinstance(value, tuple):
        parts = ((str(number), inner) for number, inner in enumerate(value))
        prefix = f"{key}."
    else:
        return None
    for name, inner in parts:
        offence = _walk(inner, prefix + name)
        if offence is not None:
            return offence
    return None


def _readable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nonsense(body: EventBody, key: str, value: object, rule: str) -> Reason:
    """That a field of an event cannot be as it is."""
    shown = ascii(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return reason("nonsense", kind=type(body).__name__, key=key, value=shown, rule=rule)
