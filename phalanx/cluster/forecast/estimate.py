"""When pending jobs will probably start: those of the queue, and those that wait for other jobs.

An estimate: jobs that end early bring it forward, new ones of higher priority push it back. Where
nobody can say, it is said which job is to blame and why. Chains of jobs are followed in an order of
their own, never by recursion, and every job is looked at once.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from msgspec import structs

from phalanx.cluster.forecast.queue_position import QueueView
from phalanx.cluster.forecast.when import Unknown, UnknownStart, When, latest
from phalanx.cluster.jobs.horizon import length_ns, likely_end_ns
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.node import NodeState
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.reasons import reason
from phalanx.cluster.state import View


class ArrayTurns:
    """When members of an array are let in: one for each that ends."""

    def __init__(
        self, ends: list[int], waiting: list[tuple[int, bool]], blame: UnknownStart
    ) -> None:
        self._heap = sorted(ends)
        heapify(self._heap)
        self._waiting = waiting  # how long each would run, and whether a person holds it
        self._blame = blame
        self._opens: list[When] = []

    def opens(self, index: int) -> When:
        """When the member with so many others before it is let in."""
        while len(self._opens) <= index:
            run_ns, on_hold = self._waiting[len(self._opens)]
            if not self._heap:
                self._opens.append(self._blame)
                continue
            at_ns = self._heap[0]
            self._opens.append(at_ns)
            if on_hold:
                heappop(self._heap)  # it takes the turn, and does not end
            else:
                heapreplace(self._heap, at_ns + run_ns)
        return self._opens[index]


class Estimates:
    """Starts of pending jobs, all estimated at one moment."""

    def __init__(self, index: QueueIndex, view: View) -> None:
        self._waiting, self._view = index.waiting, view
        self.queue = QueueView(index, view)
        self._known: dict[int, When] = {}  # by job, as if no person held it
        self._turns: dict[int, ArrayTurns] = {}  # by first job of an array
        self._awaited: dict[int, list[int]] = {}

    def start(self, number: int) -> When:
        """When a pending job will probably start."""
        when = self.if_released(number)
        if not self._view.jobs[number].held:
            return when
        if isinstance(when, UnknownStart) and when.job == number:
            return when  # to release it would not help
        return UnknownStart(number, Unknown.HELD, reason("held"))

    def if_released(self, number: int) -> When:
        """The same as if no person held this very job."""
        todo = [number]  # jobs; and arrays, as the negative number of their first job
        opened: dict[int, None] = {}
        while todo:
            key = todo[-1]
            if key not in opened:
                opened[key] = None
                todo += [each for each in self._needs(key) if not self._has(each)]
                continue
            todo.pop()
            if self._has(key):
                continue
            if key < 0:
                self._turns[-key] = self._turns_of(-key)
            else:
                self._known[key] = self._find(self._view.jobs[key])
        return self._known[number]

    def before_in_array(self, job: ClusterJob) -> int | None:
        """How many members of its array are let in before a job; None: it was let in."""
        waiting = self._view.array_waiting.get(job.array_parent, {})
        return list(waiting).index(job.id) if job.id in waiting else None

    def _has(self, key: int) -> bool:
        return key in self._known if key > 0 else -key in self._turns

    def _needs(self, key: int) -> list[int]:
        """What must be known before the estimate of a job or an array, and may itself wait."""
        if key < 0:
            return [job.id for job in self._let_in(-key) if job.state == JobState.PENDING]
        jobs, job = self._view.jobs, self._view.jobs[key]
        if self.queue.has(key) or job.never:
            return []
        awaited = [
            number for number in self._last_awaited(job) if jobs[number].state == JobState.PENDING
        ]
        if key in self._view.array_waiting.get(job.array_parent, ()):
            awaited.append(-job.array_parent)
        return awaited

    def _find(self, job: ClusterJob) -> When:
        if job.never:
            return UnknownStart(job.id, Unknown.NEVER, job.why)
        own = self.queue.start(job)
        if self.queue.has(job.id) or isinstance(own, UnknownStart):
            return own
        own = max(own, job.spec.begin_ns)
        times = [self._end(number) for number in self._last_awaited(job)]
        ended = latest(times) if times else own
        # Room goes by time limits, and what a job waits for mostly ends before its own.
        if isinstance(ended, UnknownStart) or own <= ended or not self._takes_over(job):
            times.append(own)
        before = self.before_in_array(job)
        if before is not None:
            times.append(self._turns[job.array_parent].opens(before))
        return latest(times)

    def _takes_over(self, job: ClusterJob) -> bool:
        """Whether a job needs no more than one that it waits for had, and is first in line."""
        if not self.queue.is_first(job):
            return False
        fleet, mine = self._view.fleet, _place_of(job)
        for number in self._last_awaited(job):
            other = self._view.jobs[number]
            has = other.spec.gang.floor
            if other.placement is not None:
                states = (fleet.state(node) for node in other.placement.nodes)
                if any(state is not NodeState.HEALTHY for state in states):
                    continue  # they stay empty when it has left
                has = other.placement.replicas
            if _place_of(other) == mine and job.spec.gang.floor <= has:
                return True
        return False

    def _last_awaited(self, job: ClusterJob) -> list[int]:
        """Of the jobs that one waits for, those that may be the last to end.

        Of many that ask the queue for the same it is the last in line, of an array its last
        member; and who waits for another one ends after it.
        """
        remembered = self._awaited.get(job.id)
        if remembered is not None:
            return remembered
        jobs, where = self._view.jobs, self._waiting.where
        last: dict[object, tuple[int, int]] = {}
        awaited = [number for number in job.waiting_for if number in jobs]
        covered = jobs[awaited[-1]].waiting_for if awaited else {}
        for number in awaited:
            if number in covered:
                continue
            parent, is_held = jobs[number].array_parent, jobs[number].held
            key: object = number
            entry = (0, number)
            if number in where:
                lane, demand, queued_ns = where[number]
                key, entry = (id(lane), id(demand)), (queued_ns, number)
            elif number in self._view.array_waiting.get(parent, ()):
                key = ("array", parent, is_held)
            last[key] = max(last.get(key, entry), entry)
        remembered = self._awaited[job.id] = [number for _, number in last.values()]
        return remembered

    def _end(self, number: int) -> When:
        """When a job that others wait for will have ended."""
        job, view = self._view.jobs[number], self._view
        endless = not job.spec.time_limit_ns and not job.spec.expected.steps
        if job.state != JobState.PENDING:
            found = likely_end_ns(view, job)
            if found is not None:
                return found
            return UnknownStart(
                number, Unknown.RUNS_ON, reason("endless" if endless else "overdue")
            )
        start = self.start(number)
        if isinstance(start, UnknownStart):
            return start
        if endless:
            return UnknownStart(number, Unknown.RUNS_ON, reason("endless"))
        expected = job.expected
        end_ns = start + length_ns(view, job)
        return _ends(job, start, end_ns, expected.start_ns + expected.form_ns)

    def _let_in(self, parent: int) -> list[ClusterJob]:
        """Members of an array that were let in and have not ended."""
        view = self._view
        waiting = view.array_waiting[parent]
        array = view.jobs[next(iter(waiting))].spec.array
        assert array is not None
        members = (view.jobs.get(parent + index) for index in range(array.count))
        return [job for job in members if job and not job.ended and job.id not in waiting]

    def _turns_of(self, parent: int) -> ArrayTurns:
        ends = [self._end(job.id) for job in self._let_in(parent)]
        known_ends = [end for end in ends if not isinstance(end, UnknownStart)]
        unknown = [end for end in ends if isinstance(end, UnknownStart)]
        waiting: list[tuple[int, bool]] = []
        for number in self._view.array_waiting[parent]:
            job = self._view.jobs[number]
            expected = job.expected
            run_ns = _ends(job, 0, length_ns(self._view, job), expected.start_ns + expected.form_ns)
            waiting.append((run_ns, job.held))
            if job.held:
                unknown.append(UnknownStart(number, Unknown.HELD, reason("held")))
        if not unknown:
            why = reason("no_end", problem="its array runs no member")
            first = next(iter(self._view.array_waiting[parent]))
            unknown.append(UnknownStart(first, Unknown.NO_NODES, why))
        return ArrayTurns(known_ends, waiting, unknown[0])


def _place_of(job: ClusterJob) -> tuple[object, ...]:
    """What a job's nodes must be like, and whose limits it counts towards."""
    spec = job.spec
    gang = structs.replace(spec.gang, replicas=1, least_replicas=0, most_replicas=0)
    return gang, spec.constraint, spec.partition, spec.team, spec.qos


def _ends(job: ClusterJob, since_ns: int, limit_ns: int, start_ns: int) -> int:
    """When a job has made its steps, which it begins (again) then, or has reached its limit."""
    expected, printed = job.spec.expected, job.printed
    if printed is not None and printed.steps and job.printed_step_ns:
        left = max(0, printed.steps - printed.step) * job.printed_step_ns
        return min(since_ns + start_ns + left, limit_ns)
    if not expected.steps:
        return limit_ns
    left = max(0, expected.steps - job.step) * (job.step_ns or expected.step_ns)
    done_ns = since_ns + start_ns + left
    return done_ns if job.spec.requeue_at_limit else min(done_ns, limit_ns)
