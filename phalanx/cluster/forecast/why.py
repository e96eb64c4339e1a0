"""Why a job waits, in one sentence, and when it will probably start."""

from __future__ import annotations

from phalanx.cluster.forecast.estimate import Estimates
from phalanx.cluster.forecast.queue_position import Obstacle, Way, no_capacity
from phalanx.cluster.forecast.when import Unknown, UnknownStart, When
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.queue.claims import on_loan, stays_until_ns
from phalanx.cluster.queue.decisions import Pending
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.queue.pending import base_parts
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.reasons import Fact, Reason, about, reason, span_of
from phalanx.cluster.state import View

OVERTAKEN = "others may still go before it"


def explain(queue: Queue, view: View, job: int) -> Pending:
    """What a pending job waits for, and until when. Asking changes nothing that is logged."""
    return explainer(queue, view).of(job)


def explainer(queue: Queue, view: View) -> WaitExplainer:
    """What pending jobs wait for, to ask about many; good until the next event."""
    return WaitExplainer(queue.copy_to_ask(view), view)


class WaitExplainer:
    """Why pending jobs wait, asked at one moment: what one answer needs serves the next."""

    def __init__(self, index: QueueIndex, view: View) -> None:
        self._index, self._view = index, view
        self._estimates = Estimates(index, view)

    def of(self, number: int) -> Pending:
        """What a pending job waits for, when it may start, and the parts of its priority."""
        job = self._view.jobs[number]
        if job.state != JobState.PENDING:
            return Pending(job.why, None, {})
        parts = self._parts(job)
        if job.never:
            return Pending(job.why, None, parts, str(job.why))
        when = self._estimates.if_released(number)
        why = self._why(job, when)
        if job.held:
            return Pending(why, None, parts, "a person holds it")
        if isinstance(when, UnknownStart):
            unknown = str(when.why) if when.job == job.id else self._blame(when)
            return Pending(why, None, parts, unknown)
        return Pending(why, max(when, self._view.now_ns), parts)

    def _parts(self, job: ClusterJob) -> dict[str, int]:
        """The parts of a job's priority; one that is not in the queue has no age."""
        queue, position = self._estimates.queue, self._estimates.queue.position(job)
        age, fair, quota = queue.ranks.parts(
            position.lane, position.queued_ns, position.demand.gpus
        )
        parts = base_parts(self._view.policy.queue, job)
        return parts | {"age": age, "fair_share": fair, "quota": quota}

    def _why(self, job: ClusterJob, when: When) -> Reason:
        """What keeps a job: of several things the first that must change."""
        until_ns = self._view.fabric_checks.waits.get(job.id, 0)
        if until_ns > self._view.now_ns:
            shape, left_ns = job.spec.gang, until_ns - self._view.now_ns
            nodes = shape.slots(job.wanted_replicas)
            return reason("fabric_check_first", nodes=nodes, span=span_of(left_ns))
        rest = self._estimates.queue.promise(job.id)
        if rest is not None and rest.waits:
            obstacle = self._estimates.queue.obstacle(job)
            if obstacle.way is Way.NO_ROOM:
                span, nodes = span_of(rest.start_ns - self._view.now_ns), len(rest.nodes)
                return reason("waits_for_rest", problem=obstacle.problem, nodes=nodes, span=span)
        if isinstance(when, UnknownStart) and _is_its_own(when, job):
            return when.why  # not even a person who holds it can let it start
        if job.held:
            then = ""
            if not isinstance(when, UnknownStart):
                span = about(when - self._view.now_ns)
                then = f" (released now, it would start in {span})"
            return reason("held_open", then=then)
        if isinstance(when, UnknownStart):
            for what, saver in self._estimates.queue.savers(job):
                if saver == when.job:
                    return self._saved("saved_open", what, saver, blame=self._blame(when))
        if self._estimates.queue.has(job.id):
            return self._in_line(job, when)
        blame = self._blame(when) if isinstance(when, UnknownStart) else ""
        if job.waiting_for:
            return self._dependency(job, when, blame)
        before = self._estimates.before_in_array(job)
        if before is None:
            return job.why
        width = job.spec.array_width
        if blame:
            return reason("array_open", width=width, blame=blame)
        return reason("array_turn", width=width, ahead=before)

    def _dependency(self, job: ClusterJob, when: When, blame: str) -> Reason:
        facts = {"count": len(job.waiting_for), "job": next(iter(job.waiting_for))}
        if not isinstance(when, UnknownStart):
            return reason("dependency", **facts)
        if self._view.jobs[when.job].never:
            return reason("dependency_stuck", job=when.job)
        return reason("dependency_open", **facts, blame=blame)

    def _blame(self, unknown: UnknownStart) -> str:
        """Which other job keeps one from an estimate."""
        if unknown.because is Unknown.HELD:
            return f"a person holds job {unknown.job}"
        if unknown.because is Unknown.NEVER or self._view.jobs[unknown.job].never:
            return f"job {unknown.job} can never start"
        if unknown.because is Unknown.RUNS_ON:
            return f"nobody can say when job {unknown.job} ends: {unknown.why}"
        return f"nobody can say when job {unknown.job} starts"

    def _in_line(self, job: ClusterJob, when: When) -> Reason:
        """Why a job of the queue does not start; ``when`` it will, it says as the estimate does."""
        view, queue = self._view, self._estimates.queue
        position = queue.position(job)
        gate = self._index.limits.gate(view, position.lane, position.demand.least_gpus)
        if gate is not None:
            return gate.reason
        for what, saver in queue.savers(job):
            return self._saved("saved_for", what, saver)
        obstacle = queue.obstacle(job)
        way = obstacle.way
        if way is Way.NO_ROOM and queue.ranks.entitled(position.lane.team, position.demand.gpus):
            obstacle = self._with_borrowers(position.lane.team, obstacle)
        promise = queue.promise(job.id)
        if promise is None or way is Way.NOTHING or isinstance(when, UnknownStart):
            return obstacle.why
        span = about(when - view.now_ns)
        if promise.asked:
            return reason("others_leave", jobs=len(promise.asked), span=span)
        if way is not Way.NO_ROOM:
            return obstacle.why
        count = len(promise.nodes)
        kept = f"{count} are" if count > 1 else "a node is"
        facts: dict[str, Fact] = {
            "problem": obstacle.problem,
            "nodes": count,
            "kept": kept,
            "span": span,
        }
        if not promise.sure:
            return reason(
                "promised_about", **facts, doubt="a job that runs there has no time limit"
            )
        if not queue.is_next(job):
            return reason("promised_about", **facts, doubt=OVERTAKEN)
        latest = span_of(promise.start_ns - view.now_ns)
        return reason("promised", **{**facts, "span": latest})

    def _saved(self, code: str, what: str, saver: int, **facts: str) -> Reason:
        """What is saved for a job that starves."""
        job = self._view.jobs[saver]
        span = span_of(job.waited_ns + self._view.now_ns - job.queued_ns)
        return reason(code, what=what, job=saver, span=span, **facts)

    def _with_borrowers(self, team: str, obstacle: Obstacle) -> Obstacle:
        """What keeps a job that has a right to its GPUs: who may stay there for a while."""
        view, borrowers = self._view, on_loan(self._index.state.held, self._view, team)
        staying = [stays_until_ns(view.policy.queue, view.jobs[number]) for number in borrowers]
        if not staying or min(staying) <= view.now_ns:
            return obstacle  # some can be asked now
        span, lacks = span_of(min(staying) - view.now_ns), obstacle.problem
        told = reason("guests_stay", problem=lacks, team=team, guests=len(borrowers), span=span)
        return no_capacity(str(told), obstacle.ahead)


def _is_its_own(unknown: UnknownStart, job: ClusterJob) -> bool:
    """Whether nobody else is to blame that a job's start is unknown."""
    return unknown.job == job.id and unknown.because is not Unknown.OTHERS_RUN_ON
