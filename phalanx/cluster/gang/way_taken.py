"""What a job says of the way out of a failure: what was chosen, and where it went on from."""

from __future__ import annotations

from phalanx.cluster.reasons import Code, Reason, reason


class WayTaken(Code):
    """A failure was met, with the facts ``rung``, ``cause`` and ``node`` among others."""

    RECOVER = "recover"  # the gang forms anew
    BEAR = "bear"  # it goes on as well as it can


def once_it_runs(why: Reason, step: int, lost: int, *, program: bool = False) -> Reason:
    """The reason of a gang that runs again from a step, with so many committed steps lost.

    ``program``: it may go on from something that nobody knows of. What was expected of the way out
    counts no more: the ledger has what it really cost.
    """
    if WayTaken.of(why) is None:
        return why
    facts = {name: why.facts[name] for name in ("rung", "cause", "node")}
    if lost:
        return reason("recovered_with_loss", step=step, lost=lost, **facts)
    if program and not step:
        return reason("started_again", **facts)
    return reason("recovered", step=step, **facts)
