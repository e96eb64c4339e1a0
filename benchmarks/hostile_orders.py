"""The longest that one order may hold the core at 12,500 nodes, whatever a person asks for.

    python -m benchmarks.hostile_orders [--nodes N]

The largest array, workflow, constraint and gang that are let in, cancelled, held, and everything
that falls due behind them. Times are of the processor.
"""

from __future__ import annotations

import argparse
import gc
import time

from benchmarks.cluster_load import fleet_of, policy_of
from phalanx.cluster.core import Core
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import GangShape, JobSpec
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.protocol.events import (
    Cancel,
    Event,
    EventBody,
    Hold,
    Step,
    Submit,
    SubmitWorkflow,
    Tick,
)
from proof.report import report

SECOND = 10**9
MOST_TICKS = 500


def orders(nodes: int) -> list[EventBody]:
    """What is most work for the core, of all that is let in."""
    array = JobSpec(
        name="array", gang=GangShape(slot_gpus=1), array=Array(QueuePolicy().most_array)
    )
    behind = JobSpec(name="behind", after=(Dependency("afterany", 1),))
    gang = JobSpec(name="gang", gang=GangShape(replicas=nodes, tensor=8, slot_gpus=8))
    features = JobSpec(name="features", constraint="&".join(f"f{i}" for i in range(64)))
    chain = tuple(
        Step(name=f"s{i}", spec=JobSpec(name="s"), after=(("afterok", f"s{i - 1}"),) if i else ())
        for i in range(1000)
    )
    return [
        Submit(spec=features),
        Submit(spec=array),
        Submit(spec=behind),
        Submit(spec=array),
        SubmitWorkflow(steps=chain),
        SubmitWorkflow(steps=tuple(reversed(chain))),
        Hold(job=1, held=True),
        Cancel(job=1),
        Cancel(job=2 + QueuePolicy().most_array),
        Submit(spec=gang),
    ]


def measure(nodes: int) -> dict[str, float]:
    """The longest handling of an order, and of what falls due behind them."""
    core = Core(fleet_of(nodes), policy_of())
    longest = {"order": 0.0, "tick": 0.0}
    now = core.view.now_ns
    gc.collect()
    gc.freeze()

    def one(body: EventBody, kind: str) -> None:
        began = time.thread_time()
        core.handle(Event(core.sequence + 1, now, body))
        spent = time.thread_time() - began
        if spent > longest[kind]:
            longest[kind] = spent
            print(f"{1000 * spent:.0f} ms: {type(body).__name__} at event {core.sequence}")

    for body in orders(nodes):
        now += SECOND
        one(body, "order")
        for _ in range(MOST_TICKS):
            deadline = core.next_deadline_ns()
            if deadline is None or deadline > now + 600 * SECOND:
                break
            now = max(now, deadline)
            one(Tick(), "tick")
    return {"longest_ms": 1000 * max(longest.values()), "order_ms": 1000 * longest["order"]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=12_500)
    found = measure(parser.parse_args().nodes)
    return report("longest-handling", found)


if __name__ == "__main__":
    raise SystemExit(main())
