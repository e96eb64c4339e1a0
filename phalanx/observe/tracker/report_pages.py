"""A report as Markdown, and as one HTML file: no script, no network, pictures as SVG.

Whatever people or programs wrote (names, messages) is text in it, never markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from phalanx.observe.tracker.report import Curve, ReportInput, ReportSection, sections, short

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 800, 170, 64, 12, 22, 22  # of a curve's picture
BAR = 18  # height of a row of bars
# Of the ledger's buckets and of a step's parts: work, waits, losses, what nobody used.
TONES = {
    **dict.fromkeys(("matmul", "attention", "norm and elementwise", "optimizer"), "good"),
    **dict.fromkeys(("copy", "exposed communication", "data wait"), "wait"),
    "productive": "good",
    "unreported": "good",
    "exposed_communication": "wait",
    "bubble": "wait",
    "data_wait": "wait",
    "idle_spare": "idle",
    "quarantined": "idle",
    "unallocated": "idle",
    "residual": "idle",
}


def markdown(material: ReportInput) -> str:
    """The report as Markdown."""
    lines = [f"# Report of {_plain(material.run.name)} {_plain(material.run.id)}", ""]
    for section in sections(material):
        lines += [f"## {section.title}", ""]
        lines += [f"- {_plain(line)}" for line in section.lines]
        if section.lines and section.table:
            lines.append("")
        for index, row in enumerate(section.table):
            lines.append("| " + " | ".join(_plain(cell) for cell in row) + " |")
            if index == 0:
                lines.append("|" + "---|" * len(row))
        for name, curve in section.curves.items():
            values = [value for value in curve.values if value is not None]
            if values:
                lines.append(
                    f"- {name}: first {short(values[0])}, least {short(min(values))}, "
                    f"most {short(max(values))}, last {short(values[-1])}"
                )
        lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that Markdown reads as text."""
    kept = "".join(" " if letter in "\r\n" else letter for letter in str(text))
    for letter in "\\*_{}[]<>|#":  # between backticks stand commands
        kept = kept.replace(letter, "\\" + letter)
    return kept


STYLE = """
:root{color-scheme:light dark;--paper:#f6f4ee;--card:#fffdf9;--ink:#1e1c18;--soft:#5c574c;
--line:#e2ddd0;--accent:#1f4f96;--good:#2c7f77;--wait:#5b86c4;--loss:#bf3b1d;--idle:#b9b2a2}
@media(prefers-color-scheme:dark){:root{--paper:#141310;--card:#1b1a16;--ink:#ece8de;--soft:#b0a999;
--line:#2e2b25;--accent:#8ab8f5;--good:#5cb8ac;--wait:#5f8fcd;--loss:#ff8361;--idle:#575145}}
body{font:15px/1.5 Inter,system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;
color:var(--ink);background:var(--paper);font-variant-numeric:tabular-nums}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:.9rem 1.1rem;margin:1rem 0;overflow-wrap:break-word}
h1{font-size:1.5rem;letter-spacing:-.02em}h2{font-size:1.02rem;margin:0 0 .6rem}
ul{margin:.3rem 0;padding-left:1.2rem}figure{margin:.6rem 0}
svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;margin:.5rem 0;display:block;overflow-x:auto;font-size:.92rem}
td,th{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid var(--line);
vertical-align:top}th{color:var(--soft);font-weight:550}tr:last-child td{border-bottom:0}
path{fill:none;stroke:var(--accent);stroke-width:1.6;stroke-linejoin:round}
line{stroke:var(--line)}line.mark{stroke:var(--loss);stroke-dasharray:2 3}
text{fill:var(--soft);font-size:12px}text.name{fill:var(--ink);font-weight:600}
.good{fill:var(--good)}.wait{fill:var(--wait)}.loss{fill:var(--loss)}.idle{fill:var(--idle)}
.rank{fill:var(--accent)}.track{fill:var(--line);opacity:.5}
@media print{body{max-width:none}section{break-inside:avoid}}
"""


def html(material: ReportInput) -> str:
    """The report as one HTML file."""
    title = f"Report of {material.run.name} {material.run.id}"
    return page(title, [section_html(each) for each in sections(material)])


def page(title: str, parts: Sequence[str]) -> str:
    """One HTML file of parts that are markup already."""
    shown = escape(title)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{shown}</title><style>{STYLE}</style><body><h1>{shown}</h1>{''.join(parts)}"
        "</body></html>\n"
    )


def section_html(section: ReportSection, picture: str = "") -> str:
    """A section with its lines, bars, table and curves; ``picture`` is markup that goes before."""
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.lines:
        parts.append("<ul>" + "".join(f"<li>{_prose(x)}</li>" for x in section.lines) + "</ul>")
    if section.bars:
        parts.append(_bars(section.bars))
    parts.append(picture)
    if section.table:
        parts.append(_table(section.table))
    parts += [_curve(name, each, section.marks) for name, each in section.curves.items()]
    return f"<section>{''.join(parts)}</section>"


def _prose(text: str) -> str:
    """Text with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[1:])
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _bars(shares: Mapping[str, float]) -> str:
    """One row a name, as long as its share."""
    rows = []
    for index, (name, share) in enumerate(shares.items()):
        y, label = index * (BAR + 6), escape(name.replace("_", " "))
        tone = "rank" if name.startswith("rank ") else TONES.get(name, "loss")
        rows.append(
            f'<text x="0" y="{y + 13}">{label}</text>'
            f'<rect class="track" x="200" y="{y}" width="520" height="{BAR}" rx="3"/>'
            f'<rect class="{tone}" x="200" y="{y}" width="{max(1.0, 520 * share):.1f}" '
            f'height="{BAR}" rx="3"/>'
            f'<text x="730" y="{y + 13}">{share:.1%}</text>'
        )
    high = len(shares) * (BAR + 6)
    return f'<figure><svg viewBox="0 0 {WIDE} {high}" role="img">{"".join(rows)}</svg></figure>'


def _curve(name: str, curve: Curve, marks: Sequence[int]) -> str:
    """A curve as a picture, with the steps at which something happened; unknown is a gap."""
    pairs = list(zip(curve.steps, curve.values, strict=True))
    points = [(x, y) for x, y in pairs if y is not None]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    least, most = min(y for _, y in points), max(y for _, y in points)
    wide, high = (last - first) or 1, (most - least) or 1.0

    def at(step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (step - first) / wide

    path, pen = "", "M"
    for x, y in pairs:
        if y is None:
            pen = "M"
            continue
        path += f"{pen}{at(x):.1f},{HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * (y - least) / high:.1f}"
        pen = "L"
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{short(value)}</text>'
        for y, value in ((TOP, float(most)), (HIGH - BOTTOM, float(least)))
    )
    lines += "".join(
        f'<line class="mark" x1="{at(x):.1f}" x2="{at(x):.1f}" y1="{TOP}" y2="{HIGH - BOTTOM}"/>'
        for x in sorted(set(marks))
        if first <= x <= last
    )
    words = f"{name}: {short(least)} to {short(most)}, steps {first} to {last}"
    return (
        f'<figure><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(words)}">'
        f'{lines}<path d="{path}"/><text class="name" x="{LEFT}" y="13">'
        f"{escape(name.replace('_', ' '))}</text>"
        f'<text x="{LEFT}" y="{HIGH - 4}">step {first:,}</text>'
        f'<text x="{WIDE - RIGHT}" y="{HIGH - 4}" text-anchor="end">{last:,}</text>'
        "</svg></figure>"
    )
