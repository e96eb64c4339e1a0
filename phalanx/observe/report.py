"""A run's post-mortem: what happened, where the time went, what to change.

The command line gathers a ``Material`` from a server's API or from a run's folder; ``markdown`` and
``html`` write it down. The HTML is one file: no script, no network, pictures as SVG. Whatever
people or programs wrote (names, messages) is text in it, never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from msgspec import Struct

from phalanx.observe.runs import Run

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
LOST = ("detection", "restart", "recompute", "straggler", "checkpoint_stall", "data_wait")


class Curve(Struct):
    """A metric over steps."""

    steps: Sequence[int]
    values: Numbers


class Material(Struct, kw_only=True):
    """Everything that a report is written from."""

    run: Run
    curves: dict[str, Curve] = {}
    incidents: list[dict[str, Any]] = []
    ledger: dict[str, Any] = {}  # as the API gives it
    requested: dict[str, Any] = {}  # gang and resources of the submission
    rank_means: dict[str, list[float | None]] = {}  # own seconds and parts by rank


class Section(Struct):
    """A heading with lines, a table, or a picture."""

    title: str
    lines: list[str] = []
    table: list[list[str]] = []  # the first row has the headings
    curves: dict[str, Curve] = {}


def sections(material: Material) -> list[Section]:
    """The report's parts in their order."""
    return [
        _verdict(material),
        _timeline(material),
        Section("Curves", curves={n: c for n, c in material.curves.items() if n in _SHOWN}),
        _environment(material.run),
        _resources(material),
        _bottleneck(material),
        _incidents(material),
        _ledger(material),
        Section("What to change", lines=advice(material)),
    ]


_SHOWN = ("loss", "grad_norm", "step_seconds", "mfu", "tokens_per_second")


def _verdict(material: Material) -> Section:
    run = material.run
    last = run.summary
    lines = [
        f"{run.name} ({run.id}), {run.state}",
        f"end: {run.exit.get('message') or run.exit.get('reason') or 'not yet'}",
        f"from {when(run.created)} to {when(run.ended) if run.ended else 'now'}",
    ]
    if last:
        lines.append(f"last step {last.get('step')}, loss {short(last.get('loss'))}")
    if material.ledger:
        lines.append(
            f"goodput {material.ledger['goodput']:.1%}, "
            f"{material.ledger['gpu_hours']:.3f} GPU-hours, ${material.ledger['dollars']:.2f}"
        )
    return Section("Verdict", lines)


def _timeline(material: Material) -> Section:
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
    return Section("Timeline", table=table)


def _environment(run: Run) -> Section:
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
    return Section("Environment", table=rows)


def _resources(material: Material) -> Section:
    run = material.run
    rows = [["what", "requested", "allocated"]]
    gang = material.requested.get("gang", {})
    last = run.placements[-1] if run.placements else {}
    replicas = gang.get("replicas", 1)
    rows.append(["replicas", str(replicas), str(last.get("replicas", ""))])
    rows.append(["nodes", "", str(len(last.get("nodes", [])))])
    rows.append(["formations", "1", str(last.get("generation", ""))])
    if material.ledger:
        rows.append(["GPU-hours", "", f"{material.ledger['gpu_hours']:.4f}"])
    axes = ("tensor", "context", "pipeline", "slot_gpus", "slot_cpus")
    rows += [[name, str(gang[name]), ""] for name in axes if name in gang]
    return Section("Resources", table=rows)


def step_shares(material: Material) -> dict[str, float]:
    """Mean share of each part in a step."""
    whole = mean(material.curves["step_seconds"].values) if "step_seconds" in material.curves else 0
    if not whole:
        return {}
    return {
        part: mean(curve.values) / whole
        for part in PARTS
        if (curve := material.curves.get(f"{part}_seconds")) is not None and curve.values
    }


