"""The chaos world: a small fleet, its controllers, its network, and what is true about all jobs."""

from __future__ import annotations

import traceback

from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.gang.losses import LossNotice
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.job_relations import Dependency
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, JobState
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.protocol.commands import Command, Form, Go, Notify
from phalanx.cluster.protocol.events import (
    Cancel,
    Corruption,
    Event,
    JobFinished,
    LossSpike,
    NodeRepaired,
    Submit,
)
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.recovery.own_failures import GivenUp
from phalanx.simulate.chaos.controller import SimulatedController
from phalanx.simulate.chaos.host import SimulatedHost
from phalanx.simulate.chaos.lineage import Lineage
from phalanx.simulate.chaos.network import SimulatedNetwork
from phalanx.simulate.chaos.site import (
    LAB,
    MINUTE,
    NODE_GPUS,
    SECOND,
    PlannedJob,
    as_program,
    busy_jobs,
    busy_queue,
    lab_nodes,
    lab_rules,
    make_fleet,
    make_policy,
    to_the_lab,
    usual_jobs,
)
from phalanx.simulate.chaos.stores import LogStore, SimulatedStorage
from phalanx.simulate.chaos.workers import Workers
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.rules.invariants import Invariants
from phalanx.simulate.rules.site_rules import members
from phalanx.simulate.scenario.scenario import ChaosPart
from phalanx.simulate.story import Story
from phalanx.simulate.world.agenda import Agenda
from phalanx.simulate.world.seed_counts import SeedCounts

SWEEP_EVENTS = 40
REPLAY_EVENTS = 120
CONTACT_EVENTS = 10
LEADERSHIP = 30 * SECOND  # a leader looks so often whether it still is one
FAREWELL = 5 * SECOND  # a controller waits so long for the other side to close
OWN_FAILURES = (GivenUp.SAME_STEP, GivenUp.SAME_ERROR, GivenUp.RETRIES)
HANGS = 3  # of a job without progress that the core takes for the job's own
MOST_CALLS = 400_000  # a seed that needs more is going round in circles


