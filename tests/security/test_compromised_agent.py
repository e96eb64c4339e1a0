"""An agent in the wrong hands, with everything that its node has, says whatever can be said.

It may wreck the jobs that run on its own node. Jobs of others, their nodes and the server go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Struct, structs

from phalanx.cluster.node import Node
from phalanx.cluster.protocol import messages as m
from phalanx.cluster.protocol.keeper_state import KeptSteps
from phalanx.control.trust.acceptance_signature import sign_certificate
from phalanx.control.trust.node_key import NodeKey
from phalanx.control.wire import agent_messages as wire
from phalanx.control.wire.shell_messages import ShellOutput
from phalanx.doctor.acceptance.certificate import make_certificate
from phalanx.doctor.acceptance.report import AcceptanceReport
from phalanx.doctor.setup import NodeSetup
from phalanx.hardware.probe import Fact, NodeDescription
from phalanx.observe.node.node_messages import NodeRecords, RunRecord
from phalanx.observe.node.node_sample import NodeSample
from phalanx.train.report.records import CheckpointRecord
from tests.control.servers import WORK, PlayedAgent, ServerProcess

FAR = 1 << 40  # a step that nobody has reached
Lie = Callable[[int, int, int], list[Struct]]  # of a node, about a job and its generation


def _inventory(job: int, generation: int) -> m.Inventory:
    holding = m.Holding(job, generation, "aborted", FAR, FAR)
    return m.Inventory(incarnation=1 << 30, jobs=(holding,), snapshots=((job, FAR),))


def _records(node: int, job: int, generation: int) -> NodeRecords:
    saved = CheckpointRecord(job="x", generation=generation, step=FAR, path="/evil", seconds=1.0)
    return NodeRecords(
        node=node,
        job=job,
        generation=generation,
        ranks=(0, 1),
        steps=(7,),
        times_ns=(0,),
        step_seconds=b"\0" * 8,
        compute_seconds=b"\0" * 8,
        parts=b"",
        other=(saved,),
        run=RunRecord(generation=generation, provenance='{"evil": true}', folder="/evil"),
    )


def _gang(kind: type[Struct], **more: Any) -> Lie:
    return lambda n, j, g: [kind(node=n, job=j, generation=g, **more)]


def _forged() -> bytes:
    """A certificate of another node, well signed by this one's key."""
    report = AcceptanceReport(
        node="honest-a",
        began_ns=0,
        seconds=1.0,
        wanted_seconds=1.0,
        loads=[],
        gpus=[],
        findings=[],
    )
    setup = NodeSetup(versions={}, settings={})
    made = make_certificate(report, NodeDescription(), setup, "")
    return msgspec.json.encode(sign_certificate(made, NodeKey(bytes(range(32)))))


