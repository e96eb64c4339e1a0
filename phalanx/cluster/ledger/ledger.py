"""Where every GPU-nanosecond went: each in exactly one bucket, in integers that sum exactly.

A job's time is settled up to the end of its last reported step. After a failure the time since
then stays open until the survivors say how far they came; then it splits into steps and detection.
Only steps that are kept count as training: what a rollback throws away is moved to ``recompute``
at once, under its cause, and a step that is made again counts like any other. Of a program that
reports no steps nobody knows what its time was for: all of it is ``unreported``.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.jobs.measured import waiting_parts_ns
from phalanx.cluster.ledger.buckets import (
    IDLE_BUCKETS,
    LOST,
    ROUTINE,
    TRAINING,
    Buckets,
    add,
)
from phalanx.cluster.ledger.job_account import Account, Open
from phalanx.cluster.ledger.usage import Usage, UsageRow, owner_of
from phalanx.cluster.protocol.events import Progress
from phalanx.cluster.protocol.messages import StepsPrinted
from phalanx.cluster.state import View


class LedgerState(Struct, kw_only=True):
    """The ledger as a snapshot keeps it."""

    now_ns: int
    idle: Buckets
    fleet_gpu_ns: int
    job_spare_gpus: int
    accounts: dict[int, Account]
    retired: dict[str, Account]
    usage: list[UsageRow] = []


class LedgerError(AssertionError):
    """GPU time was lost or counted twice."""


class Ledger:
    """All accounts. Times given to it never decrease."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.idle: Buckets = {}  # of GPUs that no job holds, spares of jobs left out
        self.fleet_gpu_ns = 0  # of the whole fleet: what all buckets must sum to
        self.job_spare_gpus = 0
        self.accounts: dict[int, Account] = {}
        self.retired: dict[str, Account] = {}  # by team: jobs that nobody asks about any more
        self._usage = Usage()  # up to ``changed_ns`` of each account

    def advance(self, view: View, now_ns: int) -> None:
        """Lets time pass for everything that no job holds. Called before any change at a time."""
        passed = now_ns - self.now_ns
        if not passed:
            return
        self.now_ns = now_ns
        self.fleet_gpu_ns += view.fleet.total_gpus * passed
        for bucket, gpus in zip(IDLE_BUCKETS, view.fleet.idle_gpus, strict=True):
            if bucket == "idle_spare":
                gpus -= self.job_spare_gpus
            if gpus:
                self.idle[bucket] = self.idle.get(bucket, 0) + gpus * passed

    def start(self, job: ClusterJob, gpus: int, spare_gpus: int, cause: str) -> None:
        """A job was given nodes."""
        account = self.accounts.setdefault(job.id, Account(**owner_of(job.spec)._asdict()))
        now = self.now_ns
        account.settled_ns = account.spare_ns = account.changed_ns = now
        account.running, account.bucket, account.cause = False, "restart", cause
        account.gpus = gpus
        self._set_spares(account, spare_gpus)

    def resize(self, job: int, gpus: int, spare_gpus: int) -> None:
        """The job holds another number of GPUs from now on; not while its workers run."""
        account = self.accounts[job]
        self._count(account)
        if gpus != account.gpus:
            assert not account.running, "a running gang keeps its GPUs"
            self._settle(account)
            account.gpus = gpus
        self._set_spares(account, spare_gpus)

    def fail(self, job: int, cause: str, bucket: str = "restart") -> None:
        """The workers stopped making steps, as was found out now."""
        account = self.accounts[job]
        if account.running and account.unreported:
            self._settle_unreported(account)
        elif account.running:
            account.open = Open(account.settled_ns, self.now_ns, account.gpus, cause)
            account.settled_ns = self.now_ns
            account.running = False
        else:
            self._settle(account)
        account.cause, account.bucket = cause, bucket

    def found(self, job: int, cause: str) -> None:
        """What stopped the workers is known: from now on they are brought back."""
        account = self.accounts[job]
        account.cause = cause  # the time that it took to find out is this cause's too
        if account.open is not None:
            account.open.cause = cause
        self._settle(account)
        account.bucket = "restart"

    def ready(self, job: int, step: int, *, unreported: bool = False) -> None:
        """The workers go on after this step, from now on.

        ``unreported``: they are a program's, and nobody has ever heard of a step of it.
        """
        account = self.accounts[job]
        self._settle(account)
        self._close(account)
        account.running, account.unreported = True, unreported
        if unreported and account.printed:
            return  # it goes on by itself, and will print from where
        self.roll_back(job, step)
        account.step = account.reached = step

    def printed(self, job: ClusterJob, fact: StepsPrinted) -> None:
        """A program that reports nothing prints a step: the time since the last one is known.

        What comes before the first line of a start, and after its last, stays unreported.
        """
        account = self.accounts[job.id]
        if not account.running or not account.unreported or fact.at_ns <= account.settled_ns:
            return
        until = min(fact.at_ns, self.now_ns)
        passed = until - account.settled_ns
        if account.printed != fact.generation:
            account.printed = fact.generation
            self.roll_back(job.id, fact.step)
            account.step = account.reached = fact.step
            self._add(account, "unreported", passed * account.gpus)
        else:
            steps = Progress(
                job=job.id,
                generation=fact.generation,
                step=fact.step,
                committed=0,
                durable=0,
                at_ns=fact.at_ns,
            )
            self._steps(account, job, steps, passed, account.gpus)
        account.settled_ns = until

    def roll_back(self, job: int, step: int) -> None:
        """Later steps are lost: their time, as that of the mean step, was not productive."""
        account = self.accounts.get(job)
        if account is None or step >= account.reached:
            return
        lost, kept = min(account.reached - step, account.kept_steps), account.kept_steps
        for bucket in TRAINING if lost else ():
            moved = account.buckets.get(bucket, 0) * lost // kept
            add(account.buckets, bucket, -moved)
            self._add(account, "recompute", moved)
        account.kept_steps -= lost
        account.reached = step

    def lose(self, job: int, steps: int) -> None:
        """Committed steps are lost; their time is moved when the job goes on without them."""
        if job in self.accounts:
            self.accounts[job].lost_steps += steps

    def progress(self, job: ClusterJob, fact: Progress) -> None:
        """Settles the time up to the end of a step."""
        account = self.accounts[job.id]
        if account.open is not None:
            self._explain(account, account.open, job, fact)
        elif account.running and fact.at_ns > account.settled_ns and fact.step > account.step:
            account.unreported = False
            until = min(fact.at_ns, self.now_ns)
            passed = until - account.settled_ns
            self._steps(account, job, fact, passed, account.gpus)
            account.settled_ns = until

    def stop(self, job: int, bucket: str = "checkpoint_stall") -> None:
        """The job gives its nodes back."""
        account = self.accounts[job]
        if account.running and account.unreported:
            self._settle_unreported(account)
        elif account.running:
            self._add(account, bucket, (self.now_ns - account.settled_ns) * account.gpus)
            account.settled_ns = self.now_ns
            account.running = False
        self._settle(account)
        self._close(account)
        self._count(account)
        self._set_spares(account, 0)
        account.gpus = 0

    def used_gpu_ns(self, job: int) -> int:
        """GPU-nanoseconds that a job has held in all, until now."""
        account = self.accounts.get(job)
        if account is None:
            return 0
        held = account.gpus + account.spare_gpus
        return account.allocated_gpu_ns + held * (self.now_ns - account.changed_ns)

    def usage(self) -> list[UsageRow]:
        """GPU time by day and owner until now, the oldest day first."""
        usage = Usage(self._usage.rows())
        for account in self.accounts.values():
            held = account.gpus + account.spare_gpus
            usage.add(account.owner, account.changed_ns, self.now_ns, held)
        return usage.rows()

    def retire(self, job: int) -> None:
        """Adds an ended job's account to its team's."""
        account = self.accounts.pop(job, None)
        if account is None:
            return
        assert not account.gpus and not account.spare_gpus
        into = self.retired.setdefault(account.team, Account(team=account.team))
        into.allocated_gpu_ns += account.allocated_gpu_ns
        into.lost_steps += account.lost_steps
        for bucket, gpu_ns in account.buckets.items():
            add(into.buckets, bucket, gpu_ns)
        for cause, lost in account.by_cause.items():
            for bucket, gpu_ns in lost.items():
                add(into.by_cause.setdefault(cause, {}), bucket, gpu_ns)

    def retired_of(self, team: str) -> list[Account]:
        """What is left of a team's forgotten jobs."""
        return [self.retired[team]] if team in self.retired else []

    def unsettled(self, account: Account) -> Buckets:
        """Time of an account that is in no bucket yet: what it would count as now."""
        buckets: Buckets = {}
        passed = (self.now_ns - account.settled_ns) * account.gpus
        running = "unreported" if account.unreported else "residual"
        add(buckets, running if account.running else account.bucket, passed)
        add(buckets, "idle_spare", (self.now_ns - account.spare_ns) * account.spare_gpus)
        if account.open is not None:
            add(
                buckets,
                "detection",
                (account.open.to_ns - account.open.from_ns) * account.open.gpus,
            )
        return buckets

    def check(self, view: View) -> None:
        """Raises when time was lost or counted twice; costs a pass over all accounts."""
        total = sum(self.idle.values())
        spare_gpus = self.job_spare_gpus
        for number, account in self.accounts.items():
            booked = sum(account.buckets.values()) + sum(self.unsettled(account).values())
            total += booked
            spare_gpus += account.gpus
            if booked != self.used_gpu_ns(number):
                raise LedgerError(f"job {number}: {booked} of {self.used_gpu_ns(number)} GPU-ns")
        for team, account in self.retired.items():
            booked = sum(account.buckets.values())
            total += booked
            if booked != account.allocated_gpu_ns:
                raise LedgerError(f"team {team}: {booked} of {account.allocated_gpu_ns} GPU-ns")
        if total != self.fleet_gpu_ns:
            raise LedgerError(
                f"{total} of the fleet's {self.fleet_gpu_ns} GPU-ns are accounted for"
            )
        fleet = view.fleet
        if spare_gpus != fleet.total_gpus - sum(fleet.idle_gpus) + self.job_spare_gpus:
            raise LedgerError(f"{spare_gpus} GPUs are charged to jobs, but others hold them")

    def dump(self) -> LedgerState:
        """Everything that a snapshot must keep."""
        return LedgerState(
            now_ns=self.now_ns,
            idle=self.idle,
            fleet_gpu_ns=self.fleet_gpu_ns,
            job_spare_gpus=self.job_spare_gpus,
            accounts=self.accounts,
            retired=self.retired,
            usage=self._usage.rows(),
        )

    @classmethod
    def load(cls, kept: LedgerState) -> Ledger:
        """The ledger that ``dump`` kept."""
        ledger = cls(kept.now_ns)
        ledger.idle, ledger.fleet_gpu_ns = kept.idle, kept.fleet_gpu_ns
        ledger.job_spare_gpus, ledger.accounts = kept.job_spare_gpus, kept.accounts
        ledger.retired, ledger._usage = kept.retired, Usage(kept.usage)
        return ledger

    def _set_spares(self, account: Account, gpus: int) -> None:
        passed = self.now_ns - account.spare_ns
        add(account.buckets, "idle_spare", passed * account.spare_gpus)
        account.spare_ns = self.now_ns
        self.job_spare_gpus += gpus - account.spare_gpus
        account.spare_gpus = gpus

    def _count(self, account: Account) -> None:
        held = account.gpus + account.spare_gpus
        account.allocated_gpu_ns += held * (self.now_ns - account.changed_ns)
        self._usage.add(account.owner, account.changed_ns, self.now_ns, held)
        account.changed_ns = self.now_ns

    def _settle(self, account: Account) -> None:
        """Puts the time that passed outside of steps into the account's bucket."""
        if not account.running:
            passed = self.now_ns - account.settled_ns
            self._add(account, account.bucket, passed * account.gpus)
            account.settled_ns = self.now_ns

    def _settle_unreported(self, account: Account) -> None:
        """A program without steps stops: nobody knows what of its time was lost."""
        passed = self.now_ns - account.settled_ns
        self._add(account, "unreported", passed * account.gpus)
        account.settled_ns, account.running = self.now_ns, False

    def _close(self, account: Account) -> None:
        """Nobody explained the time before a failure: all of it went by unnoticed."""
        if account.open is not None:
            span = account.open
            lost = (span.to_ns - span.from_ns) * span.gpus
            self._add(account, "detection", lost, span.cause)
            account.open = None

    def _explain(self, account: Account, span: Open, job: ClusterJob, fact: Progress) -> None:
        until = min(max(fact.at_ns, span.from_ns), span.to_ns)
        self._steps(account, job, fact, until - span.from_ns, span.gpus)
        self._add(account, "detection", (span.to_ns - until) * span.gpus, span.cause)
        account.open = None

    def _steps(
        self, account: Account, job: ClusterJob, fact: Progress, passed_ns: int, gpus: int
    ) -> None:
        """Splits a time full of steps: measured parts first, then by step, the rest is residual."""
        left = passed_ns
        for bucket, part_ns in (
            ("data_wait", fact.data_wait_ns),
            ("checkpoint_stall", fact.checkpoint_ns),
            ("straggler", fact.straggler_ns),
            ("residual", max(0, passed_ns - fact.busy_ns) if fact.busy_ns else 0),
        ):
            if part_ns > 0:
                taken = min(part_ns, left)
                self._add(account, bucket, taken * gpus)
                left -= taken
        steps = max(0, fact.step - account.step)
        account.step = account.reached = max(account.step, fact.step)
        account.kept_steps += steps
        if not steps:
            self._add(account, "residual", left * gpus)
            return
        exposed_ns, bubble_ns = waiting_parts_ns(job)
        for bucket, step_ns in (
            ("exposed_communication", exposed_ns),
            ("bubble", bubble_ns),
        ):
            if step_ns:
                taken = min(step_ns * steps, left)
                self._add(account, bucket, taken * gpus)
                left -= taken
        self._add(account, "productive", left * gpus)

    def _add(self, account: Account, bucket: str, gpu_ns: int, cause: str = "") -> None:
        if not gpu_ns:
            return
        add(account.buckets, bucket, gpu_ns)
        if bucket in LOST:
            why = cause or ROUTINE.get(bucket) or account.cause
            add(account.by_cause.setdefault(why, {}), bucket, gpu_ns)