class ChaosWorld:
    """One seed."""

    def __init__(self, part: ChaosPart, seed: int, loud: bool = False) -> None:
        self.part = part
        draws = SeedDraws(seed)
        self.draws = draws
        self.luck = draws.stream("world")
        self.agenda = Agenda()
        self.story = Story(loud)
        self.network = SimulatedNetwork(self.agenda, draws.stream("network"), part)
        self.remote = SimulatedStorage()
        self.forms: dict[tuple[int, int], Form] = {}
        self.rolled_back: dict[int, None] = {}  # jobs that the core takes back behind some step
        self.connections = 0
        self.events = 0
        self.record = SeedCounts()
        shape = draws.stream("shape")
        count = max(2, part.nodes - shape.below(part.nodes // 2 + 1))
        site = draws.stream("site")
        self.busy = site.chance(part.busy)
        stream = draws.stream("partitions")
        lab = lab_nodes(count) if self.busy and stream.chance(part.partitioned) else 0
        partitions = {LAB: lab_rules(stream)} if lab else {}
        queue = busy_queue(count * NODE_GPUS, partitions) if self.busy else QueuePolicy()
        self.policy = make_policy(shape.below(2), draws, queue)
        core = Core(make_fleet(count, lab), self.policy)
        self.checks = Invariants(core, SWEEP_EVENTS, REPLAY_EVENTS)
        self.complain = self.checks.add
        self.lineage = Lineage(self.complain)
        self.store = LogStore(core)
        self.leader = SimulatedController(self, core, 1)
        self.workers = Workers(self)
        usual = usual_jobs(shape, part, count)
        queued = busy_jobs(site, usual, count) if self.busy else [PlannedJob(s) for s in usual]
        if lab:
            queued = [to_the_lab(stream, wanted, partitions[LAB], lab) for wanted in queued]
        programs = draws.stream("programs")
        self.wanted = [as_program(programs, wanted, part.programs) for wanted in queued]
        self.ends = draws.stream("ends")  # of processes
        self.cancelled: dict[int, None] = {}  # jobs that somebody cancelled
        limits = derive(self.policy.timeouts, usual[0].expected)
        self.program_lease_ns = limits.program_lease_ns
        beat = self.policy.timeouts.heartbeat_ns
        self.hosts = [SimulatedHost(self, node, limits.lease_ns, beat) for node in range(count)]
        for host in self.hosts:
            host.skew_ns = round((draws.stream("skew", host.node).uniform() - 0.5) * 2e9)

    # Beginning and end.

    def start(self) -> None:
        """Agents connect, people submit."""
        self.leader.start()
        for host in self.hosts:
            host.connect()
        for number in range(len(self.wanted)):
            self.agenda.after(number * 20 * SECOND, self._submit, number)
        self.agenda.after(MINUTE, self._technician)

    def _submit(self, number: int) -> None:
        """Asks until the job is there: the controller may be gone, or a job that it waits for."""
        if number in (accepted := self._accepted()):
            return
        wanted = self.wanted[number]
        if self.leader.answers and all(other in accepted for _, other in wanted.after):
            after = tuple(Dependency(kind, accepted[other]) for kind, other in wanted.after)
            spec = structs.replace(wanted.spec, after=after, payload=str(number))
            self.leader.tell(Submit(spec=spec, request=spec.name))
        self.agenda.after(5 * SECOND, self._submit, number)

    def _accepted(self) -> dict[int, int]:
        """Submissions that the core knows, with their (first) jobs."""
        jobs = self.leader.core.view.jobs.values()
        return {int(job.spec.payload): job.array_parent or job.id for job in jobs}

    def spec(self, job: int) -> JobSpec:
        """What was submitted."""
        return self.leader.core.view.jobs[job].spec

    def heal(self) -> None:
        """Faults stop: links and storage work, machines boot. The rest is the core's business."""
        self.network.mend_all()
        self.remote.down = False
        for host in self.hosts:
            host.slow, host.frozen, host.lying = 1.0, False, False
            host.boot()
            host.start_agent()
            if host.controller is None:
                host.connect()

    def settled(self) -> bool:
        """Whether every job has ended."""
        jobs = self.leader.core.view.jobs.values()
        return len(jobs) >= self.jobs and all(job.ended for job in jobs)

    @property
    def jobs(self) -> int:
        """Jobs that all submissions become."""
        return sum(wanted.jobs for wanted in self.wanted)

    def judge(self) -> None:
        """After the quiet time: every job must have been done."""
        self.checks.sweep()
        if self.leader.answers:
            self.leader.contact.check(self.agenda.now_ns)
        if self.checks.core is self.leader.core:
            self.checks.replay()
        view = self.leader.core.view
        if len(view.jobs) < self.jobs:
            self.complain("liveness", f"{len(view.jobs)} of {self.jobs} jobs were accepted")
        for job in view.jobs.values():
            if not job.ended:
                phase = job.gang.phase if job.gang else "no gang"
                told = f"job {job.id} is {job.state} ({phase}) at step {job.step}: {job.why}"
                self.complain("liveness", told)
            elif job.state != JobState.DONE and not self._may_end(job):
                self.complain("liveness", f"job {job.id} {job.state} at step {job.step}: {job.why}")

    def cancels(self, job: ClusterJob) -> None:
        """Somebody cancels a job that can never start, as the core says."""
        if not self._can_never(job):
            self.complain("dependency", f"job {job.id} is said to wait for ever: {job.why}")
        self.leader.tell(Cancel(job=job.id))

    def _can_never(self, job: ClusterJob) -> bool:
        """Whether something that must succeed first did not, or cannot."""
        jobs = self.leader.core.view.jobs
        return any(
            jobs[number].state in (JobState.FAILED, JobState.CANCELLED) or jobs[number].never
            for dependency in job.spec.after
            if dependency.kind == "afterok"
            for number in members(jobs, dependency.job)
        )

    def _may_end(self, job: ClusterJob) -> bool:
        """Whether a job had a reason to end before it was done."""
        if job.state == JobState.CANCELLED and job.id in self.cancelled:
            return True
        if GivenUp.of(job.why) in OWN_FAILURES:  # as it seems, where faults happen to repeat
            return self.workers.hangs.get(job.id, 0) >= HANGS
        match LeaveCause.of(job.why):
            case LeaveCause.TIME_LIMIT:
                return bool(job.spec.time_limit_ns) and not job.spec.requeue_at_limit
            case LeaveCause.BUDGET:
                return bool(job.budget_gpu_seconds) and not job.forced
        return False

    # Controllers.

    def stored(self, event: Event) -> None:
        """The log has an event: it holds, even if the controller dies before it acts on it."""
        if isinstance(event.body, Corruption | LossSpike):
            self.rolled_back[event.body.job] = None
        if isinstance(event.body, Cancel):
            self.cancelled[event.body.job] = None

    def handled(self, controller: SimulatedController, event: Event) -> list[Command]:
        """The core takes in an event, under the eyes of all invariants."""
        self.events += 1
        body = event.body
        try:
            commands = controller.core.handle(event)
        except Exception:
            self.complain("crash", traceback.format_exc(limit=-3).replace("\n", " | "))
            raise
        self.story.write(event, commands)
        if self.events % CONTACT_EVENTS == 0:
            controller.contact.check(self.agenda.now_ns)
        self.record.ordered(event, commands, controller.core.view)
        self.checks.after(event, commands)
        jobs = controller.core.view.jobs
        for number, since_ns in list(self.lineage.heard_ns.items()):
            if jobs[number].placement is None or jobs[number].queued_ns > since_ns:  # and is back
                self.lineage.forget(number)
        for order in (each.body for each in commands if isinstance(each.body, Go)):
            # A gang may also be found ready by a controller that takes over.
            if self.lineage.heard.get(order.job) != order.generation:
                self._goes_on(jobs[order.job], gang_of(jobs[order.job]).restored, commands)
        if isinstance(body, JobFinished):
            ended = jobs.get(body.job)
            if ended and ended.state == JobState.DONE and ended.ended_ns == event.time_ns:
                self.lineage.finished(body.job, ended.spec.expected.steps)
        return commands

    def _goes_on(self, job: ClusterJob, step: int, commands: list[Command]) -> None:
        """The core lets a generation go on: a committed step is lost only with both copies."""
        lineage = self.lineage
        committed, made = lineage.committed.get(job.id, 0), lineage.heard.get(job.id, 0)
        assert job.placement is not None
        lost = step < committed and job.id not in self.rolled_back
        if lost and self.in_memory(job.id, committed, job.placement.nodes, made) is not None:
            told = f"job {job.id} went back to step {step}, but step {committed} is in memory"
            self.complain("committed", told)
        self._says(job, step, committed, commands)
        self.rolled_back.pop(job.id, None)
        lineage.hear(job.id, job.generation, step, gang_of(job).since_ns)

    def _says(self, job: ClusterJob, step: int, committed: int, commands: list[Command]) -> None:
        """Committed steps that a job lost are said: all that a node of it still knows of."""
        notices = [each.body for each in commands if isinstance(each.body, Notify)]
        given_up = [
            int(each.reason.facts["last"])
            for each in notices  # also of other jobs that the event lets go on
            if each.job == job.id and LossNotice.of(each.reason) is LossNotice.MADE_AGAIN
        ]
        ready_ns = gang_of(job).since_ns
        if not given_up and ready_ns < self.leader.core.view.now_ns:  # who wrote it down has died
            given_up = [loss.last for loss in job.losses if loss.at_ns == ready_ns]
        lost = step < committed and job.id not in self.rolled_back
        if lost and self._witnessed(job) and max(given_up, default=0) < committed:
            silent = f"job {job.id} lost steps {step + 1} to {committed}, and says {given_up}"
            self.complain("losses", silent)
        # Ranks may be one step apart, and more where a keeper was late: who holds a step and cannot
        # know of the others' tells of it.
        most = max(committed + 1, self._newest_held(job))
        if job.id in self.lineage.committed and max(given_up, default=0) > most:
            told = f"job {job.id} reports as lost {given_up}, and had committed {committed}"
            self.complain("losses", told)

    def _witnessed(self, job: ClusterJob) -> bool:
        """Whether a node of a job knows what its last generation had committed."""
        assert job.placement is not None
        made = self.lineage.heard.get(job.id, 0)
        agents = [self.hosts[n].agent for n in job.placement.nodes if self.hosts[n].alive]
        memories = [agent.memory.get(job.id) for agent in agents if agent is not None]
        return any(kept is not None and kept.kept_generation == made for kept in memories)

    def _newest_held(self, job: ClusterJob) -> int:
        """The newest step of a job's last generation in the memory of any node."""
        made = self.lineage.heard.get(job.id, 0)
        steps = (
            step
            for host in self.hosts
            for (generation, _, _), held in host.memory.get(job.id, {}).items()
            if generation == made
            for step in held
        )
        return max(steps, default=0)

    def controller_gone(self, controller: SimulatedController) -> None:
        """A controller's process ended: its connections break, and another one takes over."""
        self.story.say(self.agenda.now_ns, f"controller {controller.epoch} is gone")
        for host in self.hosts:
            if host.controller is controller:
                delay = SECOND * self.luck.below(4)
                self.agenda.after(delay, self._broken, host, host.connection)
        if controller is self.leader:
            self.agenda.after(SECOND * (1 + self.luck.below(30)), self.take_over)

    def _broken(self, host: SimulatedHost, connection: int) -> None:
        if host.connection == connection:
            host.disconnect()

    def take_over(self) -> None:
        """Another controller starts from the log, whether the last one knows or not."""
        old = self.leader
        epoch = self.store.take_over()
        core = self.store.rebuild()
        if core.sequence == old.core.sequence and core.snapshot() != old.core.snapshot():
            self.complain("replay", "the controller that took over has another state")
        self.story.say(self.agenda.now_ns, f"controller {epoch} takes over")
        self.checks.watch(core)
        self.leader = SimulatedController(self, core, epoch)
        self.leader.start()
        self.agenda.after(LEADERSHIP, old.die)  # if it has not tried to store anything before

    def hang_up(self, controller: SimulatedController, node: int, connection: int) -> None:
        """A controller closes a connection: the node sees it in its own time, then it is over."""
        near = self.network.open(node)
        delay = SECOND * self.luck.below(2) if near else SECOND * (1 + self.luck.below(20))
        self.agenda.after(delay, self._broken, self.hosts[node], connection)
        self.agenda.after(min(delay, FAREWELL), controller.broke, node, connection)

    def reset(self, controller: SimulatedController, node: int, connection: int) -> None:
        """A node spoke on a connection that the controller does not have, or not yet."""
        self.agenda.after(SECOND, self._unknown, controller, node, connection)

    def _unknown(self, controller: SimulatedController, node: int, connection: int) -> None:
        if controller.connections.get(node) != connection:
            self._broken(self.hosts[node], connection)

    def _technician(self) -> None:
        """Nodes that the core put away are repaired and offered again."""
        self.agenda.after(MINUTE, self._technician)
        fleet = self.leader.core.view.fleet
        for host in self.hosts:
            out = fleet.state(host.node) in (NodeState.QUARANTINED, NodeState.DEAD)
            if out and host.alive and host.controller is not None:
                host.broken = ""
                self.leader.tell(NodeRepaired(node=host.node))

    # Snapshots.

    def restore_ns(self, source: str) -> int:
        """How long a restore takes."""
        seconds = {"none": 1, "peer": 2, "disk": 4, "remote": 8}[source]
        return seconds * SECOND + self.luck.below(2000) * 10**6

    def branch_of(
        self, host: SimulatedHost, job: int, generation: int, step: int, source: str
    ) -> int | None:
        """The branch of a step that a node reads from a source; None: it is not there."""
        if source == "none" or step == 0:
            return 0
        if source == "remote":
            return self.remote.branch(job, step)
        if source == "disk":
            return host.disk.get(job, {}).get(step)
        return self.in_memory(job, step, tuple(range(len(self.hosts))))

    def in_memory(self, job: int, step: int, nodes: tuple[int, ...], made: int = 0) -> int | None:
        """The branch of a step of which every slot is in the memory of some living nodes.

        ``made``: only snapshots of this generation count; 0: of any.
        """
        if step == 0:
            return 0
        by_generation: dict[int, dict[int, int]] = {}  # generation: slot: branch
        for node in nodes:
            host = self.hosts[node]
            if not host.alive:
                continue
            for (generation, _, slot), steps in host.memory.get(job, {}).items():
                if step in steps and made in (0, generation):
                    by_generation.setdefault(generation, {})[slot] = steps[step]
        for generation in sorted(by_generation, reverse=True):
            form = self.forms.get((job, generation))
            whole = form is not None and len(by_generation[generation]) == len(form.nodes)
            branches = set(by_generation[generation].values())
            if whole and len(branches) == 1:
                return branches.pop()
        return None