FORGED = _forged()
# Every message that an agent may send, turned against a job that does not run on its node.
LIES: dict[type, Lie] = {
    m.Heartbeat: lambda n, j, g: [m.Heartbeat(node=n, incarnation=0)],
    m.NodeSeen: lambda n, j, g: [m.NodeSeen(node=n, inventory=_inventory(j, g))],
    m.Applied: lambda n, j, g: [m.Applied(node=n, sequence=s, index=0) for s in range(60)],
    m.Joined: _gang(m.Joined, kept=KeptSteps((FAR,)), reached=FAR, reached_ns=1, durable=FAR),
    m.LastSteps: _gang(m.LastSteps, committed=0, reached=FAR, durable=FAR),
    m.Ready: _gang(m.Ready, step=FAR, skipped=(0, FAR)),
    m.Drained: _gang(m.Drained, step=0),
    m.FlushWanted: lambda n, j, g: [m.FlushWanted(job=j, generation=g)],
    m.Finished: _gang(m.Finished, step=FAR),
    m.WorkerExited: lambda n, j, g: [
        m.WorkerExited(node=n, job=j, generation=g, rank=rank, cause=cause, step=FAR)
        for rank in (0, 3)
        for cause in ("lost_peer", "segfault", "user_error")
    ],
    m.RestoreFailed: lambda n, j, g: [
        m.RestoreFailed(node=n, job=j, generation=g, source=source, step=step, there=())
        for source in ("peer", "disk", "remote")
        for step in (0, 5)
    ],
    m.Steps: _gang(m.Steps, step=FAR, committed=FAR, durable=FAR, at_ns=FAR),
    m.StepsPrinted: _gang(m.StepsPrinted, step=FAR, steps=FAR, at_ns=FAR),
    m.ProgramEnded: _gang(m.ProgramEnded),
    m.Activity: _gang(m.Activity, cpu_ns=0, output_bytes=0, reports_steps=True),
    m.Busy: _gang(m.Busy, step=FAR, what="validation"),
    m.ReplicasDiffer: lambda n, j, g: [
        m.ReplicasDiffer(
            node=n,
            job=j,
            generation=g,
            step=2,
            clean_step=0,
            world=4,
            copies=((0, 1), (2, 2)),
            changed=changed,
        )
        for changed in ((0, 1), (2, 3), (1 << 40, -7), ())
    ],
    m.DeviceError: lambda n, j, g: [
        m.DeviceError(node=n, cause="segfault", job=j, detail="x" * 2000)
    ],
    m.NodeNotice: lambda n, j, g: [m.NodeNotice(node=n, deadline_ns=time.time_ns())],
    m.CheckResult: lambda n, j, g: [m.CheckResult(node=n, check="quick", passed=False, command=1)],
    m.KeeperSilent: lambda n, j, g: [
        m.KeeperSilent(node=n, job=j, state="replaced", seconds=9_999)
    ],
    wire.OrderRefused: lambda n, j, g: [wire.OrderRefused(node=n, problem="x" * 2000)],
    m.Seen: lambda n, j, g: [
        m.Seen(node=n, job=j, generation=g, ranks={0: 0, 1: 0, 99: 5}, folder="/evil")
    ],
    wire.Described: lambda n, j, g: [
        wire.Described(
            node=n,
            described=Node(name=name, gpus=63, leaf="evil", domain=domain),
            description=NodeDescription(facts=(Fact("leaf", "x" * size, "evil"),)),
        )
        for name, domain, size in (
            ("evil", "", 1),
            ("honest-a", "", 1),
            ("evil", "", 999),
            ("evil", "x" * 999, 1),
        )
    ],
    wire.SetUp: lambda n, j, g: [
        wire.SetUp(node=n, versions={"torch": "evil"}, settings=settings)
        for settings in ({"os.thp": "x" * 2000}, {str(i): "" for i in range(999)}, {})
    ],
    wire.AcceptanceNews: lambda n, j, g: [
        wire.AcceptanceNews(node=n, request=g, certificate=data, text="x" * 9999, end=True)
        for data in (b"", b"{}", FORGED, b"x" * (5 << 20))
    ],
    wire.LogPart: lambda n, j, g: [wire.LogPart(request=r, data=b"evil") for r in range(20)],
    ShellOutput: lambda n, j, g: [ShellOutput(request=r, data=b"evil") for r in range(20)],
    NodeRecords: lambda n, j, g: [_records(n, j, g)],
    NodeSample: lambda n, j, g: [
        NodeSample(node=n, time_ns=-1, host={"evil": float("nan")}, gpus={"evil": (1.0,) * 3})
    ],
}
# What these say of themselves takes their own node out: told last.
OWN_END = (m.NodeNotice, m.CheckResult, m.DeviceError, wire.Described)


def test_every_message_of_an_agent_is_played() -> None:
    assert set(LIES) | {wire.Register} == set(get_args(wire.Up))


async def joined(server: ServerProcess, *names: str, partition: str) -> list[PlayedAgent]:
    join = (server.state / "join.token").read_text().strip()
    made = [PlayedAgent([server.url], join, name, partition=partition) for name in names]
    for agent in made:
        agent.steps_until = 1 << 40
        agent.task = asyncio.create_task(agent.run())  # type: ignore[attr-defined]
    for agent in made:
        await agent.connected.wait()
    return made


async def running(server: ServerProcess, partition: str) -> int:
    spec = {"name": partition, "partition": partition, "gang": {"replicas": 4, "slot_gpus": 2}}
    done = await asyncio.to_thread(server.call, "POST", "/v1/jobs", {"spec": spec, "work": WORK})
    job = int(done[1]["jobs"][0])
    path = f"/v1/jobs/{job}"
    await asyncio.to_thread(server.wait_for, path, lambda a: a["job"]["state"] == "running")
    return job


async def get(server: ServerProcess, path: str) -> Any:
    return (await asyncio.to_thread(server.call, "GET", path))[1]


async def state_of(server: ServerProcess, job: int, nodes: list[PlayedAgent]) -> dict[str, Any]:
    """What must not change about somebody else's job."""
    found = (await get(server, f"/v1/jobs/{job}"))["job"]
    names = [agent.node.name for agent in nodes]
    states = [(await get(server, f"/v1/nodes/{name}"))["node"]["state"] for name in names]
    return {
        "state": found["state"],
        "generation": found["generation"],
        "nodes": found["nodes"],
        "healthy": states,
        "connections": [agent.times for agent in nodes],
    }


async def told_of(server: ServerProcess, job: int) -> set[str]:
    events = (await get(server, f"/v1/events?job={job}&limit=1000"))["events"]
    return {each["kind"] for each in events}


async def say(liar: PlayedAgent, said: list[Struct]) -> None:
    """Whatever the server does about it, the next lie finds a connection."""
    for message in said:
        async with asyncio.timeout(20):
            await liar.connected.wait()
        await liar._send(message)


