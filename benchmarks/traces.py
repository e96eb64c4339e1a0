"""What a torch profiler trace of one training step says about compute and communication.

Everything is read from the trace's own events, in milliseconds from its first event:

- communication: ``gloo:*`` events. They lie on gloo's threads, begin when such a thread takes
  up the collective and end when its result is there. (``c10d::*`` on the main thread only
  hands the work over.)
- compute: ``aten::*`` events of the main thread outside of FSDP's own ranges, whose copies
  belong to communication. A wait for a collective is no ``aten`` event and hence no compute.
- layers: forward is marked with ranges by ``mark_layers``; backward is found by autograd's
  sequence numbers, which a node of backward shares with the forward call that made it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.train.measure.intervals import Interval, intersect, merge, subtract

LAYER_RANGE = "phalanx forward of layer "
GATHER_RANGE = re.compile(r"FSDP::all_gather \((.*)\)")
BACKWARD_NODE = "autograd::engine::evaluate_function: "


class Event(NamedTuple):
    """One complete event of a trace."""

    name: str
    thread: Any
    span: Interval
    sequence: int | None

    def within(self, span: Interval) -> bool:
        return span[0] <= self.span[0] and self.span[1] <= span[1]


class Gather(NamedTuple):
    """One all-gather of a unit's weights."""

    unit: str
    span: Interval


class StepTrace:
    """Events of one rank during one step."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.span)
        layers = [event for event in self.events if event.name.startswith(LAYER_RANGE)]
        if not layers:
            raise ValueError("the trace has no layer ranges: was mark_layers called?")
        self.main_thread = layers[0].thread
        self.forward = {int(e.name.removeprefix(LAYER_RANGE)): [e.span] for e in layers}
        self.backward = self._backward_of_layers()

    @classmethod
    def read(cls, path: Path) -> StepTrace:
        """Of a file written by ``torch.profiler.profile.export_chrome_trace``."""
        raw = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
        origin = min(e["ts"] for e in raw)
        return cls([_event(e, origin) for e in raw])

    @property
    def compute(self) -> list[Interval]:
        """When the main thread calculated."""
        kernels = [e.span for e in self._main("aten::")]
        return subtract(kernels, [e.span for e in self._main("FSDP::") if _is_leaf_range(e.name)])

    @property
    def backward_compute(self) -> list[Interval]:
        nodes = [e.span for e in self._main(BACKWARD_NODE)]
        return intersect(self.compute, nodes)

    def layer_compute(self, layer: int, direction: str) -> list[Interval]:
        """When the main thread calculated one layer's forward or backward."""
        spans = self.forward if direction == "forward" else self.backward
        return intersect(self.compute, spans[layer])

    @property
    def bucket_reductions(self) -> list[Interval]:
        """DDP: the reductions of gradient buckets, without the scalars of the trainer."""
        nodes = merge(e.span for e in self._main(BACKWARD_NODE))
        calls = self._main("c10d::allreduce_")
        works = self._collectives("gloo:all_reduce")
        assert len(calls) == len(works), "every all-reduce has one event on a gloo thread"
        inside = [bool(intersect([call.span], nodes)) for call in calls]
        return [work.span for work, keep in zip(works, inside, strict=True) if keep]

    @property
    def gathers(self) -> list[Gather]:
        """FSDP: every gather of weights, in the order in which they were asked for."""
        asked = [e for e in self._main("FSDP::all_gather (") if GATHER_RANGE.fullmatch(e.name)]
        works = self._collectives("gloo:all_gather")
        assert len(asked) == len(works), "every gather has one event on a gloo thread"
        units = [e.name[len("FSDP::all_gather (") : -1] for e in asked]
        return [Gather(unit, work.span) for unit, work in zip(units, works, strict=True)]

    @property
    def gradient_reductions(self) -> list[Interval]:
        """FSDP: reduce-scatters, which gloo carries out as all-reduces."""
        ranges = [e.span for e in self._main("FSDP::post_backward_reduce")]
        works = self._collectives("gloo:all_reduce")
        return [w.span for w in works if intersect([w.span], ranges)]

    def gather_of(self, layer: int, direction: str) -> Gather:
        """The gather of one layer's weights for forward (its first) or backward (its last)."""
        found = [gather for gather in self.gathers if gather.unit == f"layers.{layer}"]
        assert len(found) == 2, f"layer {layer} is gathered for forward and for backward"
        return found[0] if direction == "forward" else found[1]

    def _main(self, prefix: str) -> list[Event]:
        return [
            e for e in self.events if e.thread == self.main_thread and e.name.startswith(prefix)
        ]

    def _collectives(self, name: str) -> list[Event]:
        return [e for e in self.events if e.name == name]

    def _backward_of_layers(self) -> dict[int, list[Interval]]:
        made_by: dict[int, int] = {}
        nodes: list[Event] = []
        for event in self.events:
            if event.thread != self.main_thread or event.sequence is None:
                continue
            if event.name.startswith(BACKWARD_NODE):
                nodes.append(event)
                continue
            for layer, (span,) in self.forward.items():
                if event.within(span):
                    made_by[event.sequence] = layer
        found: dict[int, list[Interval]] = defaultdict(list)
        for node in nodes:
            if node.sequence in made_by:
                found[made_by[node.sequence]].append(node.span)
        return dict(found)


def _is_leaf_range(name: str) -> bool:
    """FSDP's ranges around its own work, not the ones that would contain the model's."""
    return name.startswith(("FSDP::all_gather", "FSDP::post_backward", "FSDP::root_post"))


def _event(raw: dict[str, Any], origin: float) -> Event:
    start = (raw["ts"] - origin) / 1e3
    sequence = raw.get("args", {}).get("Sequence number")
    return Event(raw["name"], raw["tid"], (start, start + raw["dur"] / 1e3), sequence)