def _bottleneck(material: Material) -> Section:
    shares = step_shares(material)
    lines = []
    own = [v for v in material.rank_means.get("own_seconds", []) if v is not None]
    if len(own) > 1:
        worst = max(range(len(own)), key=lambda index: own[index])
        middle = sorted(own)[len(own) // 2]
        if middle > 0:
            lines.append(f"slowest rank by its own work: {worst}, {own[worst] / middle - 1:+.0%}")
    table = [["part of a step", "mean share"]]
    table += [[part, f"{share:.1%}"] for part, share in sorted(shares.items(), key=lambda p: -p[1])]
    return Section("Bottleneck", lines, table if shares else [])


def _incidents(material: Material) -> Section:
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
    return Section("Incidents", [] if len(table) > 1 else ["none"], table if len(table) > 1 else [])


def _ledger(material: Material) -> Section:
    ledger = material.ledger
    if not ledger:
        return Section("Ledger", ["a run without a server has no ledger"])
    total = int(ledger["allocation_gpu_ns"]) or 1
    table = [["bucket", "GPU-hours", "share"]]
    for name, text in ledger["buckets"].items():
        if int(text):
            words = f"{name} (estimated)" if name in ledger["estimated"] else name
            table.append([words, f"{int(text) / 3.6e12:.5f}", f"{int(text) / total:.2%}"])
    table.append(["allocation", f"{total / 3.6e12:.5f}", "100.00%"])
    return Section("Ledger", table=table)


def advice(material: Material) -> list[str]:
    """What would help most, from what was measured."""
    found: list[tuple[float, str]] = []
    shares = step_shares(material)
    for part, (least, words) in PART_ADVICE.items():
        share = shares.get(part, 0.0)
        if share > least:
            found.append((share, f"{share:.0%} of a step {words}"))
    if material.ledger:
        total = int(material.ledger["allocation_gpu_ns"]) or 1
        for bucket in LOST:
            share = int(material.ledger["buckets"].get(bucket, "0")) / total
            if share > 0.02:
                found.append(
                    (share, f"{share:.1%} of the GPU time went to {bucket.replace('_', ' ')}")
                )
    seen: dict[str, int] = {}
    for each in material.incidents:
        if each.get("suggestion"):
            seen[each["suggestion"]] = seen.get(each["suggestion"], 0) + 1
    lines = [text for _, text in sorted(found, reverse=True)]
    lines += [
        f"{text} (found {count} times)" for text, count in sorted(seen.items(), key=lambda p: -p[1])
    ]
    return lines or ["nothing stands out"]


# Writing.


def markdown(material: Material) -> str:
    """The report as Markdown."""
    lines = [f"# Report of {_plain(material.run.name)} {_plain(material.run.id)}", ""]
    for section in sections(material):
        lines += [f"## {section.title}", ""]
        lines += [f"- {_plain(line)}" for line in section.lines]
        for index, row in enumerate(section.table):
            lines.append("| " + " | ".join(_plain(cell) for cell in row) + " |")
            if index == 0:
                lines.append("|" + "---|" * len(row))
        for name, curve in section.curves.items():
            known = [value for value in curve.values if value is not None]
            if known:
                lines.append(
                    f"- {name}: first {short(known[0])}, least {short(min(known))}, "
                    f"most {short(max(known))}, last {short(known[-1])}"
                )
        lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that Markdown reads as text."""
    kept = "".join(" " if letter in "\r\n" else letter for letter in str(text))
    for letter in "\\`*_{}[]<>|#":
        kept = kept.replace(letter, "\\" + letter)
    return kept


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:.5rem 0;display:block;overflow-x:auto}
td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #d5dae1;vertical-align:top}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
figure{margin:1rem 0}svg{width:100%;height:auto;border:1px solid #d5dae1}
path{fill:none;stroke:#0b63b6;stroke-width:1.5}
@media(prefers-color-scheme:dark){body{color:#dfe5ec;background:#14181d}
td,th,svg{border-color:#39424e}path{stroke:#69b1ff}text{fill:#dfe5ec}}
"""


def html(material: Material) -> str:
    """The report as one HTML file."""
    title = escape(f"Report of {material.run.name} {material.run.id}")
    body = [f"<h1>{title}</h1>"]
    for section in sections(material):
        body.append(f"<h2>{escape(section.title)}</h2>")
        if section.lines:
            body.append("<ul>" + "".join(f"<li>{escape(x)}</li>" for x in section.lines) + "</ul>")
        if section.table:
            body.append(_html_table(section.table))
        body += [_svg(name, curve) for name, curve in section.curves.items()]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[1:])
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _svg(name: str, curve: Curve) -> str:
    """A curve as a picture; gaps where nothing is known."""
    known = [(x, y) for x, y in zip(curve.steps, curve.values, strict=True) if y is not None]
    if len(known) < 2:
        return ""
    first, last = known[0][0], known[-1][0]
    least, most = min(y for _, y in known), max(y for _, y in known)
    wide, high = (last - first) or 1, (most - least) or 1.0
    points = [(40 + 740 * (x - first) / wide, 150 - 130 * (y - least) / high) for x, y in known]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    words = f"{name}: {short(least)} to {short(most)}, steps {first} to {last}"
    return (
        f'<figure><svg viewBox="0 0 800 170" role="img" aria-label="{escape(words)}">'
        f'<path d="{path}"/><text x="40" y="14" font-size="12">{escape(words)}</text>'
        "</svg></figure>"
    )


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
