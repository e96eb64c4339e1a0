"""A run's post-mortem: what happened, where the time went, what to change.

The command line gathers a ``ReportInput`` from a server's API or from a run's folder; here it
becomes sections, which ``report_pages`` writes down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from phalanx.observe.tracker.runs import Run

Numbers = Sequence[float | None]

PARTS = ("data", "forward", "backward", "optimizer", "snapshot", "exposed_communication")
PART_ADVICE = {  # share from which on a part is worth a word
    "data": (0.05, "waits for data: raise data.prefetch, or move the shards nearer"),
    "exposed_communication": (
        0.2,
        "is communication that nothing hides: ask `phalanx plan` for another mapping",
    ),
    "snapshot": (0.05, "is saving: save less often, or keep snapshots in memory"),
}
MOST_BARS = 16  # ranks, the slowest first
LOST = ("detection", "restart", "recompute", "straggler", "checkpoint_stall", "data_wait")


class Curve(Struct):
    """A metric over steps."""

    steps: Sequence[int]
    values: Numbers


class ReportInput(Struct, kw_only=True):
    """Everything that a report is written from."""

    run: Run
    curves: dict[str, Curve] = {}
    incidents: list[dict[str, Any]] = []
    ledger: dict[str, Any] = {}  # as the API gives it
    unread_lines: int = 0  # of the records: cut off or damaged
    requested: dict[str, Any] = {}  # gang and resources of the submission
    rank_means: dict[str, list[float | None]] = {}  # own seconds and parts by row
    rank_names: list[str] = []  # of the rows: a rank and its node, or of large gangs a node


class ReportSection(Struct):
    """A heading with lines, a table, or a picture."""

    title: str
    lines: list[str] = []
    table: list[list[str]] = []  # the first row has the headings
    curves: dict[str, Curve] = {}
    marks: list[int] = []  # steps at which something happened
    bars: dict[str, float] = {}  # shares of a whole, or of the largest


def sections(material: ReportInput) -> list[ReportSection]:
    """The report's parts in their order."""
    return [
        _verdict(material),
        _timeline(material),
        _curves(material),
        _environment(material.run),
        _resources(material),
        _bottleneck(material),
        _incidents(material),
        _ledger(material),
        ReportSection("What to change", lines=advice(material)),
    ]


_SHOWN = ("loss", "validation_loss", "grad_norm", "step_seconds", "mfu", "tokens_per_second")


def _curves(material: ReportInput) -> ReportSection:
    shown = {n: c for n, c in material.curves.items() if n in _SHOWN}
    steps = [each.get("evidence", {}).get("step") for each in material.incidents]
    return ReportSection(
        "Curves", curves=shown, marks=[step for step in steps if isinstance(step, int)]
    )


def _verdict(material: ReportInput) -> ReportSection:
    run = material.run
    last = run.summary
    lines = [
        f"{run.name} ({run.id}), {run.state}",
        f"end: {run.exit.get('message') or run.exit.get('reason') or 'not yet'}",
        f"from {when(run.created)} to {when(run.ended) if run.ended else 'now'}",
    ]
    if last:
        lines.append(f"last step {last.get('step')}, loss {short(last.get('loss'))}")
    if "validation_step" in last:
        lines.append(
            f"loss on held-out samples after step {last['validation_step']}: "
            f"{short(last['validation_loss']) or 'not finite'}"
        )
    if material.unread_lines:
        lines.append(f"lines of its records that cannot be read: {material.unread_lines}")
    if material.ledger:
        goodput = material.ledger["goodput"]  # None: a program told of no step
        lines.append(
            f"goodput {'unknown' if goodput is None else f'{goodput:.1%}'}, "
            f"{material.ledger['gpu_hours']:.3f} GPU-hours, ${material.ledger['dollars']:.2f}"
        )
    return ReportSection("Verdict", lines)


