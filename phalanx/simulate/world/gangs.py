"""Gangs in the world: they answer the core's orders once a phase."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from msgspec import structs

from phalanx.cluster.causes import Cause
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.jobs.measured import shared_step_ns
from phalanx.cluster.protocol import commands as order
from phalanx.cluster.protocol import events as fact
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.timeouts import derive
from phalanx.plan.cost.failures import best_interval, mtbf_seconds
from phalanx.simulate.scenario.shape import ns
from phalanx.simulate.scenario.workload import USER_ERROR
from phalanx.simulate.world.fault_injector import FaultInjector
from phalanx.simulate.world.runs import Brownouts, GangRun

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World

REPORTS = 2000  # of each gang over the whole time, at most
LEAST_REPORT_NS = 300 * 10**9
MOST_REPORT_NS = 3600 * 10**9


class Gangs:
    """Every gang that has been formed and not stopped."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs: dict[int, GangRun] = {}
        self.memory: dict[int, int] = {}  # by job: step in the memory of its nodes
        self.durable: dict[int, int] = {}
        self.saved: dict[int, list[int]] = {}  # by job: durable steps that the core was told of
        self.clean: dict[int, int] = {}  # by job: last step before numbers that were found wrong
        self.wiped: dict[int, dict[int, None]] = {}  # by job: nodes that lost their memory
        self.living: dict[int, dict[int, None]] = {}  # by job: nodes with started workers
        self.brownouts = Brownouts()
        self.faults = FaultInjector(world, self)
        self._had: dict[int, tuple[int, ...]] = {}  # by job: nodes that keep a standby process
        self._down_since: dict[int, int] = {}
        self._since: dict[int, int] = {}  # by job: when it got its nodes
        scenario = world.scenario
        self._luck = world.draws.stream("phase")
        self._flush_ns = ns(scenario.checkpoint.flush_seconds)
        self._replicate_ns = ns(scenario.checkpoint.replicate_seconds)
        self.report_ns = min(max(world.end_ns // REPORTS, LEAST_REPORT_NS), MOST_REPORT_NS)

    # Orders.

    def on_form(self, body: order.Form, command: Command) -> None:
        """A new generation: living workers rejoin, missing ones start."""
        old = self.runs.get(body.job)
        if old is not None and old.generation >= body.generation:
            self._again(old, body, command)
            return
        if old is not None:
            self._finish_with(old)
        self._since.setdefault(body.job, self.world.agenda.now_ns)
        job = self.world.view.jobs[body.job]
        run = GangRun(
            job=body.job,
            generation=body.generation,
            nodes=body.nodes,
            expected=job.spec.expected,
            full_ns=shared_step_ns(job.spec, job.placement.replicas if job.placement else 0),
            shares=body.micro_batches,
            formed_ns=self.world.agenda.now_ns,
        )
        self.runs[body.job] = run
        self._join(run, body, again=False)

    def _again(self, run: GangRun, body: order.Form, command: Command) -> None:
        """A generation that is known: nodes are asked once more, or spares start their workers."""
        if run.generation != body.generation:
            return
        if run.phase == "joining":
            self._join(run, body, again=True)
            return
        delay = ns(self.world.scenario.restart.start_seconds)
        self.world.agenda.after(delay, self._warm, run.job, command.target)

    def _warm(self, job: int, nodes: tuple[int, ...]) -> None:
        fleet = self.world.fleet
        waiting = [node for node in nodes if fleet.spare_for(node) == job]
        self.living.get(job, {}).update(dict.fromkeys(waiting))

    def _join(self, run: GangRun, body: order.Form, *, again: bool) -> None:
        blockers = self.faults.blockers(run)
        if blockers:
            self.faults.blocked(run, "join", blockers, body.deadline_ns)
            return
        if again and run.token:
            run.token += 1
        restart = self.world.scenario.restart
        seconds = restart.rejoin_seconds
        missing = set(run.nodes).difference(self.living.get(run.job, ()))
        if missing:
            stands_by = missing.issubset(self._had.get(run.job, ()))
            quick = restart.standby_seconds if stands_by else None
            seconds = max(seconds, restart.start_seconds if quick is None else quick)
        delay = ns((restart.seconds or seconds) * self._spread(run.job, run.generation, 0))
        living = self.living.get(run.job, {})
        self._had[run.job] = (*run.nodes, *(node for node in body.spares if node in living))
        self.living[run.job] = dict.fromkeys(self._had[run.job])
        self.world.agenda.after(ns(restart.start_seconds), self._warm, run.job, body.spares)
        self.world.agenda.after(delay, self._joined, run, run.token)

    def _joined(self, run: GangRun, token: int) -> None:
        known = run.token == token and self.runs.get(run.job) is run
        if not known or self.world.program_faults.fail_start(run):
            return
        run.phase = "joined"
        step = self.memory.get(run.job, -1) if run.expected.snapshot_steps else -1
        durable, clean = self.durable.get(run.job, 0), self.clean.get(run.job)
        joined = fact.GangJoined(
            job=run.job,
            generation=run.generation,
            step=step,
            empty=tuple(self.wiped.get(run.job, ())),
            # What became durable too late to be reported is found on the storage.
            durable=0 if clean is not None and durable > clean else durable,
        )
        self.world.tell(joined)

    def on_restore(self, body: order.Restore, command: Command) -> None:
        """Everybody loads a step, but a spare that is told of it."""
        run = self.runs.get(body.job)
        known = run is not None and run.generation == body.generation
        if run is None or not known or run.phase == "running" or command.target[0] not in run.nodes:
            return
        self.world.checks.restores(body)
        run.phase = "restoring"
        run.token += 1
        blockers = self.faults.blockers(run)
        if blockers:
            self.faults.blocked(run, "restore", blockers, body.deadline_ns)
            return
        restart, now = self.world.scenario.restart, self.world.agenda.now_ns
        seconds = {
            "none": 0.0,
            "peer": restart.restore_peer_seconds,
            "disk": restart.restore_disk_seconds,
            "remote": restart.restore_remote_seconds,
        }[body.source] + restart.form_seconds
        delay = ns((0.0 if restart.seconds else seconds) * self._spread(run.job, run.generation, 1))
        if body.source == "remote":
            delay = self.brownouts.end_ns(now, delay) - now
        self.world.agenda.after(delay, self._ready, run, run.token, body.step)

    def _ready(self, run: GangRun, token: int, step: int) -> None:
        if run.token != token or self.runs.get(run.job) is not run:
            return
        run.phase = "running"
        run.base = run.reported = run.stalls_reported = run.memory = step
        run.base_ns = self.world.agenda.now_ns
        run.factor_ppm = self.world.slow.pace_ppm(run)
        down = self._down_since.pop(run.job, None)
        if down is not None:
            self.world.record.recovered(run.base_ns - down)
        self.memory[run.job] = step
        self.durable[run.job] = min(self.durable.get(run.job, 0), step)
        saved = self.saved.get(run.job, [])
        del saved[bisect_right(saved, step) :]  # a branch that is given up
        self.clean.pop(run.job, None)
        self.wiped[run.job] = {}
        self.world.tell(fact.GangReady(job=run.job, generation=run.generation, step=step))
        self._go_on(run)
        self.world.slow.watch(run)
        self.world.program_faults.watch(run)
        for node, incident in self.world.broken.items():
            if incident.symptom == "corruption" and run.job in self.world.fleet.held[node]:
                self.faults.corrupts(run, node)

    def _go_on(self, run: GangRun) -> None:
        """Plans what will happen if nothing goes wrong."""
        agenda = self.world.agenda
        for node, step in run.corrupted.items():
            if step <= (run.last or step):
                agenda.at(run.done_ns(step), self.faults.compared, run, run.token, node, step)
        if run.last:
            written = run.done_ns(run.last) + run.expected.checkpoint_ns
            done = self.brownouts.end_ns(written, self._flush_ns)
            agenda.at(done, self._drained, run, run.token, run.last)
            return
        agenda.after(self.report_ns, self._report_later, run, run.token)
        if run.expected.steps:
            agenda.at(run.done_ns(run.expected.steps), self._finished, run, run.token)
        payload = self.world.view.jobs[run.job].spec.payload
        if payload.startswith(USER_ERROR):
            step = max(run.base + 1, int(payload.removeprefix(USER_ERROR)))
            agenda.at(run.done_ns(step), self._user_error, run, run.token)

    def on_abort(self, body: order.Abort, command: Command) -> None:
        """Workers leave the collective."""
        run = self.runs.get(body.job)
        if run is not None and run.generation == body.generation:
            self.stop_steps(run)
        if body.answer_ns:
            self.faults.asked(body, command.target)

    def on_drain(self, body: order.Drain, command: Command) -> None:
        """The step is finished, a checkpoint is made, and the gang has left."""
        run, now = self.runs.get(body.job), self.world.agenda.now_ns
        if run is None or run.generation != body.generation or run.phase != "running":
            return
        self.report(run)  # it may be made to leave before it has saved, and is heard no more
        run.last = run.last or run.step(now) + 1
        run.token += 1
        self._go_on(run)

    def _drained(self, run: GangRun, token: int, step: int) -> None:
        if run.token != token or self.runs.get(run.job) is not run:
            return
        self.report(run)
        run.stopped_ns = self.world.agenda.now_ns
        run.phase = "stopped"
        self._save(run.job, step)
        self.world.tell(fact.GangDrained(job=run.job, generation=run.generation, step=step))

    def on_stop(self, body: order.Stop, command: Command) -> None:
        """Workers end; what they kept in memory ends with them unless it is still needed."""
        run = self.runs.get(body.job)
        living = self.living.get(body.job, {})
        for node in command.target:
            living.pop(node, None)
        if run is None or run.generation > body.generation:
            return
        known = self.world.view.jobs.get(body.job)
        left = known is None or known.placement is None  # though its nodes may keep its memory
        if left or (not body.keep_snapshots and set(run.nodes) <= set(command.target)):
            self._finish_with(run)
            self._leave(body.job, keeps=body.keep_snapshots)

    def _leave(self, job: int, *, keeps: bool = False) -> None:
        """A job has no nodes any more; they may keep its memory."""
        for table in (self.runs, self.living, self._had):
            table.pop(job, None)
        placed_job, now = self.world.view.jobs.get(job), self.world.agenda.now_ns
        over = placed_job is None or placed_job.ended
        for kept_by in (self.memory, self.wiped) if over or not keeps else ():
            kept_by.pop(job, None)
        if placed_job is not None:
            account = self.world.core.ledger.accounts.get(job)
            kept = account.reached if account is not None else 0
            self.world.record.left(placed_job, now - self._since.pop(job, now), kept)
        if over:
            self.durable.pop(job, None)
            self.saved.pop(job, None)

    def on_rebalance(self, body: order.Rebalance, command: Command) -> None:
        """A slow replica has less to do, and the others more."""
        run = self.runs.get(body.job)
        if run is not None and run.phase == "running" and body.micro_batches:
            run.shares = body.micro_batches
            self.change_pace(run, self.world.agenda.now_ns, self.world.slow.pace_ppm(run))

    def on_failure_rate(self, body: order.FailureRate, command: Command) -> None:
        """How often the fleet fails; once this event is over, checkpoints may go by it."""
        run = self.runs.get(body.job)
        if run is not None and self.world.scenario.checkpoint.follows_failures:
            self.world.agenda.after(0, self._save_at_best, run, body.per_million_node_days)

    def _save_at_best(self, run: GangRun, per_million_node_days: int) -> None:
        """From now on checkpoints are made at the best interval for a rate of failures."""
        if self.runs.get(run.job) is not run or run.phase != "running" or run.last:
            return
        gpus = sum(self.world.fleet.nodes[node].gpus for node in run.nodes)
        between = mtbf_seconds(gpus, per_million_node_days / 1000)
        seconds = best_interval(between, run.expected.checkpoint_ns / 1e9)
        every = max(1, round(seconds * 1e9 / run.full_ns))
        if every != run.expected.checkpoint_steps:
            self.report(run)
            run.rebase(self.world.agenda.now_ns, run.factor_ppm, self._replicate_ns)
            run.expected = structs.replace(run.expected, checkpoint_steps=every)
            run.token += 1
            self._go_on(run)

    def change_pace(self, run: GangRun, now_ns: int, factor_ppm: int) -> None:
        """A running gang goes on faster or slower."""
        if run.last and run.step(now_ns) >= run.last:
            return  # it makes no more steps
        if factor_ppm != run.factor_ppm:
            self.report(run)
            run.rebase(now_ns, factor_ppm, self._replicate_ns)
            run.token += 1
            self._go_on(run)

    # Faults.

    def stop_steps(self, run: GangRun) -> None:
        """No more steps from now on."""
        if run.phase == "running":
            run.phase = "stopped"
            run.stopped_ns = self.world.agenda.now_ns
            run.token += 1
            self._down_since[run.job] = run.stopped_ns

    # Reports and ends.

    def report(self, run: GangRun, most: int | None = None) -> None:
        """Tells the core how far a gang is, if that is news; of checkpoints only up to ``most``."""
        now = self.world.agenda.now_ns
        durable = self._durable(run, now, most)
        progress = run.report(now, run.committed(now, self._replicate_ns), durable)
        if progress is not None:
            self._save(run.job, durable)
            self.world.tell(progress)

    def _save(self, job: int, step: int) -> None:
        """A checkpoint is durable, and the core is told so."""
        self.durable[job] = step
        saved = self.saved.setdefault(job, [])
        if step > (saved[-1] if saved else 0):
            saved.append(step)

    def _durable(self, run: GangRun, now_ns: int, most: int | None = None) -> int:
        before = self.durable.get(run.job, 0)
        if run.phase not in ("running", "stopped"):
            return before
        return run.durable(now_ns, self._flush_ns, self.brownouts, before, most)

    def _report_later(self, run: GangRun, token: int) -> None:
        if run.token == token and self.runs.get(run.job) is run and run.phase == "running":
            self.report(run)
            self.world.agenda.after(self.report_ns, self._report_later, run, token)

    def report_of(self, nodes: list[int]) -> None:
        """Tells the core about the gangs on some nodes."""
        for job in self.world.jobs_on(nodes):
            run = self.runs.get(job)
            if run is not None and run.phase in ("running", "stopped"):
                self.report(run)

    def report_all(self) -> None:
        """Tells the core about every gang, at the end."""
        for run in list(self.runs.values()):
            if run.phase in ("running", "stopped"):
                self.report(run)

    def close(self) -> None:
        """The end of time: everything is counted up to now, and whatever still runs."""
        self.world.tell(fact.Tick())
        self.report_all()
        for job in list(self._since):
            self._leave(job)

    def _finish_with(self, run: GangRun) -> None:
        """A generation is over: what it reached is told and kept."""
        self.stop_steps(run)
        if run.phase == "stopped":
            now = self.world.agenda.now_ns
            self.memory[run.job] = run.committed(now, self._replicate_ns)
            self.durable[run.job] = self._durable(run, now)
            self.report(run)

    def _finished(self, run: GangRun, token: int) -> None:
        if run.token != token or self.runs.get(run.job) is not run or run.phase != "running":
            return
        self.report(run)
        done = fact.JobFinished(job=run.job, generation=run.generation, step=run.expected.steps)
        self.world.tell(done)
        self._leave(run.job)

    def _user_error(self, run: GangRun, token: int) -> None:
        if run.token == token and self.runs.get(run.job) is run and run.phase == "running":
            self.stop_steps(run)
            self.report(run)
            self.living.get(run.job, {}).pop(run.nodes[0], None)
            self.faults.exit(run, run.nodes[0], Cause.USER_ERROR)

    # Questions of the rest of the world.

    def gpus(self, job: int) -> int:
        """GPUs that a job works on."""
        known: ClusterJob = self.world.view.jobs[job]
        return known.spec.gang.gpus(known.placement.replicas if known.placement else 0)

    def hang_ns(self, jobs: list[int]) -> int:
        """How long a gang may be without a step."""
        waits = [0]
        for job in jobs:
            expected, run = self.world.view.jobs[job].spec.expected, self.runs.get(job)
            step_ns = expected.step_ns if run is None else run.full_ns
            limits = derive(self.world.view.policy.timeouts, expected, step_ns)
            waits.append(limits.hang_ns)
        return max(waits)

    def _spread(self, job: int, generation: int, phase: int) -> float:
        """Luck of one phase: the slowest node is now faster, now slower."""
        sigma = self.world.scenario.restart.spread
        if not sigma:
            return 1.0
        return self._luck.at(job << 24 ^ generation << 1 ^ phase).factor(sigma)
