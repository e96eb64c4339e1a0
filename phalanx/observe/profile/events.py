"""A trace of torch's profiler as what the analysis asks of it: steps, work, messages, waits.

On CUDA the work is kernels and copies of the device, each with the operation that launched it. On
CPU it is what the main thread calculates: stretches of time under their innermost operation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.train.measure.intervals import Interval, merge
from phalanx.train.profile.facts import STEP_RANGE

PHASES = ("data", "forward", "backward", "optimizer", "snapshot", "report", "device", "tracing")
# Host calls that return when the device has done something.
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_READS = ("aten::_local_scalar_dense",)  # ``.item()``: on CUDA a copy and a wait
_GLOO = "gloo:"
# What allocates or looks at memory works for whoever called it.
_LOOKS = ("autograd::", "aten::empty", "aten::as_strided", "aten::view", "aten::detach")


class Operation(NamedTuple):
    """What the host called, with what its operands looked like."""

    name: str
    dims: tuple[tuple[int, ...], ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


class TracedWork(NamedTuple):
    """Something that was calculated or copied, in seconds of the trace's clock."""

    name: str
    start: float
    end: float
    launched: float  # when the host asked for it
    operation: Operation
    number: int  # of the call that asked for it: several kernels may have the same
    copies: bool = False  # it moves memory and calculates nothing


class TracedMessage(NamedTuple):
    """A collective, or a message to one rank."""

    name: str
    start: float
    end: float
    group: str  # the description of its group; "": not told
    bytes: int


class HostWait(NamedTuple):
    """The host waited for the device."""

    name: str
    start: float
    end: float


class MemoryPoint(NamedTuple):
    """Bytes at a moment."""

    at: float
    used: int
    reserved: int


@dataclass
class StepEvents:
    """Everything that a trace says of its steps."""

    device: str
    steps: list[Interval] = field(default_factory=list)
    phases: dict[str, list[Interval]] = field(default_factory=dict)
    work: list[TracedWork] = field(default_factory=list)
    messages: list[TracedMessage] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    reads: list[Interval] = field(default_factory=list)  # ``.item()`` and its like
    recomputed: list[Interval] = field(default_factory=list)  # of the host, in backward
    memory: list[MemoryPoint] = field(default_factory=list)


Event = dict[str, Any]