def _timeline(material: ReportInput) -> ReportSection:
    run = material.run
    rows: list[tuple[float, str]] = [(run.created, "submitted")]
    for place in run.placements:
        nodes = ", ".join(place.get("nodes", []))
        words = f"generation {place.get('generation')} on {nodes}"
        rows.append((float(place.get("time", 0.0)), words[:300]))
    rows += [
        (float(each["time"]), f"{each['kind']}: {each['sentence']}") for each in material.incidents
    ]
    if run.ended:
        rows.append((run.ended, f"ended: {run.state}"))
    table = [["time", "what"]] + [[when(at), what] for at, what in sorted(rows)]
    return ReportSection("Timeline", table=table)


def _environment(run: Run) -> ReportSection:
    facts = run.provenance
    torch = facts.get("torch") or {}
    rows = [["what", "value"]]
    for name in ("project", "code"):
        code = facts.get(name) or {}
        if code:
            changed = ", with changes" if code.get("dirty") else ""
            rows.append([name, f"{code.get('commit', '')}{changed}"])
    rows += [
        ["phalanx", str(facts.get("phalanx", ""))],
        ["python", str(facts.get("python", ""))],
        ["torch", f"{torch.get('version', '')} cuda {torch.get('cuda') or 'none'}"],
        ["driver", str(facts.get("driver") or "none")],
        ["image", str(facts.get("image") or "none")],
        ["packages", str(len(facts.get("packages") or {}))],
    ]
    rows += [[f"seed {k}", str(v)] for k, v in (facts.get("seeds") or {}).items()]
    rows += [[f"data {k}", str(v)] for k, v in (facts.get("data") or {}).items()]
    return ReportSection("Environment", table=rows)


def _resources(material: ReportInput) -> ReportSection:
    run = material.run
    rows = [["what", "requested", "allocated"]]
    gang = material.requested.get("gang", {})
    last = run.placements[-1] if run.placements else {}
    replicas = gang.get("replicas", 1)
    rows.append(["replicas", str(replicas), str(last.get("replicas", ""))])
    rows.append(["nodes", _nodes_of(gang), str(len(last.get("nodes", [])))])
    rows.append(["formations", "1", str(last.get("generation", ""))])
    if material.ledger:
        rows.append(["GPU-hours", "", f"{material.ledger['gpu_hours']:.4f}"])
    axes = ("tensor", "context", "pipeline", "slot_gpus", "slot_cpus")
    rows += [[name, str(gang[name]), ""] for name in axes if name in gang]
    return ReportSection("Resources", table=rows)


