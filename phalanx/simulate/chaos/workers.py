"""Workers of gangs on simulated nodes: they start, restore, make steps together, and die."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from phalanx.cluster.protocol.commands import Form

if TYPE_CHECKING:
    from phalanx.simulate.chaos.host import SimulatedHost
    from phalanx.simulate.chaos.world import ChaosWorld

SECOND = 10**9
ASK_AGAIN = 20 * SECOND  # for leave to write
KEPT = {"own": 3, "ward": 2}  # snapshots of a slot that a keeper holds, its own or another's


class NodeWorkers(Struct, kw_only=True):
    """The processes of one job on one node."""

    job: int
    generation: int
    ranks: tuple[int, ...]
    phase: str = "starting"  # starting, up, restoring, ready, running, out
    token: int = 0
    step: int = 0
    branch: int = -1  # that it restored
    saves: str = ""  # where from, if it is only to write it and leave


class Collective(Struct, kw_only=True):
    """The ranks of one generation that make steps together."""

    form: Form
    ready: dict[int, tuple[int, int]] = {}  # node: (step, branch) that it restored
    draining: dict[int, None] = {}
    unwritten: tuple[int, int] | None = None  # (step, branch) that waits for leave to be written
    granted: dict[int, None] = {}  # nodes that have it
    step: int = 0
    broken: bool = False
    running: bool = False
    hung: bool = False

    @property
    def culprit(self) -> int:
        """The node with the rank that the others wait for when the gang hangs."""
        return self.form.nodes[self.step % len(self.form.nodes)]


class Workers:
    """All gangs' collectives."""

    def __init__(self, world: ChaosWorld) -> None:
        self.world = world
        self.gangs: dict[tuple[int, int], Collective] = {}
        self.hangs: dict[int, int] = {}  # by job: how often faults made it hang

    def restored(self, host: SimulatedHost, worker: NodeWorkers, step: int, branch: int) -> None:
        """A node of a gang was told to go on from a step; when all were, steps begin."""
        key = (worker.job, worker.generation)
        form = self.world.forms.get(key)
        if form is None:
            return
        gang = self.gangs.setdefault(key, Collective(form=form))
        gang.ready[host.node] = (step, branch)
        if gang.broken or gang.running or any(node not in gang.ready for node in form.nodes):
            return
        if len({gang.ready[node] for node in form.nodes}) > 1:
            self.world.complain("exactly_once", f"job {worker.job}: ranks restored different steps")
        gang.running = True
        gang.step = step
        if self.world.lineage.begin(worker.job, worker.generation, step, branch):
            self.world.remote.fence(worker.job, worker.generation)
            self.world.remote.cut_after(worker.job, step)
        self._drop_older(form)
        if worker.saves == "peer":
            self.world.agenda.after(self._flush_ns(), self._drained, gang, step, branch)
        elif worker.saves:
            self._leave(gang, step)  # it came from where it would be written to
        elif step >= self.world.spec(worker.job).expected.steps:
            self._leave(gang, step)  # all was done when the last generation ended
        else:
            self._next(gang)

    def _drop_older(self, form: Form) -> None:
        for host in self.world.hosts:
            kept = host.memory.get(form.job, {})
            for key in [key for key in kept if key[0] < form.generation]:
                del kept[key]

    def _next(self, gang: Collective) -> None:
        spec = self.world.spec(gang.form.job)
        slow = max(self.world.hosts[node].slow for node in gang.form.nodes)
        self.world.agenda.after(int(spec.expected.step_ns * slow), self._made, gang)

    def _made(self, gang: Collective) -> None:
        """All ranks have made the next step."""
        if gang.broken or gang.hung or self._parted(gang):
            return
        form = gang.form
        gang.step += 1
        branch = self.world.lineage.step(form.job, form.generation, gang.step)
        nodes = list(form.nodes)
        # Ranks may be one step apart: sometimes the seals of some come later than those of others.
        if len(nodes) > 1 and self.world.luck.chance(0.15):
            cut = 1 + self.world.luck.below(len(nodes) - 1)
            self._seal(gang, gang.step, branch, nodes[:cut])
            late = SECOND * (1 + self.world.luck.below(3)) // 2
            self.world.agenda.after(late, self._seal_rest, gang, gang.step, branch, nodes[cut:])
            return
        self._seal(gang, gang.step, branch, nodes)
        self._sealed_by_all(gang, branch)

    def _seal_rest(self, gang: Collective, step: int, branch: int, nodes: list[int]) -> None:
        if not gang.broken:
            self._seal(gang, step, branch, nodes)
            self._sealed_by_all(gang, branch)

    def _seal(self, gang: Collective, step: int, branch: int, nodes: list[int]) -> None:
        form = gang.form
        count, shift = len(form.nodes), form.buddy_shift
        for node in nodes:
            host = self.world.hosts[node]
            worker = host.workers.get(form.job)
            if not host.alive or worker is None or worker.generation != form.generation:
                continue
            slot = form.nodes.index(node)
            host.keep(form, "own", slot, step, branch)
            buddy = self.world.hosts[form.nodes[(slot + shift) % count]]
            acknowledged = buddy.alive
            if shift and buddy.alive:
                buddy.keep(form, "ward", slot, step, branch)
                buddy.ward_sealed(form, step)
            elif form.backup >= 0:
                self.world.hosts[form.backup].back_up(form, step, branch)
            worker.step = step
            host.sealed(worker, step, acknowledged)

    def _sealed_by_all(self, gang: Collective, branch: int) -> None:
        form, step = gang.form, gang.step
        # An agent that is down has not heard of the seal, so it is not committed for the core.
        if all(self.world.hosts[node].knows(form, step) for node in form.nodes):
            self.world.lineage.commit(form.job, form.generation, step)
        spec = self.world.spec(form.job)
        every = spec.expected.checkpoint_steps
        if step >= spec.expected.steps:
            self._leave(gang, step)
        elif gang.draining and all(node in gang.draining for node in form.nodes):
            delay = self._flush_ns()
            self.world.agenda.after(delay, self._drained, gang, step, branch)
        else:
            if every and step % every == 0:
                self._checkpoint(gang, step, branch)
            self._next(gang)

    def _checkpoint(self, gang: Collective, step: int, branch: int) -> None:
        """A checkpoint is due: written at once, or when the core says so."""
        if not self.world.policy.storage.flushes:
            self.world.agenda.after(self._flush_ns(), self._flushed, gang, step, branch)
            return
        asked = gang.unwritten is not None
        gang.unwritten = (step, branch)  # a newer one takes the turn of one that still waits
        if not asked:
            self._ask(gang)

    def _ask(self, gang: Collective) -> None:
        """Some rank asks, and asks again until there is an answer: messages get lost."""
        if gang.unwritten is None or gang.broken:
            return
        self.world.hosts[gang.form.nodes[0]].wants_flush(gang.form)
        self.world.agenda.after(ASK_AGAIN, self._ask, gang)

    def granted(self, job: int, generation: int, node: int) -> None:
        """A node's ranks may write; when all may, they do."""
        gang = self.gangs.get((job, generation))
        if gang is None or gang.unwritten is None:
            return
        gang.granted[node] = None
        if all(each in gang.granted for each in gang.form.nodes):
            (step, branch), gang.unwritten, gang.granted = gang.unwritten, None, {}
            self.world.agenda.after(self._flush_ns(), self._flushed, gang, step, branch)

    def _flush_ns(self) -> int:
        return SECOND * (3 + self.world.luck.below(8))

    def _flushed(self, gang: Collective, step: int, branch: int) -> None:
        self._commit(gang, step, branch)

    def _commit(self, gang: Collective, step: int, branch: int) -> bool:
        """Whether remote storage accepted a checkpoint."""
        form = gang.form
        history = self.world.lineage.history.get(form.job, [])
        current = step <= len(history) and history[step - 1] == branch
        if not self.world.remote.commit(form.job, form.generation, step, branch):
            return False
        if current:
            self.world.lineage.durable(form.job, form.generation, step, branch)
        else:
            self.world.complain("two_generations", f"job {form.job}: step {step} was given up")
        for node in form.nodes:
            host = self.world.hosts[node]
            if host.alive:
                host.disk.setdefault(form.job, {})[step] = branch
                host.durable[form.job] = step
        return True

    def _drained(self, gang: Collective, step: int, branch: int) -> None:
        if gang.broken:
            return
        if not self._commit(gang, step, branch):  # storage is down: try until the deadline
            self.world.agenda.after(5 * SECOND, self._drained, gang, step, branch)
            return
        for node in gang.form.nodes:
            worker = self.world.hosts[node].workers.get(gang.form.job)
            if worker is not None and worker.generation == gang.form.generation:
                self.world.hosts[node].sealed(worker, step, True)
        self._leave(gang, step)

    def _leave(self, gang: Collective, step: int) -> None:
        """All workers end as they should."""
        gang.broken = True
        for node in gang.form.nodes:
            self.world.hosts[node].left(gang.form.job, gang.form.generation, step)

    def drain(self, host: SimulatedHost, worker: NodeWorkers) -> None:
        """A node's workers are asked to leave after the step."""
        gang = self.gangs.get((worker.job, worker.generation))
        if gang is not None:
            gang.draining[host.node] = None

    def leave(self, job: int, generation: int, node: int) -> None:
        """A node's workers no longer take part: the others cannot go on."""
        gang = self.gangs.get((job, generation))
        if gang is None or gang.broken:
            return
        gang.broken = True
        for other in gang.form.nodes:
            if other != node and self.world.luck.chance(0.5):
                delay = SECOND * (1 + self.world.luck.below(5))
                host = self.world.hosts[other]
                self.world.agenda.after(delay, host.lost_peer, job, generation)

    def _parted(self, gang: Collective) -> bool:
        """Whether two nodes of a gang cannot reach each other; both say so in their own time."""
        pair = self.world.network.parted(gang.form.nodes)
        if pair is None:
            return False
        gang.broken = True
        for node in pair:
            delay = SECOND * (1 + self.world.luck.below(5))
            host = self.world.hosts[node]
            self.world.agenda.after(delay, host.lost_peer, gang.form.job, gang.form.generation)
        return True

    def entered(self, host: SimulatedHost, worker: NodeWorkers) -> dict[int, int]:
        """By rank: twice the step that it has completed, one more where it waits for others.

        In a gang that hangs, one rank has not come as far as the others.
        """
        gang = self.gangs.get((worker.job, worker.generation))
        hung = gang is not None and gang.hung
        entered = dict.fromkeys(worker.ranks, 2 * worker.step + hung)
        if gang is not None and hung and worker.ranks and host.node == gang.culprit:
            entered[worker.ranks[0]] -= 1
        return entered

    def hang(self, job: int) -> bool:
        """A running gang stops making steps, and nobody says why."""
        for gang in self.gangs.values():
            if gang.form.job == job and gang.running and not gang.broken and not gang.hung:
                gang.hung = True
                self.hangs[job] = self.hangs.get(job, 0) + 1
                return True
        return False