class Inside:
    """Whether moments lie in intervals."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._intervals = merge(intervals)
        self._starts = [start for start, _ in self._intervals]

    def has(self, moment: float) -> bool:
        place = bisect_right(self._starts, moment) - 1
        return place >= 0 and moment < self._intervals[place][1]


def read_events(trace: dict[str, Any]) -> StepEvents:
    """The steps of a trace; ValueError where it has none."""
    whole = [e for e in trace["traceEvents"] if isinstance(e, dict) and e.get("ph") in ("X", "i")]
    spans = [e for e in whole if e["ph"] == "X" and "dur" in e and "ts" in e]
    steps = _steps([e for e in spans if e.get("name") == STEP_RANGE])
    if not steps:
        raise ValueError(f"the trace has no range {STEP_RANGE!r}: no step was traced")
    operations = [e for e in spans if e.get("cat") == "cpu_op"]
    kernels = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events_of_steps = StepEvents("cuda" if kernels else "cpu", steps=steps)
    for name in PHASES:
        ranges = (e for e in spans if e.get("name") == name and e["cat"] == "user_annotation")
        events_of_steps.phases[name] = merge(map(_interval, ranges))
    events_of_steps.recomputed = _recomputed(operations, events_of_steps.phases["backward"])
    events_of_steps.memory = _memory(whole, events_of_steps.device)
    events_of_steps.reads = [_interval(e) for e in operations if e["name"] in _READS]
    if kernels:
        events_of_steps.work, events_of_steps.messages = _on_cuda(kernels, operations, spans)
        runtime = (e for e in spans if e.get("cat") in ("cuda_runtime", "cuda_driver"))
        waits = (e for e in runtime if e["name"] in SYNCS)
        events_of_steps.waits = [HostWait(e["name"], *_interval(e)) for e in waits]
    else:
        events_of_steps.work, events_of_steps.messages = _on_cpu(operations, spans)
    return events_of_steps


def _steps(ranges: Sequence[Event]) -> list[Interval]:
    """A step lasts until the next one begins; the last one as long as its own range."""
    own = sorted(_interval(each) for each in ranges if each.get("cat") == "user_annotation")
    following = [start for start, _ in own[1:]]
    return [
        (start, following[i] if i < len(following) else end) for i, (start, end) in enumerate(own)
    ]


def _interval(event: Event) -> Interval:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _operation(event: Event) -> Operation:
    arguments = _arguments(event)
    dims = tuple(
        tuple(size for size in each if isinstance(size, int)) if isinstance(each, list) else ()
        for each in arguments.get("Input Dims", ())
    )
    types = tuple(map(str, arguments.get("Input type", ())))
    return Operation(
        event["name"], dims, types, tuple(map(str, arguments.get("Concrete Inputs", ())))
    )


def _recomputed(operations: Iterable[Event], backward: Sequence[Interval]) -> list[Interval]:
    """When the host repeated forward within backward.

    Backward itself records no graph, so that its operations have no number in it.
    """
    again, inside = [], Inside(backward)
    for event in operations:
        number = _arguments(event).get("Sequence number", -1)
        name = event["name"]
        if number < 0 or name.startswith("autograd::") or "Backward" in name:
            continue
        if inside.has(_interval(event)[0]):
            again.append(_interval(event))
    return merge(again)


def _memory(events: Iterable[Event], device: str) -> list[MemoryPoint]:
    kind = 1 if device == "cuda" else 0
    points = []
    for event in events:
        arguments = _arguments(event)
        if event.get("name") != "[memory]" or arguments.get("Device Type") != kind:
            continue
        used, reserved = arguments.get("Total Allocated", 0), arguments.get("Total Reserved", 0)
        points.append(MemoryPoint(event["ts"] / 1e6, int(used), int(reserved)))
    return sorted(points)


def _on_cuda(
    kernels: Iterable[Event], operations: Iterable[Event], spans: Iterable[Event]
) -> tuple[list[TracedWork], list[TracedMessage]]:
    by_number = {
        _arguments(e)["External id"]: e for e in operations if "External id" in _arguments(e)
    }
    launches = {
        _arguments(e).get("correlation"): e["ts"] / 1e6
        for e in spans
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    work, messages = [], []
    for kernel in kernels:
        arguments, (start, end) = _arguments(kernel), _interval(kernel)
        name = kernel["name"]
        if "nccl" in name.lower() or name.lower().startswith("memcpy ptop"):
            messages.append(_nccl_message(name, start, end, arguments))
            continue
        number = arguments.get("External id", -1)
        asked = by_number.get(number)
        launched = launches.get(arguments.get("correlation"), start)
        operation = _operation(asked) if asked is not None else Operation("")
        copies = kernel["cat"] != "kernel"
        work.append(TracedWork(name, start, end, launched, operation, number, copies))
    return work, messages


_SIZES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}


def _nccl_message(name: str, start: float, end: float, arguments: dict[str, Any]) -> TracedMessage:
    size = _SIZES.get(str(arguments.get("dtype", "")), 4)
    count = max(arguments.get("In msg nelems", 0) or 0, arguments.get("Out msg nelems", 0) or 0)
    group = str(arguments.get("Process Group Description", ""))
    return TracedMessage(
        str(arguments.get("Collective name", name)), start, end, group, int(count) * size
    )


def _on_cpu(
    operations: Iterable[Event], spans: Iterable[Event]
) -> tuple[list[TracedWork], list[TracedMessage]]:
    threads = Counter(e.get("tid") for e in operations if e["name"].startswith("aten::"))
    if not threads:
        return [], []
    ((main, _),) = threads.most_common(1)
    messages = [
        TracedMessage(
            e["name"].removeprefix(_GLOO), *_interval(e), "", operand_bytes(_operation(e))
        )
        for e in spans
        if e["name"].startswith(_GLOO)
    ]
    return _innermost(e for e in operations if e.get("tid") == main), messages


WIDTHS = {
    **dict.fromkeys(("double", "long int", "long"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
}


def numbers(dims: Sequence[int]) -> int:
    """Elements of a tensor."""
    count = 1
    for size in dims:
        count *= size
    return count


def operand_bytes(operation: Operation) -> int:
    """Bytes of all operands together."""
    return sum(
        numbers(dims) * WIDTHS[kind]
        for dims, kind in zip(operation.dims, operation.types, strict=False)
        if kind in WIDTHS and dims
    )


_CALCULATES = ("aten::", "phalanx::", "Torch-Compiled Region", "c10d::", "_c10d_functional::")


def _innermost(operations: Iterable[Event]) -> list[TracedWork]:
    """One thread's time as pieces, each under its innermost operation.

    Where that is a node of autograd's graph, only Python runs: such time is nobody's.
    """
    pieces: list[TracedWork] = []
    open_: list[tuple[float, Event, Operation]] = []  # with its end; outermost first
    at = 0.0

    def give(until: float) -> None:
        nonlocal at
        if open_ and until > at and open_[-1][1]["name"].startswith(_CALCULATES):
            _, event, operation = next(
                (each for each in reversed(open_) if not each[1]["name"].startswith(_LOOKS)),
                open_[-1],
            )
            number = _arguments(event).get("External id", -1)
            pieces.append(TracedWork(event["name"], at, until, at, operation, number))
        at = max(at, until)

    for event in sorted(operations, key=lambda e: (e["ts"], -e["dur"])):
        start, end = _interval(event)
        while open_ and open_[-1][0] <= start:
            give(open_[-1][0])
            open_.pop()
        give(start)
        open_.append((end, event, _operation(event)))
    while open_:
        give(open_[-1][0])
        open_.pop()
    return pieces