def _nodes_of(gang: dict[str, Any]) -> str:
    """How many nodes a gang's shape asks for; "" where it shares them."""
    slot = int(gang.get("slot_gpus", 1) or 1)
    axes = [int(gang.get(name, 1)) for name in ("replicas", "pipeline", "tensor", "context")]
    return str(-(-math.prod(axes) // slot)) if gang else ""


def step_shares(material: ReportInput) -> dict[str, float]:
    """Mean share of each part in a step."""
    whole = mean(material.curves["step_seconds"].values) if "step_seconds" in material.curves else 0
    if not whole:
        return {}
    shares = {
        part: mean(curve.values) / whole
        for part in PARTS
        if (curve := material.curves.get(f"{part}_seconds")) is not None and curve.values
    }
    # Communication that nothing hides happens within the passes: it counts once.
    passes = [part for part in ("forward", "backward") if part in shares]
    both = sum(shares[part] for part in passes)
    hidden = min(both, shares.get("exposed_communication", 0.0))
    for part in passes:
        shares[part] *= 1 - hidden / both if both else 1
    rest = 1 - sum(shares.values())
    return {**shares, "rest": rest} if rest > 0 and shares else shares


def _slowest(own: dict[int, float], stages: int) -> tuple[int, float]:
    """The row that is furthest above the middle of its pipeline stage, and by how much."""
    each = max(1, -(-(max(own) + 1) // stages))
    slower: dict[int, float] = {}
    for stage in range(stages):
        rows = {row: value for row, value in own.items() if row // each == stage}
        middle = sorted(rows.values())[(len(rows) - 1) // 2] if rows else 0.0
        slower |= {row: value / middle - 1 for row, value in rows.items() if middle > 0}
    worst = max(slower, key=lambda row: slower[row], default=min(own))
    return worst, slower.get(worst, 0.0)


def _bottleneck(material: ReportInput) -> ReportSection:
    shares = step_shares(material)
    lines = []
    own = {n: v for n, v in enumerate(material.rank_means.get("own_seconds", [])) if v is not None}
    if len(own) > 1:
        worst, slower = _slowest(own, int(material.requested.get("gang", {}).get("pipeline", 1)))
        name = material.rank_names[worst] if material.rank_names else f"{worst}"
        lines.append(f"slowest rank beside those of its stage: {name}, {slower:+.0%} of own work")
    table = [["part of a step", "mean share"]]
    table += [[part, f"{share:.1%}"] for part, share in sorted(shares.items(), key=lambda p: -p[1])]
    named = material.rank_names or [str(row) for row in range(max(own, default=0) + 1)]
    slowest = sorted(own, key=lambda row: -own[row])[:MOST_BARS]
    bars = {f"rank {named[row]}": own[row] / own[slowest[0]] for row in slowest if own[slowest[0]]}
    return ReportSection("Bottleneck", lines, table if shares else [], bars=bars)


def _incidents(material: ReportInput) -> ReportSection:
    table = [["time", "kind", "where", "root cause", "what", "back after"]]
    for each in material.incidents:
        evidence = each.get("evidence", {})
        where = each.get("node") or (f"rank {each['rank']}" if each.get("rank", -1) >= 0 else "")
        back = evidence.get("resumed_seconds")
        table.append(
            [
                when(float(each["time"])),
                str(each["kind"]),
                str(where),
                str(evidence.get("root_cause_class", "")),
                str(each["sentence"]),
                f"{back:.2f} s" if isinstance(back, float) else "",
            ]
        )
    return ReportSection(
        "Incidents", [] if len(table) > 1 else ["none"], table if len(table) > 1 else []
    )


def _ledger(material: ReportInput) -> ReportSection:
    ledger = material.ledger
    if not ledger:
        return ReportSection("Ledger", ["a run without a server has no ledger"])
    total = int(ledger["allocation_gpu_ns"]) or 1
    table = [["bucket", "GPU-hours", "share"]]
    for name, text in ledger["buckets"].items():
        if int(text):
            words = f"{name} (estimated)" if name in ledger["estimated"] else name
            table.append([words, f"{int(text) / 3.6e12:.5f}", f"{int(text) / total:.2%}"])
    table.append(["allocation", f"{total / 3.6e12:.5f}", "100.00%"])
    bars = {name: int(text) / total for name, text in ledger["buckets"].items() if int(text)}
    return ReportSection("Ledger", table=table, bars=bars)


def advice(material: ReportInput) -> list[str]:
    """What would help most, from what was measured."""
    advices: list[tuple[float, str]] = []
    shares = step_shares(material)
    for part, (least, advice_text) in PART_ADVICE.items():
        share = shares.get(part, 0.0)
        if share > least:
            advices.append((share, f"{share:.0%} of a step {advice_text}"))
    if material.ledger:
        total = int(material.ledger["allocation_gpu_ns"]) or 1
        for bucket in LOST:
            share = int(material.ledger["buckets"].get(bucket, "0")) / total
            if share > 0.02:
                advices.append(
                    (share, f"{share:.1%} of the GPU time went to {bucket.replace('_', ' ')}")
                )
    seen: dict[str, int] = {}
    for each in material.incidents:
        if each.get("suggestion"):
            seen[each["suggestion"]] = seen.get(each["suggestion"], 0) + 1
    lines = [text for _, text in sorted(advices, reverse=True)]
    lines += [
        f"{text} (found {count} {'time' if count == 1 else 'times'})"
        for text, count in sorted(seen.items(), key=lambda p: -p[1])
    ]
    return lines or ["nothing stands out"]


def when(seconds: float) -> str:
    """A time for a person, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def short(value: object) -> str:
    """A number in few letters."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def mean(values: Iterable[float | None]) -> float:
    """Of what is known; 0 when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
