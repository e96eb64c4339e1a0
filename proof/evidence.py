"""Writes ``docs/evidence.md``: every claim, its bar, what was measured last, where and when."""

from __future__ import annotations

from proof.claim import Claim, Figure, Need
from proof.claims import CLAIMS
from proof.history import Measurement, commits_since, newest

HEAD = """\
# Evidence

Every figure that README and docs claim, measured by the command that stands beside it. This page is
written by `python -m proof` from `proof/history.jsonl`; the claims and their bars stand in
`proof/claims/`. A figure that misses its bar, or falls by more than a tenth below its own history
on such a machine, fails the run. A fixed piece of work is timed beside each claim: where the
machine is slower than such machines usually are, times and rates may be worse by that factor.

```sh
make proof-quick     # the short ones, a few minutes; `make test` runs them too
make proof           # all that this machine can measure; use quiet cores
make proof-gpu       # those that need a CUDA device
.venv/bin/python -m proof first-step queue      # some of them
.venv/bin/python -m proof --gpu --minutes 30    # the most outdated ones that fit into that time
```

"Age" counts the commits since the one that was measured, when this page was written; it is unknown
where this history does not contain that commit. Figures in brackets were measured while others used
the cores; nobody should trust them.
"""


def page(measurements: list[Measurement]) -> str:
    """The whole page."""
    shown = newest(measurements)
    ages = {commit: commits_since(commit) for commit in {m.commit for m in shown.values()}}
    parts = [HEAD]
    for title, gpu in (("Without a GPU", False), ("On a GPU", True)):
        parts.append(f"## {title}\n")
        claims = [claim for claim in CLAIMS.values() if (Need.CUDA in claim.needs) == gpu]
        parts += [_section(claim, shown.get(claim.name), ages) for claim in claims]
    return "\n".join(parts)


def _section(claim: Claim, measurement: Measurement | None, ages: dict[str, int | None]) -> str:
    lines = [f"### {claim.name}\n", claim.says, "", "```sh", claim.command, "```", ""]
    lines += ["| figure | bar | measured |", "|---|---|---|"]
    for figure in claim.figures:
        lines.append(f"| {figure.says} | {figure.bar} | {_cell(figure, measurement)} |")
    lines += ["", _origin(claim, measurement, ages), ""]
    return "\n".join(lines)


def _cell(figure: Figure, measurement: Measurement | None) -> str:
    if measurement is None or figure.name not in measurement.figures:
        return "not measured"
    words = figure.show(measurement.figures[figure.name])
    return f"({words})" if figure.timed and not measurement.trusted else words


def _origin(claim: Claim, measurement: Measurement | None, ages: dict[str, int | None]) -> str:
    if measurement is None:
        return "Not measured yet."
    age = ages[measurement.commit]
    since = "age unknown, not in this history" if age is None else f"age {age} commits"
    origin = (
        f"{measurement.date}, commit {measurement.commit} ({since}), {measurement.machine}, "
        f"{measurement.seconds:.0f} s."
    )
    if measurement.by_other_command(claim.command):
        return f"{origin} The command was another one then: `{measurement.command}`."
    return origin