@pytest.mark.timeout(180)
def test_a_compromised_agent_harms_only_the_jobs_that_it_runs(server: ServerProcess) -> None:
    async def scenario() -> None:
        (evil,) = await joined(server, "evil", partition="evil")
        honest = await joined(server, "honest-a", "honest-b", partition="honest")
        job = await running(server, "honest")
        before = await state_of(server, job, honest)
        assert evil.agent is not None
        number, generation = evil.agent.node, before["generation"]
        order = sorted(LIES, key=lambda kind: kind in OWN_END)
        for kind in order:
            for told in (generation, generation + 1, generation - 1, 0):
                await say(evil, LIES[kind](number, job, told))
            await say(evil, LIES[kind](number, 4_711, generation))  # there is no such job
            assert await state_of(server, job, honest) == before, kind
        await asyncio.sleep(6.0)  # what would be decided by a deadline is decided by now
        assert await state_of(server, job, honest) == before
        kinds = await told_of(server, job)
        assert not kinds & {"WorkerExited", "RestoreFailed", "Corruption", "FlushWanted"}
        assert not kinds & {"KeeperSilent", "GangStopped", "JobFinished", "GangDrained"}
        assert (await get(server, "/v1/nodes/honest-a/acceptance"))["certificate"] is None
        assert (await get(server, "/v1/nodes/evil/acceptance"))["certificate"] is None
        shown = (await get(server, f"/v1/jobs/{job}"))["job"]
        assert shown["step"] < FAR and shown.get("durable", 0) < FAR
        counted = [
            line
            for line in (await get(server, "/metrics")).splitlines()
            if line.startswith("phalanx_agent_messages_refused_total")
        ]
        assert any("not_a_member" in line and not line.endswith(" 0") for line in counted)
        assert "evil said what it may not" in server.output()
        assert server.output().count("evil said what it may not") < 4
        for agent in (evil, *honest):
            agent.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())


@pytest.mark.timeout(120)
def test_it_cannot_have_its_peers_taken_out_of_the_fleet(server: ServerProcess) -> None:
    async def scenario() -> None:
        evil, peer = await joined(server, "evil-2", "peer-2", partition="mixed")
        job = await running(server, "mixed")
        found = (await get(server, f"/v1/jobs/{job}"))["job"]
        assert evil.agent is not None
        ranks = (0, 1) if found["nodes"][0] == "peer-2" else (2, 3)
        lie = LIES[m.ReplicasDiffer](evil.agent.node, job, found["generation"])[0]
        await say(evil, [m.ReplicasDiffer(**{**_fields(lie), "changed": ranks})])
        path = f"/v1/jobs/{job}"
        await asyncio.to_thread(
            server.wait_for, path, lambda a: a["job"]["generation"] > found["generation"]
        )
        assert (await get(server, "/v1/nodes/peer-2"))["node"]["state"] == "healthy"
        for agent in (evil, peer):
            agent.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def _fields(message: Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.timeout(120)
def test_a_flood_of_true_words_fills_no_log(server: ServerProcess) -> None:
    async def scenario() -> None:
        (evil,) = await joined(server, "evil-3", partition="flood")
        assert evil.agent is not None
        before = (await get(server, "/v1/status"))["sequence"]
        trouble = m.DeviceError(node=evil.agent.node, cause="ecc_corrected")
        large = m.NodeSeen(
            node=evil.agent.node,
            inventory=m.Inventory(
                jobs=tuple(m.Holding(n, 1, "running", 0, 0) for n in range(9999))
            ),
        )
        for _ in range(20_000):
            await evil._send(trouble)
        await evil._send(large)
        after = (await get(server, "/v1/status"))["sequence"]
        assert after - before < 4_000
        assert evil.connected.is_set()
        evil.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())


@pytest.mark.parametrize("word", [m.Heartbeat, m.WorkerExited, NodeSample])
def test_it_cannot_speak_in_the_name_of_another_node(server: ServerProcess, word: type) -> None:
    async def scenario() -> None:
        evil, other = await joined(server, f"evil-{word.__name__}", "other", partition="names")
        assert other.agent is not None
        await say(evil, LIES[word](other.agent.node, 1, 1)[:1])
        while not evil.rejected:
            await asyncio.sleep(0.02)
        assert evil.rejected[0].code == "wrong_node"
        assert other.connected.is_set() and other.times == 1
        for agent in (evil, other):
            agent.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())


@pytest.mark.timeout(120)
def test_a_node_that_is_somewhere_else_all_the_time_fills_no_log(server: ServerProcess) -> None:
    async def scenario() -> None:
        (evil,) = await joined(server, "evil-4", partition="moves")
        assert evil.agent is not None
        before = (await get(server, "/v1/status"))["sequence"]
        for number in range(500):
            moved = structs.replace(evil.node, leaf=f"leaf-{number}")
            said = NodeDescription(facts=(Fact("leaf", moved.leaf, "lldp"),))
            await evil._send(
                wire.Described(node=evil.agent.node, described=moved, description=said)
            )
        shown = await get(server, "/v1/nodes/evil-4")
        assert (await get(server, "/v1/status"))["sequence"] - before < 100
        assert shown["node"]["state"] == "healthy" and evil.connected.is_set()
        evil.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())
