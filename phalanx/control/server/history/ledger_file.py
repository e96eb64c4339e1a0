"""The ledger of a controller that may have ended: read from its log."""

from __future__ import annotations

from pathlib import Path

from phalanx.cluster.ledger.report import report
from phalanx.cluster.policy import Policy
from phalanx.control.server.replay import recover
from phalanx.control.server.store.interface import StoreError, open_store


def stored_buckets(state: Path, job: int = 1) -> dict[str, int]:
    """GPU-nanoseconds of a job by bucket, as of the last event in a state folder's log."""
    if not (state / "log.sqlite").exists():
        raise StoreError(f"{state} holds no log of a controller")
    store = open_store("", state)
    try:
        core = recover(store, Policy()).core
    finally:
        store.close()
    shares = report(core.ledger, core.view.policy.price).jobs
    if job not in shares:
        raise StoreError(f"the log in {state} knows no job {job}")
    return dict(shares[job].buckets)
