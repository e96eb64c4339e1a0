"""Causes and what the core decides about each: it is asked, by playing each on a small fleet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from docs.generator.markdown import code, prose, table
from phalanx.cluster.causes import CAUSES, Cause
from phalanx.cluster.protocol.commands import Command, Form, Rebalance, Stop
from phalanx.cluster.protocol.events import Event
from phalanx.cluster.protocol.messages import DeviceError
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.scenario.load import scenario_of
from phalanx.simulate.scenario.workload import submissions
from phalanx.simulate.world.incidents import Incident
from phalanx.simulate.world.world import World

HIT, AT_NS = 3, 600 * 10**9
NODE = {"keep": "is fine", "suspect": "is tested before it gets work", "replace": "leaves the gang"}
OWNER = {"user": "the job", "software": "software", "hardware": "a part"}


def lines() -> list[str]:
    """A row for each cause."""
    rows = [
        (
            code(cause.value),
            prose(cause.what),
            OWNER[cause.domain],
            NODE[cause.node],
            decided(cause, spares=1),
            decided(cause, spares=0),
            "yes" if cause.blames_job else "no",
        )
        for cause in CAUSES.values()
    ]
    head = (
        "cause",
        "what it is",
        "whose",
        "the node",
        "with a spare",
        "without",
        "counts against the job",
    )
    return [
        *table(head, rows),
        "",
        "What is decided depends on more than the cause: on prices in GPU time of every way out, "
        "on what the node did before, on the policy. The table shows the first failure of a job "
        "of eight nodes whose state is in the memory of its nodes, at ten minutes, under the "
        "default policy. `in_place`: the same nodes form again; `swap`: another node takes the "
        "place; `requeue`: the job leaves and waits for nodes; "
        "goes on: nothing stops; ranks that are slow are judged by what they cost and may be "
        "swapped ([a story](../stories/slow-steps.md)). How prices are made: "
        "[recovery](../concepts/recovery.md); what counts against a job: "
        "[how a failure is judged](../concepts/failures.md).",
    ]


@cache
def decided(cause: Cause, spares: int) -> str:
    """What the core does about the first failure of a cause."""
    fleet = {"gpus": 64, "spare_nodes": spares}
    table_ = {"days": 0.01, "fleet": fleet, "faults": {"per_1000_node_days": 0}}
    world = World(scenario_of(table_), 0)
    found: list[str] = []

    def heard(event: Event, commands: Sequence[Command]) -> None:
        if event.time_ns < AT_NS:
            return
        for command in commands:
            rung = command.body.reason.facts.get("rung")
            if isinstance(command.body, Form | Rebalance | Stop) and rung:
                found.append(str(rung))

    world.listeners.append(heard)
    world.agenda.at(AT_NS, _break, world, cause)
    world.run(submissions(world.scenario, SeedDraws(0)).jobs)
    job = world.view.jobs[1]
    if not found and job.ended:
        return f"the job is {job.state}"
    if not found and job.placement is None:
        return code("requeue")
    return code(found[0]) if found else "goes on"


def _break(world: World, cause: Cause) -> None:
    if cause.effect == "goes_on":
        world.tell(DeviceError(node=HIT, cause=cause.value))
        return
    incident = Incident(
        number=0,
        time_ns=AT_NS,
        cause=cause.value,
        symptom="exit",
        nodes=(HIT,),
        repair_ns=0,
        quantile=0.5,
    )
    world.gangs.faults.apply(1, incident, [HIT])
    world.gangs.faults.announce(1, incident, [HIT], 0)
