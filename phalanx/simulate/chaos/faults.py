"""Gray faults: what goes wrong halfway, and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.cluster.jobs.measured import reports_steps
from phalanx.cluster.protocol.events import Corruption
from phalanx.cluster.protocol.messages import Heartbeat, NodeNotice
from phalanx.simulate.chaos.network import CONTROLLER
from phalanx.simulate.chaos.people import SimulatedOperators
from phalanx.simulate.chaos.site import MINUTE, SECOND
from phalanx.simulate.scenario.chaos_faults import KINDS

if TYPE_CHECKING:
    from phalanx.simulate.chaos.host import SimulatedHost
    from phalanx.simulate.chaos.world import ChaosWorld

NOTICED = 20 * SECOND  # a cut link breaks its connection after this long

# What a worker may die of: from outside, of a part, of its storage, and of its own.
CRASHES = (
    "worker_killed",
    "nccl_timeout",
    "software_bug",
    "xid",
    "keeper_lost",
    "storage",
    "user_error",
)


class ChaosInjector:
    """Draws faults and their times, and ends them."""

    def __init__(self, world: ChaosWorld) -> None:
        self.world = world
        self.luck = world.draws.stream("faults")
        self.counts: dict[str, int] = {}
        self.until_ns = int(world.part.fault_minutes * MINUTE)
        self.people = SimulatedOperators(world, self.luck)
        # Orders about the site are given on busy sites alone, and beside the faults.
        self._kinds = world.part.kinds or tuple(kind for kind in KINDS if kind != "site_order")

    def plan(self) -> None:
        """Puts all faults of the seed on the agenda."""
        mean = self.world.part.faults
        time = 0.0
        number = 0
        each = self.world.draws.stream("fault")
        while mean > 0:
            time += self.luck.exponential(self.until_ns / mean)
            if time >= self.until_ns:
                break
            kind = each.at(number).choice(self._kinds)
            self.world.agenda.at(int(time), self.inject, kind)
            number += 1

    def plan_orders(self) -> None:
        """On a busy site people give orders all the while."""
        luck = self.world.draws.stream("orders")
        for _ in range(3 + luck.below(8)):
            self.world.agenda.at(luck.below(self.until_ns), self.inject, "site_order")

    def inject(self, fault: str) -> None:
        """Makes one fault happen."""
        self.counts[fault] = self.counts.get(fault, 0) + 1
        self.world.story.say(self.world.agenda.now_ns, f"FAULT {fault}")
        getattr(self, f"_{fault}")()

    # Machines.

    def _host(self) -> SimulatedHost:
        return self.luck.choice(self.world.hosts)

    def _busy(self) -> SimulatedHost:
        """A node that runs something, if there is one."""
        busy = [host for host in self.world.hosts if host.alive and host.workers]
        return self.luck.choice(busy or self.world.hosts)

    def _later(self, least: int, most: int, call: Callable[..., None], *args: object) -> None:
        delay = SECOND * (least + self.luck.below(most - least + 1))
        self.world.agenda.after(delay, call, *args)

    def _node_crash(self) -> None:
        host = self._busy()
        host.crash()
        self._later(20, 240, host.boot)

    def _rack_loss(self) -> None:
        first = self._host().node // 2 * 2
        for host in self.world.hosts[first : first + 2]:
            host.crash()
            self._later(30, 300, host.boot)

    def _agent_restart(self) -> None:
        host = self._busy()
        host.kill_agent()
        self._later(1, 40, host.start_agent)

    def _worker_crash(self) -> None:
        host = self._busy()
        cause = self.luck.choice(CRASHES)
        for worker in list(host.workers.values()):
            if host.alive and worker.ranks:
                host.die(worker, cause)
                return

    def _gpu_error(self) -> None:
        host = self._busy()
        host.broken = self.luck.choice(("gpu_fault", "hbm_ecc", "nvlink", "xid"))
        for worker in list(host.workers.values()):
            if host.alive and worker.ranks:
                host.die(worker, host.broken)

    def _device_error(self) -> None:
        causes = ("xid", "thermal", "ssd", "hbm_ecc", "filesystem_mount", "pcie")
        self._busy().fault(self.luck.choice(causes))

    def _rail_loss(self) -> None:
        self._busy().fault("nic", rail=self.luck.below(2))

    def _lying_check(self) -> None:
        host = self._busy()
        host.lying = True
        self._gpu_error_on(host)

    def _gpu_error_on(self, host: SimulatedHost) -> None:
        host.broken = "gpu_fault"
        for worker in list(host.workers.values()):
            if host.alive and worker.ranks:
                host.die(worker, host.broken)
        self._later(60, 300, self._repair, host)

    def _repair(self, host: SimulatedHost) -> None:
        host.broken, host.lying = "", False

    def _slow_node(self) -> None:
        host = self._host()
        host.slow = 1.5 + 3 * self.luck.uniform()
        self.world.network.slow[host.node] = SECOND * (1 + self.luck.below(4))
        self._later(30, 300, self._fast, host)

    def _fast(self, host: SimulatedHost) -> None:
        host.slow = 1.0
        self.world.network.slow.pop(host.node, None)

    def _frozen_node(self) -> None:
        host = self._busy()
        host.frozen = True
        for worker in host.workers.values():
            self.world.workers.hang(worker.job)
        self._later(30, 200, self._thaw, host)

    def _thaw(self, host: SimulatedHost) -> None:
        host.frozen = False

    def _spare_dies(self) -> None:
        """Makes a node fail, and the one that replaces it as well."""
        known = dict(self.world.forms)
        self._node_crash()
        self.world.agenda.after(2 * SECOND, self._kill_incoming, known, 120)

    def _kill_incoming(self, starts: dict[tuple[int, int], object], tries: int) -> None:
        for (job, generation), form in self.world.forms.items():
            before = [f for (j, g), f in starts.items() if j == job and g < generation]
            if (job, generation) in starts or not before:
                continue
            old = {node for one in before for node in getattr(one, "nodes", ())}
            incoming = [node for node in form.nodes if node not in old]
            if incoming:
                host = self.world.hosts[self.luck.choice(incoming)]
                host.crash()
                self._later(30, 200, host.boot)
                return
        if tries:
            self.world.agenda.after(SECOND, self._kill_incoming, starts, tries - 1)

    def _hang(self) -> None:
        """Of a program that has told of no step nobody can know: the core judges none such."""
        known = self.world.leader.core.view.jobs
        running = [gang.form.job for gang in self.world.workers.gangs.values() if gang.running]
        jobs = [job for job in running if job in known and reports_steps(known[job])]
        if jobs:
            self.world.workers.hang(self.luck.choice(jobs))

    def _clock_jump(self) -> None:
        skew = self.world.part.skew_seconds
        self._host().skew_ns = round((2 * self.luck.uniform() - 1) * skew * SECOND)

    # Links.

    def _partition(self) -> None:
        node = self._busy().node
        self._cut(node, (node, CONTROLLER), (CONTROLLER, node), least=5, most=240)

    def _peer_link(self) -> None:
        one, other = self._busy().node, self._busy().node
        if one != other:
            self.world.network.cut(one, other)
            self._later(5, 240, self.world.network.mend, one, other)

    def _deaf(self) -> None:
        node = self._busy().node
        self._cut(node, (CONTROLLER, node), least=5, most=180)

    def _mute(self) -> None:
        node = self._busy().node
        self._cut(node, (node, CONTROLLER), least=5, most=180)

    def _flapping_link(self) -> None:
        node = self._busy().node
        for number in range(2 + self.luck.below(5)):
            delay = SECOND * number * (4 + self.luck.below(30))
            self.world.agenda.after(delay, self._flap, node)

    def _flap(self, node: int) -> None:
        if self.world.agenda.now_ns < self.until_ns:
            self._cut(node, (node, CONTROLLER), (CONTROLLER, node), least=1, most=25)

    def _cut(self, node: int, *ways: tuple[int, int], least: int, most: int) -> None:
        for source, target in ways:
            self.world.network.cut(source, target)
            self._later(least, most, self.world.network.mend, source, target)
        self.world.agenda.after(NOTICED, self._break, node)

    def _break(self, node: int) -> None:
        """Keep-alives of the connection have failed: both ends see it, each in its own time."""
        if self.world.network.open(node):
            return
        host = self.world.hosts[node]
        controller, connection = host.controller, host.connection
        host.disconnect()
        if controller is not None:
            controller.broke(node, connection)

    def _message_storm(self) -> None:
        self.world.network.storm = 10.0
        self._later(20, 90, self._calm)

    def _calm(self) -> None:
        self.world.network.storm = 1.0

    def _stale_heartbeat(self) -> None:
        host = self._host()
        old = Heartbeat(node=host.node, incarnation=host.incarnation - 1)
        leader = self.world.leader
        connection = leader.connections.get(host.node, 0)
        self._later(1, 30, leader.receive, host.node, connection, old)

    # Storage.

    def _storage_down(self) -> None:
        self.world.remote.down = True
        self._later(20, 240, self._storage_up)

    def _storage_up(self) -> None:
        self.world.remote.down = False

    def _lost_checkpoint(self) -> None:
        for job, steps in self.world.remote.steps.items():
            if steps:
                self.world.remote.rotten[job, max(steps)] = None

    def _corruption(self) -> None:
        """Fingerprints of replicas disagree since some steps."""
        view = self.world.leader.core.view
        for number in view.active:
            job = view.jobs[number]
            if job.gang is None or job.gang.phase != "running" or job.placement is None:
                continue
            culprits = (self.luck.choice(job.placement.nodes),) if self.luck.chance(0.7) else ()
            clean = max(0, job.step - 1 - self.luck.below(12))
            fact = Corruption(
                job=number,
                generation=job.generation,
                step=clean + 1,
                clean_step=clean,
                nodes=culprits,
                claims=() if culprits else self._claims(job.placement.nodes),
            )
            self.world.leader.tell(fact)
            return

    def _claims(self, nodes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """What two replicas say of a step: they may agree by now, or insist."""
        return tuple((node, self.luck.below(2)) for node in (nodes[0], nodes[-1]))

    # Controllers and people.

    def _controller_crash(self) -> None:
        leader = self.world.leader
        leader.crash_in = self.luck.below(6)
        leader.crash_where = self.luck.below(3)

    def _controller_stall(self) -> None:
        self.world.leader.stall(SECOND * (2 + self.luck.below(60)))

    def _failover(self) -> None:
        self.world.take_over()

    def _people(self) -> None:
        self.people.about_nodes_and_gangs()

    def _drain_by(self) -> None:
        self.people.wants_empty(self._busy().node)

    def _maintenance(self) -> None:
        host, at_ns = self._busy(), self.world.agenda.now_ns + SECOND * (5 + self.luck.below(400))
        self.world.leader.tell(NodeNotice(node=host.node, deadline_ns=at_ns))
        self.world.agenda.at(at_ns, self._taken_away, host)
        self.people.readmit_at(host.node, at_ns)

    def _taken_away(self, host: SimulatedHost) -> None:
        if self.world.agenda.now_ns < self.until_ns:
            host.crash()
            self._later(20, 240, host.boot)

    def _site_order(self) -> None:
        self.people.about_the_site()
