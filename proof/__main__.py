"""Measure the claims of README and docs on this machine.

    python -m proof            all that this machine can, stored in proof/history.jsonl
    python -m proof --quick    the short ones, stored nowhere (`make test` runs these)
    python -m proof --gpu      those that need a CUDA device
    python -m proof first-step queue    some of them
    python -m proof --minutes 30        the most outdated ones that fit into that time, and with
                                        --list which these are; also with --gpu or with names
    python -m proof --list | --write | --merge FILE

Exits with 1 when a claim could not be measured, missed its bar, or fell by more than a tenth
below its own history on such a machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from proof import documents, history
from proof.choice import most_outdated_first, said_to_fit, that_fit
from proof.claim import Claim, Need
from proof.claims import CLAIMS
from proof.history import Measurement
from proof.machine import QUIET_SHARE, busy_share, machine_name, missing
from proof.runner import Outcome, Prover


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="only these")
    parser.add_argument("--quick", action="store_true", help="the short ones; nothing is stored")
    parser.add_argument("--gpu", action="store_true", help="those that need a CUDA device")
    parser.add_argument("--minutes", type=float, help="the most outdated ones that fit into them")
    parser.add_argument("--list", action="store_true", help="what is claimed, and the bars")
    parser.add_argument("--store", action="store_true", help="store what --quick measured too")
    parser.add_argument("--history", type=Path, default=history.HISTORY, help="another store")
    parser.add_argument("--write", action="store_true", help="write the documents, measure nothing")
    parser.add_argument("--merge", type=Path, help="add what another machine measured")
    options = parser.parse_args()
    unknown = [name for name in options.claims if name not in CLAIMS]
    if unknown:
        parser.error(f"no such claim: {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    chosen = _chosen(options.claims, quick=options.quick, gpu=options.gpu)
    past = _past(options.history)
    if options.minutes is not None:
        chosen = most_outdated_first(chosen, past)
    if options.list:
        print(_listed(chosen, past, options))
        return 0
    if options.merge:
        history.append(history.read(options.merge), options.history)
    if options.merge or options.write:
        documents.write(history.read(options.history))
        return 0
    stores = options.store or not options.quick
    if options.minutes is None:
        outcomes = _prove_all(chosen, options.history, past, stores=stores)
    else:
        in_time = that_fit(chosen, options.minutes)
        outcomes = _prove_all(in_time, options.history, past, stores=stores)
    if stores and options.history == history.HISTORY:
        documents.write(history.read())
    return _summary(outcomes)


def _chosen(names: list[str], *, quick: bool, gpu: bool) -> list[Claim]:
    if names:
        return [CLAIMS[name] for name in names]
    return [
        claim
        for claim in CLAIMS.values()
        if (Need.CUDA in claim.needs) == gpu and (claim.quick or not quick)
    ]


def _past(store: Path) -> list[Measurement]:
    """What was measured, here or elsewhere."""
    past = history.read(history.HISTORY)
    return past if store == history.HISTORY else past + history.read(store)


def _prove_all(
    claims: Iterable[Claim], store: Path, past: list[Measurement], *, stores: bool
) -> list[Outcome]:
    busy = busy_share()
    print(f"{machine_name()}, {busy:.0%} busy before", flush=True)
    if busy > QUIET_SHARE:
        print("others use the cores: figures that need quiet ones will not be trusted", flush=True)
    of = f"/{len(claims)}" if isinstance(claims, list) else ""
    outcomes, prover = [], Prover(past)
    for number, claim in enumerate(claims, 1):
        lacking = missing(claim.needs)
        if lacking:
            words = ", ".join(need.value for need in lacking)
            print(f"[{number}{of}] {claim.name}: skipped, it needs {words}", flush=True)
            continue
        print(f"[{number}{of}] {claim.name}: {claim.command}", flush=True)
        began = time.monotonic()
        outcome = prover.prove(claim)
        outcomes.append(outcome)
        if stores and outcome.measurement:
            history.append([outcome.measurement], store)  # a run that is cut off loses nothing
        _show(outcome, time.monotonic() - began)
    return outcomes


def _show(outcome: Outcome, seconds: float) -> None:
    if outcome.error:
        print(f"    FAILED after {seconds:.0f} s: {outcome.error}", flush=True)
        return
    for verdict in outcome.verdicts:
        mark = f"FAILED, {verdict.problem}" if verdict.problem else f"({verdict.figure.bar})"
        mark = "" if mark == "()" else mark
        print(f"    {verdict.figure.says}: {verdict.words}  {mark}")
    if outcome.failed:
        print(outcome.output)
    assert outcome.measurement is not None
    if not outcome.measurement.trusted:
        print(f"    not trusted: others used {outcome.measurement.busy:.0%} of the cores")
    print(f"    {seconds:.0f} s", flush=True)


def _summary(outcomes: list[Outcome]) -> int:
    failed = [outcome.claim.name for outcome in outcomes if outcome.failed]
    doubtful = [o.claim.name for o in outcomes if o.measurement and not o.measurement.trusted]
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} claims hold")
    if doubtful:
        print(f"not judged by time, the cores were busy: {', '.join(doubtful)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _listed(chosen: list[Claim], past: list[Measurement], options: argparse.Namespace) -> str:
    """All claims; where some are asked for, these alone."""
    claims = chosen if options.claims else list(CLAIMS.values())
    if options.minutes is not None:
        claims = said_to_fit(chosen, options.minutes)
    shown = history.newest(past)
    return "\n".join(_described(claim, shown.get(claim.name)) for claim in claims)


def _described(claim: Claim, measurement: Measurement | None) -> str:
    needs = ", ".join(need.value for need in claim.needs) or "nothing more"
    measured = f"measured {measurement.date}" if measurement else "never measured"
    head = (
        f"{claim.name} ({claim.minutes:g} min, needs {needs}, {measured}): {claim.says}\n"
        f"  $ {claim.command}"
    )
    return "\n".join([head, *(f"    {f.name}: {f.says} {f.bar}" for f in claim.figures)])


if __name__ == "__main__":
    sys.exit(main())
