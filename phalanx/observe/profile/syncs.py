"""Where in the code the host waits for the device, from a trace with Python's stacks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from phalanx.observe.profile.events import SYNCS, Inside
from phalanx.observe.profile.profile import HostSync
from phalanx.train.profile.facts import STEP_RANGE

_READ = "aten::_local_scalar_dense"  # ``.item()``: on CPU it waits for nothing
_FOREIGN = ("<", "torch/", "/torch/", "contextlib.py", "threading.py")
LOOP_WAIT = "trainer.py"  # the one wait of a step that the loop makes itself, at its end


def host_syncs(trace: dict[str, Any]) -> list[HostSync]:
    """Waits of the traced steps by the innermost line outside torch, the most frequent first."""
    spans = [e for e in trace["traceEvents"] if isinstance(e, dict) and e.get("ph") == "X"]
    steps = [e for e in spans if e.get("name") == STEP_RANGE and e.get("cat") == "user_annotation"]
    inside = Inside((e["ts"], e["ts"] + e["dur"]) for e in steps)
    on_device = any(e.get("cat") == "kernel" for e in spans)
    waits = [e for e in spans if _waits(e, on_device) and inside.has(e["ts"])]
    frames = [e for e in spans if e.get("cat") == "python_function"]
    found = Counter(_places(waits, frames))
    count = max(1, len(steps))
    return [HostSync(where=where, calls=n / count) for where, n in found.most_common()]


def _waits(event: dict[str, Any], on_device: bool) -> bool:
    if on_device:
        return event.get("cat") in ("cuda_runtime", "cuda_driver") and event["name"] in SYNCS
    return event.get("name") == _READ


def _places(waits: list[dict[str, Any]], frames: list[dict[str, Any]]) -> list[str]:
    """For each wait the innermost frame around it on its thread that is nobody's library."""
    both = [(e["ts"], 1, e) for e in waits] + [(e["ts"], 0, e) for e in frames]
    open_: dict[object, list[dict[str, Any]]] = {}
    places = []
    for moment, is_wait, event in sorted(both, key=lambda each: each[:2]):
        stack = open_.setdefault(event.get("tid"), [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= moment:
            stack.pop()
        if not is_wait:
            stack.append(event)
            continue
        names = (frame["name"] for frame in reversed(stack))
        places.append(next((name for name in names if not _is_foreign(name)), ""))
    return places


def _is_foreign(name: str) -> bool:
    return name.startswith(_FOREIGN) or "/torch/" in name
