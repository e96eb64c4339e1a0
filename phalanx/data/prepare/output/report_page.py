"""The report as a page with pictures: one file, drawn by SVG, that needs nothing else."""

from __future__ import annotations

from html import escape

from phalanx.data.prepare.output.summary import PrepareReport

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}tr:nth-child(even){background:#f4f4f6}"
    "blockquote{color:#555;margin:.2rem 0 .8rem 1rem}text{font:12px system-ui,sans-serif}"
)
_WIDTH, _ROW, _LABEL = 900, 22, 250


def html_page(report: PrepareReport) -> str:
    """The whole page."""
    rows = "".join(
        f"<tr><td>{escape(step.name)}<td class=n>{step.dropped:,}<td class=n>{step.left:,}"
        f"<td class=n>{step.edited or ''}<td>{escape(step.says)}"
        for step in report.steps
    )
    masked = "".join(f"<li>{count:,} {name}" for name, count in sorted(report.masked.items()))
    left = [(step.name, [step.left]) for step in report.steps]
    bins = sorted({*report.lengths_read, *report.lengths_kept})
    lengths = [
        (f"< {1 << each:,}", [report.lengths_read.get(each, 0), report.lengths_kept.get(each, 0)])
        for each in bins
    ]
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(report.out)}</title>"
        f"<style>{STYLE}</style><h1>{escape(report.out)}</h1>"
        f"<p>{report.records:,} records of {report.files:,} files became {report.documents:,}"
        f" documents and {report.tokens:,} tokens.</p>"
        f"<h2>Documents left after each step</h2>{_bars(left)}"
        f"<table><tr><th>step<th>dropped<th>left<th>edited<th>rule{rows}</table>"
        f"<h2>Masked</h2><ul>{masked or '<li>nothing'}</ul>"
        f"<h2>Documents by length in characters: read, and passed by filters</h2>{_bars(lengths)}"
        f"<h2>Examples of what was dropped</h2>{_examples(report)}\n"
    )


def _bars(rows: list[tuple[str, list[int]]]) -> str:
    """Horizontal bars, one below the other; several of a row in shades."""
    most = max((count for _, counts in rows for count in counts), default=1) or 1
    parts, top = [], 0
    for name, counts in rows:
        parts.append(f'<text x="0" y="{top + 15}">{escape(name)}</text>')
        for at, count in enumerate(counts):
            height = (_ROW - 4) / len(counts)
            length = (_WIDTH - _LABEL - 110) * count / most
            y = top + at * height
            colour = ("#3566b8", "#8fb0e3")[at if len(counts) == 1 else 1 - at]
            parts.append(
                f'<rect x="{_LABEL}" y="{y:.1f}" width="{length:.1f}" height="{height:.1f}"'
                f' fill="{colour}"><title>{count:,}</title></rect>'
            )
        shown = " / ".join(f"{count:,}" for count in counts)
        parts.append(f'<text x="{_WIDTH - 100}" y="{top + 15}">{shown}</text>')
        top += _ROW
    return f'<svg viewBox="0 0 {_WIDTH} {top}" width="100%">{"".join(parts)}</svg>'


def _examples(report: PrepareReport) -> str:
    parts = []
    for name, examples in sorted(report.examples.items()):
        parts.append(f"<h3>{escape(name)}</h3>")
        for each in examples:
            place = escape(f"{each.file}:{each.record} {each.id}".strip())
            parts.append(f"<code>{place}</code>: {escape(each.reason)}")
            parts.append(f"<blockquote>{escape(each.text)}</blockquote>")
    return "".join(parts) or "<p>None.</p>"
