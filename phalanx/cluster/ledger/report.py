"""What the ledger says, for people: hours, dollars, energy, effective time and goodput.

``ettr``: time of steps that are kept, what slow nodes added left out, over the time that workers
held their GPUs. ``goodput``: what those steps computed (data waits left out too), over all GPU time
that was held, idle spares included; for the fleet, over all GPU time there was. Where programs ran
and nobody has ever told of a step, neither is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from phalanx.cluster.ledger.buckets import (
    BUCKETS,
    ESTIMATED,
    LOST,
    ROUTINE,
    TRAINING,
    Buckets,
    add,
)
from phalanx.cluster.ledger.job_account import Account
from phalanx.cluster.ledger.ledger import Ledger
from phalanx.cluster.policy import PricePolicy
from phalanx.cluster.units import HOUR_NS, MILLION

COMPUTING = ("productive", "exposed_communication", "bubble")
# Buckets in which GPUs draw their idle power.
UNHELD = ("idle_spare", "quarantined", "unallocated")  # no job has these GPUs
RESTING = ("detection", "restart", "idle_spare", "quarantined", "unallocated")


class Share(Struct, frozen=True, kw_only=True):
    """The time of one job, team or fleet. All integers; the buckets sum to ``gpu_ns``."""

    gpu_ns: int
    buckets: Buckets  # in the order of BUCKETS
    by_cause: dict[str, Buckets]
    ettr_ppm: int
    goodput_ppm: int
    gpu_hours: int
    micro_dollars: int
    watt_hours: int
    steps_known: bool = True  # False: nothing was held, or programs that told of none: no goodput
    lost_steps: int = 0  # committed ones that were lost; their time is in ``recompute``
    estimated: tuple[str, ...] = ESTIMATED


class LedgerReport(Struct, frozen=True, kw_only=True):
    """The whole ledger."""

    fleet: Share
    teams: dict[str, Share]
    jobs: dict[int, Share]


def report(ledger: Ledger, price: PricePolicy) -> LedgerReport:
    """Everything that the ledger knows now."""
    jobs = {
        number: _share_of([account], ledger, price) for number, account in ledger.accounts.items()
    }
    teams: dict[str, list[Account]] = {}
    for account in ledger.accounts.values():
        teams.setdefault(account.team, []).append(account)
    for team in ledger.retired:
        teams.setdefault(team, [])
    return LedgerReport(
        fleet=fleet_share(ledger, price),
        teams={
            team: _share_of([*teams[team], *ledger.retired_of(team)], ledger, price)
            for team in sorted(teams)
        },
        jobs=jobs,
    )


def fleet_share(ledger: Ledger, price: PricePolicy) -> Share:
    """The time of the whole fleet."""
    every = [*ledger.accounts.values(), *ledger.retired.values()]
    buckets, causes = _collect(every, ledger)
    for bucket, gpu_ns in ledger.idle.items():
        add(buckets, bucket, gpu_ns)
    return _share(buckets, causes, price, _lost_steps(every))


def _share_of(accounts: list[Account], ledger: Ledger, price: PricePolicy) -> Share:
    return _share(*_collect(accounts, ledger), price, _lost_steps(accounts))


def _lost_steps(accounts: list[Account]) -> int:
    return sum(account.lost_steps for account in accounts)


def _collect(accounts: list[Account], ledger: Ledger) -> tuple[Buckets, dict[str, Buckets]]:
    buckets: Buckets = {}
    causes: dict[str, Buckets] = {}
    for account in accounts:
        for bucket, gpu_ns in account.buckets.items():
            add(buckets, bucket, gpu_ns)
        for bucket, gpu_ns in ledger.unsettled(account).items():
            add(buckets, bucket, gpu_ns)
        for cause, lost in account.by_cause.items():
            for bucket, gpu_ns in lost.items():
                add(causes.setdefault(cause, {}), bucket, gpu_ns)
        for cause, bucket, gpu_ns in _not_settled(account, ledger):
            add(causes.setdefault(cause, {}), bucket, gpu_ns)
    return buckets, causes


def _not_settled(account: Account, ledger: Ledger) -> Iterable[tuple[str, str, int]]:
    """Losses that are in no bucket yet, with the cause that is known so far."""
    lost_ns = (ledger.now_ns - account.settled_ns) * account.gpus
    if lost_ns and not account.running and account.bucket in LOST:
        yield ROUTINE.get(account.bucket, account.cause), account.bucket, lost_ns
    if account.open is not None:
        span = account.open
        yield span.cause, "detection", (span.to_ns - span.from_ns) * span.gpus


def _share(
    buckets: Buckets, causes: dict[str, Buckets], price: PricePolicy, lost_steps: int
) -> Share:
    total = sum(buckets.values())
    held_gpu_ns = total - sum(buckets.get(name, 0) for name in UNHELD)
    training = sum(buckets.get(name, 0) for name in TRAINING)
    computing = sum(buckets.get(name, 0) for name in COMPUTING)
    resting = sum(buckets.get(name, 0) for name in RESTING)
    watt_ns = (total - resting) * price.watts_per_gpu + resting * price.idle_watts_per_gpu
    return Share(
        gpu_ns=total,
        buckets={name: buckets.get(name, 0) for name in BUCKETS},
        by_cause={cause: causes[cause] for cause in sorted(causes)},
        ettr_ppm=training * MILLION // held_gpu_ns if held_gpu_ns else 0,
        goodput_ppm=computing * MILLION // total if total else 0,
        gpu_hours=total // HOUR_NS,
        micro_dollars=total * price.micro_dollars_per_gpu_hour // HOUR_NS,
        watt_hours=watt_ns // HOUR_NS,
        steps_known=training > 0 or (total > 0 and not buckets.get("unreported", 0)),
        lost_steps=lost_steps,
    )
